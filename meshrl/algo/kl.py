"""Per-token estimators of KL(policy, reference) from the log-probabilities of sampled tokens.

T tokens. With d = log p_ref - log p of a token sampled from the policy p:

| kind | value | expectation | gradient as a term of the loss, on-policy |
| --- | --- | --- | --- |
| k1 | -d | KL(p, ref), exact | zero on average: it only adds noise |
| k2 | d^2 / 2 | about KL(p, ref) | gradient of KL(p, ref), the reverse KL |
| k3 | e^d - 1 - d | KL(p, ref), exact | gradient of KL(ref, p), the forward KL |

So use k1 in the reward, and k2 or k3 in the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios in exponents: e^20 = 5e8 is far outside any trust region, and its square fits in float32."""


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    # expm1 is precise for small d, where e^d - 1 cancels. Only large d is cut, where e^d would overflow. The linear
    # term is cut, too: otherwise the gradient would change its sign.
    safe = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(safe) - safe


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: str) -> torch.Tensor:
    """One estimate of KL(policy, reference) for each sampled token, in nats; k2 and k3 are never negative.

    The gradient with respect to `logprobs` is in the table above. k3 is clamped at d = 20; above, its gradient is 0.

    Shapes: logprobs, ref_logprobs and the result are [T] (any equal shapes).
    Source: J. Schulman, "Approximating KL Divergence", 2020; the gradients: tests/unit/algo/test_kl_estimators.py.
    """
    return KL_ESTIMATORS[kind](ref_logprobs - logprobs)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": _k3,
}

"""Calls a user-defined loss or advantage once with made-up numbers when a run starts. Otherwise it would fail only
after the models are loaded and the first answers are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from meshrl.algo.advantages import assign_advantages
from meshrl.algo.losses import LossInputs, policy_terms
from meshrl.config.algo import AlgoConfig, KlConfig
from meshrl.core.errors import ConfigError
from meshrl.core.types import Sample, unsampled_row


def try_user_functions(cfg: AlgoConfig) -> None:
    """Call the advantage with three groups of answers, of which one has equal rewards, and the loss with rows of two
    and three tokens.

    Raises: ConfigError when a function raises, or returns something that is not allowed.
    """
    for key, path in cfg.advantages.items():
        if ":" in path:
            one = cfg.model_copy(update={"advantage": path, "advantage_by_env": {}, "kl": KlConfig()})
            _tried(key, path, partial(_advantage, one))
    if ":" in cfg.loss.kind:
        _tried("algo.loss.kind", cfg.loss.kind, lambda: _loss(cfg))


def _tried(key: str, path: str, trial: Callable[[], None]) -> None:
    try:
        trial()
    except ConfigError:
        raise
    except Exception as error:  # user code
        raise ConfigError(
            f"{key} is {path!r}: a trial with made-up numbers raised {type(error).__name__}: {error}"
        ) from error


def _advantage(cfg: AlgoConfig) -> None:
    groups = {"a": (1.0, 0.0, 0.5), "b": (1.0, 0.0, 0.5), "equal rewards": (1.0, 1.0, 1.0)}
    samples = [_sample(group, i, reward) for group, rewards in groups.items() for i, reward in enumerate(rewards)]
    assign_advantages(samples, cfg)


def _sample(group: str, index: int, reward: float) -> Sample:
    mask = np.arange(3 + index) > 1
    row = unsampled_row(f"{group}/{index}", np.ones(len(mask), np.int32), mask)
    row.rollout_logprobs[mask], row.versions[mask] = -1.0, 0
    return replace(row, group_id=group, prefix_len=2, reward=reward)


def _loss(cfg: AlgoConfig) -> None:
    logprobs = torch.tensor([-0.5, -2.0, -1.0, -0.1, -3.0], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-0.6, -1.9, -1.0, -0.3, -2.0]),
        rollout_logprobs=torch.tensor([-0.6, -1.9, -1.0, -0.3, -2.0]),
        advantages=torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5]),
        ref_logprobs=torch.full([5], -1.0) if cfg.kl.coef > 0 else None,
        entropy=0.7 - 0.1 * logprobs,
        row_lengths=[2, 3],
    )
    loss, _ = policy_terms(cfg.loss, inputs)
    loss.sum().backward()
    if logprobs.grad is None or not logprobs.grad.isfinite().all():
        raise ValueError(f"its gradient with respect to inputs.logprobs is {logprobs.grad}; it must be finite")

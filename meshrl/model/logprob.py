"""log p(token | preceding tokens), in fp32, in chunks: [T, V] never exists. Used by trainer and sampler.

Callers pass the hidden state before each scored token (`Batch.previous`); nothing here shifts.

Letters: N scored tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from meshrl.model import prepack

SAVED_LOGITS = 1 << 24  # fp32 numbers of [N, V] (64 MiB) that a forward may store instead of computing them twice


@dataclass(frozen=True, slots=True)
class Head:
    """How hidden states become logits: x @ weight.T (+ bias), times scale, softcapped. weight [V, D]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    packed: torch.Tensor | None = None  # a prepacked copy of the weight, see `ready`

    def ready(self) -> Head:
        """The same head, for many calls of `logits` with unchanged weights and no gradient: on a CPU its weight is cast
        to fp32 and prepacked once."""
        if self.weight.device.type != "cpu":
            return self
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return replace(self, weight=wide, packed=prepack.prepacked(wide))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> [N, V] in fp32 (fp64 stays). The product itself must be in fp32: rounding it to bf16
        changes logprobs by 0.016 nats on average, half as much as a full softmax in bf16."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.weight.dtype == wide:
            hidden = hidden.to(wide)
        if self.packed is not None:
            out = prepack.linear(hidden, self.packed, None)
        elif hidden.dtype == wide or hidden.device.type == "cpu":  # no 16-bit product with fp32 output on CPUs
            out = hidden.to(wide) @ self.weight.to(wide).T
        else:
            out = torch.mm(hidden, self.weight.T, out_dtype=wide)
        if self.bias is not None:
            out = out + self.bias
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out


def token_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    *,
    chunk_tokens: int = 2048,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs of targets at each token's own temperature, and the entropy of the same distribution.

    hidden [N, D] is the state BEFORE each target; targets int64[N]; temperature [N], where 0 (greedy) scores as 1.
    Returns float32 [N] (float64 for fp64 models), differentiable in hidden and the head; logp <= 0, 0 <= H <= log V.
    """
    temperature = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    logp, ent = _ChunkedLogprob.apply(
        hidden, head.weight, head.bias, targets, temperature, head.scale, head.softcap, chunk_tokens, entropy
    )
    return logp, ent if entropy else None


class _ChunkedLogprob(torch.autograd.Function):
    """Forward stores no logits, backward recomputes each chunk's: peak memory is one chunk [C, V]. Up to SAVED_LOGITS
    logits are one chunk, which is stored."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, scale, softcap, chunk, want_entropy):  # type: ignore[override]
        head = Head(weight, bias, scale, softcap)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        save = ctx.needs_input_grad[0] and softcap is None and hidden.shape[0] * weight.shape[0] <= SAVED_LOGITS
        chunk, saved = max(1, hidden.shape[0]) if save else chunk, None
        flat = hidden.device.type == "cpu" and bool((temperature == 1).all())  # accelerators would have to wait
        logp = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        ent = torch.empty_like(logp) if want_entropy else logp.new_empty(0)
        for a in range(0, hidden.shape[0], chunk):
            part = slice(a, a + chunk)
            z = head.logits(hidden[part])
            if not flat:
                z.div_(temperature[part, None].to(dtype))
            lse = torch.logsumexp(z, dim=-1)
            logp[part] = z.gather(1, targets[part, None])[:, 0].sub_(lse).clamp_(max=0)
            if want_entropy or save:
                logq = z.sub_(lse[:, None])  # lse - sum(p z) would cancel: its error grows with the logits
            if want_entropy:
                ent[part] = (logq.exp() * logq).sum(-1).neg_().clamp_(min=0)
            saved = logq if save else None
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, saved)
        ctx.set_materialize_grads(False)  # an entropy that is only a metric has no backward
        ctx.facts = (scale, softcap, chunk, flat)
        return logp, ent

    @staticmethod
    def backward(ctx, grad_logp, grad_ent):  # type: ignore[override]
        hidden, weight, bias, targets, temperature, saved = ctx.saved_tensors
        scale, softcap, chunk, flat = ctx.facts
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
        for a in range(0, hidden.shape[0], chunk):
            part = slice(a, a + chunk)
            x, t = hidden[part], temperature[part, None].to(dtype)
            logq, slope = saved, None
            if logq is None:
                z = Head(weight, bias, scale, softcap).logits(x)
                slope = None if softcap is None else 1 - (z / softcap) ** 2
                logq = torch.log_softmax(z.div_(t), dim=-1)
            p = logq.exp()
            dz = torch.zeros_like(p) if grad_ent is None else _entropy_slope(logq, p) * grad_ent[part, None]
            if grad_logp is not None:
                g = grad_logp[part, None].to(dtype)
                dz.addcmul_(p, g, value=-1).scatter_add_(1, targets[part, None], g)
            if not flat:
                dz.div_(t)
            if slope is not None:
                dz *= slope
            if scale != 1.0:
                dz *= scale
            dz_low = dz.to(weight.dtype)
            grad_hidden[part] = dz_low @ weight
            grad_weight += dz_low.T @ x
            if grad_bias is not None:
                grad_bias += dz.sum(0)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None, None, None


def _entropy_slope(logq: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """dH/dz_j = -p_j (log p_j + H), of p = exp(logq) = softmax(z) [C, V]."""
    entropy = -(p * logq).sum(-1, keepdim=True)
    return -p * (logq + entropy)

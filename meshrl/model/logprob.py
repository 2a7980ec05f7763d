"""log p(token | preceding tokens), in fp32, in chunks: [T, V] never exists. Used by trainer and sampler.

Callers pass the hidden state before each scored token (`Batch.previous`); nothing here shifts.

Letters: N scored tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshrl.core.device import has_triton
from meshrl.model.prepack import Product, prepacked
from meshrl.parallel.exchange import Axis, gathered_values
from meshrl.plan.decisions import CHUNK_LOGITS, CHUNK_LOGITS_ON_CPU, SAVED_LOGITS_ON_CPU

SAVED_LOGITS = 1 << 24  # that a forward may store on an accelerator: 64 MiB
BLOCK_LOGITS = 1 << 20  # of a chunk that a CPU works on at a time, in its cache
_PARTS = 16  # of the head's gradient, to which a chunk's products are added one after another


@dataclass(frozen=True, slots=True)
class Head:
    """How hidden states become logits: x @ weight.T, times scale, softcapped, plus bias (which a mask of ids is, too).
    weight [V, D]. No family with a bias of its own has one of the others."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    packed: Product | None = None  # with a prepacked copy of the weight, see `ready`

    def ready(self) -> Head:
        """The same head, for many calls of `logits` with unchanged weights and no gradient: on a CPU its weight is cast
        to fp32 and prepacked once."""
        if self.weight.device.type != "cpu":
            return self
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return replace(self, weight=wide, packed=prepacked(wide))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> [N, V] in fp32 (fp64 stays). The product itself must be in fp32: rounding it to bf16
        changes logprobs by 0.016 nats on average, half as much as a full softmax in bf16."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.weight.dtype == wide:
            hidden = hidden.to(wide)
        if self.packed is not None:
            out = self.packed(hidden, None)
        elif hidden.dtype == wide or hidden.device.type == "cpu":  # no 16-bit product with fp32 output on CPUs
            out = hidden.to(wide) @ self.weight.to(wide).T
        else:
            out = torch.mm(hidden, self.weight.T, out_dtype=wide)
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A rank's part of the vocabulary: its head has the ids from `start` on, the other ranks of the axis have the
    rest."""

    start: int
    axis: Axis


def token_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    entropy: bool = False,
    vocabulary: Vocabulary | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs of targets at each token's own temperature, and the entropy of the same distribution.

    hidden [N, D] is the state BEFORE each target; targets int64[N]; temperature [N], where 0 (greedy) scores as 1.
    chunk_tokens: tokens whose logits exist at one time; None = all, if a forward may store their logits for the
    backward pass, else as many as have CHUNK_LOGITS logits (CHUNK_LOGITS_ON_CPU). vocabulary: of a head that has only a
    part of it.
    Returns float32 [N] (float64 for fp64 models), differentiable in hidden and the head; logp <= 0, 0 <= H <= log V.
    """
    temperature = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    if chunk_tokens is None:
        limit = CHUNK_LOGITS_ON_CPU if hidden.device.type == "cpu" else CHUNK_LOGITS
        trains = torch.is_grad_enabled() and hidden.requires_grad
        is_stored = trains and head.softcap is None and _may_store(hidden, head.weight)
        chunk_tokens = max(1, len(hidden) if is_stored else limit // head.weight.shape[0])
    function: type[torch.autograd.Function] = _ChunkedLogprob
    if hidden.dtype == head.weight.dtype and hidden.dtype.itemsize == 2 and has_triton(hidden.device):
        from meshrl.model.kernels import TiledLogprob as function
    inside = torch.empty(0)
    if vocabulary is not None:
        targets = targets - vocabulary.start
        inside = (targets >= 0) & (targets < head.weight.shape[0])
        targets = torch.where(inside, targets, 0)
    logp, ent, lse = function.apply(
        hidden, head.weight, head.bias, targets, temperature, head.scale, head.softcap, chunk_tokens, entropy
    )
    if vocabulary is not None:
        logp, ent = _over_full_vocabulary(logp, ent, lse, inside, vocabulary.axis)
    return logp, ent if entropy else None


def _over_full_vocabulary(
    logp: torch.Tensor, ent: torch.Tensor, lse: torch.Tensor, inside: torch.Tensor, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of the full distribution from those of each rank's part, and the part's log of the sum of
    exp(logits)."""
    at_target = torch.where(inside, logp + lse, 0)
    parts = gathered_values(torch.stack([lse, at_target, *([ent] if len(ent) == len(lse) else [])]), axis)
    log_share = parts[:, 0] - (total := torch.logsumexp(parts[:, 0], 0))
    logp = parts[:, 1].sum(0) - total
    logp = logp - logp.detach().clamp(min=0)
    return logp, (log_share.exp() * (parts[:, 2] - log_share)).sum(0) if parts.shape[1] == 3 else ent


class _ChunkedLogprob(torch.autograd.Function):
    """Logprobs, entropies, and logs of the sums of exp(logits). A single chunk's logits are stored if `_may_store`
    allows it, and the first backward pass overwrites them. Otherwise forward stores none, and backward recomputes each
    chunk's: peak memory is one chunk [C, V]. The products of the backward pass are in the dtype of the weight."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, scale, softcap, chunk, want_entropy):  # type: ignore[override]
        head = Head(_wide_on_cpu(weight), bias, scale, softcap)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        single = hidden.shape[0] <= chunk and _may_store(hidden, weight)
        save = ctx.needs_input_grad[0] and softcap is None and single
        ctx.stored = None
        flat = hidden.device.type == "cpu" and bool((temperature == 1).all())  # accelerators would have to wait
        logp = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        ent = torch.empty_like(logp) if want_entropy else logp.new_empty(0)
        sums = torch.empty_like(logp)
        for a in range(0, hidden.shape[0], chunk):
            part = slice(a, a + chunk)
            chunk_logits = head.logits(hidden[part])
            for rows, z in _blocks(chunk_logits, a):
                if not flat:
                    z.div_(temperature[rows, None].to(dtype))
                lse = torch.logsumexp(z, dim=-1, out=sums[rows])
                logp[rows] = z.gather(1, targets[rows, None])[:, 0].sub_(lse).clamp_(max=0)
                if want_entropy or save:
                    z.sub_(lse[:, None])  # lse - sum(p z) would cancel: its error grows with the logits
                if want_entropy:
                    ent[rows] = (z.exp() * z).sum(-1).neg_().clamp_(min=0)
            ctx.stored = chunk_logits if save else None
            del chunk_logits, z  # before the next chunk's exist
        ctx.save_for_backward(hidden, weight, bias, targets, temperature)
        ctx.set_materialize_grads(False)  # an entropy that is only a metric has no backward
        ctx.facts = (scale, softcap, chunk, flat)
        return logp, ent, sums

    @staticmethod
    def backward(ctx, grad_logp, grad_ent, grad_lse):  # type: ignore[override]
        hidden, weight, bias, targets, temperature = ctx.saved_tensors
        scale, softcap, chunk, flat = ctx.facts
        stored, ctx.stored = ctx.stored, None
        is_stored = stored is not None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden)
        single, grad_weight = 0 < len(hidden) <= chunk, None
        total = gradient_to_add_to(ctx, weight) if weight.dtype == dtype else None
        if ctx.needs_input_grad[1] and total is None and not single:
            total = grad_weight = torch.zeros_like(weight, dtype=dtype)
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if ctx.needs_input_grad[2] else None
        head = Head(weight if is_stored else _wide_on_cpu(weight), bias, scale, softcap)
        for a in range(0, hidden.shape[0], chunk):
            part = slice(a, a + chunk)
            x = hidden[part]
            chunk_logits, stored = stored if is_stored else head.logits(x), None
            for rows, logq in _blocks(chunk_logits, a):
                t, slope = temperature[rows, None].to(dtype), None
                if not is_stored:
                    if softcap is not None:
                        slope = 1 - ((logq if bias is None else logq - bias) / softcap) ** 2
                    logq = logq if flat else logq.div_(t)
                    logq.sub_(torch.logsumexp(logq, dim=-1, keepdim=True))
                p = logq.exp_() if grad_ent is None else logq.exp()
                entropy = None if grad_ent is None else _entropy_slope(logq, p) * grad_ent[rows, None]
                g = torch.zeros_like(t) if grad_logp is None else grad_logp[rows, None].to(dtype)
                of_sum = -g if grad_lse is None else grad_lse[rows, None].to(dtype) - g
                dz = p.mul_(of_sum).scatter_add_(1, targets[rows, None], g)
                if entropy is not None:
                    dz += entropy
                if not flat:
                    dz.div_(t)
                if grad_bias is not None:
                    grad_bias += dz.sum(0)
                if slope is not None:
                    dz *= slope
                if scale != 1.0:
                    dz *= scale
                if dz is not logq:
                    logq.copy_(dz)
            low = chunk_logits.to(weight.dtype)
            del chunk_logits, logq, p, dz, entropy
            grad_hidden[part] = low @ weight
            if total is not None:
                _add_product(total, low, x.to(weight.dtype))
            elif ctx.needs_input_grad[1]:
                grad_weight = low.T @ x.to(weight.dtype)
            del low
        del head  # before the gradient is cast: it may have an fp32 copy of the weight
        grads = [None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias)]
        return grad_hidden, *grads, None, None, None, None, None, None, None


def gradient_to_add_to(ctx: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """`.grad` of the head's weight, if it exists and this backward pass would add to it: then the pass may add in place
    and return None, which needs no second gradient of this size. No hook may wait for the returned gradient, and
    `torch.autograd.grad` adds to no `.grad`."""
    if not ctx.needs_input_grad[1] or not weight.is_leaf or weight.grad is None or torch.is_grad_enabled():
        return None
    if isinstance(weight, DTensor) or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    try:
        is_added = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
    except RuntimeError:  # torch.autograd.grad of this weight
        return None
    return weight.grad if is_added else None


def _may_store(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a forward may store the logits of these tokens, so that the backward pass does not recompute them."""
    limit = SAVED_LOGITS_ON_CPU if hidden.device.type == "cpu" else SAVED_LOGITS
    return hidden.shape[0] * weight.shape[0] <= limit


def _wide_on_cpu(weight: torch.Tensor) -> torch.Tensor:
    """The weight in which a chunk's products are computed: on a CPU in fp32, where 16-bit products of this size are
    slower; cast here, once for all chunks."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) if weight.device.type == "cpu" else weight


def _blocks(logits: torch.Tensor, first: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parts of a chunk's logits [C, V] for operations on each row, with their slice of all tokens. first: the chunk's
    first token. On a CPU as many rows as stay in its cache, so that only they need memory for intermediate results."""
    step = max(1, BLOCK_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    for low in range(0, len(logits), step):
        block = logits[low : low + step]
        yield slice(first + low, first + low + len(block)), block


def _add_product(total: torch.Tensor, low: torch.Tensor, x: torch.Tensor) -> None:
    """total [V, D] += low [C, V].T @ x [C, D], in parts: the product would need as much memory as the total."""
    for part, columns in zip(total.chunk(_PARTS), low.chunk(_PARTS, 1), strict=True):
        part.add_(columns.T @ x)


def _entropy_slope(logq: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """dH/dz_j = -p_j (log p_j + H), of p = exp(logq) = softmax(z) [C, V]."""
    entropy = -(p * logq).sum(-1, keepdim=True)
    return -p * (logq + entropy)

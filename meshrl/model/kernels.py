"""The model's kernels in Triton, for devices for which `has_triton` holds.

First logprobs and entropies over tiles of the vocabulary: what `logprob._ChunkedLogprob` computes, without its passes
over logits in memory.
Forward: a program computes the logits of BLOCK_N tokens for one tile of the vocabulary after the other, and keeps three
numbers for each token: the largest logit m, s = sum exp(z - m) and u = sum exp(z - m) (z - m). With log Z = m + log s,
H = log s - u / s, of which both terms are at least 0, so nothing cancels. A program ends after SPLIT columns, whatever
the number of tokens: the result of a token does not depend on the other tokens.
Backward: a program computes its tile of logits again, and writes dL/dlogits in the operands' dtype, for as many columns
at a time as the caller allows; the two products with it are matrix products of torch.

Letters: N tokens, D hidden size, V vocabulary, S splits of the vocabulary.

Then what the fast decoder computes between its matrix products: one launch each for sum and norm, rotation (decode
attention has its own) and gate. Each result is rounded where Transformers' modules round it, so sampler and trainer
differ by the order of sums alone.

Letters: T tokens, D hidden size, H query heads, K key heads, S head size, F inner size of the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meshrl.model.attention import Rotation
from meshrl.model.logprob import Head, gradient_to_add_to
from meshrl.plan.decisions import SLOPES

BLOCK_N, BLOCK_V, BLOCK_D = 128, 128, 64
SPLIT = 32 * BLOCK_V  # columns of a program
GROUP = 16  # blocks of tokens whose programs run side by side, so that they find each other's operands in the L2 cache
LAUNCH = {"num_warps": 8, "num_stages": 3}


@triton.jit
def _place(num_rows, num_columns, GROUP: tl.constexpr):
    """The row and the column of this program: GROUP rows are complete before the next ones begin."""
    first = tl.program_id(0) // (GROUP * num_columns) * GROUP
    size = tl.minimum(num_rows - first, GROUP)
    inside = tl.program_id(0) % (GROUP * num_columns)
    return first + inside % size, inside // size


@triton.jit
def _logits(hidden, weight, bias, tokens, columns, D, scale, softcap, BLOCK_D: tl.constexpr):
    """The logits of a tile, before the temperature: fp32 products of operands in their own dtype, and fp32 sums."""
    k = tl.arange(0, BLOCK_D)
    x = hidden + tokens.to(tl.int64)[:, None] * D + k[None, :]
    w = weight + columns.to(tl.int64)[None, :] * D + k[:, None]
    z = tl.zeros((tokens.shape[0], columns.shape[0]), tl.float32)
    for d in range(0, D, BLOCK_D):
        left = tl.load(x + d, mask=k[None, :] < D - d, other=0.0)
        right = tl.load(w + d, mask=k[:, None] < D - d, other=0.0)
        z = tl.dot(left, right, z, input_precision="ieee")
    z *= scale
    if softcap is not None:
        z = (1 - 2 / (tl.exp(z * (2 / softcap)) + 1)) * softcap  # tanh
    if bias is not None:
        z += tl.load(bias + columns).to(tl.float32)[None, :]
    return z


@triton.jit
def forward_kernel(
    hidden, weight, bias, targets, temperature, stats, at_target, N, V, D, scale, softcap,
    ENTROPY: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """stats fp32[3, S, N]: m, s and u of each split. at_target fp32[N]: the target's logit over its temperature."""
    splits = tl.cdiv(V, SPLIT)
    block, split = _place(tl.cdiv(N, BLOCK_N), splits, GROUP)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.minimum(rows, N - 1)  # rows after the last token are computed, but not stored
    target, t = tl.load(targets + tokens), tl.load(temperature + tokens)
    m = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    s, u, hit = tl.zeros_like(m), tl.zeros_like(m), tl.zeros_like(m)
    first, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, V)
    for v in range(first, end, BLOCK_V):
        columns = v + tl.arange(0, BLOCK_V)
        z = _logits(hidden, weight, bias, tokens, tl.minimum(columns, V - 1), D, scale, softcap, BLOCK_D) / t[:, None]
        hit += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
        z = tl.where(columns[None, :] < V, z, float("-inf"))
        top = tl.maximum(m, tl.max(z, 1))
        e, shrink = tl.exp(z - top[:, None]), tl.exp(m - top)
        if ENTROPY:
            u = tl.where(s > 0, (u + s * (m - top)) * shrink, 0.0)
            u += tl.sum(tl.where(e > 0, e * (z - top[:, None]), 0.0), 1)
        s = s * shrink + tl.sum(e, 1)
        m = top
    out = stats + split.to(tl.int64) * N + rows
    tl.store(out, m, mask=rows < N)
    tl.store(out + splits.to(tl.int64) * N, s, mask=rows < N)
    if ENTROPY:
        tl.store(out + 2 * splits.to(tl.int64) * N, u, mask=rows < N)
    tl.store(at_target + rows, hit, mask=(rows < N) & (target >= first) & (target < end))


@triton.jit
def backward_kernel(
    hidden, weight, bias, targets, temperature, lse, entropy, grad_logp, grad_entropy, grad_lse, dz, bias_sums,
    first, width, N, V, D, scale, softcap, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dz [N, width]: dL/d(hidden @ weight.T) of the columns from `first` on. bias_sums fp32[blocks of N, width]: its
    sums, before rounding. grad_entropy: None = the loss has no entropy; grad_lse: None = no sum of exp(logits)."""
    block, tile = _place(tl.cdiv(N, BLOCK_N), tl.cdiv(width, BLOCK_V), GROUP)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.minimum(rows, N - 1)
    places = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.minimum(first + places, V - 1)
    target, t = tl.load(targets + tokens), tl.load(temperature + tokens)[:, None]
    z = _logits(hidden, weight, None, tokens, columns, D, scale, softcap, BLOCK_D)
    logq = (z if bias is None else z + tl.load(bias + columns).to(tl.float32)[None, :]) / t
    logq -= tl.load(lse + tokens)[:, None]
    p = tl.exp(logq)
    g = tl.load(grad_logp + tokens)[:, None]
    grad = tl.where(columns[None, :] == target[:, None], g, 0.0) - g * p
    if grad_entropy is not None:
        h, of_h = tl.load(entropy + tokens)[:, None], tl.load(grad_entropy + tokens)[:, None]
        grad -= of_h * p * (logq + h)
    if grad_lse is not None:
        grad += tl.load(grad_lse + tokens)[:, None] * p
    grad /= t
    if bias_sums is not None:
        sums = tl.sum(tl.where(rows[:, None] < N, grad, 0.0), 0)
        tl.store(bias_sums + block.to(tl.int64) * width + places, sums, mask=places < width)
    if softcap is not None:
        grad *= 1 - (z / softcap) * (z / softcap)
    grad *= scale
    inside = (rows[:, None] < N) & (places[None, :] < width)
    tl.store(dz + rows.to(tl.int64)[:, None] * width + places[None, :], grad.to(dz.dtype.element_ty), mask=inside)


class TiledLogprob(torch.autograd.Function):
    """`logprob._ChunkedLogprob` for 16-bit operands; the same arguments and results."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, scale, softcap, chunk, want_entropy):  # type: ignore[override]
        hidden, weight, temperature = hidden.contiguous(), weight.contiguous(), temperature.float()
        (n, d), v = hidden.shape, len(weight)
        stats = torch.empty(3, triton.cdiv(v, SPLIT), n, dtype=torch.float32, device=hidden.device)
        at_target = torch.empty(n, dtype=torch.float32, device=hidden.device)
        forward_kernel[(triton.cdiv(n, BLOCK_N) * stats.shape[1],)](
            hidden, weight, bias, targets, temperature, stats, at_target, n, v, d, scale, softcap,
            ENTROPY=want_entropy, SPLIT=SPLIT, GROUP=GROUP, BLOCK_N=BLOCK_N, BLOCK_V=BLOCK_V, BLOCK_D=BLOCK_D, **LAUNCH,
        )  # fmt: skip
        m, s, u = stats
        top = m.amax(0)
        shrink = (m - top).exp()
        total = (s * shrink).sum(0)
        log_total = total.log()
        ent = log_total.new_empty(0)
        if want_entropy:
            ent = (log_total - ((u + s * (m - top)) * shrink).sum(0) / total).clamp_(min=0)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, top + log_total, ent)
        ctx.set_materialize_grads(False)
        ctx.facts = (scale, softcap, chunk)
        return ((at_target - top) - log_total).clamp_(max=0), ent, top + log_total

    @staticmethod
    def backward(ctx, grad_logp, grad_ent, grad_lse):  # type: ignore[override]
        hidden, weight, bias, targets, temperature, lse, entropy = ctx.saved_tensors
        scale, softcap, chunk = ctx.facts
        (n, d), v = hidden.shape, len(weight)
        grad_logp = torch.zeros_like(lse) if grad_logp is None else grad_logp.contiguous()
        grad_ent = None if grad_ent is None else grad_ent.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        grad_hidden = torch.zeros(n, d, dtype=torch.float32, device=hidden.device)
        total = gradient_to_add_to(ctx, ctx.saved_tensors[1])
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] and total is None else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        blocks, width = triton.cdiv(n, BLOCK_N), max(1, min(chunk * v, SLOPES) // max(1, n) // BLOCK_V) * BLOCK_V
        for first in range(0, v, width):
            part = slice(first, min(first + width, v))
            dz = hidden.new_empty(n, part.stop - first)
            bias_sums = None if grad_bias is None else lse.new_empty(blocks, part.stop - first)
            backward_kernel[(blocks * triton.cdiv(dz.shape[1], BLOCK_V),)](
                hidden, weight, bias, targets, temperature, lse, entropy, grad_logp, grad_ent, grad_lse, dz, bias_sums,
                first, dz.shape[1], n, v, d, scale, softcap,
                GROUP=GROUP, BLOCK_N=BLOCK_N, BLOCK_V=BLOCK_V, BLOCK_D=BLOCK_D, **LAUNCH,
            )  # fmt: skip
            grad_hidden += Head(weight[part].T).logits(dz)  # their product in fp32
            if grad_weight is not None:
                torch.mm(dz.T, hidden, out=grad_weight[part])
            if total is not None:
                total[part] += dz.T @ hidden
            if grad_bias is not None and bias_sums is not None:
                grad_bias[part] = bias_sums.sum(0)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None, None, None


BLOCK = 1024  # columns of the gate that a program computes


@triton.jit
def _rounded(x, like):
    """x fp32, rounded to the dtype of a pointer."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def norm_kernel(x, added, weight, out, D, eps, SIZE: tl.constexpr):
    """RMSNorm of a token, to which `added` is added before, if it is not None."""
    d = tl.arange(0, SIZE)
    place = tl.program_id(0).to(tl.int64) * D + d
    row = tl.load(x + place, mask=d < D, other=0.0).to(tl.float32)
    if added is not None:
        row = _rounded(row + tl.load(added + place, mask=d < D, other=0.0).to(tl.float32), x)
        tl.store(x + place, row, mask=d < D)
    row = _rounded(row * tl.rsqrt(tl.sum(row * row, 0) / D + eps), x)
    tl.store(out + place, row * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32), mask=d < D)


@triton.jit
def load_rotated(x, cos, sin, weight, eps, head, s, inside, S: tl.constexpr):
    """Rotated heads of a token in fp32, of pointers to its first head, cosines and sines; head [N, 1] and s [1, SIZE]
    are the places, `inside` those that exist. weight: of the heads' RMSNorm; None = they have none."""
    other = tl.where(s < S // 2, s + S // 2, s - S // 2)
    a = tl.load(x + head * S + s, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + head * S + other, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(a * a, 1, keep_dims=True) / S + eps)
        of_a = tl.load(weight + s, mask=s < S, other=0.0).to(tl.float32)
        of_b = tl.load(weight + other, mask=s < S, other=0.0).to(tl.float32)
        a, b = _rounded(_rounded(a * scale, x) * of_a, x), _rounded(_rounded(b * scale, x) * of_b, x)
    c = tl.load(cos + s, mask=s < S, other=0.0).to(tl.float32)
    d = tl.load(sin + s, mask=s < S, other=0.0).to(tl.float32)
    return _rounded(a * c, x) + _rounded(b * d, x)


@triton.jit
def rotate_kernel(
    qkv, cos, sin, q_weight, k_weight, out, stride, num_heads, num_query_heads, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, S: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program rotates all heads of a token. cos and sin [T, S], the first half of sin negated."""
    token = tl.program_id(0).to(tl.int64)
    x, out = qkv + token * stride, out + token * num_heads * S
    cos, sin, s = cos + token * S, sin + token * S, tl.arange(0, SIZE)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    inside = (head < num_query_heads) & (s < S)
    tl.store(out + head * S + s, load_rotated(x, cos, sin, q_weight, eps, head, s, inside, S), mask=inside)
    head = num_query_heads + tl.arange(0, KEY_HEADS)[:, None]
    inside = (head < num_heads) & (s < S)
    tl.store(out + head * S + s, load_rotated(x, cos, sin, k_weight, eps, head, s, inside, S), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, F, BLOCK: tl.constexpr):
    """silu(gate) * up of a token; gate_up [T, 2 F]."""
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + token * F + f, _rounded(gate / (1 + tl.exp(-gate)), gate_up) * up, mask=f < F)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm of x [T, D]. added [T, D]: is added to x before, in its memory."""
    out = torch.empty_like(x)
    if len(x):
        size = triton.next_power_of_2(x.shape[1])
        norm_kernel[(len(x),)](x, added, weight, out, x.shape[1], eps, SIZE=size, num_warps=max(1, min(8, size // 512)))
    return out


def rotate(qkv: torch.Tensor, heads: tuple[int, int], rotation: Rotation) -> torch.Tensor:
    """Rotated queries and keys [T, H + K, S] of qkv [T, H + 2 K, S]. heads: H and K."""
    num_tokens, num_heads, size = len(qkv), sum(heads), qkv.shape[2]
    out = torch.empty((num_tokens, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = rotation.norms or (None, None, 0.0)
    if num_tokens:
        rotate_kernel[(num_tokens,)](
            *(qkv, rotation.cos, rotation.sin, q_weight, k_weight, out, qkv.stride(0), num_heads, heads[0], eps),
            HEADS=triton.next_power_of_2(heads[0]), KEY_HEADS=triton.next_power_of_2(heads[1]),
            S=size, SIZE=triton.next_power_of_2(size),
        )  # fmt: skip
    return out


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 F]."""
    inner = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), inner), dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        gate_kernel[(len(gate_up), triton.cdiv(inner, BLOCK))](gate_up, out, inner, BLOCK=BLOCK)
    return out

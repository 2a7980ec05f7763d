"""What the fast decoder computes between its matrix products, in Triton: one launch each for norm, rotation and gate.
`fast_decoder` imports this file on devices for which `has_triton` holds. Each result is rounded where Transformers'
modules round it, so sampler and trainer differ by the order of sums alone.

Letters: T tokens, D hidden size, H query heads, K key heads, S head size, F inner size of the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # columns of the gate that a program computes


@triton.jit
def _rounded(x, like):
    """x fp32, rounded to the dtype of a pointer."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def norm_kernel(x, weight, out, D, eps, SIZE: tl.constexpr):
    """RMSNorm of a token."""
    d = tl.arange(0, SIZE)
    place = tl.program_id(0).to(tl.int64) * D + d
    row = tl.load(x + place, mask=d < D, other=0.0).to(tl.float32)
    row = _rounded(row * tl.rsqrt(tl.sum(row * row, 0) / D + eps), x)
    tl.store(out + place, row * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32), mask=d < D)


@triton.jit
def _of_heads(q_weight, k_weight, places, of_q, of_k):
    """The weights of the norms of query heads and of key heads, in one tensor."""
    of_queries = tl.load(q_weight + places, mask=of_q, other=0.0).to(tl.float32)
    return of_queries + tl.load(k_weight + places, mask=of_k, other=0.0).to(tl.float32)


@triton.jit
def rotate_kernel(
    qkv, cos, sin, q_weight, k_weight, out, stride, num_heads, num_query_heads, eps,
    HEADS: tl.constexpr, S: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program rotates all heads of a token. cos and sin [T, S], the first half of sin negated."""
    token = tl.program_id(0).to(tl.int64)
    head, s = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    other = tl.where(s < S // 2, s + S // 2, s - S // 2)
    inside = (head < num_heads) & (s < S)
    x = tl.load(qkv + token * stride + head * S + s, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv + token * stride + head * S + other, mask=inside, other=0.0).to(tl.float32)
    if q_weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / S + eps)
        of_q, of_k = inside & (head < num_query_heads), inside & (head >= num_query_heads)
        places = s + tl.zeros((HEADS, 1), tl.int32), other + tl.zeros((HEADS, 1), tl.int32)
        of_x = _of_heads(q_weight, k_weight, places[0], of_q, of_k)
        of_y = _of_heads(q_weight, k_weight, places[1], of_q, of_k)
        x = _rounded(_rounded(x * scale, qkv) * of_x, qkv)
        y = _rounded(_rounded(y * scale, qkv) * of_y, qkv)
    c = tl.load(cos + token * S + s, mask=s < S, other=0.0).to(tl.float32)
    d = tl.load(sin + token * S + s, mask=s < S, other=0.0).to(tl.float32)
    tl.store(out + (token * num_heads + head) * S + s, _rounded(x * c, qkv) + _rounded(y * d, qkv), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, F, BLOCK: tl.constexpr):
    """silu(gate) * up of a token; gate_up [T, 2 F]."""
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + token * F + f, _rounded(gate / (1 + tl.exp(-gate)), gate_up) * up, mask=f < F)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [T, D]."""
    out = torch.empty_like(x)
    if len(x):
        size = triton.next_power_of_2(x.shape[1])
        norm_kernel[(len(x),)](x, weight, out, x.shape[1], eps, SIZE=size, num_warps=max(1, min(8, size // 512)))
    return out


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Rotated queries and keys [T, H + K, S] of qkv [T, H + 2 K, S]. heads: H and K. norms: weights of the RMSNorms of
    query heads and of key heads, and their eps."""
    num_tokens, num_heads, size = len(qkv), sum(heads), qkv.shape[2]
    out = torch.empty((num_tokens, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    if num_tokens:
        rotate_kernel[(num_tokens,)](
            *(qkv, cos, sin, q_weight, k_weight, out, qkv.stride(0), num_heads, heads[0], eps),
            HEADS=triton.next_power_of_2(num_heads), S=size, SIZE=triton.next_power_of_2(size),
        )  # fmt: skip
    return out


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 F]."""
    inner = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), inner), dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        gate_kernel[(len(gate_up), triton.cdiv(inner, BLOCK))](gate_up, out, inner, BLOCK=BLOCK)
    return out

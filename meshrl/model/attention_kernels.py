"""The attention of equally long rows; attention.py chooses between these functions.

Letters: B rows, L queries and N keys of a row, H query heads, K key/value heads, D head size. A row's queries are its
last L positions.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from meshrl.model.attention import AttentionSpec

# All but cuDNN's kernel, which takes up to a second for the first call in a shape: the shapes of packs differ from step
# to step.
READY = [kernel for name, kernel in SDPBackend.__members__.items() if name not in ("ERROR", "CUDNN_ATTENTION")]


def padded_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The fastest exact way here: q [B, H, L, D], k and v [B, K, N, D] -> [B, H, L, Dv]."""
    if no_sdpa(q, spec) or _short_on_cpu(q, k.shape[2]):
        return _product_attention(q, k, v, spec)
    return sdpa_attention(q, k, v, spec)


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, kernels: list[SDPBackend] = READY
) -> torch.Tensor:
    """As padded_attention, where `no_sdpa` allows it; PyTorch chooses one of these kernels."""
    n = k.shape[2]
    plain = spec.sinks is None and spec.slopes is None
    causal = plain and not spec.is_mutual and q.shape[2] == n and (spec.window is None or n <= spec.window)
    mask = None if causal else _mask(q, n, spec)
    if not plain:
        assert mask is not None
        bias = torch.zeros_like(mask, dtype=q.dtype) if spec.slopes is None else _position_bias(q, n, spec.slopes)
        mask = bias.masked_fill(~mask, -torch.inf).expand(q.shape[1], -1, -1)
        if spec.sinks is not None:  # one more key, with a score of its own and no value
            mask = torch.cat([mask, spec.sinks.to(mask.dtype)[:, None, None].expand(-1, len(mask[0]), 1)], dim=-1)
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    grouped = q.shape[1] != k.shape[1]
    with nullcontext() if q.device.type == "cpu" else sdpa_kernel(kernels):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped
        )


cudnn_attention = partial(sdpa_attention, kernels=[SDPBackend.CUDNN_ATTENTION])


def no_sdpa(q: torch.Tensor, spec: AttentionSpec) -> str:
    """Why SDPA can't compute this layer exactly; "" if it can. A GPU's kernels need a bias in the dtype of q, and bf16
    rounds the bias of a token 100 positions back by up to 0.25."""
    if spec.softcap is not None:
        return "SDPA computes no softcap"
    return "SDPA would round ALiBi to 16 bits" if spec.slopes is not None and q.dtype.itemsize < 4 else ""


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """As padded_attention, by its definition, with all scores in memory: for a debugger."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.to(wide) @ k.to(wide).transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.slopes is not None:
        scores = scores + _position_bias(q, k.shape[2], spec.slopes.to(wide))
    scores = scores.masked_fill(~_mask(q, k.shape[2], spec), -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.to(wide)[:, None, None].expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : k.shape[2]].to(v.dtype) @ v


def _product_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """As padded_attention: matrix products compute the scores, in fp32, as PyTorch's fused kernels do. Only the result
    of the softmax is rounded, to the dtype that the product with the values needs."""
    (b, h, q_len, d), (heads, n) = q.shape, k.shape[1:3]
    # Query heads that share a key head are rows of one matrix product: no key or value is repeated.
    unseen = ~_mask(q, n, spec).repeat(h // heads, 1)
    queries, keys = q.reshape(b * heads, -1, d), k.reshape(b * heads, n, d).transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    bias = torch.zeros(unseen.shape, dtype=wide, device=q.device).masked_fill_(unseen, torch.finfo(wide).min)
    if spec.slopes is not None:
        bias = bias + _position_bias(q, n, spec.slopes.to(wide)).reshape(heads, -1, n)
        bias = bias.repeat(b, 1, 1)
    bias = bias.expand(b * heads, -1, -1)
    if spec.softcap is None:
        scores = wide_product(queries, keys, bias, spec.scale)
    else:
        scores = torch.tanh(wide_product(queries, keys) * (spec.scale / spec.softcap)) * spec.softcap + bias
    out = torch.bmm(probabilities(scores, spec.sinks, heads).to(v.dtype), v.reshape(b * heads, n, v.shape[3]))
    return out.view(b, h, q_len, v.shape[3])


def _short_on_cpu(q: torch.Tensor, num_keys: int) -> bool:
    """Whether two matrix products are faster than PyTorch's fused CPU kernel. The kernel's backward takes 18 ms for 64
    bf16 rows of 20 tokens, the products 2 ms; above 256 keys (fp32: 64) the kernel is faster. Accelerators always use
    the fused kernel."""
    return q.device.type == "cpu" and num_keys <= (256 if q.dtype == torch.bfloat16 else 64)


def probabilities(scores: torch.Tensor, sinks: torch.Tensor | None, kv_heads: int) -> torch.Tensor:
    """Softmax of scores [B * K, H / K * L, N], with the H attention sinks as scores of one more key, which is cut."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).view(kv_heads, -1, 1)
    column = column.repeat_interleave(scores.shape[1] // column.shape[1], dim=1)
    column = column.repeat(scores.shape[0] // kv_heads, 1, 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def _position_bias(q: torch.Tensor, num_keys: int, slopes: torch.Tensor) -> torch.Tensor:
    """ALiBi [H, L, N]: a head's slope times how far a key is after a query, which is at most 0 for keys that it sees.
    Source: Press et al., Train Short, Test Long (2022)."""
    position = torch.arange(num_keys, device=q.device)
    ahead = position - position[num_keys - q.shape[2] :, None]
    return slopes[:, None, None] * ahead.to(slopes.dtype)


def _mask(q: torch.Tensor, num_keys: int, spec: AttentionSpec) -> torch.Tensor:
    """bool [L, N]: which keys each query of a row sees."""
    position = torch.arange(num_keys, device=q.device)
    queries = position[num_keys - q.shape[2] :]
    if spec.is_mutual:  # as for the last query, but for the beginning of the window
        behind = queries[:, None] - position
        return behind < (num_keys if spec.window is None else spec.window)
    return visible(queries, position, spec.window)


def visible(query_position: torch.Tensor, key_position: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool [..., Q, N]: which keys each query may see, given the positions [..., Q] and [..., N] in their row."""
    behind = query_position[..., :, None] - key_position[..., None, :]
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def wide_product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """a @ b, or bias + scale * (a @ b) with a bias in the result's dtype: a [B, M, K], b [B, K, N] of one dtype ->
    [B, M, N] in fp32 (fp64 stays).

    Attention scores may be large with small differences, since a key bias adds nearly the same number to all scores of
    a query. bf16 rounds a score of 196 by up to 0.5, which changes logprobs by 0.1 nats on average.
    """
    if a.dtype.itemsize < 4:
        return _WideProduct.apply(a, b, bias, scale)  # type: ignore[no-any-return]  # apply is not typed
    return torch.bmm(a, b) if bias is None else torch.baddbmm(bias, a, b, alpha=scale)


class _WideProduct(torch.autograd.Function):
    """PyTorch's product of 16-bit operands with fp32 output exists on accelerators only, and has no backward pass. On a
    CPU the operands are converted, which rounds nothing. The backward pass multiplies in the operands' dtype, as fused
    kernels do. (PyTorch has baddbmm with fp32 output, too, whose bias can't be broadcast in some versions.)"""

    @staticmethod
    def forward(ctx, a, b, bias, scale):  # type: ignore[override]
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        if a.device.type == "cpu":
            product = torch.bmm(a.float(), b.float())
        else:
            product = torch.bmm(a, b, out_dtype=torch.float32)
        return product if bias is None else torch.add(bias, product, alpha=scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype)
        return torch.bmm(grad, b.mT).mul_(ctx.scale), torch.bmm(a.mT, grad).mul_(ctx.scale), None, None

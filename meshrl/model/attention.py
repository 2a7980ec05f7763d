"""One attention function for trainer and sampler, behind Transformers' attention interface.

A model loaded here has the attention name "meshrl". Transformers builds no mask for a name it has no mask function
for, and every attention layer passes its q, k, v to the `attention_context` argument of the forward call. The context
supplies the past of the tokens: rows packed end to end (training, here) or a KV cache (rollout/embedded).

Letters: T packed tokens, S rows, B rows of one bucket, L padded length of a bucket, H query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from meshrl.core.device import has_varlen_kernels, upload
from meshrl.parallel.exchange import Axis, swapped

NAME = "meshrl"
PAD_WASTE = 1.25  # a padded bucket may cost at most this many times what its rows cost one by one
ALIGNED_KEYS = 16  # on a CPU, 316 keys take 11 ms and 320 take 7 ms (bf16, forward): a softmax computes full vectors
CHEAP_WASTE = 128 * 128  # scores of padding that cost less than the kernel launches of one more bucket


class AttentionContext(Protocol):
    """Computes the attention of new tokens over themselves and their past."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, Dv] of the new tokens -> [T, H, Dv]."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Parameters of one attention layer: softmax scale, sliding window in tokens (None = all), logit softcap."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def register() -> None:
    """Make the attention name known to Transformers; safe to call again."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' interface, query [1, H, T, D] -> [1, T, H, D]."""
    if attention_context is None:
        raise ValueError(
            f"{type(module).__name__} was called without attention_context, which meshrl's packed and cached attention "
            "needs: either the model does not pass the arguments of its forward call on to its attention layers, or it "
            "was not called through meshrl.model.causal.CausalModel"
        )
    if s_aux is not None or dropout:
        feature = "attention sinks (s_aux)" if s_aux is not None else f"attention dropout {dropout}"
        raise ValueError(f"{type(module).__name__} asks for {feature}, which meshrl's attention does not compute")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scale, sliding_window, softcap)
    out = attention_context.attend(
        module.layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), spec
    )
    return out[None], None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments of similar length as one batch: B rows of L queries. Each row sees its prefix and itself; the prefixes
    of a bucket are equally long, but they may be different segments."""

    rows: int
    length: int
    prefix: int = 0

    @property
    def num_queries(self) -> int:
        return self.rows * self.length

    @property
    def num_keys(self) -> int:
        return self.rows * (self.prefix + self.length)


@dataclass(frozen=True, slots=True)
class _Padded:
    """All buckets of a pack, end to end: one gather, whatever the number of buckets, and one scatter in the backward
    pass. An index that would change nothing is None."""

    buckets: list[_Bucket]
    queries: torch.Tensor | None  # int64: token of each padded position (a segment's last token fills its padding)
    keys: torch.Tensor | None  # int64: token of each key, its prefix before each segment
    back: torch.Tensor | None  # int64[T]: padded position of each token


class PackedAttention:
    """Causal attention inside each row of a pack; no token sees another row, and no [T, T] mask exists.

    cu_seqlens cuts the pack into segments. A segment is a row, or continues another segment (parents[s], -1 = none): a
    group's prompt is then computed once, and each answer sees the prompt and itself.

    Where PyTorch has a kernel for packed rows, it computes all segments in one call. Elsewhere segments with prefixes
    of equal length are sorted by length and cut into buckets, whose padded cost stays within PAD_WASTE times the sum
    of queries x keys, so a pack costs about what its rows cost one by one, with few kernel launches. Right padding
    can't leak: attention is causal.
    """

    def __init__(self, cu_seqlens: list[int], device: torch.device, parents: Sequence[int] | None = None):
        self.num_tokens = cu_seqlens[-1]
        self.use_varlen = has_varlen_kernels(device)  # when False, buckets compute the same result
        self._segments = (cu_seqlens, parents, device)
        self._padded: dict[int, _Padded] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        if self.use_varlen and _varlen_computes(q, v, spec):
            return self._varlen.attend(q, k, v, spec)
        padded = self.padded(ALIGNED_KEYS if q.device.type == "cpu" and q.dtype == torch.bfloat16 else 1)
        sizes = [b.num_queries for b in padded.buckets], [b.num_keys for b in padded.buckets]
        queries = _picked(q, padded.queries).split(sizes[0])
        keys, values = (_picked(x, padded.keys).split(sizes[1]) for x in (k, v))
        outs = []
        for i, b in enumerate(padded.buckets):
            x, y, z = (_in_rows(part, b.rows) for part in (queries[i], keys[i], values[i]))
            out = _causal_attention(x, y, z, spec)
            outs.append(out.transpose(1, 2).reshape(b.num_queries, q.shape[1], v.shape[2]))
        out = _picked(outs[0] if len(outs) == 1 else torch.cat(outs), padded.back)
        return out.contiguous()  # that of a single row may be a transposed view, which some models can't reshape

    def padded(self, align: int) -> _Padded:
        """The buckets; their rows are padded to a multiple of `align` keys."""
        if align not in self._padded:
            self._padded[align] = self._buckets(align)
        return self._padded[align]

    def _buckets(self, align: int) -> _Padded:
        cu_seqlens, parents, device = self._segments
        starts, lengths = cu_seqlens[:-1], [b - a for a, b in itertools.pairwise(cu_seqlens)]
        prefixes = [range(starts[p], starts[p] + lengths[p]) if p >= 0 else range(0) for p in parents or ()]
        prefixes = prefixes or [range(0)] * len(lengths)
        by_prefix: dict[int, list[int]] = {}
        for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
            if lengths[s] > 0:
                by_prefix.setdefault(len(prefixes[s]), []).append(s)
        buckets: list[_Bucket] = []
        queries, keys = [], []
        at, back = 0, torch.empty(self.num_tokens, dtype=torch.int64)
        for prefix, segments in sorted(by_prefix.items()):
            while segments:
                size = _bucket_size([lengths[s] for s in segments], prefix)
                members, segments = sorted(segments[:size]), segments[size:]
                length = max(lengths[s] for s in members)
                length += -(prefix + length) % align
                buckets.append(_Bucket(len(members), length, prefix))
                for s in members:
                    own = starts[s] + torch.arange(length).clamp_(max=lengths[s] - 1)
                    queries.append(own)
                    keys += [torch.arange(prefixes[s].start, prefixes[s].stop), own]
                    back[starts[s] : starts[s] + lengths[s]] = torch.arange(at, at + lengths[s])
                    at += length
        picked = [_unless_same(torch.cat(parts) if parts else back, self.num_tokens) for parts in (queries, keys)]
        indices = [*picked, _unless_same(back, at)]
        sent = iter(upload([i for i in indices if i is not None], device))
        return _Padded(buckets, *(i if i is None else next(sent) for i in indices))

    @cached_property
    def _varlen(self) -> Varlen:
        return varlen_layout(*self._segments)


class UlyssesAttention:
    """Attention of tokens whose other chunks are on the peers along `ulysses`: they swap tokens for heads, so that each
    has all tokens of some heads, and back."""

    def __init__(self, context: AttentionContext, axis: Axis):
        self.context, self.axis = context, axis

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        n, heads, shared = self.axis.size, q.shape[1], k.shape[1]
        if heads % n or (shared % n and n % shared):
            raise ValueError(
                f"{n} ranks of ulysses can't share {heads} attention heads and {shared} key heads of a layer: ulysses "
                "must divide the attention heads, and the key heads must be a multiple or a divisor of it"
            )
        if shared % n:
            k, v = (x.repeat_interleave(n // shared, dim=1) for x in (k, v))
        q, k, v = (self._all_tokens(x) for x in (q, k, v))
        out = self.context.attend(layer, q, k, v, spec)
        return swapped(out.unflatten(0, (n, -1)), self.axis).transpose(0, 1).flatten(1, 2)

    def _all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[T / n, H, D] -> [T, H / n, D]"""
        return swapped(x.unflatten(1, (self.axis.size, -1)).transpose(0, 1), self.axis).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Varlen:
    """All segments in one call of a kernel that gets the start of each segment: nothing is padded, sorted or masked.

    The queries of segment s are tokens [queries[s], queries[s + 1]); its keys are [keys[s], keys[s + 1]) of the tokens
    that `gather` picks. The last query is aligned with the last key, and each query sees the keys up to its own.
    """

    queries: torch.Tensor  # int32[S + 1]
    keys: torch.Tensor  # int32[S + 1]
    longest: tuple[int, int]  # most queries and most keys of a segment
    gather: torch.Tensor | None  # int64: token of each key, a parent's before its segment's own; None = all

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if self.gather is not None:
            k, v = k.index_select(0, self.gather), v.index_select(0, self.gather)
        back = -1 if spec.window is None or spec.window >= self.longest[1] else spec.window - 1
        kernel = _varlen_kernel()
        return kernel(q, k, v, self.queries, self.keys, *self.longest, scale=spec.scale, window_size=(back, 0))


def varlen_layout(cu_seqlens: list[int], parents: Sequence[int] | None, device: torch.device) -> Varlen:
    """The positions of the queries and keys of each segment."""
    queries = torch.tensor(cu_seqlens, dtype=torch.int32)
    longest = int(queries.diff().max())
    if parents is None or max(parents) < 0:
        (queries,) = upload([queries], device)
        return Varlen(queries, queries, (longest, longest), None)
    picked, lengths = [], []
    for (start, stop), parent in zip(itertools.pairwise(cu_seqlens), parents, strict=True):
        seen = [torch.arange(start, stop)]
        if parent >= 0 and stop > start:  # without a query of its own a segment needs no keys
            seen.insert(0, torch.arange(cu_seqlens[parent], cu_seqlens[parent + 1]))
        picked += seen
        lengths.append(sum(len(part) for part in seen))
    keys = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    queries, keys, gather = upload([queries, keys, torch.cat(picked)], device)
    return Varlen(queries, keys, (longest, max(lengths)), gather)


def _varlen_computes(q: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernel supports this dtype, head size and score function."""
    size = q.shape[2]
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and spec.softcap is None and size == v.shape[2] and size % 8 == 0 and size <= 256


@lru_cache(maxsize=1)
def _varlen_kernel() -> Callable[..., Any]:
    """PyTorch's kernel. Newer versions need enable_gqa when query heads share a key head, older ones do not have the
    argument. Imported here, because it imports the compiler, which nothing on a CPU needs."""
    from torch.nn.attention.varlen import varlen_attn

    knows_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if knows_gqa else varlen_attn


def _bucket_size(lengths: list[int], prefix: int) -> int:
    """How many of the leading segments (sorted long to short) share one padded batch."""
    longest, cost = lengths[0], 0
    for n, length in enumerate(lengths, start=1):
        cost += length * (prefix + length)
        waste = n * longest * (prefix + longest) - cost
        if waste > max(CHEAP_WASTE, (PAD_WASTE - 1) * cost):
            return n - 1
    return len(lengths)


def _unless_same(index: torch.Tensor, size: int) -> torch.Tensor | None:
    """The index; None when it picks all `size` positions in order."""
    return None if len(index) == size and torch.equal(index, torch.arange(size)) else index


def _picked(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return x if index is None else x.index_select(0, index)


def _in_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[B * L, H, D] -> [B, H, L, D]"""
    return x.reshape(rows, -1, x.shape[1], x.shape[2]).transpose(1, 2)


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Equally long rows, each after a prefix of N - L tokens: q [B, H, L, D], k and v [B, K, N, D] -> [B, H, L, Dv]."""
    n = k.shape[2]
    prefix = n - q.shape[2]
    unseen = spec.window is not None and n > spec.window
    if prefix or unseen or spec.softcap is not None or _short_on_cpu(q, n):
        position = torch.arange(n, device=q.device)
        return masked_attention(q, k, v, visible(position[prefix:], position, spec.window), spec)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _short_on_cpu(q: torch.Tensor, num_keys: int) -> bool:
    """Whether two matrix products are faster than PyTorch's fused CPU kernel. The kernel's backward takes 18 ms for 64
    bf16 rows of 20 tokens, the products 2 ms; above 256 keys (fp32: 64) the kernel is faster. Accelerators always use
    the fused kernel."""
    return q.device.type == "cpu" and num_keys <= (256 if q.dtype == torch.bfloat16 else 64)


def visible(query_position: torch.Tensor, key_position: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool [..., Q, N]: which keys each query may see, given the positions [..., Q] and [..., N] in their row."""
    behind = query_position[..., :, None] - key_position[..., None, :]
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention under a bool mask [Q, N]: q [B, H, Q, D], k and v [B, K, N, D] -> [B, H, Q, Dv].

    With a softcap, and for short rows on a CPU, separate matrix products compute the scores, in fp32, as PyTorch's
    fused kernels do. Only the result of the softmax is rounded, to the dtype that the product with the values needs.
    """
    (b, h, q_len, d), (heads, n) = q.shape, k.shape[1:3]
    if spec.softcap is None and not _short_on_cpu(q, n):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=h != heads)
    # Query heads that share a key head are rows of one matrix product: no key or value is repeated.
    unseen = ~mask.repeat(h // heads, 1)
    queries, keys = q.reshape(b * heads, -1, d), k.reshape(b * heads, n, d).transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    bias = torch.zeros(unseen.shape, dtype=wide, device=q.device).masked_fill_(unseen, torch.finfo(wide).min)
    bias = bias.expand(b * heads, -1, -1)
    if spec.softcap is None:
        scores = wide_product(queries, keys, bias, spec.scale)
    else:
        scores = torch.tanh(wide_product(queries, keys) * (spec.scale / spec.softcap)) * spec.softcap + bias
    out = torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v.reshape(b * heads, n, v.shape[3]))
    return out.view(b, h, q_len, v.shape[3])


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

"""One attention function for trainer and sampler, behind Transformers' attention interface.

A model loaded here has the attention name "meshrl". Transformers builds no mask for a name it has no mask function
for, and every attention layer passes its q, k, v to the `attention_context` argument of the forward call. The context
supplies the past of the tokens: rows packed end to end (training, here) or a KV cache (rollout/embedded). It does the
same for layers with a state (state_layers.py).

Letters: T packed tokens, S rows, B rows of one bucket, L padded length of a bucket, H query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

import inspect
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from meshrl.core.device import has_long_row_kernels, has_varlen_kernels, upload
from meshrl.model.attention_kernels import (
    cudnn_attention,
    eager_attention,
    no_sdpa,
    padded_attention,
    sdpa_attention,
)
from meshrl.model.inputs import Mutual

NAME = "meshrl"
OWN_CODE = ("gptj", "falcon", "bloom")  # model types that compute attention by themselves
ONLY_CACHE = (*OWN_CODE, "nemotron", "stablelm")  # model types that pass nothing but a cache on to attention
# Transformers' name of each model.attn_implementation. It loads a package of its own for a name with "flash" in it, and
# refuses one with "sdpa" for some models.
NAMES = {"auto": NAME, "sdpa": f"{NAME}_padded", "eager": f"{NAME}_products", "flash": f"{NAME}_varlen"}
PAD_WASTE = 1.25  # a padded bucket may cost at most this many times what its rows cost one by one
ALIGNED_KEYS = 16  # on a CPU, 316 keys take 11 ms and 320 take 7 ms (bf16, forward): a softmax computes full vectors
LONG_ROW = 4096  # tokens; from here on cuDNN computes rows, where it can
CHEAP_WASTE = 128 * 128  # scores of padding that cost less than the kernel launches of one more bucket


Outs = list[torch.Tensor | None]
StateCompute = Callable[[torch.Tensor, Any], Outs]


class AttentionContext(Protocol):
    """Computes the attention of new tokens over themselves and their past."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, Dv] of the new tokens -> [T, H, Dv]."""
        ...

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        """The outputs [T, ...] of a layer with a state for its input x [T, ...]. compute: (rows [B, L, ...], the cache
        of their states, None = without a past that is kept) -> outputs [B, L, ...]."""
        ...


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos, sin [T, 1, D], the first half of sin negated. norms: of query and key heads, which come before: the weights
    of both RMSNorms, and their eps."""

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None


@runtime_checkable
class RotatingContext(AttentionContext, Protocol):
    """Rotates queries and keys itself."""

    def attend_rotated(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, rotation: Rotation
    ) -> torch.Tensor:
        """As `attend`, of q and k before the rotation."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Parameters of one attention layer: softmax scale, sliding window in tokens (None = all), logit softcap.
    implementation: one of NAMES, the value of model.attn_implementation. sinks [H]: the score of one more key of each
    head, without a value. slopes [H]: ALiBi adds to a score minus this times the distance of its tokens. is_mutual: the
    queries also see each other's keys, the last ones."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    implementation: str = "auto"
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    is_mutual: bool = False


def register(outside_graphs: bool = False) -> None:
    """Make the attention names known to Transformers; safe to call again. outside_graphs: from now on torch.compile
    leaves attention out, which differs from pack to pack."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for implementation, name in NAMES.items():
        function = ALL_ATTENTION_FUNCTIONS.get(name) or partial(attend, implementation=implementation)
        if outside_graphs and isinstance(function, partial):
            function = torch.compiler.disable(function)
        ALL_ATTENTION_FUNCTIONS.register(name, function)


class ContextCache:
    """Takes the place of Transformers' cache in families of which the layers pass no other argument on to attention:
    `update`, which a layer calls before, names the context of its attention. So a checkpointed block that is computed
    again has its own context."""

    current: ClassVar[AttentionContext | None] = None

    def __init__(self, context: AttentionContext):
        self.context = context

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer: int) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int | None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ContextCache.current = self.context
        return key, value


def attend(
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
    implementation: str = "auto",
    slopes: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' interface, query [1, H, T, D] -> [1, T, H, D]."""
    if attention_context is None:
        attention_context, ContextCache.current = ContextCache.current, None
    if attention_context is None:
        raise ValueError(
            f"{type(module).__name__} was called without attention_context, which meshrl's packed and cached attention "
            "needs: either the model does not pass the arguments of its forward call on to its attention layers, or it "
            "was not called through meshrl.model.causal.CausalModel"
        )
    if dropout:
        raise ValueError(f"{type(module).__name__} asks for attention dropout {dropout}, which meshrl does not compute")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scale, sliding_window, softcap, implementation, s_aux, slopes)
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

    KERNELS has the ways to compute it. Where PyTorch has a kernel for packed rows, it computes all segments in one
    call. Elsewhere segments with prefixes of equal length are sorted by length and cut into buckets, whose padded cost
    stays within PAD_WASTE times the sum of queries x keys, so a pack costs about what its rows cost one by one, with
    few kernel launches. Right padding can't leak: attention is causal.

    lengths: of the segments. used: layer -> its kernel, and why it is not the one that was asked for. num_past: leading
    segments that have keys and values alone, which others continue. mutual: tokens that also see each other, each span
    in one segment, counted without the past; their attention is computed a second time, and replaces the first.
    """

    def __init__(
        self,
        cu_seqlens: list[int],
        device: torch.device,
        parents: Sequence[int] | None = None,
        num_past: int = 0,
        mutual: Mutual | None = None,
    ):
        self.num_tokens = cu_seqlens[-1] - cu_seqlens[num_past]
        self.use_varlen = has_varlen_kernels(device)  # when False, buckets compute the same result
        self.use_cudnn = has_long_row_kernels(device) and not torch.are_deterministic_algorithms_enabled()
        self.used: dict[int, tuple[str, str]] = {}
        self.lengths = [b - a for a, b in itertools.pairwise(cu_seqlens)][num_past:]
        self._segments, self._mutual = (cu_seqlens, parents, num_past, device), mutual
        self._padded: dict[int, _Padded] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        kernel, _ = self.used[layer] = self._choose(q, v, spec)
        out = KERNELS[kernel](self, q, k, v, spec)
        if self._mutual is not None and (self._mutual.rule == "image" or spec.window is not None):
            out = self._with_mutual(out, q, k, v, replace(spec, is_mutual=True), self._mutual.spans)
        return out

    def _with_mutual(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        spans: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """The attention with that of the spans' tokens to their prefix, what is before the span, and all of it."""
        cu_seqlens, parents, num_past, _ = self._segments
        parts, at, past = [], 0, cu_seqlens[num_past]
        for start, end in spans:
            segment = bisect_right(cu_seqlens, start + past) - 1
            seen = [(cu_seqlens[segment], end + past)]
            if parents is not None and (parent := parents[segment]) >= 0:
                seen.insert(0, (cu_seqlens[parent], cu_seqlens[parent + 1]))
            rows = [torch.cat([x[a:b] for a, b in seen]) for x in (k, v)]
            x, y, z = (_in_rows(each, 1) for each in (q[start:end], *rows))
            compute = eager_attention if spec.implementation == "eager" else padded_attention
            parts += [out[at:start], compute(x, y, z, spec)[0].transpose(0, 1)]
            at = end
        return torch.cat([*parts, out[at:]])

    def _choose(self, q: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> tuple[str, str]:
        """The name of a kernel, and why it is not the one that was asked for."""
        no_flash = _no_flash(q, v, spec) if self.use_varlen else "PyTorch has no kernel for packed rows for this device"
        problem = ""
        if spec.implementation == "flash":
            problem = no_flash
        elif spec.implementation == "sdpa":
            problem = no_sdpa(q, spec)
        if problem or spec.implementation == "auto":
            return "padded" if no_flash else "cudnn" if self._suits_cudnn(q, spec) else "flash", problem
        return spec.implementation, ""

    def _suits_cudnn(self, q: torch.Tensor, spec: AttentionSpec) -> bool:
        """Whether cuDNN computes what the kernel for packed rows can compute, in less time: long rows by themselves."""
        if not self.use_cudnn or q.shape[2] > 128 or any(parent >= 0 for parent in self._segments[1] or ()):
            return False
        return min(self.lengths) >= LONG_ROW and (spec.window is None or spec.window >= max(self.lengths))

    def row_by_row(
        self, compute: RowKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """The attention of a pack without parents by a function of one row. Rows are padded to one of 16 lengths
        between two powers of two, so that a kernel that prepares itself for a length does so for few."""
        outs = []
        for n, *parts in zip(self.lengths, *(x.split(self.lengths) for x in (q, k, v)), strict=True):
            more = -n % max(128, 1 << n.bit_length() >> 5)
            x, y, z = (_in_rows(F.pad(part, (0, 0, 0, 0, 0, more)) if more else part, 1) for part in parts)
            outs.append(compute(x, y, z, spec)[0].transpose(0, 1)[:n])
        return torch.cat(outs)

    def in_rows(
        self, compute: RowKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """The attention of the pack by a function of equally long rows."""
        padded = self.padded(ALIGNED_KEYS if q.device.type == "cpu" and q.dtype == torch.bfloat16 else 1)
        sizes = [b.num_queries for b in padded.buckets], [b.num_keys for b in padded.buckets]
        queries = _picked(q, padded.queries).split(sizes[0])
        keys, values = (_picked(x, padded.keys).split(sizes[1]) for x in (k, v))
        outs = []
        for i, b in enumerate(padded.buckets):
            x, y, z = (_in_rows(part, b.rows) for part in (queries[i], keys[i], values[i]))
            outs.append(compute(x, y, z, spec).transpose(1, 2).reshape(b.num_queries, q.shape[1], v.shape[2]))
        out = _picked(outs[0] if len(outs) == 1 else torch.cat(outs), padded.back)
        return out.contiguous()  # that of a single row may be a transposed view, which some models can't reshape

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        """Each segment after its prefix, padded on the right, which does not change the outputs before."""
        padded = self.padded(1)
        parts = _picked(x, padded.keys).split([b.num_keys for b in padded.buckets])
        outs = []
        for b, part in zip(padded.buckets, parts, strict=True):
            results = compute(part.unflatten(0, (b.rows, -1)), None)
            outs.append([r if r is None else r[:, b.prefix :].flatten(0, 1) for r in results])
        joined = [None if any(x is None for x in of_all) else torch.cat(of_all) for of_all in zip(*outs, strict=True)]
        return [x if x is None else _picked(x, padded.back) for x in joined]

    def padded(self, align: int) -> _Padded:
        """The buckets; their rows are padded to a multiple of `align` keys."""
        if align not in self._padded:
            self._padded[align] = self._buckets(align)
        return self._padded[align]

    def _buckets(self, align: int) -> _Padded:
        cu_seqlens, parents, num_past, device = self._segments
        starts, lengths, past = cu_seqlens[num_past:-1], self.lengths, cu_seqlens[num_past]
        prefixes = [range(cu_seqlens[p], cu_seqlens[p + 1]) if p >= 0 else range(0) for p in (parents or ())[num_past:]]
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
                    queries.append(own - past)
                    keys += [torch.arange(prefixes[s].start, prefixes[s].stop), own]
                    back[starts[s] - past :][: lengths[s]] = torch.arange(at, at + lengths[s])
                    at += length
        picked = [_unless_same(torch.cat(parts) if parts else back, self.num_tokens) for parts in (queries, keys)]
        indices = [*picked, _unless_same(back, at)]
        sent = iter(upload([i for i in indices if i is not None], device))
        return _Padded(buckets, *(i if i is None else next(sent) for i in indices))

    @cached_property
    def varlen(self) -> Varlen:
        return varlen_layout(*self._segments)


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


def varlen_layout(cu_seqlens: list[int], parents: Sequence[int] | None, num_past: int, device: torch.device) -> Varlen:
    """The positions of the queries and keys of each segment after the first num_past, which have no queries."""
    queries = torch.tensor(cu_seqlens[num_past:], dtype=torch.int32) - cu_seqlens[num_past]
    longest = int(queries.diff().max())
    if parents is None or max(parents) < 0:
        (queries,) = upload([queries], device)
        return Varlen(queries, queries, (longest, longest), None)
    picked, lengths = [], []
    for (start, stop), parent in list(zip(itertools.pairwise(cu_seqlens), parents, strict=True))[num_past:]:
        seen = [torch.arange(start, stop)]
        if parent >= 0 and stop > start:  # without a query of its own a segment needs no keys
            seen.insert(0, torch.arange(cu_seqlens[parent], cu_seqlens[parent + 1]))
        picked += seen
        lengths.append(sum(len(part) for part in seen))
    keys = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    queries, keys, gather = upload([queries, keys, torch.cat(picked)], device)
    return Varlen(queries, keys, (longest, max(lengths)), gather)


def _no_flash(q: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> str:
    """Why the kernel for packed rows can't compute this layer; "" if it can."""
    size = q.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes bfloat16 and float16, not {q.dtype}".replace("torch.", "")
    if size != v.shape[2] or size % 8 or size > 256:
        return f"the kernel has no head sizes {size} and {v.shape[2]}"
    others = {"softcap": spec.softcap, "attention sinks": spec.sinks, "ALiBi": spec.slopes}
    return next((f"the kernel computes no {name}" for name, value in others.items() if value is not None), "")


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


RowKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]
Kernel = Callable[[PackedAttention, torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]
KERNELS: dict[str, Kernel] = {
    "padded": lambda pack, *layer: pack.in_rows(padded_attention, *layer),
    "sdpa": lambda pack, *layer: pack.in_rows(sdpa_attention, *layer),
    "eager": lambda pack, *layer: pack.in_rows(eager_attention, *layer),
    "flash": lambda pack, *layer: pack.varlen.attend(*layer),
    "cudnn": lambda pack, *layer: pack.row_by_row(cudnn_attention, *layer),
}
_TEXTS = {
    "padded": "SDPA over padded rows, and matrix products for short rows on a CPU, softcaps and ALiBi in 16 bits",
    "sdpa": "SDPA over padded rows",
    "eager": "plain matrix products",
    "flash": "torch's kernel for packed rows (varlen_attn)",
    "cudnn": "cuDNN's kernel, row by row",
}


def attention_text(asked: str, used: Mapping[int, tuple[str, str]]) -> str:
    """How the layers of a model compute attention, and why not as asked. used: of a PackedAttention."""
    counts = Counter(used.values())
    parts = []
    for (kernel, problem), count in counts.items():
        layers = f" in {count} of {len(used)} layers" if len(counts) > 1 else ""
        parts.append(f"{_TEXTS[kernel]}{layers}" + (f", because {problem}" if problem else ""))
    return f"attention {asked}: {'; '.join(parts) or 'no layer computes it'}"

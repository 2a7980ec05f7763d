"""Attention of one engine step: causal attention inside the new contexts, and one new token of each running row over
its pages of the KV cache.

Letters: T tokens of the step, N running rows, H query heads, K key/value heads, G query heads of a key head, D head
size, P pages that are read, R rows that read one page, W tokens of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from meshrl.core.device import upload
from meshrl.model.attention import AttentionSpec, Outs, PackedAttention, Rotation, StateCompute
from meshrl.model.attention_kernels import wide_product
from meshrl.model.inputs import Mutual
from meshrl.model.state_layers import StateCache
from meshrl.rollout.embedded.kv_cache import AddressTable, KVPool, Places
from meshrl.rollout.embedded.pages import PageTable, kinds

MAX_GAP = 2  # pages between two others that are read in vain, so that one product reads all of them
_MASKED = torch.finfo(torch.float32).min  # the bias of a token that a row does not see; -inf - -inf would be NaN


@dataclass(slots=True)
class Past:
    """Tokens of contexts that are in pages already, end to end: where they are, and their number for each context."""

    places: Places
    lengths: list[int]


class PrefillAttention(PackedAttention):
    """Packed causal attention that also writes its keys and values to the pages, and the states after each context to
    rows: for each context its pools and rows. A context continues its past, if it has one."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        pool: KVPool,
        places: Places,
        past: Past | None = None,
        rows: Sequence[Sequence[tuple[KVPool, int]]] = (),
        mutual: Mutual | None = None,
    ):
        pasts = [] if past is None else [n for n in past.lengths if n]
        is_past = iter(range(len(pasts)))
        parents = None if past is None else [-1] * len(pasts) + [next(is_past) if n else -1 for n in past.lengths]
        cu_seqlens = np.cumsum([0, *pasts, *lengths]).tolist()
        super().__init__(cu_seqlens, device, parents, len(pasts), mutual)
        self.pool, self.places, self.past, self.rows = pool, places, past, rows
        self.kernels_fit = True  # all layers so far

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.write(layer, k, v)
        self.kernels_fit &= fit_kernels(q, v, spec)
        if self.past is not None:
            past = self.pool.gather(layer, self.past.places)
            k, v = (torch.cat([old.to(new.dtype), new]) for old, new in zip(past, (k, v), strict=True))
        return super().attend(layer, q, k, v, spec)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.pool.write(layer, k, v, self.places)

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        """Contexts of equal length at once: padding would change the states after them."""
        contexts = x.split(self.lengths)
        results: dict[int, list[torch.Tensor | None]] = {}
        for length in set(self.lengths):
            members = [i for i, n in enumerate(self.lengths) if n == length]
            cache = StateCache(layer)
            outs = compute(torch.stack([contexts[i] for i in members]), cache)
            for at, i in enumerate(members):
                results[i] = [out if out is None else out[at] for out in outs]
                for pool, row in self.rows[i]:
                    pool.write_states(layer, row, {name: state[at] for name, state in cache.states.items()})
        in_order = zip(*(results[i] for i in range(len(contexts))), strict=True)
        return [None if any(x is None for x in of_all) else torch.cat(of_all) for of_all in in_order]


@dataclass(frozen=True, slots=True)
class _Extent:
    """Neighbouring pages that one product reads, for up to `readers` rows each. first_pair: of its (page, reader)
    pairs, which are counted through all extents."""

    first: int
    num: int
    readers: int
    first_pair: int

    @property
    def pairs(self) -> slice:
        return slice(self.first_pair, self.first_pair + self.num * self.readers)


@dataclass(frozen=True, slots=True)
class _HeadIndex:
    """Of N rows and H heads, int64. queries: of each pair and key head, the row and key head whose queries it needs.
    parts: the results for each row and head, of one page each, end to end; they begin at `offsets`. padded [N * H, most
    pages], with 0 where `is_padding`; `places` of the parts in it."""

    queries: torch.Tensor
    parts: torch.Tensor
    offsets: torch.Tensor
    padded: torch.Tensor
    is_padding: torch.Tensor
    places: torch.Tensor


class PageReads:
    """Which pages the rows read, in an order that reads each page once. It changes only with the table: in most steps
    the lengths of rows alone are new.

    Pages are grouped by `kinds` of readers, and into extents of neighbours. So a prompt that a group shares is read
    once for the group.

    pairs int64[3, pairs], of each page and reader: the row, and the first and last positions that it reads of the page;
    pairs without a reader have none.
    """

    def __init__(self, table: PageTable, slots: np.ndarray, device: torch.device):
        self._counts, self._device = table.counts[slots], device
        row = np.repeat(np.arange(len(slots)), self._counts)
        column = np.arange(len(row)) - np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        page = table.pages[slots[row], column].astype(np.int64)
        by_page = np.lexsort((row, page))
        pages, first, readers = np.unique(page[by_page], return_index=True, return_counts=True)
        self.extents, extents = _extents(pages, readers)
        which, rank = np.empty((2, len(row)), np.int64)
        which[by_page] = np.repeat(extents, readers)
        rank[by_page] = np.arange(len(row)) - np.repeat(first, readers)
        firsts = np.array([[e.first, e.readers, e.first_pair] for e in self.extents])[which].T
        # Of each row and page, in the order of rows: first pair and readers of the extent, the page's number in it, and
        # the row's number among the readers.
        self._places = firsts[2], firsts[1], page - firsts[0], rank
        self._pairs = np.zeros((3, self.extents[-1].pairs.stop), np.int64)
        pair = firsts[2] + (page - firsts[0]) * firsts[1] + rank
        self._pairs[0, pair], self._pairs[1, pair] = row, table.starts[slots[row], column]
        self._pairs[2, pair] = table.starts[slots[row], column + 1]
        (self.pairs,) = upload([torch.from_numpy(self._pairs)], device)
        self._of_heads: dict[tuple[int, int], _HeadIndex] = {}

    def of_heads(self, kv_heads: int, group: int) -> _HeadIndex:
        """For layers with so many key heads, and query heads of each."""
        if (kv_heads, group) not in self._of_heads:
            self._of_heads[kv_heads, group] = self._head_index(kv_heads, group)
        return self._of_heads[kv_heads, group]

    def _head_index(self, kv_heads: int, group: int) -> _HeadIndex:
        heads, counts = kv_heads * group, self._counts
        queries = [
            self._pairs[0, e.pairs].reshape(e.num, 1, e.readers) * kv_heads + np.arange(kv_heads)[:, None]
            for e in self.extents
        ]
        sizes = np.repeat(counts, heads)
        bag = np.repeat(np.arange(len(sizes)), sizes)
        within = np.arange(len(bag)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        row, head = bag // heads, bag % heads
        first_pair, readers, page, rank = (x[(np.cumsum(counts) - counts)[row] + within] for x in self._places)
        parts = first_pair * heads + ((page * kv_heads + head // group) * readers + rank) * group + head % group
        padded, most = np.zeros((2, len(sizes), counts.max()), np.int64), int(counts.max())
        padded[1] = 1
        places = bag * most + within
        padded[0].flat[places], padded[1].flat[places] = parts, 0
        arrays = [np.concatenate([x.ravel() for x in queries]), parts, np.cumsum(sizes) - sizes, *padded, places]
        sent = upload([torch.from_numpy(array) for array in arrays], self._device)
        return _HeadIndex(sent[0], sent[1], sent[2], sent[3], sent[4].bool(), sent[5])


def _extents(pages: np.ndarray, readers: np.ndarray) -> tuple[list[_Extent], np.ndarray]:
    """The extents of pages in ascending order; and the extent of each page."""
    kind = kinds(readers)
    order = np.lexsort((pages, kind))
    begins = np.ones(len(pages), bool)
    begins[1:] = (np.diff(kind[order]) != 0) | (np.diff(pages[order]) > MAX_GAP + 1)
    starts = np.flatnonzero(begins)
    first, last = pages[order][starts], pages[order][np.append(starts[1:], len(pages)) - 1]
    most = np.maximum.reduceat(readers[order], starts)
    num_pairs = (last - first + 1) * most
    extents = np.stack([first, last - first + 1, most, np.cumsum(num_pairs) - num_pairs], axis=1).tolist()
    of_page = np.empty(len(pages), np.int64)
    of_page[order] = np.cumsum(begins) - 1
    return [_Extent(*extent) for extent in extents], of_page


class DecodeAttention:
    """One new token for each of N rows: its key and value are written to `places`, then it attends to all positions of
    its row. lengths: returns int64[N], positions of each row, including the new token.

    Each page is multiplied by the queries of all its readers, and its softmax is a part of theirs; parts are merged by
    the logarithms of their sums. PyTorch's SDPA is optimized for many queries per row, not for one. The dtypes are
    those of PyTorch's fused kernels, with which the trainer scores, on each device: scores, softmax and sums over pages
    in fp32, and probabilities rounded to the dtype of the model. A device differs only in the dtype of the pages, which
    rounds nothing, and in how `wide_product` is computed.
    """

    def __init__(self, pool: KVPool, reads: PageReads, places: Places, lengths: Callable[[], torch.Tensor]):
        self.pool, self.reads, self.places, self._lengths = pool, reads, places, lengths
        self._biases: dict[tuple[int | None, int], list[torch.Tensor]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.write(layer, k, v)
        (num_rows, heads, size), kv_heads = q.shape, k.shape[1]
        index = self.reads.of_heads(kv_heads, heads // kv_heads)
        dtype = self.pool.layers[layer][1].dtype
        queries = q.to(dtype).reshape(num_rows * kv_heads, -1).index_select(0, index.queries)
        extents = [(e, *self.pool.read(layer, e.first, e.num)) for e in self.reads.extents]
        sizes = [len(keys) * e.readers * (heads // kv_heads) for e, keys, _ in extents]
        scores = q.new_empty(sum(sizes), self.pool.page_tokens, dtype=torch.promote_types(dtype, torch.float32))
        parts = zip(queries.view(-1, size).split(sizes), scores.split(sizes), strict=True)
        for (_, keys, _), bias, (x, out) in zip(extents, self._bias(heads, kv_heads, spec), parts, strict=True):
            _write_scores(out.view(len(keys), -1, out.shape[1]), x.view(len(keys), -1, size), keys, bias, spec)
        probs = torch.softmax(scores, dim=-1)
        sums = scores.amax(-1) - probs.amax(-1).log_()
        outs = scores.new_empty(len(scores), v.shape[2])
        parts = zip(probs.to(v.dtype).to(dtype).split(sizes), outs.split(sizes), strict=True)
        for (_, _, values), (x, out) in zip(extents, parts, strict=True):
            _write_product(out.view(len(values), -1, v.shape[2]), x.view(len(values), -1, x.shape[1]), values)
        shares = sums.take(index.padded).masked_fill_(index.is_padding, -torch.inf)
        if spec.sinks is not None:
            shares = torch.cat([shares, spec.sinks.to(shares.dtype).repeat(num_rows)[:, None]], dim=1)
        shares = torch.softmax(shares, dim=1)[:, : index.padded.shape[1]].take(index.places)
        # A weighted sum of the parts of each row and head.
        out = F.embedding_bag(index.parts, outs, index.offsets, mode="sum", per_sample_weights=shares)
        return out.to(v.dtype).view(num_rows, heads, -1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.pool.write(layer, k, v, self.places)

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        """The states are views of the pool, which the layer updates in place."""
        outs = compute(x[:, None], StateCache(layer, self.pool.read_states(layer, len(x))))
        return [out if out is None else out[:, 0] for out in outs]

    def _bias(self, heads: int, kv_heads: int, spec: AttentionSpec) -> list[torch.Tensor]:
        """What is added to the scores of each extent, [its pages * K, 1 or R * G, W]: 0 where a row may attend and a
        large negative number elsewhere, and ALiBi; masks alone are made once per step and window."""
        if spec.slopes is None and (spec.window, kv_heads) in self._biases:
            return self._biases[spec.window, kv_heads]
        rows, starts, ends = self.reads.pairs
        lengths = self._lengths().index_select(0, rows)
        positions = starts[:, None] + torch.arange(self.pool.page_tokens, device=rows.device)
        seen = positions < torch.minimum(ends, lengths)[:, None]
        if spec.window is not None:
            seen &= positions >= (lengths - spec.window)[:, None]
        wide = torch.promote_types(self.pool.layers[next(iter(self.pool.layers))][1].dtype, torch.float32)
        masks = torch.zeros(seen.shape, dtype=wide, device=rows.device).masked_fill_(~seen, _MASKED)
        group, biases = heads // kv_heads, []
        for e in self.reads.extents:
            bias = masks[e.pairs].view(e.num, 1, e.readers, 1, -1)
            if spec.slopes is not None:
                ahead = (positions[e.pairs] - lengths[e.pairs, None] + 1).view(bias.shape)
                bias = bias + spec.slopes.to(wide).view(kv_heads, 1, group, 1) * ahead
            each = (1, 1) if bias.shape[3] == e.readers == 1 else (e.readers, group)
            biases.append(bias.expand(-1, kv_heads, *each, -1).reshape(e.num * kv_heads, each[0] * each[1], -1))
        if spec.slopes is None:
            self._biases[spec.window, kv_heads] = biases
        return biases


def _write_scores(
    out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, spec: AttentionSpec
) -> None:
    """Attention scores in fp32 (fp64 stays): q [B, L, D], keys [B, D, W], out [B, L, W]."""
    if spec.softcap is None:
        _write_product(out, q, keys, bias, spec.scale)
    else:
        _write_product(out, q, keys)
        out.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap).add_(bias)


def _write_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0
) -> None:
    """`wide_product`, into `out`."""
    if a.dtype.itemsize < 4:
        out.copy_(wide_product(a, b, bias, scale))
    elif bias is None:
        torch.bmm(a, b, out=out)
    else:
        torch.baddbmm(bias, a, b, alpha=scale, out=out)


class KernelAttention(DecodeAttention):
    """As DecodeAttention, by the kernels of `kernels.py`, for layers that `fit_kernels`. slots, lengths: return
    int64[N] on the device."""

    def __init__(self, table: AddressTable, slots: Callable[[], torch.Tensor], lengths: Callable[[], torch.Tensor]):
        self._table, self._slots, self._lengths = table, slots, lengths

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        return self.attend_rotated(layer, q, k, v, spec, None)

    def attend_rotated(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """As for `RotatingContext`; None = q and k are rotated."""
        from meshrl.rollout.embedded.kernels import attend  # Triton is not installed everywhere

        table, slots, lengths = self._table, self._slots(), self._lengths()
        width, window = table.pool.page_tokens, spec.window
        return attend(q, k, v, table.bases(layer), table.rows, slots, lengths, width, spec.scale, window, rotation)


def fit_kernels(q: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernels can compute the decode attention of a layer."""
    size = q.shape[2]
    plain = spec.softcap is None and spec.sinks is None and spec.slopes is None
    return plain and q.dtype.itemsize == 2 and size == v.shape[2] and size in (16, 32, 64, 128, 256)


class StepAttention:
    """The first tokens of the step are contexts to prefill, the others are the new tokens of the running rows."""

    def __init__(self, prefill: PrefillAttention, decode: DecodeAttention):
        self.prefill, self.decode = prefill, decode

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        n = self.prefill.num_tokens
        return torch.cat(
            [
                self.prefill.attend(layer, q[:n], k[:n], v[:n], spec),
                self.decode.attend(layer, q[n:], k[n:], v[n:], spec),
            ]
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        n = self.prefill.num_tokens
        self.prefill.write(layer, k[:n], v[:n])
        self.decode.write(layer, k[n:], v[n:])

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        n = self.prefill.num_tokens
        halves = zip(self.prefill.mix(layer, x[:n], compute), self.decode.mix(layer, x[n:], compute), strict=True)
        return [None if a is None or b is None else torch.cat([a, b]) for a, b in halves]

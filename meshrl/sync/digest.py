"""The digest of a tensor. Two kinds: XXH3 of a run of bytes (RunningDigest), and the sum that the rest is about.

The sum is additive over shards, slices and deltas, so that every rank digests only what it holds, on any device. A
tensor is the byte stream of its elements in flat order, read as little-endian 32-bit words w_0, w_1, ...

    digest = sum over words k of (w_k + 0x01010101) * key(k)   mod 2^64,     key(k) odd, pseudo-random

A word is a sum of its bytes, so the digest is a sum over bytes, and over elements of mix(bits, global flat index):
digests of any partition add up to the digest of the whole, even where a cut falls inside a word. The 0x01010101 makes
a zero byte count: zeros at another place, or fewer of them, have another digest. Names are not mixed in; digests are
compared name by name, so two tensors that swapped places are two differences.

key(k) = COLUMN[k mod 16384] * row(k // 16384): 64 KiB of data are one row, whose keys are a table that stays in cache.
This costs one multiplication and one addition a word, and runs at 4 to 5 GB/s on one core, whatever the dtype.

What goes unnoticed. Let d_k be the changes of the words and 2^t the largest power of two that divides all of them
(t <= 31; t = 0 as soon as the lowest bit of any word changes).
- One word changed (any flip inside 4 bytes): never. d_k * odd is not 0 mod 2^64.
- Several words of one row: with probability 2^-(63-t) over the keys, because the sum is uniform on a coset of
  2^(t+1); over several rows at most 2^-(57-t), because the second factor can meet a sum that is already even.
So corruption that does not know the keys is missed with 2^-57, and at worst, when nothing but the top bit of whole
words changed (the signs of float32 values), with 2^-26. It is a proof against faults, not against an adversary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import torch
import xxhash

DigestKind = Literal["sum64", "xxh3"]
MASK64 = (1 << 64) - 1
_ROW_BITS = 14
_ROW = 1 << _ROW_BITS  # words in one row of keys
_ONES = 0x01010101
_ROW_SEED = 1 << 40  # row keys come from other counters than column keys


def digest(tensor: torch.Tensor, start: int = 0) -> int:
    """The digest of a tensor, or of a contiguous range of one, in [0, 2^64). Extra memory is bounded.

    start: flat index, in the whole tensor, of this range's first element.
    """
    if tensor.is_contiguous():
        return _unsigned(_range(as_bytes(tensor), start * tensor.element_size()))
    if start:
        raise ValueError("a range that starts inside a tensor must be contiguous; use digest_slice for strided slices")
    return digest_slice(tensor, tensor.shape, (0,) * tensor.dim())


Readable = torch.Tensor | memoryview


class RunningDigest:
    """The digest of bytes that come piece by piece, in order, and start at byte `start` of the whole.

    xxh3 for host memory: 65 GB/s from a core's cache, 28 from memory, and XXH3's own 64 bits against any change; but
    it speaks of these bytes as one run, so both sides must cut alike. sum64, the sum above, for every other device.
    """

    def __init__(self, kind: DigestKind, start: int = 0):
        self._position, self._sum = start, 0
        self._hash = xxhash.xxh3_64() if kind == "xxh3" else None

    def readable(self, raw: torch.Tensor) -> Readable:
        """uint8[N], contiguous, as `update` takes slices of it; asked for once, where they are many. In host memory it
        sees what is written later; xxh3 over any other would read a copy."""
        return raw if self._hash is None else _host_bytes(raw)

    def update(self, part: Readable) -> None:
        """part: of what `readable` gave."""
        if self._hash is not None:
            assert isinstance(part, memoryview)
            self._hash.update(part)
        else:
            assert isinstance(part, torch.Tensor)
            self._sum += digest(part, self._position)
            self._position += part.numel()

    @property
    def value(self) -> int:
        return self._sum & MASK64 if self._hash is None else self._hash.intdigest()


def digest_range(kind: DigestKind, raw: torch.Tensor, start: int = 0) -> int:
    """The digest of uint8[N], contiguous, that lies at byte `start` of the whole."""
    if kind == "xxh3":
        return xxhash.xxh3_64_intdigest(_host_bytes(raw))
    return digest(raw, start)


def _host_bytes(raw: torch.Tensor) -> memoryview:
    return raw.cpu().numpy().data


def kind_for(device: torch.device) -> DigestKind:
    """The faster digest of what lies in the memory of this device."""
    return "xxh3" if device.type == "cpu" else "sum64"


def digest_slice(tensor: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The digest of `tensor` as the slice [offsets, offsets + tensor.shape) of a tensor of `global_shape`."""
    return _unsigned(partial_digest(tensor, global_shape, offsets))


def partial_digest(tensor: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
    """`digest_slice` left on the tensor's device, without waiting for it: int64 with wrap-around.

    Shapes: -> []. Raises: ValueError when the slice does not lie inside global_shape.
    """
    shape, whole, first = tuple(tensor.shape), tuple(global_shape), tuple(offsets)
    inside = len(shape) == len(whole) == len(first) and all(
        at >= 0 and at + size <= full for size, full, at in zip(shape, whole, first)
    )
    if not inside:
        raise ValueError(f"a slice of shape {shape} at offsets {first} does not lie inside a tensor of shape {whole}")
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.int64)
    if not tensor.is_contiguous():
        parts = [partial_digest(piece, whole, (first[0] + at, *first[1:])) for at, piece in _contiguous_pieces(tensor)]
        return torch.stack(parts).sum()

    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    split = len(shape)  # dims from split - 1 on form one contiguous run of the whole tensor
    while split > 1 and shape[split - 1] == whole[split - 1]:
        split -= 1
    lead = max(split - 1, 0)
    begin = sum(at * stride for at, stride in zip(first, strides))
    if math.prod(shape[:lead]) == 1:
        return _range(as_bytes(tensor), begin * tensor.element_size())
    starts = torch.full((), begin, dtype=torch.int64, device=tensor.device)
    for dim in range(lead):
        starts = starts[..., None] + torch.arange(shape[dim], device=tensor.device) * strides[dim]
    size = tensor.element_size()
    return _runs(as_bytes(tensor).view(starts.numel(), -1), starts.reshape(-1) * size, math.prod(whole) * size)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor of any dtype and shape as uint8[num_bytes], outside of autograd."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a size of 0 or 1 may carry any stride, view minds
    return flat.view(torch.uint8)


def _unsigned(value: torch.Tensor) -> int:
    return int(value.item()) & MASK64


def _contiguous_pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first row, contiguous copy of some rows): at least one row, and about one chunk of memory."""
    row_bytes = max(1, math.prod(tensor.shape[1:]) * tensor.element_size())
    step = max(1, _chunk_words(tensor.device) * 4 // row_bytes)
    for at in range(0, tensor.shape[0], step):
        yield at, tensor[at : at + step].contiguous()


def _chunk_words(device: torch.device) -> int:
    """Words weighed at once. A core wants chunk and keys in its cache; an accelerator wants few, large launches."""
    return (8 if device.type == "cpu" else 256) * _ROW


def _range(raw: torch.Tensor, position: int) -> torch.Tensor:
    """Bytes raw[N] that lie at [position, position + N) of the whole. Extra memory: one chunk as int64."""
    num_bytes = raw.numel()
    head = min(-position % 4, num_bytes)
    body = (num_bytes - head) // 4 * 4
    total = raw.new_zeros((), dtype=torch.int64)
    for low, high in ((0, head), (head + body, num_bytes)):
        if high > low:
            at = torch.arange(position + low, position + high, device=raw.device)
            total = total + _weigh_bytes(raw[low:high], at, position + num_bytes)
    if body:
        total = total + _weigh_words(raw[head : head + body], (position + head) // 4)
    return total


def _weigh_words(raw: torch.Tensor, first: int) -> torch.Tensor:
    """Whole words, raw[4 * N] bytes, of which the first has index `first`: the rows that are cut, then whole rows."""
    end = first + raw.numel() // 4
    column, column_sum = _columns(raw.device)
    base = first >> _ROW_BITS
    rows = _rows(-(-end // _ROW), raw.device)[base:]
    sums = raw.new_zeros(rows.shape, dtype=torch.int64)
    low, high = -(-first // _ROW) * _ROW, end // _ROW * _ROW  # words [low, high) are whole rows
    for start, stop in ((first, min(low, end)), (max(low, high), end)):
        if stop > start:
            keys = column[start % _ROW :][: stop - start]
            words = _words(raw[4 * (start - first) : 4 * (stop - first)])
            sums[(start >> _ROW_BITS) - base] = (words * keys).sum() + _ONES * keys.sum()
    step = _chunk_words(raw.device)
    buffer = torch.empty((max(0, min(step, high - low)) // _ROW, _ROW), dtype=torch.int64, device=raw.device)
    for start in range(low, high, step):
        stop = min(start + step, high)
        weighed = buffer[: (stop - start) // _ROW]
        weighed.copy_(_words(raw[4 * (start - first) : 4 * (stop - first)]).view(-1, _ROW)).mul_(column)
        sums[(start >> _ROW_BITS) - base : (stop >> _ROW_BITS) - base] = weighed.sum(1) + _ONES * column_sum
    return (sums * rows).sum()


def _runs(raw: torch.Tensor, starts: torch.Tensor, whole_bytes: int) -> torch.Tensor:
    """Bytes raw[R, N]; run r lies at starts[r] of whole_bytes. Long runs go one by one, short ones by index."""
    num_runs, run_bytes = raw.shape
    chunk = _chunk_words(raw.device) // 8  # keys are gathered: three int64 temporaries a unit
    if run_bytes // 4 >= chunk:
        return torch.stack([_range(raw[run], at) for run, at in enumerate(starts.tolist())]).sum()
    aligned = run_bytes % 4 == 0 and not bool((starts % 4).any())
    unit = 4 if aligned else 1
    step = max(1, chunk // (run_bytes // unit))
    within = torch.arange(0, run_bytes, unit, device=raw.device)
    total = raw.new_zeros((), dtype=torch.int64)
    for run in range(0, num_runs, step):
        piece, at = raw[run : run + step], starts[run : run + step, None] + within
        if aligned:
            weighed = (_words(piece.reshape(-1)).view(at.shape).long() + _ONES) * _keys(at >> 2, whole_bytes)
            total = total + weighed.sum()
        else:
            total = total + _weigh_bytes(piece, at, whole_bytes)
    return total


def _weigh_bytes(raw: torch.Tensor, at: torch.Tensor, whole_bytes: int) -> torch.Tensor:
    """Single bytes by their positions `at` (same shape), each as its part of the signed word it belongs to."""
    shift = (at & 3) * 8
    value = (raw.long() << shift).to(torch.int32).long() + (torch.ones_like(at) << shift)
    return (value * _keys(at >> 2, whole_bytes)).sum()


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Bytes as int32. A cut inside a word of the memory (not of the stream) needs a copy of the chunk."""
    return (raw.clone() if raw.storage_offset() % 4 else raw).view(torch.int32)


def _keys(word: torch.Tensor, whole_bytes: int) -> torch.Tensor:
    rows = _rows(whole_bytes // (4 * _ROW) + 1, word.device)
    return torch.take(_columns(word.device)[0], word & (_ROW - 1)) * torch.take(rows, word >> _ROW_BITS)


@lru_cache(maxsize=16)
def _columns(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The column keys and their sum, which is what 0x01010101 in every word of a row is multiplied by."""
    keys = _mix64(torch.arange(_ROW, device=device)) | 1
    return keys, keys.sum()


def _rows(count: int, device: torch.device) -> torch.Tensor:
    """The first `count` row keys: 8 bytes for 64 KiB of data, kept for the largest tensor seen."""
    return _row_table(max(count - 1, 0).bit_length(), device)[:count]


@lru_cache(maxsize=64)
def _row_table(bits: int, device: torch.device) -> torch.Tensor:
    return _mix64(torch.arange(1 << bits, device=device) + _ROW_SEED) | 1


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """`core.types.mix64` on int64 tensors, whose sums and products wrap and whose right shifts have to be masked."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x

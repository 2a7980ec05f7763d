"""64-bit digests of bytes: XXH3 in host memory, a weighted sum on every other device.

The sum reads the bytes as little-endian 32-bit words w_0, w_1, ... (the last one padded with zeros):

    digest = sum over words k of (w_k + 0x01010101) * key(k)   mod 2^64,     key(k) odd, pseudo-random

0x01010101 makes zero bytes count: zeros at another index, or fewer of them, have another digest.
key(k) = COLUMN[k mod 16384] * row(k // 16384): 64 KiB of data are one row; the table of column keys stays in cache.
A device computes one multiplication and one addition for each word, and one copy to the host reads many digests
(`values`).

Probability that a change is missed. Let d_k be the changes of the words and 2^t the largest power of two that divides
all of them (t <= 31; t = 0 as soon as the lowest bit of any word changes).
- One word changed (any flip inside 4 bytes): 0. d_k * odd is not 0 mod 2^64.
- Several words of one row: 2^-(63-t) over the keys, because the sum is uniform on a coset of 2^(t+1); over several rows
  at most 2^-(57-t), because the second factor can multiply a sum that is already even.
So random corruption is missed with probability 2^-57 and, at worst, if only top bits of words change (the signs of
float32 values), 2^-26. The digest protects against faults, not against attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
import xxhash

DigestKind = Literal["sum64", "xxh3"]
_MASK64 = (1 << 64) - 1
_ROW_BITS = 14
_ROW = 1 << _ROW_BITS  # words in a row
_ONES = 0x01010101
_ROW_SEED = 1 << 40  # so that row keys and column keys use different counters

Readable = torch.Tensor | memoryview


def kind_for(device: torch.device) -> DigestKind:
    """The faster kind of digest for data in the memory of this device."""
    return "xxh3" if device.type == "cpu" else "sum64"


def digest_bytes(kind: DigestKind, raw: torch.Tensor) -> int:
    """The digest of uint8[N], contiguous."""
    running = RunningDigest(kind)
    running.update(running.readable(raw))
    return running.value


class RunningDigest:
    """The digest of bytes that arrive in pieces."""

    def __init__(self, kind: DigestKind):
        self._position = 0
        self._sum: torch.Tensor | None = None
        self._hash = xxhash.xxh3_64() if kind == "xxh3" else None

    def readable(self, raw: torch.Tensor) -> Readable:
        """raw uint8[N], contiguous, in a form whose slices `update` takes; call it once for many slices. In host memory
        it is a view, which shows later writes; for xxh3 of a device's memory it is a copy."""
        return raw if self._hash is None else raw.cpu().numpy().data

    def update(self, part: Readable) -> None:
        """part: a slice of the result of `readable`. sum64: complete words, except in the last part."""
        if self._hash is not None:
            assert isinstance(part, memoryview)
            self._hash.update(part)
        else:
            assert isinstance(part, torch.Tensor)
            added = _sum64(part, self._position // 4)
            self._sum = added if self._sum is None else self._sum + added
            self._position += part.numel()

    @property
    def value(self) -> int:
        return values([self])[0]


def values(running: Sequence[RunningDigest]) -> list[int]:
    """All digests, with one copy from the device to the host."""
    sums = [each._sum for each in running if each._sum is not None]
    found = iter(torch.stack(sums).tolist() if sums else ())
    return [
        each._hash.intdigest() if each._hash is not None else 0 if each._sum is None else next(found) & _MASK64
        for each in running
    ]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor of any dtype and shape as uint8[num_bytes], outside of autograd."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a dim of size 0 or 1 may have any stride
    return flat.view(torch.uint8)


def _chunk_words(device: torch.device) -> int:
    """Words in one operation: chunk and keys fit in a core's cache; accelerators get few, large launches."""
    return (8 if device.type == "cpu" else 256) * _ROW


def _sum64(raw: torch.Tensor, first: int) -> torch.Tensor:
    """The sum over bytes that start at word `first`: int64[] with wrap-around, on the bytes' device, without waiting
    for the device. Extra memory: one chunk as int64."""
    body = raw.numel() // 4 * 4
    total = raw.new_zeros((), dtype=torch.int64)
    if body:
        total = total + _weigh_words(raw[:body], first)
    if body < raw.numel():
        last = torch.zeros(4, dtype=torch.uint8, device=raw.device)
        last[: raw.numel() - body] = raw[body:]
        ones = _ONES & ((1 << 8 * (raw.numel() - body)) - 1)
        word = first + body // 4
        key = _columns(raw.device)[0][word & (_ROW - 1)] * _rows((word >> _ROW_BITS) + 1, raw.device)[-1]
        total = total + (last.view(torch.int32).long() + ones)[0] * key
    return total


def _weigh_words(raw: torch.Tensor, first: int) -> torch.Tensor:
    """The sum over N words, raw[4 * N] bytes, the first with index `first`: incomplete rows, then complete rows."""
    end = first + raw.numel() // 4
    column, column_sum = _columns(raw.device)
    base = first >> _ROW_BITS
    rows = _rows(-(-end // _ROW), raw.device)[base:]
    sums = raw.new_zeros(rows.shape, dtype=torch.int64)
    low, high = -(-first // _ROW) * _ROW, end // _ROW * _ROW  # words [low, high) are complete rows
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


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Bytes as int32. Memory that is not aligned to 4 bytes needs a copy of the chunk."""
    return (raw.clone() if raw.storage_offset() % 4 else raw).view(torch.int32)


@lru_cache(maxsize=16)
def _columns(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The column keys and their sum, by which 0x01010101 of all words of a row is multiplied."""
    keys = _mix64(torch.arange(_ROW, device=device)) | 1
    return keys, keys.sum()


def _rows(count: int, device: torch.device) -> torch.Tensor:
    """The first `count` row keys: 8 bytes for 64 KiB of data, cached for the largest tensor so far."""
    return _row_table(max(count - 1, 0).bit_length(), device)[:count]


@lru_cache(maxsize=64)
def _row_table(bits: int, device: torch.device) -> torch.Tensor:
    return _mix64(torch.arange(1 << bits, device=device) + _ROW_SEED) | 1


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """`core.types.mix64` on int64 tensors: sums and products wrap, right shifts have to be masked."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same width, in the same memory."""
    return tensor.view(_BITS[tensor.element_size()])


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

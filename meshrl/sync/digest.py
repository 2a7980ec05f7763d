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

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char
from functools import lru_cache, partial
from typing import Literal, TypeVar

import numpy as np
import torch
import xxhash

from meshrl.core.device import has_triton
from meshrl.core.errors import SyncError
from meshrl.core.types import mix64

S = TypeVar("S")
T = TypeVar("T")
DigestKind = Literal["sum64", "xxh3"]
_MASK64 = (1 << 64) - 1
_ROW = 16384  # words
_ROW_BYTES = 4 * _ROW
_ONES = 0x01010101
_SMALL_BYTES = 1 << 20  # below this, threads cost more than they gain
_BATCH_BYTES = 1 << 29  # of an accelerator's memory that one launch digests: copies of slices live until then
_MAX_LISTED = 20  # tensors listed in an error
_lock = threading.Lock()
_ROW_SEED = 1 << 40  # so that row keys and column keys use different counters

Readable = torch.Tensor | memoryview
Piece = tuple[int, torch.Tensor, int]  # number of the digest, its bytes, the row at which they begin in it


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
        self._pieces: list[tuple[torch.Tensor, int]] = []  # not summed yet: bytes, and the row at which they begin
        self._hash = xxhash.xxh3_64() if kind == "xxh3" else None

    def readable(self, raw: torch.Tensor) -> Readable:
        """raw uint8[N], contiguous, in a form whose slices `update` takes; call it once for many slices. In host memory
        it is a view, which shows later writes; for xxh3 of a device's memory it is a copy."""
        return raw if self._hash is None else np.from_dlpack(raw.cpu()).data  # Tensor.numpy forbids a later resize

    def update(self, part: Readable) -> None:
        """part: a slice of the result of `readable`. sum64: complete rows of 64 KiB, except in the last part; where
        Triton is used, `values` reads them, so they must not change before."""
        if self._hash is not None:
            assert isinstance(part, memoryview)
            self._hash.update(part)
        elif len(part):
            assert isinstance(part, torch.Tensor) and self._position % _ROW_BYTES == 0
            first = self._position // _ROW_BYTES
            if has_triton(part.device):
                self._pieces.append((part, first))
            else:
                added = _sum64(part, first)
                self._sum = added if self._sum is None else self._sum + added
            self._position += part.numel()

    @property
    def value(self) -> int:
        return values([self])[0]


def values(running: Sequence[RunningDigest]) -> list[int]:
    """All digests, with one copy from the device to the host, and where Triton is used with one launch."""
    sums = Sums()
    sums.add(running)
    return [
        total if each._hash is None else each._hash.intdigest()
        for each, total in zip(running, sums.read(), strict=True)
    ]


class Sums:
    """Digests in a device's memory, which one copy to the host reads."""

    def __init__(self) -> None:
        self._totals: list[torch.Tensor] = []
        self._has_bytes: list[bool] = []

    def add(self, running: Sequence[RunningDigest]) -> None:
        """Queue the sums, where Triton is used in one launch; the bytes may be freed after that."""
        pieces = [(number, *piece) for number, each in enumerate(running) for piece in each._pieces]
        sums = [each._sum for each in running if each._sum is not None]
        if pieces:
            self.add_together(pieces, len(running))
        else:
            self._totals += [each.view(1) for each in sums]
            self._has_bytes += [each._sum is not None for each in running]

    def add_together(
        self,
        pieces: Sequence[Piece],
        num_digests: int,
        sources: Sequence[torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Queue the digests of these pieces, where Triton is used. sources, dtype: see `kernels.sum64`."""
        from meshrl.sync import kernels

        device, end = pieces[0][1].device, max(first + -(-raw.numel() // _ROW_BYTES) for _, raw, first in pieces)
        row_keys = _row_table((end - 1).bit_length(), device)
        self._totals.append(kernels.sum64(pieces, num_digests, _columns(device)[0], row_keys, _ONES, sources, dtype))
        self._has_bytes += [True] * num_digests  # the sum of no bytes is 0, too

    def read(self) -> list[int]:
        """Of all that were added, in order; waits for the device."""
        numbers = iter(torch.cat(self._totals).tolist() if self._totals else ())
        return [next(numbers) & _MASK64 if each else 0 for each in self._has_bytes]


def digests_in_threads(
    kind: DigestKind, digest: Callable[[S], RunningDigest], items: Sequence[S], num_bytes: Sequence[int]
) -> list[int]:
    """The digest of each item; of host memory by all threads. num_bytes: of each item."""
    if kind == "xxh3":
        return values(in_threads(digest, items, num_bytes))
    sums, running, size = Sums(), list[RunningDigest](), 0
    for item, count in zip(items, num_bytes, strict=True):
        running.append(digest(item))
        size += count
        if size >= _BATCH_BYTES:
            sums.add(running)
            running, size = [], 0
    sums.add(running)
    return sums.read()


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """By name, the digests of tensors of one device."""
    if not tensors:
        return {}
    kind = kind_for(next(iter(tensors.values())).device)
    items, sizes = list(tensors.values()), [tensor.nbytes for tensor in tensors.values()]
    if kind == "xxh3":
        digests = in_threads(_host_digest, items, sizes)
    else:
        digests = digests_in_threads(kind, partial(running_digest, kind), items, sizes)
    return dict(zip(tensors, digests, strict=True))


def _host_digest(tensor: torch.Tensor) -> int:
    """As `running_digest`, in host memory. Of a small tensor, views by torch take ten times as long as the digest."""
    tensor = tensor.contiguous()
    return xxhash.xxh3_64_intdigest((c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def array_digest(arrays: Iterable[np.ndarray | None]) -> int:
    """One digest of arrays of the host, in their order."""
    parts = [b"" if array is None else array.tobytes() for array in arrays]
    return int(xxhash.xxh3_64_intdigest(b"".join([np.array([*map(len, parts)]).tobytes(), *parts])))


def running_digest(kind: DigestKind, tensor: torch.Tensor) -> RunningDigest:
    """The digest of a tensor's elements in order, for `values` or `digests_in_threads`."""
    running = RunningDigest(kind)
    running.update(running.readable(as_bytes(tensor.contiguous())))
    return running


class BlockDigests:
    """The digests of one version, by tensor: one of each of its blocks, which a transfer carries or a server's worker
    keeps. A parameter that is read back must have them."""

    def __init__(self, version: int):
        self.version = version
        self._digests: dict[str, list[int]] = {}
        self._blocks: dict[str, list[object]] = {}  # as errors name them

    def add(self, name: str, block: object, digest: int) -> None:
        """Add the digest of the tensor's next block."""
        self._digests.setdefault(name, []).append(digest)
        self._blocks.setdefault(name, []).append(block)

    def num_changed(self, before: BlockDigests) -> int:
        """The number of tensors whose digests differ from `before`."""
        return sum(digests != before._digests[name] for name, digests in self._digests.items())

    def fault(self, name: str, found: Mapping[int, int], before: BlockDigests | None) -> str | None:
        """A description of the tensor's wrong values, with the tensor or version whose values they are, if known; None
        when there are none. found: digest by number of the block. before: of the last committed sync."""
        should = self._digests.get(name, [])
        if found and not should:
            return "was not received"
        wrong = {number: digest for number, digest in found.items() if digest != should[number]}
        if not wrong:
            return None
        first, digest = next(iter(wrong.items()))
        more = f", and {len(wrong) - 1} more parts" if len(wrong) > 1 else ""
        place = "" if len(should) == 1 else f" in {self._blocks[name][first]}{more}"
        if before is not None and all(before._digests[name][number] == each for number, each in wrong.items()):
            return f"still has the values of version {before.version}{place}"
        for other, digests in self._digests.items():
            if all(each in digests for each in wrong.values()):
                return f"has the values of {other}{place}"
        return f"has digest {digest:016x}, the trainer's is {should[first]:016x}{place}"


def require_in_place(name: str, version: int, faults: Sequence[str], num_tensors: int) -> None:
    """name: of the receiver. faults: an error text for each tensor with other values."""
    if faults:
        lines = "\n".join(f"    {fault}" for fault in faults[:_MAX_LISTED])
        raise SyncError(
            f"{name}: version {version} is not in place; {len(faults)} of {num_tensors} tensors differ from the "
            f"trainer's:\n{lines}\nThis receiver stays unusable until the next full sync"
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor of any dtype and shape as uint8[num_bytes], outside of autograd."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a dim of size 0 or 1 may have any stride
    return flat.view(torch.uint8)


def _sum64(raw: torch.Tensor, first: int) -> torch.Tensor:
    """The sum over bytes that start at row `first`: int64[] with wrap-around, on the bytes' device, without waiting for
    the device. Extra memory: one chunk as int64."""
    column, column_sum = _columns(raw.device)
    num_rows, rest = divmod(raw.numel(), _ROW_BYTES)
    sums = raw.new_zeros(num_rows + (rest > 0), dtype=torch.int64)
    step = 8 if raw.device.type == "cpu" else 256  # chunk and keys fit in a core's cache; few launches on accelerators
    buffer = torch.empty((min(step, num_rows), _ROW), dtype=torch.int64, device=raw.device)
    for low in range(0, num_rows, step):
        high = min(low + step, num_rows)
        weighed = buffer[: high - low]
        chunk = raw[low * _ROW_BYTES : high * _ROW_BYTES]
        aligned = chunk.clone() if chunk.storage_offset() % 4 else chunk  # as int32
        weighed.copy_(aligned.view(torch.int32).view(-1, _ROW)).mul_(column)
        sums[low:high] = weighed.sum(1) + _ONES * column_sum
    if rest:
        last = torch.zeros(2, -(-rest // 4) * 4, dtype=torch.uint8, device=raw.device)
        last[0, :rest] = raw[num_rows * _ROW_BYTES :]
        last[1, :rest] = 1
        words = last.view(torch.int32).sum(0)
        sums[num_rows] = (words * column[: len(words)]).sum()
    count = first + len(sums)
    keys = _row_table(max(count - 1, 0).bit_length(), raw.device)
    return (sums * keys[first:count]).sum()


@lru_cache(maxsize=16)
def _columns(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The column keys and their sum, by which 0x01010101 of all words of a row is multiplied."""
    keys = _keys(0, _ROW, device)
    return keys, keys.sum()


@lru_cache(maxsize=64)
def _row_table(bits: int, device: torch.device) -> torch.Tensor:
    """The first 1 << bits row keys: 8 bytes for 64 KiB of data."""
    return _keys(_ROW_SEED, 1 << bits, device)


def _keys(first: int, count: int, device: torch.device) -> torch.Tensor:
    keys = np.array([mix64(number) | 1 for number in range(first, first + count)], dtype=np.uint64)
    return torch.from_numpy(keys.view(np.int64)).to(device)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same width, in the same memory."""
    return tensor.view(_BITS[tensor.element_size()])


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lap(seconds: dict[str, float], stage: str, since: float) -> float:
    """Add the time since `since` to a stage; several threads may call it at once. Returns the current time."""
    now = time.perf_counter()
    with _lock:
        seconds[stage] += now - since
    return now


def in_threads(work: Callable[[S], T], items: Sequence[S], num_bytes: Sequence[int]) -> list[T]:
    """The result of `work` for each item. num_bytes: that each item works on; items of few bytes are worked on in the
    caller's thread.

    Each core works on its own item, with one torch thread, so that cores do not wait for each other after every
    operation, as they do when torch splits each operation. The caller and other threads that first use torch meanwhile
    have one torch thread, too.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or sum(num_bytes) < _SMALL_BYTES:
        return [work(item) for item in items]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            begun = [pool.submit(work, x) if n >= _SMALL_BYTES else None for x, n in zip(items, num_bytes, strict=True)]
            return [work(x) if call is None else call.result() for x, call in zip(items, begun, strict=True)]
    finally:
        torch.set_num_threads(num_threads)  # set_num_threads in a thread also sets the default of later threads

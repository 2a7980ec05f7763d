"""Digests and changes of weights on devices for which `has_triton` holds, in Triton.

`sum64`: the digests of many pieces of memory in one launch; `digest._sum64` takes several launches for each piece.
`take_changes`: the changed elements of a part in two passes over it, which cast, compare, compact them and update the
base; no other tensor of the part's size exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from meshrl.sync.digest import bits_of

ROWS = 8  # of 64 KiB that a program reads: it reads the column keys, of twice the size, once for all of them
BLOCK = 256  # words of a row at a time
ELEMENTS = 1024  # that a program compares
LAUNCH = {"num_warps": 4}
ALIGNMENT = 16  # bytes; at such addresses a thread loads four words at once


@triton.jit
def sum64_kernel(
    pieces, piece_of, columns, row_keys, sums, num_pieces, ones,
    ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pieces int64[5, P]: address, bytes, row at which the piece begins in its digest, first program, digest. piece_of:
    of each program. Adds to sums int64[digests], with wrap-around."""
    piece = pieces + tl.load(piece_of + tl.program_id(0))
    address, num_bytes = tl.load(piece), tl.load(piece + num_pieces)
    rows = (tl.program_id(0) - tl.load(piece + 3 * num_pieces)) * ROWS + tl.arange(0, ROWS)
    left = tl.minimum(tl.maximum(num_bytes - rows * ROW * 4, 0), ROW * 4).to(tl.int32)[:, None]  # bytes of each row
    loaded = (left + 15) // 16 * 4  # words of each row: complete loads of 16 bytes, which no allocation ends inside of
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + rows[:, None] * ROW
    total = tl.zeros((ROWS, BLOCK), tl.int64)
    for low in range(0, tl.minimum(tl.cdiv(num_bytes, 4), ROW), BLOCK):
        column = low + tl.arange(0, BLOCK)
        inside = tl.minimum(left - column[None, :] * 4, 4)  # bytes of the word that the piece has
        mask = tl.where(inside == 4, -1, (1 << (tl.maximum(inside, 0) * 8)) - 1)
        value = tl.load(words + column[None, :], mask=column[None, :] < loaded, other=0) & mask
        total += (value.to(tl.int64) + (ones & mask)) * tl.load(columns + column)[None, :]
    keys = tl.load(row_keys + tl.load(piece + 2 * num_pieces) + rows, mask=rows * ROW * 4 < num_bytes, other=0)
    tl.atomic_add(sums + tl.load(piece + 4 * num_pieces), tl.sum(tl.sum(total, 1) * keys))


def sum64(
    pieces: Sequence[tuple[int, torch.Tensor, int]],
    num_sums: int,
    columns: torch.Tensor,
    row_keys: torch.Tensor,
    ones: int,
) -> torch.Tensor:
    """int64[num_sums], on the device of the pieces, without waiting for it. pieces: (number of the digest, its bytes,
    the row at which they begin in it), none of them empty. columns, row_keys: the keys of `digest`; ones: is added to
    each word."""
    sums = columns.new_zeros(num_sums)
    aligned = [raw if raw.data_ptr() % ALIGNMENT == 0 else raw.clone() for _, raw, _ in pieces]  # until the launch
    programs = [triton.cdiv(raw.numel(), ROWS * len(columns) * 4) for raw in aligned]
    first = accumulate(programs, initial=0)
    rows = [
        (raw.data_ptr(), raw.numel(), row, program, number, count)
        for (number, _, row), raw, program, count in zip(pieces, aligned, first, programs, strict=False)
    ]
    table = torch.tensor(rows).T.contiguous().to(sums.device)
    piece_of = torch.repeat_interleave(table[5], output_size=sum(programs))
    sum64_kernel[(len(piece_of),)](
        table, piece_of, columns, row_keys, sums, len(aligned), ones, ROW=len(columns), ROWS=ROWS, BLOCK=BLOCK, **LAUNCH
    )
    return sums


@triton.jit
def _compared(source, base, bits, n, ELEMENTS: tl.constexpr):
    """Of this program's elements: their indices, their bits in the base's dtype, and whether these differ from the
    base's. bits: the base as integers, in the same memory."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    now = tl.load(source + at, mask=at < n).to(base.dtype.element_ty).to(bits.dtype.element_ty, bitcast=True)
    return at, now, (now != tl.load(bits + at, mask=at < n)) & (at < n)


@triton.jit
def count_kernel(source, base, bits, counts, n, ELEMENTS: tl.constexpr):
    """counts int64: of each program's changed elements."""
    _, _, changed = _compared(source, base, bits, n, ELEMENTS)
    tl.store(counts + tl.program_id(0), tl.sum(changed.to(tl.int32)))


@triton.jit
def compact_kernel(source, base, bits, ends, indices, new, n, ELEMENTS: tl.constexpr):
    """ends int64: for each program, the number of changed elements up to its last one."""
    at, now, changed = _compared(source, base, bits, n, ELEMENTS)
    number = tl.cumsum(changed.to(tl.int32), 0)
    place = tl.load(ends + tl.program_id(0)) - tl.sum(changed.to(tl.int32)) + number - 1
    tl.store(indices + place, at, mask=changed)
    tl.store(new + place, now, mask=changed)
    tl.store(bits + at, now, mask=changed)


def take_changes(source: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices int32[N], ascending, at which source [P], cast to the base's dtype, differs from base [P] in any bit,
    and the new bits there [N], which the base gets, too. Waits once for the device. P is less than 2^31 - ELEMENTS."""
    bits, n = bits_of(base), len(base)
    counts = torch.empty(triton.cdiv(n, ELEMENTS), dtype=torch.int64, device=base.device)
    count_kernel[(len(counts),)](source, base, bits, counts, n, ELEMENTS=ELEMENTS, **LAUNCH)
    ends = counts.cumsum(0)
    indices = torch.empty(int(ends[-1]), dtype=torch.int32, device=base.device)
    new = torch.empty_like(indices, dtype=bits.dtype)
    compact_kernel[(len(counts),)](source, base, bits, ends, indices, new, n, ELEMENTS=ELEMENTS, **LAUNCH)
    return indices, new

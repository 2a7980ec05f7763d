"""Digests and changes of weights on devices for which `has_triton` holds, in Triton.

`sum64`: the digests of many pieces of memory in one launch, which may cast the trainer's values into them, too;
`digest._sum64` takes several launches for each piece.
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
_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None}


@triton.jit
def _words_of(values, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of values of 16 bits [ROWS, 2 * BLOCK], two in each word."""
    halves = values.to(tl.uint16, bitcast=True).to(tl.int32)
    lower, upper = tl.split(tl.reshape(halves, (ROWS, BLOCK, 2)))
    return lower | (upper << 16)


@triton.jit
def sum64_kernel(
    pieces, piece_of, columns, row_keys, sums, num_pieces, ones,
    TO: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pieces int64[7, P]: address, bytes, row at which the piece begins in its digest, first program, digest, programs,
    address of the values in fp32. piece_of: of each program. Adds to sums int64[digests], with wrap-around. TO: the
    dtype of 16 bits in which the values are first written into the pieces; None = these are only read."""
    piece = pieces + tl.load(piece_of + tl.program_id(0))
    address, num_bytes = tl.load(piece), tl.load(piece + num_pieces)
    first = (tl.program_id(0) - tl.load(piece + 3 * num_pieces)) * ROWS
    rows = first + tl.arange(0, ROWS)
    left = tl.minimum(tl.maximum(num_bytes - rows * ROW * 4, 0), ROW * 4).to(tl.int32)[:, None]  # bytes of each row
    loaded = (left + 15) // 16 * 4  # words of each row: complete loads of 16 bytes, which no allocation ends inside of
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + rows[:, None] * ROW
    source = tl.load(piece + 6 * num_pieces).to(tl.pointer_type(tl.float32))
    source = tl.multiple_of(source, 16) + rows[:, None] * ROW * 2
    end = tl.minimum(tl.cdiv(num_bytes, 4), ROW).to(tl.int32)
    total = tl.zeros((ROWS, BLOCK), tl.int64)
    if (first + ROWS) * ROW * 4 <= num_bytes:  # all rows are complete; without masks a thread loads 16 bytes at once
        for low in range(0, ROW, BLOCK):
            column = low + tl.arange(0, BLOCK)
            if TO is None:
                value = tl.load(words + column[None, :])
            else:
                at = low * 2 + tl.arange(0, BLOCK * 2)[None, :]
                cast = tl.load(source + at).to(TO)
                tl.store(words.to(tl.pointer_type(TO)) + at, cast)
                value = _words_of(cast, ROWS, BLOCK)
            total += (value.to(tl.int64) + ones) * tl.load(columns + column)[None, :]
    else:
        for low in range(0, end, BLOCK):
            column = low + tl.arange(0, BLOCK)
            inside = tl.minimum(left - column[None, :] * 4, 4)  # bytes of the word that the piece has
            mask = tl.where(inside == 4, -1, (1 << (tl.maximum(inside, 0) * 8)) - 1)
            if TO is None:
                value = tl.load(words + column[None, :], mask=column[None, :] < loaded, other=0) & mask
            else:
                at = low * 2 + tl.arange(0, BLOCK * 2)[None, :]
                cast = tl.load(source + at, mask=at * 2 < left, other=0.0).to(TO)
                tl.store(words.to(tl.pointer_type(TO)) + at, cast, mask=at * 2 < left)
                value = _words_of(cast, ROWS, BLOCK)
            total += (value.to(tl.int64) + (ones & mask)) * tl.load(columns + column)[None, :]
    keys = tl.load(row_keys + tl.load(piece + 2 * num_pieces) + rows, mask=rows * ROW * 4 < num_bytes, other=0)
    tl.atomic_add(sums + tl.load(piece + 4 * num_pieces), tl.sum(tl.sum(total, 1) * keys))


def sum64(
    pieces: Sequence[tuple[int, torch.Tensor, int]],
    num_sums: int,
    columns: torch.Tensor,
    row_keys: torch.Tensor,
    ones: int,
    sources: Sequence[torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """int64[num_sums], on the device of the pieces, without waiting for it. pieces: (number of the digest, its bytes,
    the row at which they begin in it), none of them empty. columns, row_keys: the keys of `digest`; ones: is added to
    each word. sources: of each piece, the values that are first written into it in `dtype`, as `can_cast` allows."""
    sums = columns.new_zeros(num_sums)
    raws = [raw for _, raw, _ in pieces]
    if sources is None:
        raws = [raw if raw.data_ptr() % ALIGNMENT == 0 else raw.clone() for raw in raws]  # until the launch
    addresses = [0] * len(raws) if sources is None else [source.data_ptr() for source in sources]
    programs = [triton.cdiv(raw.numel(), ROWS * len(columns) * 4) for raw in raws]
    first = accumulate(programs, initial=0)
    rows = [
        (raw.data_ptr(), raw.numel(), row, program, number, count, address)
        for (number, _, row), raw, program, count, address in zip(
            pieces, raws, first, programs, addresses, strict=False
        )
    ]
    table = torch.tensor(rows).T.contiguous().to(sums.device)
    piece_of = torch.repeat_interleave(table[5], output_size=sum(programs))
    sum64_kernel[(len(piece_of),)](
        table, piece_of, columns, row_keys, sums, len(raws), ones,
        TO=_TRITON[dtype], ROW=len(columns), ROWS=ROWS, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip
    return sums


def can_cast(source: torch.Tensor, raw: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `sum64` can write these contiguous values into these bytes."""
    fits = source.dtype == torch.float32 and dtype in _TRITON and raw.numel() > 0
    return fits and source.data_ptr() % ALIGNMENT == raw.data_ptr() % ALIGNMENT == 0


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

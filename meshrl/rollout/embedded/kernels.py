"""Decode attention over the pages of the KV cache, in Triton: two launches a layer, whatever the rows and their
lengths. `cached_attention.KernelAttention` imports this file on devices for which `has_triton` holds.

A row is cut into splits, which different programs read at the same time; `merge_kernel` joins their results. The new
token of a row is the first of split 0, whose program writes its key and value to the page. Sizes that change from step
to step are read from the device, so that a recorded launch is valid for later steps.

Letters: N rows, H query heads, K key heads, S head size, P pages, W tokens of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meshrl.model.attention import Rotation
from meshrl.model.kernels import load_rotated

HEADS = 16  # rows of the smallest matrix product, to which the query heads of a key head are padded
PROGRAMS = 1024  # of a launch, if there are enough splits: several for each multiprocessor
MAX_SPLITS = 64
BLOCK = 128  # positions at a time
BLOCKS = 16  # of sampling weights that a program computes
LAUNCH = {"num_warps": 4, "num_stages": 4}  # so many stages, because addresses are loaded before what they point to


@triton.jit
def attend_kernel(
    q, k, v, cos, sin, q_weight, k_weight, bases, rows, slots, lengths, out, parts, stats,
    q_stride, k_stride, v_stride, row_size, num_columns, num_heads, eps, scale, window,
    W: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes one split of a row for the GROUP query heads of a key head. cos: None = q and k are rotated
    already, otherwise as for `load_rotated`. out [N, H, S]: with one split.
    parts fp32[N, H, SPLITS, S] and stats fp32[2, N, H, SPLITS] otherwise: what softmax weights of this split sum up to,
    their largest score, and their sum."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - window, 0)
    pages = rows + tl.load(slots + row) * row_size
    num_pages = tl.where(length > 0, tl.load(pages), 0)
    # A page has at most W tokens, so none before first // W has a position that is seen.
    columns = num_pages - first // W
    begin = first // W + tl.cdiv(columns, SPLITS) * split
    end = tl.minimum(begin + tl.cdiv(columns, SPLITS), num_pages)
    group, s, place = tl.arange(0, HEADS), tl.arange(0, S), tl.arange(0, BLOCK)
    inside = (group < GROUP)[:, None]
    head = tl.program_id(1) * GROUP + group[:, None]
    kv_head = tl.zeros((1, 1), tl.int32) + tl.program_id(1)
    q, k, s_of_head = q + row * q_stride, k + row * k_stride, s[None, :]
    if cos is not None:
        cos, sin = cos + row * S, sin + row * S
        query = load_rotated(q, cos, sin, q_weight, eps, head, s_of_head, inside, S).to(q.dtype.element_ty)
    else:
        query = tl.load(q + head * S + s_of_head, mask=inside, other=0.0)
    keys_of = tl.multiple_of(tl.load(bases).to(tl.pointer_type(q.dtype.element_ty)), 16)
    values_of = tl.multiple_of(tl.load(bases + 1).to(tl.pointer_type(q.dtype.element_ty)), 16)
    m = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, S), tl.float32)
    if (split == 0) & (length > 0):
        if cos is not None:
            key = load_rotated(k, cos, sin, k_weight, eps, kv_head, s_of_head, kv_head >= 0, S).to(q.dtype.element_ty)
        else:
            key = tl.load(k + kv_head * S + s_of_head)
            query = tl.load(q + head * S + s_of_head, mask=inside, other=0.0)  # again: else it takes 50 registers more
        value = tl.load(v + row * v_stride + kv_head * S + s_of_head)
        page, start = tl.load(pages + num_pages).to(tl.int64), tl.load(pages + num_pages + num_columns)
        place_of_token = ((page * num_heads + kv_head) * W + length - 1 - start) * S + s_of_head
        tl.store(keys_of + place_of_token, key)
        tl.store(values_of + place_of_token, value)
        m = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
        total = tl.full((HEADS,), 1.0, tl.float32)
        acc += value.to(tl.float32)
    for block in range(begin * (W // BLOCK), end * (W // BLOCK)):
        column = block // (W // BLOCK)
        page, start = tl.load(pages + 1 + column).to(tl.int64), tl.load(pages + 1 + num_columns + column)
        stop = tl.minimum(tl.load(pages + 2 + num_columns + column), length - 1)
        from_page = block % (W // BLOCK) * BLOCK
        address = ((page * num_heads + tl.program_id(1)) * W + from_page) * S
        position = start + from_page + place
        seen = (position < stop) & (position >= first)
        key = tl.load(keys_of + address + place[None, :] * S + s[:, None], mask=seen[None, :], other=0.0)
        value = tl.load(values_of + address + place[:, None] * S + s[None, :], mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(query, key) * scale, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp(scores - top[:, None]), 0.0)
        shrink = tl.where(m == float("-inf"), 0.0, tl.exp(m - top))
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        m = top
    place_of_head = row * num_heads * GROUP + head
    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place_of_head * S + s[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + (place_of_head * SPLITS + split) * S + s[None, :], acc, mask=inside)
        place_of_split = (row * num_heads * GROUP + tl.program_id(1) * GROUP + group) * SPLITS + split
        tl.store(stats + place_of_split, m, mask=group < GROUP)
        size = tl.num_programs(0).to(tl.int64) * num_heads * GROUP * SPLITS
        tl.store(stats + size + place_of_split, total, mask=group < GROUP)


@triton.jit
def merge_kernel(parts, stats, out, S: tl.constexpr, SPLITS: tl.constexpr):
    """Join the splits of a head. out [N * H, S]."""
    head = tl.program_id(0).to(tl.int64)
    split, s = tl.arange(0, SPLITS), tl.arange(0, S)
    m = tl.load(stats + head * SPLITS + split)
    total = tl.load(stats + tl.num_programs(0).to(tl.int64) * SPLITS + head * SPLITS + split)
    share = tl.where(total > 0, tl.exp(m - tl.max(m, 0)), 0.0)
    part = tl.load(parts + (head * SPLITS + split)[:, None] * S + s[None, :])
    sums = tl.sum(share * total, 0)
    result = tl.sum(part * share[:, None], 0) / tl.where(sums > 0, sums, 1.0)
    tl.store(out + head * S + s, result.to(out.dtype.element_ty))


@triton.jit
def exponentials_kernel(z, top, weights, sums, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """A program computes BLOCKS blocks of a row. z, weights [N, num_blocks * BLOCK], sums [N, num_blocks]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    place = (row * num_blocks + block)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < num_blocks)[:, None]
    weight = tl.exp(tl.load(z + place, mask=inside, other=0.0) - tl.load(top + row))
    tl.store(weights + place, weight, mask=inside)
    tl.store(sums + row * num_blocks + block, tl.sum(weight, 1), mask=block < num_blocks)


def exponentials(z: torch.Tensor, top: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(z - top) of z fp32[N, V] and top [N, 1], and its sums of each `block` columns, of which V is a multiple."""
    z, num_blocks = z.contiguous(), z.shape[1] // block
    weights, sums = torch.empty_like(z), z.new_empty(len(z), num_blocks)
    grid = (len(z), triton.cdiv(num_blocks, BLOCKS))
    exponentials_kernel[grid](z, top, weights, sums, num_blocks, BLOCK=block, BLOCKS=BLOCKS, num_warps=4)
    return weights, sums


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bases: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
    scale: float,
    window: int | None,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Rotate q [N, H, S] and k [N, K, S], unless they are so already (None), write k and v [N, K, S] to pages, and
    attend with q to all positions of each row; returns [N, H, S].
    bases int64[2]: addresses of the layer's keys and values [P, K, W, S]. rows int32[slots, 2 + 2 * columns]: number of
    pages, pages, and first position of each page and of the next one. slots, lengths int64[N]: lengths have the new
    token; 0 = no row, whose result is 0."""
    num_rows, heads, size = q.shape
    kv_heads, row_size = k.shape[1], rows.shape[1]
    q, k, v = (x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (q, k, v))
    table = bases, rows, slots, lengths
    sizes = row_size, row_size // 2 - 1, kv_heads
    splits = min(MAX_SPLITS, triton.next_power_of_2(-(-PROGRAMS // (num_rows * kv_heads))))
    out = torch.empty((num_rows, heads, size), dtype=q.dtype, device=q.device)
    parts = stats = out
    if splits > 1:
        parts = torch.empty((num_rows, heads, splits, size), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, num_rows, heads, splits), dtype=torch.float32, device=q.device)
    cos, sin, norms = (None, None, None) if rotation is None else (rotation.cos, rotation.sin, rotation.norms)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    attend_kernel[(num_rows, kv_heads, splits)](
        *(q, k, v, cos, sin, q_weight, k_weight, *table, out, parts, stats),
        *(q.stride(0), k.stride(0), v.stride(0), *sizes, eps, scale),
        (1 << 31) - 1 if window is None else window,
        W=page_tokens, S=size, GROUP=heads // kv_heads, HEADS=max(HEADS, triton.next_power_of_2(heads // kv_heads)),
        SPLITS=splits, BLOCK=min(page_tokens, BLOCK if size <= 128 else BLOCK // 2), **LAUNCH,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(num_rows * heads,)](parts, stats, out, S=size, SPLITS=splits, num_warps=1)
    return out

"""The bytes of a training step's collectives on one rank, by formula for each axis of the mesh.

A collective counts the bytes of its full tensor: the gathered one of an all-gather, the one before a reduce-scatter or
an all-reduce. Of n ranks, each sends (n - 1) / n of it; in an all-reduce, twice that.

The formulas of tp and ulysses are for the families whose blocks are one attention and one MLP, with no more key heads
than query heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the formulas need to know of a model. Parameters: the shapes of those that this rank has before FSDP2 shards
    them. replicated: of those that tp does not cut, with a gradient of each rank's part. heads: 0 = the formulas of
    ulysses and tp do not hold."""

    num_layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    blocks: Sequence[tuple[int, ...]]
    root: Sequence[tuple[int, ...]]
    replicated: Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A micro-batch of this rank's data index: its tokens, and how many of them this rank scores."""

    tokens: int
    scored: int


def fsdp_bytes(shape: Shape, num_batches: int, shards: int, width: int) -> Counter[str]:
    """Blocks are gathered for the forward and for the backward pass, and freed after each; embedding and head once.
    Gradients are reduced in fp32. Each parameter is padded to a multiple of the shards. width: bytes of a number."""
    blocks, root = (
        sum(ceil(size[0] / shards) * shards * prod(size[1:]) for size in part) for part in (shape.blocks, shape.root)
    )
    gathered, reduced = num_batches * (2 * blocks + root) * width, num_batches * (blocks + root) * 4
    return Counter(all_gather=gathered, reduce_scatter=reduced)


def tp_bytes(shape: Shape, work: Sequence[Work], ulysses: int, tp: int, width: int, recomputed: int) -> Counter[str]:
    """x: the hidden states of a rank's chunk. Attention and MLP gather x and scatter a sum of x, the other way round in
    the backward pass. Recomputation ends before the scatter of a block's MLP, whose result nothing needs. The embedding
    scatters x, and the head gathers it. Its statistics are two numbers, and the entropy, of each scored token.
    Gradients are summed in fp32. recomputed: layers."""
    total: Counter[str] = Counter()
    for batch in work:
        x = ceil(batch.tokens / (ulysses * tp)) * tp * shape.hidden * width
        gathers = scatters = 2 * shape.num_layers
        total["all_gather"] += x * (gathers + 2 * recomputed + scatters + 1 + 1) + tp * 3 * batch.scored * 4
        total["reduce_scatter"] += x * (scatters + recomputed + gathers + 1 + 1)
        total["all_reduce"] += sum(map(prod, shape.replicated)) * max(width, 4)
    return total


def ulysses_bytes(
    shape: Shape, work: Sequence[Work], ulysses: int, tp: int, width: int, recomputed: int
) -> Counter[str]:
    """Attention swaps q, k, v and its output, which the backward pass swaps back. A key head is sent to each rank that
    needs it. Each rank gets the logprobs and entropies of all tokens."""
    total: Counter[str] = Counter()
    heads, key_heads = shape.heads // tp, max(shape.key_heads // tp, ulysses)
    for batch in work:
        chunk = ceil(batch.tokens / (ulysses * tp)) * tp
        layer = chunk * (2 * heads + 2 * key_heads) * shape.head_dim * width
        total["all_to_all"] += layer * (2 * shape.num_layers + recomputed)
        total["all_reduce"] += 2 * batch.tokens * 4
    return total


def step_bytes(
    shape: Shape, work: Sequence[Work], mesh: tuple[int, int, int, int], width: int, recomputed: int
) -> Counter[str]:
    """Of a step on a mesh (dp_replicate 1, dp_shard, ulysses, tp); the gradient norm is one fp32 number."""
    _, shards, ulysses, tp = mesh
    total = Counter(all_reduce=4)
    if shards * ulysses > 1:
        total += fsdp_bytes(shape, len(work), shards * ulysses, width)
    if ulysses > 1:
        total += ulysses_bytes(shape, work, ulysses, tp, width, recomputed)
    if tp > 1:
        total += tp_bytes(shape, work, ulysses, tp, width, recomputed)
    return total


def sent_bytes(
    shape: Shape, work: Sequence[Work], mesh: tuple[int, int, int, int], width: int, recomputed: int
) -> dict[str, float]:
    """By axis, what a rank sends in an optimizer step. Replicas reduce the shards of the gradients in fp32. Without the
    axes of which the formulas do not hold for this model."""
    replicas, shards, ulysses, tp = mesh
    fsdp = fsdp_bytes(shape, len(work), shards * ulysses, width)
    by_axis = {
        "FSDP2": (fsdp, shards * ulysses),
        "replicas": (Counter(all_reduce=fsdp["reduce_scatter"] // (shards * ulysses)), replicas),
        "ulysses": (ulysses_bytes(shape, work, ulysses, tp, width, recomputed), ulysses),
        "tp": (tp_bytes(shape, work, ulysses, tp, width, recomputed), tp),
    }
    return {
        axis: (total.total() + total["all_reduce"]) * (n - 1) / n
        for axis, (total, n) in by_axis.items()
        if n > 1 and (shape.heads or axis not in ("ulysses", "tp"))
    }

"""The bytes of a training step's collectives on one rank: by formula for each axis of the mesh, and counted.

    python benchmarks/mesh_bytes.py          # the table of docs/perf/device_mesh.md

A collective counts the bytes of its full tensor: the gathered one of an all-gather, the one before a reduce-scatter or
an all-reduce. Of n ranks, each sends (n - 1) / n of it; in an all-reduce, twice that.

The formulas are for the families whose blocks are one attention and one MLP, with no more key heads than query heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
OPERATIONS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",  # of a DTensor
    "all_reduce_": "all_reduce",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the formulas need to know of a model. Parameters: the shapes of those that this rank has before FSDP2 shards
    them. replicated: of those that tp does not cut, with a gradient of each rank's part."""

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


def tp_bytes(shape: Shape, work: Sequence[Work], ulysses: int, tp: int, width: int, recompute: bool) -> Counter[str]:
    """x: the hidden states of a rank's chunk. Attention and MLP gather x and scatter a sum of x, the other way round in
    the backward pass. Recomputation ends before the scatter of a block's MLP, whose result nothing needs. The embedding
    scatters x, and the head gathers it. Its statistics are two numbers, and the entropy, of each scored token.
    Gradients are summed in fp32."""
    total: Counter[str] = Counter()
    for batch in work:
        x = ceil(batch.tokens / (ulysses * tp)) * tp * shape.hidden * width
        gathers = scatters = 2 * shape.num_layers
        again = (2 * shape.num_layers, shape.num_layers) if recompute else (0, 0)
        total["all_gather"] += x * (gathers + again[0] + scatters + 1 + 1) + tp * 3 * batch.scored * 4
        total["reduce_scatter"] += x * (scatters + again[1] + gathers + 1 + 1)
        total["all_reduce"] += sum(map(prod, shape.replicated)) * max(width, 4)
    return total


def ulysses_bytes(
    shape: Shape, work: Sequence[Work], ulysses: int, tp: int, width: int, recompute: bool
) -> Counter[str]:
    """Attention swaps q, k, v and its output, which the backward pass swaps back. A key head is sent to each rank that
    needs it. Each rank gets the logprobs and entropies of all tokens."""
    total: Counter[str] = Counter()
    heads, key_heads = shape.heads // tp, max(shape.key_heads // tp, ulysses)
    for batch in work:
        chunk = ceil(batch.tokens / (ulysses * tp)) * tp
        layer = chunk * (2 * heads + 2 * key_heads) * shape.head_dim * width
        total["all_to_all"] += shape.num_layers * layer * (3 if recompute else 2)
        total["all_reduce"] += 2 * batch.tokens * 4
    return total


def step_bytes(
    shape: Shape, work: Sequence[Work], mesh: tuple[int, int, int, int], width: int, recompute: bool
) -> Counter[str]:
    """Of a step on a mesh (dp_replicate 1, dp_shard, ulysses, tp); the gradient norm is one fp32 number."""
    _, shards, ulysses, tp = mesh
    total = Counter(all_reduce=4)
    if shards * ulysses > 1:
        total += fsdp_bytes(shape, len(work), shards * ulysses, width)
    if ulysses > 1:
        total += ulysses_bytes(shape, work, ulysses, tp, width, recompute)
    if tp > 1:
        total += tp_bytes(shape, work, ulysses, tp, width, recompute)
    return total


class CountedBytes(TorchDispatchMode):
    """Context that counts what this process gives to torch.distributed in groups of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations come here next
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            kind = OPERATIONS[name]  # an unknown collective is an error
            if space == "c10d":
                group = next(ProcessGroup.unbox(a) for a in args if hasattr(a, "_type"))
            else:
                group = _resolve_process_group(args[-1])
            if group.size() > 1:
                tensor = (
                    args[0][0] if isinstance(args[0], (list, tuple)) else args[1 if kind == "reduce_scatter" else 0]
                )
                self.bytes[kind] += tensor.numel() * tensor.element_size()
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


TOKENS, MICRO_BATCH = 1 << 20, 1 << 14  # of a step, and of a micro-batch for each rank of ulysses
MODELS = {  # layers, hidden, intermediate, heads, key heads, words
    "7B": (28, 3584, 18944, 28, 4, 152064),
    "32B": (64, 5120, 27648, 40, 8, 152064),
    "70B": (80, 8192, 28672, 64, 8, 128256),
}
EXAMPLES = [  # model, dp_shard, ulysses, tp
    *(("7B", *mesh) for mesh in [(8, 1, 1), (4, 2, 1), (2, 1, 4)]),
    *(("32B", *mesh) for mesh in [(32, 1, 1), (16, 2, 1), (8, 1, 4), (4, 2, 4)]),
    *(("70B", *mesh) for mesh in [(64, 1, 1), (32, 2, 1), (8, 1, 8), (4, 2, 8)]),
]


def example(model: str, shards: int, ulysses: int, tp: int) -> list[float]:
    """GB: what a rank sends in a step of TOKENS in bf16 with activation checkpointing, by axis; and what it holds: its
    masters, gradients and moments, the inputs of all blocks, and the largest block with the root, as gathered."""
    layers, hidden, inner, heads, key_heads, words = MODELS[model]
    size, keys = hidden // heads, key_heads * (hidden // heads)
    matrices = [(hidden, hidden)] * 2 + [(keys, hidden)] * 2 + [(inner, hidden)] * 3
    block, root = [(a // tp, b) for a, b in matrices], [(words // tp, hidden)] * 2
    norms = [(hidden,)] * (2 * layers + 1)
    facts = dict(num_layers=layers, hidden=hidden, heads=heads, key_heads=key_heads, head_dim=size)
    shape = Shape(**facts, blocks=block * layers + norms[1:], root=[*root, norms[0]], replicated=norms)
    work = [Work(tokens=MICRO_BATCH * ulysses, scored=MICRO_BATCH)] * (TOKENS // (MICRO_BATCH * ulysses * shards))
    by_axis = [
        (fsdp_bytes(shape, len(work), shards * ulysses, 2), shards * ulysses),
        (ulysses_bytes(shape, work, ulysses, tp, 2, True), ulysses),
        (tp_bytes(shape, work, ulysses, tp, 2, True), tp),
    ]
    sent = [(total.total() + total["all_reduce"]) * (n - 1) / n / 1e9 for total, n in by_axis]
    numbers = sum(map(prod, [*shape.blocks, *shape.root])) / (shards * ulysses)
    inputs = layers * MICRO_BATCH // tp * hidden * 2
    return [*sent, numbers * 16 / 1e9, inputs / 1e9, 2 * sum(map(prod, [*block, *root])) / 1e9]


def main() -> None:
    for model, *mesh in EXAMPLES:
        print("|", " | ".join([model, " x ".join(map(str, mesh)), *(f"{x:,.1f}" for x in example(model, *mesh))]), "|")


if __name__ == "__main__":
    main()

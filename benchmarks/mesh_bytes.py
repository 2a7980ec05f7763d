"""The bytes of a training step's collectives on one rank: by formula for each axis of the mesh, and counted.

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
    scatters x, and the head gathers it. Its statistics are two numbers, and the entropy, of each scored token."""
    total: Counter[str] = Counter()
    for batch in work:
        x = ceil(batch.tokens / (ulysses * tp)) * tp * shape.hidden * width
        gathers = scatters = 2 * shape.num_layers
        again = (2 * shape.num_layers, shape.num_layers) if recompute else (0, 0)
        total["all_gather"] += x * (gathers + again[0] + scatters + 1 + 1) + tp * 3 * batch.scored * 4
        total["reduce_scatter"] += x * (scatters + again[1] + gathers + 1 + 1)
        total["all_reduce"] += sum(map(prod, shape.replicated)) * width
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

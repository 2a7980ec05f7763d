"""The bytes of a training step's collectives on one rank: by formula for each axis of the mesh, and counted.

    python benchmarks/mesh_bytes.py          # the table of docs/perf/device_mesh.md

A collective counts the bytes of its full tensor: the gathered one of an all-gather, the one before a reduce-scatter or
an all-reduce. Of n ranks, each sends (n - 1) / n of it; in an all-reduce, twice that.

The formulas are those of `meshrl plan` (meshrl/plan/traffic.py).
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.plan.traffic import Shape, Work, sent_bytes

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
OPERATIONS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",  # of a DTensor
    "all_reduce_": "all_reduce",
}


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
    by_axis = sent_bytes(shape, work, (1, shards, ulysses, tp), 2, shape.num_layers)
    sent = [by_axis.get(axis, 0) / 1e9 for axis in ("FSDP2", "ulysses", "tp")]
    numbers = sum(map(prod, [*shape.blocks, *shape.root])) / (shards * ulysses)
    inputs = layers * MICRO_BATCH // tp * hidden * 2
    return [*sent, numbers * 16 / 1e9, inputs / 1e9, 2 * sum(map(prod, [*block, *root])) / 1e9]


def main() -> None:
    for model, *mesh in EXAMPLES:
        print("|", " | ".join([model, " x ".join(map(str, mesh)), *(f"{x:,.1f}" for x in example(model, *mesh))]), "|")


if __name__ == "__main__":
    main()

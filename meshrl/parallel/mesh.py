"""The DeviceMesh, dp_replicate x dp_shard x ulysses x tp, and a rank's peers, which work on the same packed rows: along
ulysses and tp. What a rank is in the mesh: plan/ranks.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

from meshrl.parallel.exchange import Axis, gathered, summed_values
from meshrl.parallel.tp import TensorParallel

AXES = ("dp_replicate", "dp_shard", "ulysses", "tp")


def build_mesh(shape: tuple[int, int, int, int], device_type: str) -> DeviceMesh:
    """The named mesh over the default process group."""
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that FSDP2 shards over: 1-D, or (replicate, shard) when there are replicas. It shards over
    the ranks of ulysses, too, since each of them computes the gradients of its own tokens."""
    shard = mesh["dp_shard"]
    if mesh["ulysses"].size() > 1:
        shard = mesh["dp_shard", "ulysses"]._flatten("shard")
    if mesh["dp_replicate"].size() > 1:
        return DeviceMesh._concatenate([mesh["dp_replicate"], shard])
    return shard


def replica_group(mesh: DeviceMesh) -> Any:
    """The process group of this rank's replica, in which rank s is sender s (a collective when called first)."""
    axes = [axis for axis in AXES[1:] if mesh[axis].size() > 1]
    if len(axes) > 1:
        return mesh[tuple(axes)]._flatten().get_group()
    return mesh[axes[0] if axes else "dp_shard"].get_group()


def forget_meshes() -> None:
    """Clear DTensor's caches: they keep meshes, and so process groups with their threads, alive. A fork from another
    thread would destroy these groups in the child, where the threads that they join don't exist, and the child would
    crash before its exec (Ray starts its servers by such forks).
    """
    plans = getattr(_redistribute, "_gen_transform_infos", None)
    # Not by torch.distributed.tensor.debug, whose import loads TorchDynamo and takes half a second.
    propagator = getattr(DTensor._op_dispatcher, "sharding_propagator", None)
    private = (  # another torch may lack them
        (plans, "cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(propagator, "propagate_op_sharding", None), "cache_clear"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
    )
    for owner, name in private:
        getattr(owner, name, lambda: None)()


class Peers:
    """T tokens of a pack are padded to a multiple of all peers. A rank of ulysses has a chunk of them, whose tokens the
    ranks of tp share. None: the mesh has one rank along this axis."""

    def __init__(self, mesh: DeviceMesh):
        self.ulysses = Axis.of(mesh, "ulysses") if mesh["ulysses"].size() > 1 else None
        self.tp = TensorParallel(Axis.of(mesh, "tp"), mesh["tp"]) if mesh["tp"].size() > 1 else None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Peers | None:
        return None if mesh is None or mesh["ulysses"].size() * mesh["tp"].size() == 1 else cls(mesh)

    def padded(self, cu_seqlens: list[int]) -> list[int]:
        """With a last segment of the tokens that pad the pack, if there are any."""
        chunks = self.ulysses.size if self.ulysses else 1
        end = self.chunk(cu_seqlens[-1]) * chunks
        return cu_seqlens if end == cu_seqlens[-1] else [*cu_seqlens, end]

    def chunk(self, num_tokens: int) -> int:
        """Tokens of a rank of ulysses."""
        return chunk_tokens(num_tokens, self.ulysses.size if self.ulysses else 1, self.tp.axis.size if self.tp else 1)

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[..., T] -> this rank's chunk, padded with 0."""
        chunk = self.chunk(x.shape[-1])
        own = x[..., self.first(x.shape[-1]) :][..., :chunk]
        return F.pad(own, (0, chunk - own.shape[-1]))

    def first(self, num_tokens: int) -> int:
        """Index of the first token of this rank's chunk."""
        return self.chunk(num_tokens) * self.ulysses.index if self.ulysses else 0

    def gather_tp(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states of this rank's tokens -> those of its chunk."""
        return hidden if self.tp is None else gathered(hidden, self.tp.axis)

    def sum_chunks(self, values: torch.Tensor) -> torch.Tensor:
        """[T], with values for the tokens that this rank scores and 0 elsewhere -> the values of all tokens."""
        return values if self.ulysses is None else summed_values(values, self.ulysses)

    def without_tp(self) -> AbstractContextManager[None]:
        """A context in which each rank computes all of the model."""
        return nullcontext() if self.tp is None else self.tp.inactive()


def sizes_for(heads: int, key_heads: int) -> list[int]:
    """Into how many equal parts attention heads can be split, with the key heads that each part needs."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return [n for n in divisors if key_heads % n == 0 or n % key_heads == 0]


def chunk_tokens(num_tokens: int, num_ulysses: int, num_tp: int) -> int:
    """Tokens of one of num_ulysses equal chunks, a multiple of num_tp."""
    return -(-num_tokens // (num_ulysses * num_tp)) * num_tp

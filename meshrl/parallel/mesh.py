"""The DeviceMesh, dp_replicate x dp_shard x ulysses x tp. What a rank is in it: plan/ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

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

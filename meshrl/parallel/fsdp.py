"""FSDP2 over a CausalModel: one group for each block, and the root group for embedding, norm and head."""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshrl.parallel.timing import time_fsdp, timed_collective


def is_sharded(dp_mesh: DeviceMesh) -> bool:
    """Whether FSDP2 is used. With one rank it would copy each parameter and gradient, and share nothing."""
    return dp_mesh.size() > 1


def shard_model(
    root: torch.nn.Module,
    blocks: list[torch.nn.Module],
    dp_mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard in place. Parameters keep the dtype of the master weights, compute runs in compute_dtype, gradients are
    reduced in fp32 (or the masters' dtype, if that is wider).

    The root group holds the embedding and the head, so that tied weights share one group.
    """
    masters = {p.dtype for p in root.parameters()}
    reduce_dtype = torch.promote_types(torch.float32, max(masters, key=lambda d: d.itemsize))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in [*blocks, root]:
        assert isinstance(module, FSDPModule)
        time_fsdp(module, dp_mesh.size(0) if dp_mesh.ndim > 1 else 1)


def reshard(root: torch.nn.Module) -> None:
    """Free all unsharded parameters. After a forward without a backward FSDP does not do this, and saving, digests and
    syncs need this rank's shards. FSDP's own method reaches only one group."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(p: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter (or of its gradient)."""
    return p.to_local() if isinstance(p, DTensor) else p


def full_tensor(p: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank (a collective, if it is sharded)."""
    if not isinstance(p, DTensor):
        return p
    axes = zip(p.device_mesh.shape, p.placements, strict=True)
    num_ranks = prod(size for size, placement in axes if not placement.is_replicate())
    with timed_collective("all_gather", p, num_ranks):
        return p.full_tensor()

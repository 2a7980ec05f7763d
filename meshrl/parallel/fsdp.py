"""FSDP2 over a CausalModel: each block its own group, everything else (embedding, norm, head) the root's."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard_model(
    root: torch.nn.Module,
    blocks: list[torch.nn.Module],
    dp_mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard in place. Parameters keep their storage dtype (the masters'), compute runs in compute_dtype, gradients are
    reduced in fp32 (or wider, if the masters are).

    The root group holds the embedding and the head, so that tied weights share one group (P11).
    """
    masters = {p.dtype for p in root.parameters()}
    reduce_dtype = torch.promote_types(torch.float32, max(masters, key=lambda d: d.itemsize))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)


def reshard(root: torch.nn.Module) -> None:
    """Free every whole parameter: after a forward without a backward nobody else does, and a whole parameter is no
    shard of this rank to be saved, digested or sent. FSDP's own method reaches one group only."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter (or of its gradient)."""
    return p.to_local() if isinstance(p, DTensor) else p


def whole(p: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank (a collective, when it is sharded)."""
    return p.full_tensor() if isinstance(p, DTensor) else p

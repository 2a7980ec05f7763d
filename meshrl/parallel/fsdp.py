"""FSDP2 over a CausalModel: groups of modules that are gathered together, and the root group with the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshrl.parallel.timing import time_fsdp, timed_collective

T = TypeVar("T")


def is_sharded(dp_mesh: DeviceMesh) -> bool:
    """Whether FSDP2 is used. With one rank it would copy each parameter and gradient, and share nothing."""
    return dp_mesh.size() > 1


def shard_model(
    root: torch.nn.Module,
    groups: Sequence[list[torch.nn.Module]],
    dp_mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    prefetch: int = 1,
) -> None:
    """Shard in place. Parameters keep the dtype of the master weights, compute runs in compute_dtype, gradients are
    reduced in fp32 (or the masters' dtype, if that is wider).

    An embedding is not gathered for the backward pass, which does not read it. A group that is a linear layer is the
    head (`run_within`), whose backward pass begins as soon as its forward has ended: it stays gathered meanwhile.
    prefetch: as train.fsdp_prefetch.
    """
    masters = {p.dtype for p in root.parameters()}
    reduce_dtype = torch.promote_types(torch.float32, max(masters, key=lambda d: d.itemsize))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for group in [*groups, [root]]:
        reshards = reshard_after_forward and not isinstance(group[0], torch.nn.Linear) and group != [root]
        modules: Any = group if len(group) > 1 else group[0]
        fully_shard(modules, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=reshards)
        module = group[0]
        assert isinstance(module, FSDPModule)
        if isinstance(module, torch.nn.Embedding):
            module.set_unshard_in_backward(False)
        time_fsdp(module, dp_mesh.size(0) if dp_mesh.ndim > 1 else 1)
    if prefetch > 1:  # FSDP2 gathers one group ahead by itself
        _gather_ahead([group[0] for group in groups], prefetch)


def _gather_ahead(modules: Sequence[torch.nn.Module], number: int) -> None:
    """modules: the first of each group, in the order of forward. Embedding and head keep FSDP2's own order."""
    ends = (torch.nn.Linear, torch.nn.Embedding)
    blocks: list[Any] = [module for module in modules if not isinstance(module, ends)]
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + number])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - number) : i][::-1])


def run_within(module: torch.nn.Module, function: Callable[..., T], *args: Any) -> T:
    """function(*args) in place of the module's forward, so that the parameters of a group are gathered for it, and
    again for its backward pass."""
    if not isinstance(module, FSDPModule):
        return function(*args)
    before = module.__dict__.get("forward")
    module.forward = function
    try:
        return module(*args)  # type: ignore[no-any-return,operator]
    finally:
        del module.forward
        if before is not None:
            module.forward = before


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

"""Communication of ranks besides that of FSDP2: collectives with a gradient, between the peers of one axis of the mesh,
which work on the same rows; values that are not tensors; and the stores in which ranks form process groups.

Peers share each gradient: what one rank computes is a part of it, and the sum over the peers is the gradient. So a
gather's backward pass sums, and that of a sum of parts gathers. The loss is an exception: each peer computes all of it,
from values that `gathered_values` and `summed_values` give to all, so its gradient of a value counts once.

The connections of torch.distributed and its stores are not authenticated. Its own collectives for objects read pickles,
which can run code; so values are sent as JSON.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrl.parallel.timing import timed_collective
from meshrl.process.connect import listening_socket

# Newer versions have both under new names, and warn of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """The peers along one axis of the mesh: their number, this rank's place, and their process group."""

    size: int
    index: int
    group: Any

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> Axis:
        return cls(mesh[name].size(), mesh.get_local_rank(name), mesh[name].get_group())

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] of each rank -> [size * N, ...], without a gradient."""
        full = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with timed_collective("all_gather", full, self.size):
            _all_gather(full, x.contiguous(), group=self.group)
        return full

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * N, ...] of each rank -> this rank's [N, ...] of their sum, without a gradient."""
        own = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        with timed_collective("reduce_scatter", x, self.size):
            _reduce_scatter(own, x.contiguous(), group=self.group)
        return own

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...], entry r for rank r -> [size, ...], entry r from rank r, without a gradient."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        with timed_collective("all_to_all", x, self.size):
            dist.all_to_all_single(received, x.contiguous(), group=self.group)
        return received

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, without a gradient."""
        total = x.clone()
        with timed_collective("all_reduce", total, self.size):
            dist.all_reduce(total, group=self.group)
        return total

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's [N, ...] of [size * N, ...]."""
        return x.unflatten(0, (self.size, -1))[self.index]


def gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Slices [N, ...] of all peers -> [size * N, ...]."""
    return _Exchanged.apply(x, axis.gather, axis.reduce_scatter)  # type: ignore[no-any-return]  # apply is not typed


def sum_scattered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Parts [size * N, ...] of a sum -> this rank's slice [N, ...] of it."""
    return _Exchanged.apply(x, axis.reduce_scatter, axis.gather)  # type: ignore[no-any-return]


def swapped(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[size, ...], entry r for rank r -> [size, ...], entry r from rank r."""
    return _Exchanged.apply(x, axis.swap, axis.swap)  # type: ignore[no-any-return]


def gathered_values(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Values [N] of all peers -> [size, N], for a loss that each peer computes."""
    return _Exchanged.apply(  # type: ignore[no-any-return]
        x, lambda values: axis.gather(values[None]), lambda grad: grad[axis.index]
    )


def summed_values(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of all peers' values, for a loss that each peer computes."""
    return _Exchanged.apply(x, axis.sum, lambda grad: grad)  # type: ignore[no-any-return]


def sum_gradients(tensors: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """The same tensors, of whose gradients each rank computes a part: they get the sums, by one all-reduce,
    in fp32 as FSDP2's."""
    return list(_SummedGradients.apply(axis, *tensors)) if tensors else []


class _Exchanged(torch.autograd.Function):
    """The result of an operation; of_gradient computes the gradient of x from that of the result."""

    @staticmethod
    def forward(ctx, x, operation, of_gradient):  # type: ignore[override]
        ctx.of_gradient = of_gradient
        return operation(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return ctx.of_gradient(grad), None, None


class _SummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis, *tensors):  # type: ignore[override]
        ctx.axis = axis
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        own = torch.cat([grad.flatten() for grad in grads])
        total = ctx.axis.sum(own.to(torch.promote_types(own.dtype, torch.float32)))
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in zip(parts, grads, strict=True))


T = TypeVar("T")


def all_gather_json(value: T) -> list[T]:
    """The value of every rank, in the order of the ranks (a collective, if there is a process group). It must equal
    what JSON makes of it: lists instead of tuples, and texts as keys of dicts."""
    if not dist.is_initialized():
        return [value]
    body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)  # never empty
    num_ranks = dist.get_world_size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(num_ranks)]
    with timed_collective("all_gather_json", body.expand(num_ranks, -1), num_ranks):
        dist.all_gather(lengths, torch.tensor([len(body)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(body)] = body
        bodies = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(bodies, padded)
    return [json.loads(bytes(text[: int(length)].numpy())) for text, length in zip(bodies, lengths, strict=True)]


DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)  # of torch


def listening_store(host: str, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> dist.TCPStore:
    """A store of torch.distributed in this process, on a free port. torch's own socket would listen on all
    interfaces. host: the address at which other ranks reach this machine.
    """
    sock = listening_socket(host)
    port = sock.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=sock.detach()
    )

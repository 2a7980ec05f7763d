"""Spans of a rank's computation and collectives, timed where they run: on a CPU by its clock, on an accelerator
by events in the current stream, which are read at the end of the step, without waiting for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from meshrl.monitor.recorder import Category, recorder

_queued: deque[tuple[str, Category, Any, Any, dict[str, Any]]] = deque(maxlen=1 << 16)
_reference: tuple[int, Any] = (0, None)  # an event, and its unix time


@contextmanager
def timed(name: str, category: Category, device: torch.device, **args: Any) -> Iterator[None]:
    """Record the work that the block does, or puts into the device's current stream."""
    begin = _now(device)
    try:
        with recorder.annotate(name):
            yield
    finally:
        _record(name, category, begin, _now(device), args)


def timed_collective(name: str, tensor: torch.Tensor, num_ranks: int) -> AbstractContextManager[None]:
    """Record a collective. tensor: the full one. Nothing is recorded for a group of one rank."""
    return nullcontext() if num_ranks == 1 else timed(name, "collective", tensor.device, **_facts(tensor, num_ranks))


def settle(device: torch.device) -> None:
    """Record the device's work that has ended. Call it at the end of a step, when the device is idle."""
    global _reference
    if device.type == "cpu":
        return
    while _queued and _queued[0][3].query():
        name, category, begin, end, args = _queued.popleft()
        at_ns, event = _reference
        times = [at_ns + round(event.elapsed_time(of) * 1e6) for of in (begin, end)]
        recorder.add(name, category, times[0], times[1], args)
    if not _queued:  # a new reference: differences are float32 milliseconds
        event = _now(device)
        event.synchronize()
        _reference = time.time_ns(), event


def time_fsdp(module: FSDPModule, num_replicas: int) -> None:
    """Record the collectives of one group of FSDP2, which stay the same operations. num_replicas: 1 = no all-reduce."""
    reduce_scatter = _ReduceScatter(num_replicas)
    module.set_custom_all_gather(_AllGather())
    module.set_custom_reduce_scatter(reduce_scatter)
    if num_replicas > 1:
        module.set_all_reduce_hook(reduce_scatter.all_reduced)


class _AllGather(DefaultAllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        with timed_collective("all_gather", output_tensor, group.size()):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2 has no extension point for its all-reduce, only a hook after it. So the all-reduce begins at the end of the
    reduce-scatter; or, if each replica is one rank, when its tensor is allocated, which includes a copy into it."""

    def __init__(self, num_replicas: int):
        super().__init__()
        self._num_replicas = num_replicas
        self._begin: Any = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._num_replicas > 1:
            self._begin = _now(device)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        with timed_collective("reduce_scatter", input_tensor, group.size()):
            work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        if self._num_replicas > 1:
            self._begin = _now(output_tensor.device)
        return work

    def all_reduced(self, output: torch.Tensor) -> None:
        """Called in the stream of the all-reduce, after it."""
        _record("all_reduce", "collective", self._begin, _now(output.device), _facts(output, self._num_replicas))


def _facts(tensor: torch.Tensor, num_ranks: int) -> dict[str, Any]:
    num_bytes, dtype = tensor.numel() * tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
    return {"bytes": num_bytes, "dtype": dtype, "group": num_ranks, "phase": recorder.phase}


def _now(device: torch.device) -> Any:
    """The unix time in nanoseconds, or an event in the current stream."""
    if device.type == "cpu":
        return time.time_ns()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def _record(name: str, category: Category, begin: Any, end: Any, args: dict[str, Any]) -> None:
    if isinstance(begin, int):
        recorder.add(name, category, begin, end, args)
    else:
        _queued.append((name, category, begin, end, args))

"""The forward of a decode step as graphs of a device: hundreds of launches repeated by one call. Without them a device
waits for the launches of small models. With the numbers of one engine step that the device needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from meshrl.core.device import graph_memory, recorded, upload
from meshrl.model.attention import AttentionContext


class StepArrays:
    """Arrays that are computed on the host before the model's call, and sent by one copy when the first is used."""

    def __init__(self, device: torch.device):
        self._device = device
        self._arrays: list[torch.Tensor] = []

    def add(self, array: np.ndarray) -> Callable[[], torch.Tensor]:
        """A function that returns the array on the device; call it when all arrays are added."""
        place = len(self._arrays)
        self._arrays.append(torch.from_numpy(array))
        return lambda: self._sent[place]

    @cached_property
    def _sent(self) -> list[torch.Tensor]:
        return upload(self._arrays, self._device)


Forward = Callable[[torch.Tensor, torch.Tensor, AttentionContext], torch.Tensor]
Context = Callable[[Callable[[], torch.Tensor], Callable[[], torch.Tensor]], AttentionContext]


class DecodeGraphs:
    """A graph for each padded number of rows; rows of length 0 fill it. hidden: CausalModel.hidden, or what replaces
    it. context: makes the attention from functions that return the slots and the lengths of the rows."""

    def __init__(self, hidden: Forward, context: Context, device: torch.device):
        self._hidden, self._context, self._device = hidden, context, device
        self._graphs: dict[int, tuple[torch.Tensor, Callable[[], None], torch.Tensor]] = {}
        self._memory: Any = None

    def run(self, inputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """inputs int64[3, `padded(N)`]: position, length and slot of each row; tokens int64[N]; on the device -> final
        hidden states [N, D], which are overwritten by the next call."""
        size = inputs.shape[1]
        if size not in self._graphs:
            self._graphs[size] = self._record(size)
        static, replay, hidden = self._graphs[size]
        static[1:].copy_(inputs)
        static[0, : len(tokens)].copy_(tokens)
        replay()
        return hidden[: len(tokens)]

    def clear(self) -> None:
        """When tensors that the graphs read have moved."""
        self._graphs.clear()

    def _record(self, size: int) -> tuple[torch.Tensor, Callable[[], None], torch.Tensor]:
        """The inputs of a graph, a function that repeats it, and its result."""
        if not self._graphs:  # memory without a graph can't be used again
            self._memory = graph_memory()
        static = torch.zeros((4, size), dtype=torch.int64, device=self._device)  # rows of length 0 write nothing
        context = self._context(lambda: static[3], lambda: static[2])

        def work() -> torch.Tensor:
            return self._hidden(static[0], static[1], context)

        work()  # it compiles kernels
        return static, *recorded(work, self._memory)


def padded(num_rows: int) -> int:
    """The number of rows of the graph: the next power of two, or three quarters of it."""
    power = 1 << (num_rows - 1).bit_length()
    return power * 3 // 4 if power >= 8 and num_rows <= power * 3 // 4 else power

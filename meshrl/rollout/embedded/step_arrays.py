"""The numbers of one engine step that the device needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from meshrl.core.device import upload


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

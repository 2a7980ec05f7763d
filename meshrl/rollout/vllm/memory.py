"""Memory of a vLLM worker that is released while the trainer beside it works.

On an accelerator this is vLLM's own sleep mode (`--enable-sleep-mode`), of level 2: nothing is kept. Runs in vLLM's
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshrl.rollout.vllm.cpu_build import CpuMemory


class WorkerMemory:
    """asleep: the parts of {weights, kv_cache} that are released. Weights that were restored are garbage until a full
    reload; caches are empty."""

    def __init__(self, worker: Any):
        self.asleep: set[str] = set()
        self._worker = worker
        self._cpu = CpuMemory(worker) if worker.device.type == "cpu" else None

    def release(self, parts: set[str]) -> int:
        """Release these parts, except what is asleep already; returns bytes freed."""
        new, before = parts - self.asleep, set(self.asleep)
        self.asleep |= new  # whatever fails from here on has made them unusable
        if self._cpu is not None:
            return self._cpu.empty(new)
        return -self._taken(lambda: self._sleep(new, before))

    def restore(self, parts: set[str]) -> int:
        """Take these back, as far as they are asleep; returns bytes taken."""
        back = parts & self.asleep
        taken = 0
        if back:
            taken = self._cpu.fill(back) if self._cpu is not None else self._taken(lambda: self._wake(back))
        self.asleep -= back
        return taken

    def _sleep(self, parts: set[str], before: set[str]) -> None:
        if "weights" in parts:
            self._worker.sleep(level=2)  # takes everything, and keeps the buffers, which no sync could bring back
            if "kv_cache" not in parts | before:
                self._worker.wake_up(tags=["kv_cache"])
        elif parts:
            self._worker.discard(tuple(parts))

    def _wake(self, parts: set[str]) -> None:
        self._worker.wake_up(tags=sorted(parts))

    def _taken(self, run: Callable[[], None]) -> int:
        free = torch.accelerator.get_memory_info()[0]
        run()
        return free - torch.accelerator.get_memory_info()[0]

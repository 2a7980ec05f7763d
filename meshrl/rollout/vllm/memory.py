"""Releases the memory of a vLLM worker while the trainer on the same device works.

On an accelerator this is vLLM's sleep mode (`--enable-sleep-mode`), level 2, which discards everything. Runs in vLLM's
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshrl.rollout.vllm.cpu_build import CpuMemory


class WorkerMemory:
    """released: the released parts of {weights, kv_cache}. Restored weights are garbage until a full reload; restored
    caches are empty."""

    def __init__(self, worker: Any):
        self.released: set[str] = set()
        self._worker = worker
        self._cpu = CpuMemory(worker) if worker.device.type == "cpu" else None

    def release(self, parts: set[str]) -> int:
        """Release these parts, except parts that are already released; returns bytes freed."""
        new, before = parts - self.released, set(self.released)
        self.released |= new  # first: after any failure below they are unusable
        if self._cpu is not None:
            return self._cpu.release(new)
        return -self._taken(lambda: self._sleep(new, before))

    def restore(self, parts: set[str]) -> int:
        """Allocate these parts again, if they are released; returns bytes."""
        back = parts & self.released
        if self._cpu is not None:
            taken = self._cpu.restore(back)
        else:
            taken = self._taken(lambda: self._worker.wake_up(tags=sorted(back))) if back else 0
        self.released -= back
        return taken

    def _sleep(self, parts: set[str], before: set[str]) -> None:
        if "weights" in parts:
            self._worker.sleep(level=2)  # releases everything except the buffers, which no sync could restore
            if "kv_cache" not in parts | before:
                self._worker.wake_up(tags=["kv_cache"])
        elif parts:
            self._worker.discard(tuple(parts))

    def _taken(self, run: Callable[[], None]) -> int:
        free = torch.accelerator.get_memory_info()[0]
        run()
        return free - torch.accelerator.get_memory_info()[0]

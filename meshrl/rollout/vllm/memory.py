"""Releases the memory of a vLLM worker while the trainer on the same device works.

On an accelerator this is vLLM's sleep mode (`--enable-sleep-mode`), level 2, which discards everything. The worker of
its CPU build has none, so the storages of its tensors are released in place. Runs in vLLM's worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch


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


class CpuMemory:
    """Releases the storages of a worker's tensors in place: every tensor that vLLM refers to stays the same object."""

    def __init__(self, worker: Any):
        self._worker = worker
        self._released_storages: dict[str, list[tuple[Any, int]]] = {}

    def release(self, parts: set[str]) -> int:
        """Free these parts of {weights, kv_cache}; returns bytes."""
        freed = 0
        for part in parts:
            if part == "weights":
                freed += self._drop_packed()
            storages = _storages(self._parameters() if part == "weights" else self._caches())
            self._released_storages[part] = [(storage, storage.nbytes()) for storage in storages]
            for storage, num_bytes in self._released_storages[part]:
                storage.resize_(0)
                freed += num_bytes
        return freed

    def restore(self, parts: set[str]) -> int:
        """Allocate them again; returns bytes."""
        taken = 0
        for part in parts:
            for storage, num_bytes in self._released_storages.pop(part, ()):
                storage.resize_(num_bytes)
                taken += num_bytes
                if part == "kv_cache":  # zeros, as vLLM allocates it: unwritten elements must be finite
                    storage.fill_(0)
        return taken

    def _parameters(self) -> Iterator[torch.Tensor]:
        """The parameters, without packed copies."""
        for p in self._worker.get_model().parameters():
            if not p.untyped_storage().resizable():  # it maps the model file
                p.data = torch.empty_like(p.data)
            yield p

    def _caches(self) -> Iterator[torch.Tensor]:
        for layer in self._worker.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            yield from [cache] if isinstance(cache, torch.Tensor) else cache or ()

    def _drop_packed(self) -> int:
        """Drop the packed copies of linear layers' weights, which the CPU kernels use; a reload packs them again."""
        freed = 0
        for module in self._worker.get_model().modules():
            if hasattr(module, "cpu_linear"):
                if module.weight.numel() == 0:  # otherwise the parameter exists and is counted already
                    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

                    freed += get_layerwise_info(module).restore_metadata[0]["weight"].nbytes
                module.cpu_linear = _raise_released
        return freed


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages that have memory, each once."""
    by_address = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in by_address.values() if storage.nbytes()]


def _raise_released(*_: Any) -> NoReturn:
    raise RuntimeError("the memory of the weights is released: restore and sync before using the model")

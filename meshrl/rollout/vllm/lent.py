"""Memory of a vLLM worker that is lent to the trainer beside it.

On an accelerator this is vLLM's own sleep mode (`--enable-sleep-mode`), of level 2: nothing is kept. Its CPU worker has
none, so there the storages are emptied in place: every tensor that vLLM holds stays what it is, over no memory.

Runs in vLLM's worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch


class LentMemory:
    """What one worker has given up. Weights that come back are garbage until a whole reload; caches are empty."""

    def __init__(self, worker: Any):
        self.lent: set[str] = set()
        self._worker = worker
        self._emptied: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def release(self, parts: set[str]) -> int:
        """Give up these of {weights, kv_cache}, but for what is lent already; returns bytes freed."""
        new, before = parts - self.lent, set(self.lent)
        self.lent |= new  # whatever fails from here on has made them unusable
        if self._worker.device.type == "cpu":
            return self._empty(new)
        return -self._taken(lambda: self._suspend(new, before))

    def restore(self, parts: set[str]) -> int:
        """Take these back, where they are lent; returns bytes taken."""
        back = parts & self.lent
        taken = 0
        if back:
            taken = self._fill(back) if self._worker.device.type == "cpu" else self._taken(lambda: self._wake(back))
        self.lent -= back
        return taken

    # ---- an accelerator

    def _suspend(self, parts: set[str], before: set[str]) -> None:
        if "weights" in parts:
            self._worker.sleep(level=2)  # takes all, and keeps the buffers, which no sync could bring back
            if "kv_cache" not in parts | before:
                self._worker.wake_up(tags=["kv_cache"])
        elif parts:
            self._worker.discard(tuple(parts))

    def _wake(self, parts: set[str]) -> None:
        self._worker.wake_up(tags=sorted(parts))

    def _taken(self, run: Any) -> int:
        free = torch.accelerator.get_memory_info()[0]
        run()
        return free - torch.accelerator.get_memory_info()[0]

    # ---- a CPU

    def _empty(self, parts: set[str]) -> int:
        freed = 0
        for part in parts:
            if part == "weights":
                freed += self._drop_packed()
            storages = _storages(self._parameters() if part == "weights" else self._caches())
            self._emptied[part] = [(storage, storage.nbytes()) for storage in storages]
            for storage, num_bytes in self._emptied[part]:
                storage.resize_(0)
                freed += num_bytes
        return freed

    def _fill(self, parts: set[str]) -> int:
        taken = 0
        for part in parts:
            for storage, num_bytes in self._emptied.pop(part, ()):
                storage.resize_(num_bytes)
                taken += num_bytes
                if part == "kv_cache":  # as vLLM allocates it: what no token has written must stay finite
                    storage.fill_(0)
        return taken

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Those that are left beside the packed copies."""
        for p in self._worker.get_model().parameters():
            if not p.untyped_storage().resizable():  # a view of the model's file
                p.data = torch.empty_like(p.data)
            yield p

    def _caches(self) -> Iterator[torch.Tensor]:
        for layer in self._worker.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            yield from [cache] if isinstance(cache, torch.Tensor) else cache or ()

    def _drop_packed(self) -> int:
        """The copies of linear layers' weights that the CPU's kernels multiply; a reload packs anew."""
        freed = 0
        for module in self._worker.get_model().modules():
            if hasattr(module, "cpu_linear"):
                if module.weight.numel() == 0:  # else the copy lies beside the parameter, or there is none
                    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

                    freed += get_layerwise_info(module).restore_metadata[0]["weight"].nbytes
                module.cpu_linear = _lent
        return freed


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Those that have memory, each once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _lent(*_: Any) -> NoReturn:
    raise RuntimeError("the weights' memory is lent: restore it and sync before anything is computed")

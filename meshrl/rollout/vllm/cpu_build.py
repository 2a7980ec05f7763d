"""What only vLLM's CPU build needs: arguments and threads of its server, and memory that is released without a sleep
mode, which its worker does not have. (Its packed weights are in packed.py.)"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

KV_CACHE_BYTES = 1 << 30  # where the config names no size
FLAGS = ["--no-enable-chunked-prefill"]  # vLLM 0.32 ends there when it cuts the prompt of a request with a seed


def threads() -> dict[str, str]:
    """The environment in which each worker takes a rank's share of the cores and is bound to none of them, because
    other ranks use them too."""
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": binding}


class CpuMemory:
    """Storages of a worker's tensors, emptied in place: every tensor that vLLM holds stays the same object."""

    def __init__(self, worker: Any):
        self._worker = worker
        self._emptied: dict[str, list[tuple[Any, int]]] = {}

    def empty(self, parts: set[str]) -> int:
        """Free these of {weights, kv_cache}; returns bytes."""
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

    def fill(self, parts: set[str]) -> int:
        """Take them back; returns bytes."""
        taken = 0
        for part in parts:
            for storage, num_bytes in self._emptied.pop(part, ()):
                storage.resize_(num_bytes)
                taken += num_bytes
                if part == "kv_cache":  # as vLLM allocates it: what no token has written must be finite
                    storage.fill_(0)
        return taken

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Those that exist beside the packed copies."""
        for p in self._worker.get_model().parameters():
            if not p.untyped_storage().resizable():  # a view of the model's file
                p.data = torch.empty_like(p.data)
            yield p

    def _caches(self) -> Iterator[torch.Tensor]:
        for layer in self._worker.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            yield from [cache] if isinstance(cache, torch.Tensor) else cache or ()

    def _drop_packed(self) -> int:
        """The copies of linear layers' weights that the CPU's kernels multiply; a reload packs them again."""
        freed = 0
        for module in self._worker.get_model().modules():
            if hasattr(module, "cpu_linear"):
                if module.weight.numel() == 0:  # otherwise the copy is beside the parameter, or there is none
                    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

                    freed += get_layerwise_info(module).restore_metadata[0]["weight"].nbytes
                module.cpu_linear = _released
        return freed


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Those that have memory, each once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _released(*_: Any) -> NoReturn:
    raise RuntimeError("the memory of the weights is released: restore it and sync before anything is computed")

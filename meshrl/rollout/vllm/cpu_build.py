"""Code for vLLM's CPU build only: arguments and threads of its server, and releasing memory, because its worker has no
sleep mode. (Its packed weights are in packed.py.)"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

KV_CACHE_BYTES = 1 << 30  # default, if the config has no size
FLAGS = ["--no-enable-chunked-prefill"]  # on CPUs vLLM 0.32 crashes if it splits the prompt of a request with a seed


def threads() -> dict[str, str]:
    """The environment that gives each worker one rank's share of the cores, without binding: other ranks use the same
    cores."""
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": binding}


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

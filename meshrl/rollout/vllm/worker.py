"""meshrl's code in vLLM's workers: it reads weights from shared memory, loads them with vLLM's own loader, and reads
them back for the proof.

The server is started with `--worker-extension-cls meshrl.rollout.vllm.worker.WeightsExtension`; each of its workers
then has the `meshrl_*` methods. `/collective_rpc` calls them with JSON, and they answer with JSON, `{"error": text}`
after a failure.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.rollout.server.worker_weights import WorkerWeights
from meshrl.rollout.vllm.memory import WorkerMemory
from meshrl.rollout.vllm.packed import PackedExperts, PackedLayers
from meshrl.rollout.vllm.placeholders import without_data
from meshrl.sync.layout import SyncHeader


class WeightsExtension:
    """A mixin of vLLM's worker class. It uses the worker's get_model(), model_config and vllm_config."""

    def meshrl_weights(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if step == "reconcile" or not hasattr(self, "_meshrl_weights"):
            self._meshrl_weights = VllmWeights(self)
        return self._meshrl_weights.call(step, arguments)

    def meshrl_release(self, parts: list[str]) -> dict[str, Any]:
        return _answer(lambda: {"num_bytes": _memory_of(self).release(set(parts))})

    def meshrl_restore(self, parts: list[str]) -> dict[str, Any]:
        return _answer(lambda: {"num_bytes": _memory_of(self).restore(set(parts))})


class VllmWeights(WorkerWeights):
    """The weights of one worker, loaded by vLLM's layer-by-layer reload."""

    def __init__(self, worker: Any):
        super().__init__(worker.get_model(), f"vllm worker {worker.rank}", without_data)
        self.worker = worker
        self._packed = PackedLayers(self.model, -1)
        self._experts = PackedExperts(self.model)
        self._reloading = False

    def reconcile(self, layout: dict[str, Any]) -> dict[str, Any]:
        answer = super().reconcile(layout)
        sent = {tensor.name: tensor.dtype for tensor in self.layout.tensors}
        biases = [name for name, patches in self.map.patches.items() if self._packed.has_bias(patches[0].param)]
        return answer | {"dtypes": self.map.dtypes | {name: sent[name] for name in biases if name in sent}}

    def before_loading(self, header: SyncHeader) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if "weights" in _memory_of(self.worker).released:
            raise SyncError(f"{self.name}: the weights' memory is released; restore it before a sync")
        self._packed = PackedLayers(self.model, header.version)
        with self.loading():
            initialize_layerwise_reload(self.model)
        self._reloading = True

    def after_loading(self) -> None:
        self._finish_reload()
        self._packed.pack_shared()
        self._experts.pack()
        self.worker.model_runner.reset_lora_state()

    def cancel(self) -> dict[str, Any]:
        if self._reloading:
            with self.loading():
                self._finish_reload()
        return super().cancel()

    def _finish_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._reloading = False
        finalize_layerwise_reload(self.model, self.worker.model_config)

    @contextmanager
    def loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.worker.vllm_config), torch.no_grad():
            yield

    def note(self, name: str, tensor: torch.Tensor) -> None:
        for patch in self.map.patches.get(name, ()):
            if patch.param in self._packed:
                self._packed.note(patch, tensor)

    def read_back(self) -> dict[str, torch.Tensor]:
        return super().read_back() | self._experts.unpacked()

    def packed(self) -> Container[str]:
        return self._packed

    def differing_packed(self) -> list[str]:
        return self._packed.differing()


def _memory_of(worker: Any) -> WorkerMemory:
    if not hasattr(worker, "_meshrl_memory"):
        worker._meshrl_memory = WorkerMemory(worker)
    memory: WorkerMemory = worker._meshrl_memory
    return memory


def _answer(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The process boundary: an exception here would reach the client only as status 500."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}

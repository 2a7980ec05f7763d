"""meshrl's code in vLLM's workers: it reads weights from shared memory, loads them with vLLM's own loader, and reads
them back for the proof.

The server is started with `--worker-extension-cls meshrl.rollout.vllm.worker.WeightsExtension`; each of its workers
then has the method `meshrl_call`. `/collective_rpc` calls it with JSON, and it answers with JSON, `{"error": text}`
after a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems

from meshrl.core.errors import SyncError
from meshrl.rollout.server.worker_weights import WorkerWeights
from meshrl.rollout.vllm.features import array_of
from meshrl.rollout.vllm.memory import WorkerMemory
from meshrl.rollout.vllm.packed import PackedExperts, PackedLayers
from meshrl.sync.layout import SyncHeader


class WeightsExtension:
    """A mixin of vLLM's worker class. It uses the worker's get_model(), model_config and vllm_config."""

    def meshrl_call(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self, "_meshrl_weights"):
            self._meshrl_weights = VllmWeights(self)
        return self._meshrl_weights.call(step, arguments)


class VllmWeights(WorkerWeights):
    """The weights of one worker, loaded by vLLM's layer-by-layer reload; and its memory."""

    def __init__(self, worker: Any):
        super().__init__(worker.get_model(), f"vllm worker {worker.rank}", _make_placeholder, worker.rank)
        self.worker, self.memory = worker, WorkerMemory(worker)
        self.steps |= {"release": self.release, "restore": self.restore, "encode": self.encode}
        self.packed: PackedLayers = PackedLayers(self.model, -1)
        self._experts = PackedExperts(self.model)
        self._reloading = False

    def reconcile(self, layout: dict[str, Any]) -> dict[str, Any]:
        answer = super().reconcile(layout)
        sent = {tensor.name: tensor.dtype for tensor in self.layout.tensors}
        biases = [name for name, patches in self.map.patches.items() if self.packed.has_bias(patches[0].param)]
        return answer | {"dtypes": self.map.dtypes | {name: sent[name] for name in biases if name in sent}}

    def before_loading(self, header: SyncHeader) -> None:
        if "weights" in self.memory.released:
            raise SyncError(f"{self.name}: the weights' memory is released; restore it before a sync")
        self.packed = PackedLayers(self.model, header.version)
        with self.loading():
            initialize_layerwise_reload(self.model)
        self._reloading = True

    def after_loading(self) -> None:
        self._finish_reload()
        self.packed.pack_shared()
        self._experts.pack()
        self.worker.model_runner.reset_lora_state()

    def cancel(self) -> dict[str, Any]:
        if self._reloading:
            with self.loading():
                self._finish_reload()
        return super().cancel()

    def _finish_reload(self) -> None:
        self._reloading = False
        finalize_layerwise_reload(self.model, self.worker.model_config)

    @contextmanager
    def loading(self) -> Iterator[None]:
        with set_current_vllm_config(self.worker.vllm_config), torch.no_grad():
            yield

    def note(self, name: str, tensor: torch.Tensor) -> None:
        super().note(name, tensor)
        for patch in self.map.patches.get(name, ()):
            if patch.param in self.packed:
                self.packed.note(patch, tensor)

    def model_tensors(self) -> dict[str, torch.Tensor]:
        return super().model_tensors() | self._experts.unpacked()

    def differing(self) -> list[str]:
        return super().differing() + self.packed.differing()

    def release(self, parts: list[str]) -> dict[str, Any]:
        return {"num_bytes": self.memory.release(set(parts))}

    def restore(self, parts: list[str]) -> dict[str, Any]:
        return {"num_bytes": self.memory.restore(set(parts))}

    @cached_property
    def _processor(self) -> Any:
        return MULTIMODAL_REGISTRY.create_processor(self.worker.model_config)

    def encode(self, arrays: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The arrays of an image (features.py) as a request carries them."""
        tensors = {name: torch.from_numpy(array_of(values)) for name, values in arrays.items()}
        fields = self._processor._get_mm_fields_config(tensors, {})
        (image,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
        if left_out := tensors.keys() - image.keys():
            raise SyncError(f"vLLM's class of this model does not take {', '.join(sorted(left_out))} of an image")
        return {"text": encode_mm_kwargs_item(image)}


def _make_placeholder(layer: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    recorded = (buffers if name in layer._buffers else parameters).get(name)
    placeholder = restore_layer_refs(to_meta_tensor(tensor if recorded is None else recorded), layer)
    # vLLM's reload wraps a loader into one that waits for the complete layer; restore_metadata retains the wrapper.
    while getattr(getattr(placeholder, "weight_loader", None), "__name__", "") == "online_process_loader":
        placeholder.weight_loader = placeholder.weight_loader.__wrapped__
    return placeholder

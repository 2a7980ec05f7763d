"""Faulty worker extensions for vLLM, in place of meshrl's: packed copies of weights stay stale after a sync, and the
read-back does not look at packed copies."""

from __future__ import annotations

from typing import Any

from meshrl.rollout.vllm.packed import PackedLayers
from meshrl.rollout.vllm.worker import VllmWeights, WeightsExtension


class _Unseen(WeightsExtension):
    def meshrl_call(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        PackedLayers.differing = lambda self: []  # type: ignore[method-assign]
        return super().meshrl_call(step, arguments)


class Head(_Unseen):
    """As after vLLM's own reload, which packs a shared weight for its first module alone."""

    def meshrl_call(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        PackedLayers.pack_shared = lambda self: None  # type: ignore[method-assign]
        return super().meshrl_call(step, arguments)


class Layers(_Unseen):
    """Layers keep the kernels of the weights that the server has loaded from its folder."""

    def meshrl_call(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if step == "begin" and not hasattr(self, "_kernels"):
            layers = [m for m in self.get_model().modules() if hasattr(m, "cpu_linear")]  # type: ignore[attr-defined]
            self._kernels = {m: m.cpu_linear for m in layers if not hasattr(m, "num_embeddings")}  # not the head
            finish = VllmWeights._finish_reload

            def finish_reload(weights: VllmWeights) -> None:
                finish(weights)
                for layer, kernel in self._kernels.items():
                    layer.cpu_linear = kernel

            VllmWeights._finish_reload = finish_reload  # type: ignore[method-assign]
        return super().meshrl_call(step, arguments)

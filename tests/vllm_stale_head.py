"""Loaded by a vLLM worker alone, in the place of meshrl's extension: leaves a tied head with the copy it packed first,
as vLLM's own reload does."""

from meshrl.rollout.vllm.packed import PackedLayers
from meshrl.rollout.vllm.worker import WeightsExtension

PackedLayers.pack_shared = lambda self: None


class StaleHead(WeightsExtension):
    pass

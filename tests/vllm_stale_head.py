"""A faulty worker extension for vLLM, in place of meshrl's: a tied head keeps the copy that was packed first, as after
vLLM's own reload."""

from meshrl.rollout.vllm.packed import PackedLayers
from meshrl.rollout.vllm.worker import WeightsExtension

PackedLayers.pack_shared = lambda self: None


class StaleHead(WeightsExtension):
    pass

"""A faulty worker extension for vLLM, in place of meshrl's: experts keep the order in which they were sent, as after a
reload of vLLM's CPU build."""

from meshrl.rollout.vllm.packed import PackedExperts
from meshrl.rollout.vllm.worker import WeightsExtension

PackedExperts.pack = lambda self: None


class UnpackedExperts(WeightsExtension):
    pass

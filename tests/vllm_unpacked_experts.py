"""Loaded by a vLLM worker alone, in the place of meshrl's extension: leaves experts in the order in which they were
sent, as the reload of vLLM's CPU build does."""

from meshrl.rollout.vllm.packed import PackedExperts
from meshrl.rollout.vllm.worker import WeightsExtension

PackedExperts.pack = lambda self: None


class UnpackedExperts(WeightsExtension):
    pass

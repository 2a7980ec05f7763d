"""Who samples: `rollout.engine` -> the engine of a rank."""

from __future__ import annotations

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.rollout.base import RolloutEngine
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.rollout.endpoint import build_endpoint_engine
from meshrl.rollout.sglang.launch import build_sglang_engine
from meshrl.rollout.vllm.launch import build_vllm_engine


def build_rollout_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    rank: int,
    stop_token_ids: tuple[int, ...],
) -> RolloutEngine:
    """The engine of this rank's device, without a weight version. Blocks until it can take requests."""
    name = rollout_cfg.engine
    return ENGINES[name](model_cfg, rollout_cfg, device, f"{name}-{rank}", stop_token_ids)


ENGINES = {
    "embedded": build_embedded_engine,
    "vllm": build_vllm_engine,
    "sglang": build_sglang_engine,
    "endpoint": build_endpoint_engine,
}


def takes_adapters(cfg: RolloutConfig) -> bool:
    """Whether LoRA adapters are sent beside the base; else the trainer adds them to it. A server has none, but the rank
    beside it may keep both."""
    return cfg.engine == "embedded" or cfg.sync_mode == "delta"

"""Build a rank's engine from `rollout.engine`."""

from __future__ import annotations

from pathlib import Path

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.model.facts import ModelFacts
from meshrl.model.limits import limits_of
from meshrl.rollout.base import RolloutEngine
from meshrl.rollout.completions import connect_endpoint
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.rollout.server.dialect import ServerSpec
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.sglang.dialect import connect_sglang
from meshrl.rollout.stop_strings import stop_strings_of
from meshrl.rollout.vllm.dialect import start_vllm

SERVERS = {"vllm": start_vllm, "sglang": connect_sglang, "endpoint": connect_endpoint}


def build_rollout_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    rank: int,
    stop_token_ids: tuple[int, ...],
    logs: Path | None = None,
    facts: ModelFacts | None = None,
    synced: bool = False,
    base: torch.nn.Module | None = None,
) -> RolloutEngine:
    """The engine on this rank's device, without a weight version. Blocks until it can take requests. logs: the folder
    of the log of a server that is started. facts, synced, base: as for the embedded engine; servers load their own
    weights."""
    engine_id = f"{rollout_cfg.engine}-{rank}"
    if rollout_cfg.engine == "embedded":
        return build_embedded_engine(model_cfg, rollout_cfg, device, engine_id, stop_token_ids, facts, synced, base)
    max_context_tokens, vocab_size = limits_of(model_cfg.path, rollout_cfg.max_context_tokens)
    spec = ServerSpec(
        model=model_cfg,
        rollout=rollout_cfg,
        device=device,
        name=engine_id,
        max_context_tokens=max_context_tokens,
        logs=logs,
    )
    return ServerEngine(
        SERVERS[rollout_cfg.engine](spec),
        stop_token_ids=stop_token_ids,
        max_context_tokens=max_context_tokens,
        vocab_size=vocab_size,
        keep_weights=rollout_cfg.sync_mode == "delta",
        adapter_scale=model_cfg.lora.scale,
        stop_strings=stop_strings_of(model_cfg, rollout_cfg),
    )

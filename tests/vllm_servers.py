"""vLLM servers of tiny models. A server takes seconds to start, so tests share servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_lm

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig, VllmConfig
from meshrl.rollout.server.dialect import ServerSpec
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.vllm.dialect import VllmDialect, http_of, start_server

MISSING = "" if importlib.util.find_spec("vllm") else "vLLM is not installed here: make test-vllm"
MAX_CONTEXT_TOKENS = 1024
CPU = torch.device("cpu")
MODEL: dict[str, Any] = {  # the smallest with a kernel in vLLM's CPU attention; both ranks of tp 2 hold its one KV head
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "max_position_embeddings": MAX_CONTEXT_TOKENS,
}


def tiny_vllm_lm(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    return tiny_lm("qwen2", dtype=dtype, seed=seed, **{**MODEL, **changes})


def config_of(**changes: Any) -> RolloutConfig:
    return RolloutConfig(engine="vllm", max_running_requests=4, vllm=VllmConfig(kv_cache_bytes=32 << 20), **changes)


@contextmanager
def serving(
    lm: torch.nn.Module, folder: Path, *args: str, device: torch.device = CPU, **changes: Any
) -> Iterator[ServerProcess]:
    """A server of a model. args: options of vLLM that follow meshrl's own, so they may override these."""
    lm.save_pretrained(folder)
    cfg = config_of(**changes)
    cfg = cfg.model_copy(
        update={"vllm": cfg.vllm.model_copy(update={"args": ["--enforce-eager", *args]})}
    )  # compiling takes longer than the tests
    model = ModelConfig(path=str(folder), dtype=str(lm.dtype).removeprefix("torch."))
    server = start_server(
        ServerSpec(model=model, rollout=cfg, device=device, name="vllm", max_context_tokens=MAX_CONTEXT_TOKENS)
    )
    try:
        yield server
    finally:
        server.close()


def client_of(server: ServerProcess, dialect: type[VllmDialect] = VllmDialect, **changes: Any) -> ServerEngine:
    """An engine that uses a shared server, for one event loop; closing it does not end the server."""
    facts: dict[str, Any] = {
        "stop_token_ids": (2,),
        "max_context_tokens": MAX_CONTEXT_TOKENS,
        "vocab_size": 64,
    }
    return ServerEngine(dialect(http_of(server), None, can_release=True), **{**facts, **changes})

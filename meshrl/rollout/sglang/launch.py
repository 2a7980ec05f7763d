"""Starts an SGLang server for this process's devices, or finds the one that runs, and makes the engine that speaks to
it."""

from __future__ import annotations

import secrets
import socket
import sys
from typing import Any

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import visible_devices
from meshrl.core.errors import ConfigError
from meshrl.model.limits import limits_of
from meshrl.rollout.http import HttpClient, fetch, is_up, key_in
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.sglang.engine import SglangEngine
from meshrl.rollout.sglang.facts import facts_of
from meshrl.rollout.sglang.workers import LOADER
from meshrl.rollout.stop_strings import stop_strings_of

_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}


def build_sglang_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    engine_id: str,
    stop_token_ids: tuple[int, ...],
) -> SglangEngine:
    """Start the server and wait for it, unless one is named; no weight version yet. Blocks.

    Raises: ConfigError when the server, or rollout.max_context_tokens, will not do; EngineFailure.
    """
    cfg = rollout_cfg.sglang
    max_context_tokens, vocab_size = limits_of(model_cfg.path, rollout_cfg.max_context_tokens)
    server, url, headers = None, cfg.url, key_in(cfg.api_key_env)
    if url is None:
        key = secrets.token_hex(16)  # whoever else is on this machine can reach a port of it
        headers = {"Authorization": f"Bearer {key}"}
        server, url = start_server(model_cfg, rollout_cfg, device, engine_id, max_context_tokens, key)
    info = fetch("/server_info", url, headers)
    facts = facts_of(info, fetch("/model_info", url, headers), engine_id, cfg.deterministic)
    _require_fit(info, engine_id, max_context_tokens, model_cfg.dtype)
    return SglangEngine(
        HttpClient(engine_id, url, headers=headers),
        facts,
        engine_id=engine_id,
        stop_token_ids=stop_token_ids,
        max_context_tokens=max_context_tokens,
        max_running=rollout_cfg.max_running_requests,
        vocab_size=vocab_size,
        keep_weights=rollout_cfg.sync_mode == "delta",
        adapter_scale=model_cfg.lora.scale if model_cfg.lora.enabled else None,
        server=server,
        stop_strings=stop_strings_of(model_cfg, rollout_cfg),
    )


def _require_fit(info: dict[str, Any], engine_id: str, max_context_tokens: int, dtype: str) -> None:
    """What a server that somebody else started must be. Raises: ConfigError."""
    if int(info.get("context_length") or max_context_tokens) < max_context_tokens:
        raise ConfigError(
            f"{engine_id} holds {info['context_length']} tokens a request, and rollout.max_context_tokens is "
            f"{max_context_tokens}; start it with --context-length {max_context_tokens}, or lower the key"
        )
    if info.get("dtype") not in (None, "auto", dtype):
        raise ConfigError(f"{engine_id} computes in {info['dtype']}, and model.dtype is {dtype}; make them agree")


def start_server(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    name: str,
    max_context_tokens: int,
    key: str,
) -> tuple[ServerProcess, str]:
    """A server that answers, and its address. Raises: EngineFailure."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = _command(model_cfg, rollout_cfg, device, max_context_tokens, port, key)
    server = ServerProcess(name, lambda _: command, _ENVIRONMENT | visible_devices(device, rollout_cfg.tp_size))
    url = f"http://127.0.0.1:{port}"
    key_name, deadline_s = "rollout.sglang.start_deadline_s", rollout_cfg.sglang.start_deadline_s
    server.wait_until(lambda: is_up("/health", url), deadline_s, key_name)
    return server, url


def _command(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    max_context_tokens: int,
    port: int,
    key: str,
) -> list[str]:
    """The command line. Its flags are those that config/rollout.py refuses in rollout.sglang.args."""
    cfg = rollout_cfg.sglang
    # Another Python must not find this one's packages before its own.
    python = [sys.executable] if cfg.python is None else ["env", "-u", "PYTHONPATH", cfg.python]
    values: dict[str, object] = {
        "--model-path": model_cfg.path,
        "--host": "127.0.0.1",
        "--port": port,
        "--api-key": key,
        "--dtype": model_cfg.dtype,
        "--tp-size": rollout_cfg.tp_size,
        "--context-length": max_context_tokens,
        "--max-running-requests": rollout_cfg.max_running_requests,
        "--mem-fraction-static": cfg.mem_fraction_static,
        "--custom-weight-loader": LOADER,
        "--log-level": "warning",
    }
    flags = ["--skip-tokenizer-init", "--incremental-streaming-output"]
    if cfg.deterministic:
        flags.append("--enable-deterministic-inference")
    if device.type != "cpu":
        flags.append("--enable-memory-saver")
    pairs = [text for name, value in values.items() for text in (name, str(value))]
    return [*python, "-m", "sglang.launch_server", *pairs, *flags, *cfg.args]

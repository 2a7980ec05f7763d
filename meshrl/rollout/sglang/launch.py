"""Starts an SGLang server for this process's devices, or finds the one that runs."""

from __future__ import annotations

import secrets
import socket
from typing import Any

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import visible_devices
from meshrl.core.errors import ConfigError
from meshrl.rollout.server.dialect import command_line
from meshrl.rollout.server.http import HttpClient, authorization, fetch, is_up
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.sglang.dialect import SglangDialect, facts_of
from meshrl.rollout.sglang.workers import LOADER

_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}


def connect_sglang(
    model_cfg: ModelConfig, rollout_cfg: RolloutConfig, device: torch.device, engine_id: str, max_context_tokens: int
) -> SglangDialect:
    """Start the server and wait for it, unless the config names one. Blocks.

    Raises: ConfigError for a server that does not fit the config; EngineFailure.
    """
    cfg = rollout_cfg.sglang
    server, url, headers = None, cfg.url, authorization(cfg.api_key_env)
    if url is None:
        key = secrets.token_hex(16)  # other users of this machine can reach its ports
        headers = {"Authorization": f"Bearer {key}"}
        server, url = start_server(model_cfg, rollout_cfg, device, engine_id, max_context_tokens, key)
    info = fetch("/server_info", url, headers)
    facts = facts_of(info, fetch("/model_info", url, headers), engine_id, cfg.deterministic)
    _require_fit(info, engine_id, max_context_tokens, model_cfg.dtype)
    return SglangDialect(HttpClient(engine_id, url, headers=headers, server=server), facts, server)


def _require_fit(info: dict[str, Any], engine_id: str, max_context_tokens: int, dtype: str) -> None:
    """Raises: ConfigError for a running server of another shape than the config's."""
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
    """A server that answers, and its address. The command line's flags are those that config/check_rollout.py refuses
    in rollout.sglang.args. Raises: EngineFailure."""
    cfg = rollout_cfg.sglang
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
    command = command_line(cfg.python, "sglang.launch_server", values, flags, cfg.args)
    server = ServerProcess(name, lambda _: command, _ENVIRONMENT | visible_devices(device, rollout_cfg.tp_size))
    url = f"http://127.0.0.1:{port}"
    server.wait_until(lambda: is_up("/health", url), cfg.start_deadline_s, "rollout.sglang.start_deadline_s")
    return server, url

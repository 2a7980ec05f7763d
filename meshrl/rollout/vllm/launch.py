"""Starts a vLLM server for this process's devices."""

from __future__ import annotations

from pathlib import Path

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import visible_devices
from meshrl.rollout.server.dialect import command_line
from meshrl.rollout.server.http import HttpClient, is_up
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.vllm import cpu_build
from meshrl.rollout.vllm.dialect import VllmDialect

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the commands of pause, abort, cache and weights; only this user can reach the socket
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def start_vllm(
    model_cfg: ModelConfig, rollout_cfg: RolloutConfig, device: torch.device, engine_id: str, max_context_tokens: int
) -> VllmDialect:
    """Start the server and wait for it. Blocks. Raises: EngineFailure."""
    server = start_server(model_cfg, rollout_cfg, device, engine_id, max_context_tokens)
    return VllmDialect(http_of(server), server, can_release=device.type == "cpu" or rollout_cfg.release_memory)


def start_server(
    model_cfg: ModelConfig, rollout_cfg: RolloutConfig, device: torch.device, name: str, max_context_tokens: int
) -> ServerProcess:
    """A server that answers. Raises: EngineFailure."""
    threads = cpu_build.threads() if device.type == "cpu" else {}
    server = ServerProcess(
        name,
        lambda folder: _command(model_cfg, rollout_cfg, device, max_context_tokens, folder),
        {**_ENVIRONMENT, **threads, **visible_devices(device, rollout_cfg.tp_size)},
    )
    key, deadline_s = "rollout.vllm.start_deadline_s", rollout_cfg.vllm.start_deadline_s
    server.wait_until(lambda: is_up("/health", socket=_socket_in(server.folder)), deadline_s, key)
    return server


def http_of(server: ServerProcess) -> HttpClient:
    return HttpClient(server.name, socket=_socket_in(server.folder), server=server)


def _socket_in(folder: Path) -> Path:
    return folder / "http"


def _command(
    model_cfg: ModelConfig, rollout_cfg: RolloutConfig, device: torch.device, max_context_tokens: int, folder: Path
) -> list[str]:
    """The command line. Its flags are those that config/check_rollout.py refuses in rollout.vllm.args."""
    cfg, on_cpu = rollout_cfg.vllm, device.type == "cpu"
    values: dict[str, object] = {
        "--model": model_cfg.path,
        "--uds": _socket_in(folder),
        "--dtype": model_cfg.dtype,
        "--max-model-len": max_context_tokens,
        "--max-num-seqs": rollout_cfg.max_running_requests,
        "--tensor-parallel-size": rollout_cfg.tp_size,
        "--worker-extension-cls": "meshrl.rollout.vllm.worker.WeightsExtension",
        "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from (P2)
        "--generation-config": "vllm",  # no filters from the model's folder
        "--seed": 0,
    }
    kv_cache_bytes = cfg.kv_cache_bytes or (cpu_build.KV_CACHE_BYTES if on_cpu else None)
    if kv_cache_bytes is not None:
        values["--kv-cache-memory-bytes"] = kv_cache_bytes
    else:
        values["--gpu-memory-utilization"] = cfg.gpu_memory_utilization
    flags = [
        "--skip-tokenizer-init",
        "--enable-scale-out",  # the endpoint that takes and returns ids
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]
    if on_cpu:
        flags += cpu_build.FLAGS
    elif rollout_cfg.release_memory:
        flags.append("--enable-sleep-mode")
    return command_line(cfg.python, "vllm.entrypoints.openai.api_server", values, flags, cfg.args)

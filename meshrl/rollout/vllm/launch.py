"""Starts a vLLM server for this process's devices and makes the engine that speaks to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import visible_devices
from meshrl.model.limits import limits_of
from meshrl.rollout.base import Capabilities
from meshrl.rollout.http import is_up
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.stop_strings import stop_strings_of
from meshrl.rollout.vllm.engine import VllmEngine

_CPU_KV_CACHE_BYTES = 1 << 30
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the commands of pause, abort, cache and weights; nobody else can reach the socket
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def build_vllm_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    engine_id: str,
    stop_token_ids: tuple[int, ...],
) -> VllmEngine:
    """Start the server and wait for it; no weight version yet. Blocks.

    Raises: ConfigError when rollout.max_context_tokens is more than the model has positions; EngineFailure.
    """
    max_context_tokens, vocab_size = limits_of(model_cfg.path, rollout_cfg.max_context_tokens)
    server = start_server(model_cfg, rollout_cfg, device, engine_id, max_context_tokens)
    return VllmEngine(
        server,
        socket_of(server),
        stop_token_ids=stop_token_ids,
        max_context_tokens=max_context_tokens,
        max_running=rollout_cfg.max_running_requests,
        vocab_size=vocab_size,
        capabilities=capabilities_on(device, model_cfg.dtype, rollout_cfg.release_memory),
        keep_weights=rollout_cfg.sync_mode == "delta",
        adapter_scale=model_cfg.lora.scale if model_cfg.lora.enabled else None,
        stop_strings=stop_strings_of(model_cfg, rollout_cfg),
    )


def capabilities_on(device: torch.device, dtype: str, sleep_mode: bool) -> Capabilities:
    return Capabilities(
        release=device.type == "cpu" or sleep_mode,
        in_flight=True,
        resident_digest=True,
        score=True,
        tp=True,
        exact=device.type == "cpu" and dtype == "float32",
    )


def start_server(
    model_cfg: ModelConfig, rollout_cfg: RolloutConfig, device: torch.device, name: str, max_context_tokens: int
) -> ServerProcess:
    """A server that answers. Raises: EngineFailure."""
    server = ServerProcess(
        name,
        lambda folder: _command(model_cfg, rollout_cfg, device, max_context_tokens, folder),
        {**_ENVIRONMENT, **_threads(device), **visible_devices(device, rollout_cfg.tp_size)},
    )
    key, deadline_s = "rollout.vllm.start_deadline_s", rollout_cfg.vllm.start_deadline_s
    server.wait_until(lambda: is_up("/health", socket=socket_of(server)), deadline_s, key)
    return server


def socket_of(server: ServerProcess) -> Path:
    return server.folder / "http"


def _command(
    model_cfg: ModelConfig, rollout_cfg: RolloutConfig, device: torch.device, max_context_tokens: int, folder: Path
) -> list[str]:
    """The command line. Its flags are those that config/rollout.py refuses in rollout.vllm.args."""
    cfg, on_cpu = rollout_cfg.vllm, device.type == "cpu"
    # Another Python must not find this one's packages before its own.
    python = [sys.executable] if cfg.python is None else ["env", "-u", "PYTHONPATH", cfg.python]
    values: dict[str, object] = {
        "--model": model_cfg.path,
        "--uds": folder / "http",
        "--dtype": model_cfg.dtype,
        "--max-model-len": max_context_tokens,
        "--max-num-seqs": rollout_cfg.max_running_requests,
        "--tensor-parallel-size": rollout_cfg.tp_size,
        "--worker-extension-cls": "meshrl.rollout.vllm.worker.WeightsExtension",
        "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from (P2)
        "--generation-config": "vllm",  # no filters out of the model's folder
        "--seed": 0,
    }
    kv_cache_bytes = cfg.kv_cache_bytes or (_CPU_KV_CACHE_BYTES if on_cpu else None)
    if kv_cache_bytes is not None:
        values["--kv-cache-memory-bytes"] = kv_cache_bytes
    else:
        values["--gpu-memory-utilization"] = cfg.gpu_memory_utilization
    flags = [
        "--skip-tokenizer-init",
        "--enable-scale-out",  # the endpoint that takes and gives ids
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]
    if on_cpu:  # vLLM 0.32 ends there when it cuts the prompt of a request with a seed
        flags.append("--no-enable-chunked-prefill")
    elif rollout_cfg.release_memory:
        flags.append("--enable-sleep-mode")
    pairs = [text for name, value in values.items() for text in (name, str(value))]
    return [*python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *cfg.args]


def _threads(device: torch.device) -> dict[str, str]:
    """On the CPU each worker takes a rank's share of the cores, and is bound to none: other ranks have theirs."""
    if device.type != "cpu":
        return {}
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": binding}

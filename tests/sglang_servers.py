"""Real SGLang servers of tiny models on a CPU. A server takes half a minute to start, so tests share servers."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import torch
from tiny_tokenizers import numbered_tokenizer

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import EndpointConfig, RolloutConfig, SglangConfig
from meshrl.rollout.completions import CompletionsDialect, only_model
from meshrl.rollout.server.dialect import ServerSpec
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.server.http import HttpClient, fetch, is_up
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.sglang.dialect import LOADER, SglangDialect, start_server

MISSING = "" if importlib.util.find_spec("sglang") else "SGLang is not installed here: make test-sglang"
MAX_CONTEXT_TOKENS = 1024
KEY = "the key of this server"
HEADERS = {"Authorization": f"Bearer {KEY}"}
DROPPING_LOADER = "sglang_dropping_loader.load"
START_S = 300.0  # on a busy machine
ON_CPU = [  # arguments for rollout.sglang.args on a machine without a GPU
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--max-total-tokens", "8192", "--sleep-on-idle"),
]
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def config_of(*args: str, tp_size: int = 1) -> RolloutConfig:
    sglang = SglangConfig(mem_fraction_static=0.1, args=[*ON_CPU, *args], start_deadline_s=START_S)
    return RolloutConfig(engine="sglang", max_running_requests=4, tensor_model_parallel_size=tp_size, sglang=sglang)


@contextmanager
def serving(lm: torch.nn.Module, folder: Path, tp_size: int = 1) -> Iterator[str]:
    """The address of a server of a model, started as meshrl starts SGLang, and with two options more: it can release
    its memory, as on a GPU, and has a loader that drops a weight."""
    lm.save_pretrained(folder)
    model = ModelConfig(path=str(folder), dtype=str(lm.dtype).removeprefix("torch."))
    cfg = config_of("--enable-memory-saver", "--custom-weight-loader", LOADER, DROPPING_LOADER, tp_size=tp_size)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    if tp_size > 1:  # a core for each rank; on a machine with one NUMA node SGLang requires that they are named
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(tp_size))
    spec = ServerSpec(
        model=model,
        rollout=cfg,
        device=torch.device("cpu"),
        name="sglang-0",
        max_context_tokens=MAX_CONTEXT_TOKENS,
    )
    with mock.patch.dict(os.environ, environment):
        server, url = start_server(spec, KEY)
    try:
        yield url
    finally:
        server.close()


@contextmanager
def serving_text(folder: Path, *args: str) -> Iterator[str]:
    """The address of a server of the model and the tokenizer in a folder, as its user may start it. Only a server with
    a tokenizer has /v1/completions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    command += [
        "--api-key",
        KEY,
        "--dtype",
        "float32",
        "--mem-fraction-static",
        "0.1",
        "--custom-weight-loader",
        LOADER,
    ]
    command += ["--enable-deterministic-inference", "--max-running-requests", "4", *ON_CPU, *args]
    command += ["--skip-server-warmup"]  # its English prompt has no tokens in numbered_tokenizer, which ends the server
    server, url = ServerProcess("sglang", lambda _: command, ENVIRONMENT), f"http://127.0.0.1:{port}"
    try:
        server.wait_until(lambda: is_up("/health", url), START_S)
        yield url
    finally:
        server.close()


def save_with_tokenizer(lm: torch.nn.Module, folder: Path) -> Path:
    lm.save_pretrained(folder)
    numbered_tokenizer(lm.config.vocab_size).save_pretrained(folder)
    return folder


def post(url: str, path: str, body: Any) -> httpx2.Response:
    """Send a request as another client of the server."""
    return httpx2.post(url + path, json=body, headers=HEADERS, trust_env=False, timeout=60)


FACTS: dict[str, Any] = {"stop_token_ids": (2,), "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": 64}


def sglang_client(url: str, **changes: Any) -> ServerEngine:
    """An engine that uses a shared server, for one event loop; closing it does not end the server."""
    info, label = fetch("/server_info", url, HEADERS), fetch("/model_info", url, HEADERS)["weight_version"]
    dialect = SglangDialect(HttpClient("sglang-0", url, headers=HEADERS), info, label)
    return ServerEngine(dialect, **{**FACTS, **changes})


def endpoint_client(
    url: str, model_folder: Path, versions: Path | None = None, takes_folders: bool = True, **changes: Any
) -> ServerEngine:
    """The same for an endpoint. model_folder: of the model that the server was started with."""
    http, model = HttpClient("endpoint-0", url, headers=HEADERS), only_model(fetch("/v1/models", url, HEADERS), url)
    folder, weights = None if versions is None else str(versions), "files" if takes_folders else "none"
    dialect = CompletionsDialect(http, EndpointConfig(weights=weights, folder=folder), model, model_folder, 4)
    return ServerEngine(dialect, **{**FACTS, **changes})

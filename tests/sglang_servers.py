"""Stand-ins for SGLang's server (sglang_server.py) as processes, and engines that are connected to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.rollout.completions import RELOAD_PATH, CompletionsDialect, only_model
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.server.http import HttpClient, fetch
from meshrl.rollout.sglang.dialect import SglangDialect, start_server

MAX_CONTEXT_TOKENS = 256
KEY = "the key of this server"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CPU = torch.device("cpu")
_LAUNCHER = """import runpy, sys
sys.path.insert(0, {tests!r})
sys.argv += {extra!r}
runpy.run_path({server!r}, run_name="__main__")
"""


@contextmanager
def launcher_in(folder: Path, *extra: str) -> Iterator[None]:
    """Let `python -m sglang.launch_server` start the stand-in, with `extra` as additional arguments."""
    package, tests = folder / "sglang", Path(__file__).parent
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    text = _LAUNCHER.format(tests=str(tests), extra=list(extra), server=str(tests / "sglang_server.py"))
    (package / "launch_server.py").write_text(text)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        yield


def model_of(lm: torch.nn.Module, folder: Path) -> ModelConfig:
    """Save the model in `folder`; the config section that names it."""
    lm.save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype=str(lm.dtype).removeprefix("torch."))


@contextmanager
def serving(
    lm: torch.nn.Module, folder: Path, *extra: str, tp_size: int = 1, tokens: int = MAX_CONTEXT_TOKENS
) -> Iterator[str]:
    """The address of a stand-in that serves a model, started as meshrl starts SGLang."""
    cfg = RolloutConfig(engine="sglang", max_running_requests=4, tensor_model_parallel_size=tp_size)
    with launcher_in(folder / "launcher", *extra):
        server, url = start_server(model_of(lm, folder / "model"), cfg, CPU, "sglang-0", tokens, KEY)
    try:
        yield url
    finally:
        server.close()


ENGINE: dict[str, Any] = {
    "stop_token_ids": (2,),
    "max_context_tokens": MAX_CONTEXT_TOKENS,
    "vocab_size": 64,
}


def sglang_client(url: str, **changes: Any) -> ServerEngine:
    """An engine that uses a shared server, for one event loop; closing it does not end the server."""
    info, label = fetch("/server_info", url, HEADERS), fetch("/model_info", url, HEADERS)["weight_version"]
    dialect = SglangDialect(HttpClient("sglang-0", url, headers=HEADERS), info, label)
    return ServerEngine(dialect, **{**ENGINE, **changes})


def endpoint_client(
    url: str,
    takes_folders: bool = True,
    reload_url: str = RELOAD_PATH,
    versions: Path | None = None,
    max_running: int = 4,
    **changes: Any,
) -> ServerEngine:
    """The same server as an endpoint that loads folders."""
    model = only_model(fetch("/v1/models", url, HEADERS), url)
    dialect = CompletionsDialect(
        HttpClient("endpoint-0", url, headers=HEADERS),
        model=model,
        model_folder=Path(model),
        takes_folders=takes_folders,
        reload_url=reload_url,
        versions=versions,
        max_running=max_running,
    )
    return ServerEngine(dialect, **{**ENGINE, **changes})


@contextmanager
def broken(url: str, fault: str, **more: Any) -> Iterator[None]:
    """Let the server behave with this fault."""
    httpx2.post(f"{url}/standin", json={"fault": fault, **more}, headers=HEADERS, trust_env=False)
    try:
        yield
    finally:
        httpx2.post(f"{url}/standin", json={}, headers=HEADERS, trust_env=False)

"""The interface of the server-specific code: requests, answers and commands of one kind of server."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.errors import CapabilityError
from meshrl.core.types import Request, mix64
from meshrl.rollout.admission import Bounds, check_supported
from meshrl.rollout.base import Capabilities
from meshrl.rollout.server.answer import AnswerPart
from meshrl.rollout.server.http import HttpClient
from meshrl.rollout.server.process import ServerProcess

STREAM_INTERVAL = 16  # tokens per event; the first event has one token
STREAM_INTERVAL_STOP = 4  # with stop strings: the server samples until this process has found one


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What a dialect needs to start its server, or to connect to it. name: of the engine and its server, in errors and
    of the log. logs: the folder of the log of a server that is started; None = a private one."""

    model: ModelConfig
    rollout: RolloutConfig
    device: torch.device
    name: str
    max_context_tokens: int
    logs: Path | None = None


class Dialect:
    """One server, as a ServerEngine uses it.

    name: used in errors. loaded_label: the server's label for the weights that it loaded at its start; None = it does
    not label tokens, so weights may not change while a request runs. drains_before_release: running requests must
    finish before memory is released. no_release: why the server can't release memory.
    """

    name: str
    capabilities: Capabilities
    loaded_label: str | None = None
    drains_before_release = False
    no_release = "its server has no command for it"

    def __init__(self, http: HttpClient, server: ServerProcess | None = None):
        """server: stopped by `close`; None = it continues to run."""
        self.http, self._server = http, server

    def check(self, request: Request, bounds: Bounds) -> None:
        """Raises: CapabilityError for a request that this server can't process as specified: media, extras, and stop
        rules that servers interpret differently."""
        check_supported(request, self.name)
        if request.sampling.ignore_eos and bounds.stop_ids:
            raise CapabilityError(
                f"request {request.id} has ignore_eos and stop_token_ids {sorted(bounds.stop_ids)}; with ignore_eos "
                f"{self.name} may ignore both. Use only one of them"
            )

    def stream(self, request: Request, bounds: Bounds) -> AsyncGenerator[AnswerPart]:
        """Send the request and yield the parts of its answer. Raises: RequestError, EngineFailure."""
        raise NotImplementedError

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort these requests, which were all sent; their streams end soon after, with the reason "abort"."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Stop sampling; running requests stay in place. (capabilities.in_flight)"""

    async def resume(self) -> None:
        """Resume sampling."""

    async def call_workers(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a step of a weight sync (`WorkerWeights`) in each of the server's workers, and return their answers."""
        raise NotImplementedError

    async def begin_update(self, label: str, has_cache: bool) -> None:
        """A sync of weights with this label begins. Every cache of the old weights must be dropped before `end_update`
        returns. has_cache: the cache's memory is not released."""

    async def end_update(self, label: str) -> None:
        """The new weights are in place."""

    async def release(self, parts: set[str]) -> int:
        """Free the memory of weights or kv_cache; returns bytes. The server is paused. (capabilities.release)"""
        raise NotImplementedError

    async def restore(self, parts: set[str]) -> int:
        """Allocate it again; returns bytes. (capabilities.release)"""
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect, and stop the server if this engine has started it."""
        await self.http.close()
        if self._server is not None:
            self._server.close()


def continuation_seed(request: Request) -> int:
    """For servers that seed a generator for each request. A continuation with the same seed would repeat the random
    numbers of the earlier tokens, so it gets another seed."""
    done = len(request.prefix_output)
    return mix64(request.seed ^ mix64(done)) >> 1 if done else request.seed


def sampling_body(request: Request, bounds: Bounds) -> dict[str, Any]:
    """The sampling parameters that have the same names for all servers."""
    p = request.sampling
    body: dict[str, Any] = {
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k or -1,
        "min_p": p.min_p,
        "repetition_penalty": p.repetition_penalty,
        "ignore_eos": not bounds.stop_ids,
    }
    return body | ({"stop_token_ids": sorted(bounds.stop_ids)} if bounds.stop_ids else {})


def stream_interval(request: Request) -> int:
    """Tokens per event of the stream."""
    return STREAM_INTERVAL_STOP if request.sampling.stop else STREAM_INTERVAL


def command_line(
    python: str | None, module: str, values: Mapping[str, object], flags: Sequence[str], more: Sequence[str]
) -> list[str]:
    """The command that starts a Python module as a server. python: None = the Python of this process."""
    # Another Python must not find the packages of this one before its own.
    program = [sys.executable] if python is None else ["env", "-u", "PYTHONPATH", python]
    pairs = [text for name, value in values.items() for text in (name, str(value))]
    return [*program, "-m", module, *pairs, *flags, *more]

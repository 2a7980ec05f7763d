"""What differs between servers: how requests, answers and commands are written for each."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np

from meshrl.core.errors import CapabilityError
from meshrl.core.types import Request
from meshrl.rollout.admission import Bounds
from meshrl.rollout.base import Capabilities
from meshrl.rollout.server.answer import Part
from meshrl.rollout.server.http import HttpClient

STREAM_INTERVAL = 16  # tokens in one event, after the first, which comes at once
STREAM_INTERVAL_STOP = 4  # with stop strings: the server samples on until this process has found one


class Dialect:
    """One server, as a ServerEngine uses it.

    name: in errors. loaded_label: the server's label for the weights that it loaded at its start; None = it does not
    label tokens, so no weights may change under a request. drains_before_release: running requests have to finish
    before memory is released. no_release: why the server can't release memory.
    """

    name: str
    capabilities: Capabilities
    loaded_label: str | None = None
    drains_before_release = False
    no_release = "its server has no command for it"

    def __init__(self, http: HttpClient):
        self.http = http

    def check(self, request: Request, bounds: Bounds) -> None:
        """Raises: CapabilityError for a request that this server can't answer as asked."""
        raise NotImplementedError

    def stream(self, request: Request, bounds: Bounds) -> AsyncGenerator[Part]:
        """Send the request; the parts of its answer. Raises: RequestError, EngineFailure."""
        raise NotImplementedError

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests, all of which were sent; their streams end soon after, with the reason "abort"."""
        raise NotImplementedError

    async def hold(self) -> None:
        """Stop computing; running requests stay in place. (capabilities.in_flight)"""

    async def go_on(self) -> None:
        """Compute again."""

    async def call_workers(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a step of a weight sync (`WorkerWeights`) in each of the server's workers, and return their answers."""
        raise NotImplementedError

    async def begin_update(self, label: str, has_cache: bool) -> None:
        """Weights arrive next, which are to get this label. By `end_update` no cache may hold anything of the old ones.
        has_cache: the memory of the cache is not released."""

    async def end_update(self, label: str) -> None:
        """The new weights are in place."""

    async def score(self, ids: list[int]) -> np.ndarray:
        """Teacher-forced logprobs at temperature 1, float32[T]. Raises: CapabilityError."""
        raise CapabilityError(f"{self.http.name} can't score: its server only samples (capabilities.score)")

    async def release(self, parts: set[str]) -> int:
        """Free the memory of weights or kv_cache; returns bytes. Nothing is computing. (capabilities.release)"""
        raise NotImplementedError

    async def restore(self, parts: set[str]) -> int:
        """Take it back; returns bytes. (capabilities.release)"""
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect; end the server if it is this engine's own."""
        await self.http.close()


def sampling_body(request: Request, bounds: Bounds) -> dict[str, Any]:
    """The sampling parameters that all servers call by the same names."""
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


def check_stop_rule(request: Request, bounds: Bounds, server: str) -> None:
    """Raises: CapabilityError for what servers read differently."""
    if request.sampling.ignore_eos and bounds.stop_ids:
        raise CapabilityError(
            f"request {request.id} has ignore_eos and stop_token_ids {sorted(bounds.stop_ids)}; with ignore_eos "
            f"{server} may ignore both. Give one of them"
        )


def stream_interval(request: Request) -> int:
    """Tokens in one event of the stream."""
    return STREAM_INTERVAL_STOP if request.sampling.stop else STREAM_INTERVAL


def command_line(
    python: str | None, module: str, values: Mapping[str, object], flags: Sequence[str], more: Sequence[str]
) -> list[str]:
    """Of a server that is a Python module. python: None = the one that runs this process."""
    # Another Python must not find this one's packages before its own.
    program = [sys.executable] if python is None else ["env", "-u", "PYTHONPATH", python]
    pairs = [text for name, value in values.items() for text in (name, str(value))]
    return [*program, "-m", module, *pairs, *flags, *more]

"""HTTP to a rollout server: JSON in, JSON or a stream of it out, with typed errors.

No request is ever repeated: a request that was sampled and whose answer was lost would be sampled a second time.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from meshrl.core.errors import ConfigError, EngineEnded, EngineFailure, RequestError
from meshrl.rollout.server.process import ServerProcess

CONTROL_S = 600.0  # for one command; the phases of a run have deadlines of their own, which expire earlier
_CONNECT_S = 30.0
_IDLE_S = 2.0  # less than servers keep an idle connection; otherwise a request could meet one that is being closed
_EXIT_S = 30.0  # a server whose engine has died exits by itself, on a busy machine within this time
_DONE = "[DONE]"


class HttpClient:
    """A client of one server, for one event loop.

    socket: of a server on this machine, in place of a TCP port. server: its process, where it is a child of this one:
    an EngineFailure becomes an EngineEnded that reports how the process ended, where that is the reason.
    """

    def __init__(
        self,
        name: str,
        base_url: str = "http://localhost",
        *,
        socket: Path | None = None,
        headers: Mapping[str, str] | None = None,
        server: ServerProcess | None = None,
    ):
        self.name, self._server = name, server
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            headers=headers,
            transport=httpx2.AsyncHTTPTransport(
                uds=str(socket) if socket else None, limits=httpx2.Limits(keepalive_expiry=_IDLE_S), retries=0
            ),
            trust_env=False,  # no proxy between a run and its own sampler
        )

    async def get(self, path: str) -> Any:
        """The JSON of the answer. Raises: EngineFailure."""
        return await self._call("GET", path, CONTROL_S)

    async def post(self, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, **params: Any) -> Any:
        """The JSON of the answer; None where it is empty. params: of the query string.

        Raises: RequestError when the server refuses, EngineFailure when it can't answer, or not in time.
        """
        return await self._call("POST", path, timeout_s, json=body, params=params or None)

    async def _call(self, method: str, path: str, timeout_s: float, **content: Any) -> Any:
        timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
        async with self._diagnosed():
            try:
                answer = await self._client.request(method, path, timeout=timeout, **content)
            except httpx2.TransportError as error:
                raise EngineFailure(f"{self.name}: no answer to {method} {path}: {_cause(error)}") from error
            self._check(path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """The JSON of each server-sent event. Waits for as long as the connection is open: a queue may be long.

        Raises: RequestError, EngineFailure; also when the stream breaks off.
        """
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        async with self._diagnosed():
            try:
                async with self._client.stream("POST", path, json=body, timeout=timeout) as answer:
                    if answer.status_code != httpx2.codes.OK:
                        await answer.aread()
                        self._check(path, answer.status_code, answer.text)
                    async for line in answer.aiter_lines():
                        if not line.startswith("data:"):
                            continue
                        text = line.removeprefix("data:").strip()
                        if text == _DONE:
                            return
                        event = json.loads(text)
                        if "error" in event:
                            self._check(path, int(event["error"].get("code") or 500), text)
                        yield event
            except httpx2.TransportError as error:
                raise EngineFailure(f"{self.name}: the answer to {path} broke off: {_cause(error)}") from error
            raise EngineFailure(f"{self.name}: the answer to {path} ended without its closing event")

    @asynccontextmanager
    async def _diagnosed(self) -> AsyncIterator[None]:
        try:
            yield
        except EngineFailure as error:
            if self._server is None or not await asyncio.to_thread(self._server.ends_within, _EXIT_S):
                raise
            raise EngineEnded(f"{error}. {self.name} has ended{self._server.diagnosis()}") from error

    def _check(self, path: str, status: int, text: str) -> None:
        if status >= httpx2.codes.BAD_REQUEST:
            kind = EngineFailure if status >= httpx2.codes.INTERNAL_SERVER_ERROR else RequestError
            raise kind(f"{self.name} answered {status} to {path}: {_message(text)}")

    async def close(self) -> None:
        await self._client.aclose()


def is_up(path: str, base_url: str = "http://localhost", socket: Path | None = None) -> bool:
    """Whether a server of this machine answers GET `path` with 200. Blocks."""
    try:  # plain HTTP: to load the certificates for TLS takes 40 ms of CPU time, at each of many attempts
        _get(path, base_url, socket, timeout_s=5.0, verify=False)
    except EngineFailure:
        return False
    return True


def fetch(path: str, base_url: str, headers: Mapping[str, str] | None = None) -> Any:
    """The JSON of GET `path`. Blocks. Raises: EngineFailure."""
    return _get(path, base_url, headers=headers).json()


def _get(
    path: str,
    base_url: str,
    socket: Path | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    verify: bool = True,
) -> httpx2.Response:
    transport = httpx2.HTTPTransport(verify=verify, uds=str(socket) if socket else None)
    with httpx2.Client(
        base_url=base_url, headers=headers, transport=transport, timeout=timeout_s, trust_env=False
    ) as client:
        try:
            answer = client.get(path)
        except httpx2.TransportError as error:
            raise EngineFailure(f"no answer from {base_url} to GET {path}: {_cause(error)}") from error
    if answer.status_code != httpx2.codes.OK:
        raise EngineFailure(f"{base_url} answered {answer.status_code} to GET {path}: {_message(answer.text)}")
    return answer


def authorization(variable: str | None) -> dict[str, str]:
    """The header with the key that an environment variable holds. Raises: ConfigError."""
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(
            f"the environment variable {variable} (api_key_env) is not set; export the server's key in it"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _message(text: str) -> str:
    """The message in an error's body, without its wrapping."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:1000]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]

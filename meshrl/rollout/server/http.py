"""The HTTP client of a rollout server: it sends JSON, reads JSON or a stream of JSON events, and raises typed errors.

No request is ever repeated: if only its answer was lost, it would be sampled a second time.
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

CONTROL_S = 600.0  # time limit of one command; the deadlines of a run's phases expire earlier
_CONNECT_S = 30.0
_IDLE_S = 2.0  # servers keep idle connections longer; otherwise a request could use a connection that is being closed
_EXIT_S = 30.0  # after its engine has died, a server exits within this time, also on a busy machine
_DONE = "[DONE]"


class HttpClient:
    """A client of one server, for one event loop.

    socket: a Unix socket of a server on this machine, instead of a TCP port. server: the server's process if it is a
    child of this one: if it has ended, an EngineFailure becomes an EngineEnded that reports how.
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
        """The JSON of the answer."""
        return await self._call("GET", path, CONTROL_S)

    async def post(self, path: str, body: Any = None, *, timeout_s: float = CONTROL_S, **params: Any) -> Any:
        """The JSON of the answer; None if it is empty. params: the query string."""
        return await self._call("POST", path, timeout_s, json=body, params=params or None)

    async def _call(self, method: str, path: str, timeout_s: float, **content: Any) -> Any:
        timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
        async with self._diagnosed():
            try:
                answer = await self._client.request(method, path, timeout=timeout, **content)
            except httpx2.TransportError as error:
                raise EngineFailure(f"{self.name}: no answer to {method} {path}: {_cause(error)}") from error
            self._check(path, answer.status_code, answer.text)
        return _json(self.name, path, answer) if answer.content else None

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """The JSON of each server-sent event. No time limit while the connection is open: a queue may be long."""
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
                        if (error := event.get("error")) is not None:
                            code = error.get("code") if isinstance(error, dict) else None
                            self._check(path, code if isinstance(code, int) and code >= 400 else 500, text)
                        yield event
            except httpx2.TransportError as error:
                raise EngineFailure(f"{self.name}: the answer to {path} was interrupted: {_cause(error)}") from error
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
    """Whether a server on this machine answers GET `path` with 200. Blocks."""
    # Without TLS: loading the certificates takes 40 ms of CPU time for each of many attempts.
    transport = httpx2.HTTPTransport(verify=False, uds=str(socket) if socket else None)
    with httpx2.Client(base_url=base_url, transport=transport, timeout=5.0, trust_env=False) as client:
        try:
            return client.get(path).status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False


def fetch(path: str, base_url: str, headers: Mapping[str, str] | None = None) -> Any:
    """The JSON of GET `path`. Blocks."""
    try:
        answer = httpx2.get(base_url.rstrip("/") + path, headers=headers, timeout=60.0, trust_env=False)
    except httpx2.TransportError as error:
        raise EngineFailure(f"no answer from {base_url} to GET {path}: {_cause(error)}") from error
    if answer.status_code != httpx2.codes.OK:
        raise EngineFailure(f"{base_url} answered {answer.status_code} to GET {path}: {_message(answer.text)}")
    return _json(base_url, path, answer)


def _json(server: str, path: str, answer: httpx2.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise EngineFailure(f"{server} answered {path} with {answer.text!r:.200}, which is not JSON") from error


def authorization(variable: str | None) -> dict[str, str]:
    """The Authorization header with the key of an environment variable."""
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(
            f"the environment variable {variable} (api_key_env) is not set; set it to the server's API key"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _message(text: str) -> str:
    """The message in the body of an error answer."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:1000]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]

"""HTTP to a rollout server: JSON in, JSON or a stream of it out, with typed errors.

Nothing is ever sent twice by itself: a request that was sampled and whose answer got lost would be sampled again.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2

from meshrl.core.errors import ConfigError, EngineFailure, RequestError

_CONNECT_S = 30.0
_KEPT_S = 2.0  # of an idle connection: less than servers keep it, or a request meets one that closes
_DONE = "[DONE]"


class HttpClient:
    """A client of one server, for one event loop. socket: of a server on this machine, in place of a TCP port."""

    def __init__(
        self,
        name: str,
        base_url: str = "http://localhost",
        socket: Path | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.name = name
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            headers=headers,
            transport=httpx2.AsyncHTTPTransport(
                uds=str(socket) if socket else None, limits=httpx2.Limits(keepalive_expiry=_KEPT_S), retries=0
            ),
            trust_env=False,  # no proxy stands between a run and its own sampler
        )

    async def get(self, path: str, timeout_s: float) -> Any:
        """The JSON of an answer. Raises: EngineFailure."""
        return await self._call("GET", path, None, None, timeout_s)

    async def post(self, path: str, body: Any = None, params: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
        """The JSON of an answer; None where it is empty. Raises: RequestError when the server refuses, EngineFailure
        when it can't answer, or not in time."""
        return await self._call("POST", path, body, params, timeout_s)

    async def _call(self, method: str, path: str, body: Any, params: dict[str, Any] | None, timeout_s: float) -> Any:
        timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
        try:
            answer = await self._client.request(method, path, json=body, params=params, timeout=timeout)
        except httpx2.TransportError as error:
            raise EngineFailure(f"{self.name}: no answer to {method} {path}: {_said(error)}") from error
        self._check(path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The JSON of each server-sent event. Waits as long as the connection stands: a queue may be long.

        Raises: RequestError, EngineFailure; also when the stream breaks off.
        """
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
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
            raise EngineFailure(f"{self.name}: the answer to {path} broke off: {_said(error)}") from error
        raise EngineFailure(f"{self.name}: the answer to {path} ended without its closing event")

    def _check(self, path: str, status: int, text: str) -> None:
        if status < httpx2.codes.BAD_REQUEST:
            return
        kind = EngineFailure if status >= httpx2.codes.INTERNAL_SERVER_ERROR else RequestError
        raise kind(f"{self.name} answered {status} to {path}: {_message(text)}")

    async def close(self) -> None:
        await self._client.aclose()


def is_up(path: str, base_url: str = "http://localhost", socket: Path | None = None, timeout_s: float = 5.0) -> bool:
    """Whether a server of this machine answers GET `path` with 200. Blocks."""
    # Plain HTTP: to load the certificates for TLS takes 40 ms of CPU time, at each of many attempts.
    transport = httpx2.HTTPTransport(verify=False, uds=str(socket) if socket else None)
    with httpx2.Client(base_url=base_url, transport=transport, timeout=timeout_s, trust_env=False) as client:
        try:
            return client.get(path).status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False


def fetch(path: str, base_url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> Any:
    """The JSON of GET `path`. Blocks. Raises: EngineFailure."""
    with httpx2.Client(base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False) as client:
        try:
            answer = client.get(path)
        except httpx2.TransportError as error:
            raise EngineFailure(f"no answer from {base_url} to GET {path}: {_said(error)}") from error
        if answer.status_code != httpx2.codes.OK:
            raise EngineFailure(f"{base_url} answered {answer.status_code} to GET {path}: {_message(answer.text)}")
        return answer.json()


def key_in(variable: str | None) -> dict[str, str]:
    """The header that carries the key in an environment variable. Raises: ConfigError."""
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(
            f"the environment variable {variable} (api_key_env) is not set; export the server's key in it"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _message(text: str) -> str:
    """What an error's body says, without its wrapping."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:1000]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]

"""The HTTP server of the endpoint: keys, limits of size and time, and the routes of the dialects.

uvicorn limits neither the time in which headers and a body arrive, nor the size of a body; both are limited here, and a
body is read only with a valid key.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshrl.agent.endpoint.chat import CHAT
from meshrl.agent.endpoint.conversation import Ask, ModelReply, RefusedRequest
from meshrl.agent.endpoint.dialect import WireFormat, require_shallow
from meshrl.agent.endpoint.messages import MESSAGES
from meshrl.agent.endpoint.responses import RESPONSES
from meshrl.agent.endpoint.tokens import TOKENS
from meshrl.core.errors import ConfigError, MeshrlError

HEADERS_S = 30.0  # from a connection, or the last answer on it, to the end of a request's headers
BODY_S = 30.0
MAX_BODY_BYTES = 16 << 20
MAX_CONNECTIONS = 4096
_MAX_HEADER_BYTES = 64 << 10
_SPARE_FILES = 512  # descriptors that the rest of the process needs

FORMATS: dict[str, WireFormat] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/inference/v1/generate": TOKENS,
}


class Answering(Protocol):
    """What has a key: the requests of a trajectory, or those to a served model."""

    def parts(self, ask: Ask, digest: bytes) -> AsyncIterator[str | ModelReply]:
        """The parts of the answer's text as they are sampled, if it samples them one by one, then the answer. digest:
        of the request. Raises: RefusedRequest before the first part."""
        ...


class Endpoint:
    """find: from a key to what answers its requests; None for a key that is not valid. model: its name for clients.
    max_model_len: the context in tokens; None = not known before a request. note: prints a line for the user."""

    def __init__(
        self,
        find: Callable[[str], Answering | None],
        model: str,
        max_model_len: int | None,
        note: Callable[[str], None],
    ):
        self._find, self._model, self._max_model_len, self._note = find, model, max_model_len, note
        routes = [Route(path, self._handler(wire), methods=["POST"]) for path, wire in FORMATS.items()]
        routes += [Route("/v1/models", self._models), Route("/health", lambda request: PlainTextResponse("ok"))]
        self._app = Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})

    @asynccontextmanager
    async def opened(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """The server's URL, for the time in which it runs. port: 0 = any free one."""
        try:
            listener = socket.create_server((host, port), backlog=2048)
        except OSError as cause:
            raise ConfigError(
                f"the endpoint can't listen on {host}:{port}: {cause.strerror}. Give another port"
            ) from cause
        with _many_files():
            config = uvicorn.Config(
                self._app,
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                timeout_keep_alive=60,  # HEADERS_S ends idle connections; httpx's pools use them for uvicorn's 5 s
                timeout_graceful_shutdown=1,
            )
            server = _RunServer(config)
            task = asyncio.create_task(server.serve([listener]))
            try:
                yield f"http://{host}:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await task

    def _handler(self, wire: WireFormat) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            try:
                answering = self._answering(request)
                raw = await _body_of(request)
                try:
                    body = json.loads(text := raw.decode())
                    if "\\ud" in text.lower():  # half of a surrogate pair is not a text
                        json.dumps(body, ensure_ascii=False).encode()
                except (ValueError, RecursionError) as cause:
                    raise RefusedRequest(400, f"the body is not JSON: {cause}") from cause
                if not isinstance(body, dict):
                    raise RefusedRequest(400, f"the body is {type(body).__name__}; it must be an object")
                require_shallow(body)
                path = request.url.path
                digest = hashlib.sha256(path.encode() + b"\0" + raw).digest()
                ask = replace(wire.read(body), source=f"POST {path} {digest.hex()[:8]}")
                parts = aiter(answering.parts(ask, digest))
                first = await anext(parts)
                if ask.stream:
                    events = _events(wire, ask, self._model, first, parts)
                    return StreamingResponse(events, media_type="text/event-stream")
                while isinstance(first, str):
                    first = await anext(parts)
                return JSONResponse(wire.answer(ask, first, self._model))
            except RefusedRequest as refusal:
                return _refusal(wire, refusal)
            except ClientDisconnect:
                return Response(status_code=499)
            except MeshrlError as failure:
                return _refusal(wire, RefusedRequest(503, f"no answer: {failure}", retry_after_s=1))
            except Exception as error:
                self._note(f"the endpoint failed to answer {request.url.path}: {type(error).__name__}: {error}")
                return _refusal(wire, RefusedRequest(500, "the endpoint failed; its process has printed the cause"))

        return handle

    def _answering(self, request: Request) -> Answering:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        answering = self._find(key) if key else None
        if answering is None:
            raise RefusedRequest(
                401, "the key is not valid; a key of a training attempt is valid while this attempt runs"
            )
        return answering

    async def _models(self, request: Request) -> Response:
        try:
            self._answering(request)
        except RefusedRequest as refusal:
            return _refusal(CHAT, refusal)
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "meshrl"}
        return JSONResponse({"object": "list", "data": [entry | {"max_model_len": self._max_model_len}]})


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    known = ", ".join(f"POST {path}" for path in FORMATS)
    text = f"{request.method} {request.url.path} is no route of this server; it has {known}, GET /v1/models"
    return _refusal(FORMATS.get(request.url.path, CHAT), RefusedRequest(status, text))


async def _body_of(request: Request) -> bytes:
    """Raises: RefusedRequest for one that is too large or too slow."""
    too_large = RefusedRequest(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB")
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError as cause:
        raise RefusedRequest(408, f"the body was not complete after {BODY_S:g} s") from cause
    return b"".join(parts)


def _refusal(wire: WireFormat, refusal: RefusedRequest) -> Response:
    headers = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
    if refusal.status in (401, 408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(wire.error(refusal.status, refusal.message), status_code=refusal.status, headers=headers)


async def _events(
    wire: WireFormat, ask: Ask, model: str, first: str | ModelReply, rest: AsyncIterator[str | ModelReply]
) -> AsyncIterator[bytes]:
    """The events of a streamed answer."""

    async def parts() -> AsyncIterator[str | ModelReply]:
        yield first
        async for part in rest:
            yield part

    try:
        name = first.id if isinstance(first, ModelReply) else secrets.token_hex(8)
        async for events in wire.stream(ask, name, model, parts()):
            yield _encoded(events)
        if wire.done is not None:
            yield _encoded([(None, wire.done)])
    except (MeshrlError, RefusedRequest) as error:
        yield _encoded([("error", wire.error(500, str(error)))])


def _encoded(events: Any) -> bytes:
    return b"".join(_event(*event) for event in events)


def _event(name: str | None, content: Any) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


class _RunServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # the run handles them
        yield


class LimitedProtocol(H11Protocol):
    """Closes connections whose request headers are not complete in time, and the one that has waited longest when there
    are too many."""

    waiting_since: float | None = None  # None: a request is being answered
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = [each for each in self.connections if each.waiting_since is not None]  # type: ignore[union-attr]
            min(waiting, key=lambda each: each.waiting_since or 0.0).transport.abort()  # type: ignore[union-attr]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # a request that was sent ahead
            self._stop_waiting()

    def _wait(self) -> None:
        self._stop_waiting()
        self.waiting_since = time.monotonic()
        self._deadline = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        self.waiting_since = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


@contextmanager
def _many_files() -> Iterator[None]:
    """Raise the limit of open files, so that idle connections take none from the run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _SPARE_FILES
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= top:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

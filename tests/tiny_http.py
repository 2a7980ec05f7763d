"""A small HTTP/1.1 server on asyncio for test servers: it reads JSON, answers with JSON or server-sent events, and can
inject faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any


class Refused(Exception):
    """An answer with an error status; body: JSON, or text."""

    def __init__(self, status: int, body: Any):
        super().__init__(str(body))
        self.status, self.body = status, body


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Handle = Callable[[str, str, Any], Awaitable[Any]]
"""`await handle(method, path, body)` returns the answer; None = an empty body, an async generator = a stream."""


class HttpServer:
    """fault: {"fault": error | hang | disconnect, "path": PATH}, for every request to that path until it is changed.

    key: required in all requests except /health.
    """

    def __init__(self, handle: Handle, key: str | None = None):
        self._handle, self._key = handle, key
        self.fault: dict[str, Any] = {}

    async def serve(self, port: int, ready: Callable[[int], None]) -> None:
        server = await asyncio.start_server(self._client, "127.0.0.1", port)
        ready(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, target, _ = line.decode().split()
                headers: dict[str, str] = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(writer, method, target.partition("?")[0], raw, headers)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, raw: bytes, headers: dict[str, str]
    ) -> None:
        kind = headers.get("content-type", "")
        try:
            if self._key is not None and path != "/health" and headers.get("authorization") != f"Bearer {self._key}":
                raise Refused(401, {"error": "Unauthorized"})
            if self.fault.get("path") == path and self.fault["fault"] in ("error", "hang"):
                if self.fault["fault"] == "hang":
                    await asyncio.sleep(3600)
                raise Refused(500, {"object": "error", "message": "something broke in here", "code": 500})
            if raw and kind.partition(";")[0] != "application/json":
                raise Refused(400, {"message": f"Unsupported Media Type: {kind}"})
            answer = await self._handle(method, path, json.loads(raw) if raw else None)
        except Refused as refused:
            return await _write(writer, refused.status, refused.body)
        except Exception as error:
            return await _write(writer, 500, {"message": f"{type(error).__name__}: {error}"})
        if not isinstance(answer, AsyncGenerator):
            return await _write(writer, 200, answer)
        cut = self.fault.get("path") == path and self.fault["fault"] == "disconnect"
        await self._stream(writer, answer, cut)

    async def _stream(self, writer: asyncio.StreamWriter, events: AsyncGenerator[Any], cut: bool) -> None:
        began = False
        try:
            async with contextlib.aclosing(events):  # the generator must end when the client disconnects
                async for event in events:
                    if not began:
                        writer.write(_STREAM)
                        began = True
                    _chunk(writer, f"data: {json.dumps(event)}\n\n")
                    await writer.drain()
                    if cut:
                        raise ConnectionError("injected fault")
        except Refused as refused:
            if not began:
                return await _write(writer, refused.status, refused.body)
            _chunk(writer, f"data: {json.dumps({'error': {'message': str(refused), 'code': refused.status}})}\n\n")
        _chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())


async def _write(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    kind = "text/plain" if isinstance(body, str) else "application/json"
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    await writer.drain()

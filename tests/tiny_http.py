"""A small HTTP/1.1 server on asyncio that answers with JSON or server-sent events, for faults that a real server can't
be made to show."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Handle = Callable[[str, Any], Awaitable[Any]]
"""`await handle(path, body)` returns the answer; an async generator = a stream. After a ConnectionError, also within
the stream, the connection is closed."""


@asynccontextmanager
async def answering(handle: Handle) -> AsyncIterator[str]:
    """The address of a server in this event loop."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                await _answer(writer, handle, line.decode().split()[1], json.loads(raw) if raw else None)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # also at the end of the event loop
        finally:
            writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _answer(writer: asyncio.StreamWriter, handle: Handle, path: str, body: Any) -> None:
    status = 200
    try:
        answer = await handle(path, body)
    except Refused as refused:
        status, answer = refused.status, {"message": str(refused)}
    if isinstance(answer, AsyncGenerator):
        writer.write(_STREAM)
        async with contextlib.aclosing(answer):  # it must end when the client disconnects
            async for event in answer:
                _chunk(writer, f"data: {json.dumps(event)}\n\n")
                await writer.drain()
        _chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
    else:
        data = json.dumps(answer).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

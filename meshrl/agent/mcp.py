"""Tools of MCP servers, which commands start and which are called over their standard input and output."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from meshrl.agent.tools import Tool, ToolError
from meshrl.core.errors import ConfigError
from meshrl.process.diagnosis import output_tail
from meshrl.reward.replies import error_line

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_TAIL_BYTES = 2000


class McpServer:
    """One server. It runs twice: now, to list its tools for the prompt, and while it is `opened`, to answer calls.

    It gets none of this process's environment but PATH, HOME and the like, and ends with its standard input.
    """

    def __init__(self, command: str, key: str):
        """key: of the command in errors. Raises: ConfigError for a server that can't be started."""
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ConfigError(f"{key}: the package mcp is not installed: pip install 'meshrl[agents]'") from None
        self._arguments = shlex.split(command) if isinstance(command, str) else []
        if not self._arguments:
            raise ConfigError(f"{key} is {command!r:.80}; it must be the command of a server with its arguments")
        self._client: Any = None
        self._key = key
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            self.tools: list[Tool] = thread.submit(asyncio.run, self._listed()).result()

    async def _listed(self) -> list[Tool]:
        async with self.opened():
            listed, cursor = list[Any](), None
            while True:
                page = await self._client.list_tools(cursor=cursor)
                listed, cursor = [*listed, *page.tools], page.next_cursor
                if not cursor:
                    break
        return [
            Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema,
                function=partial(self._call, tool.name),
            )
            for tool in listed
        ]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The server runs. Its client has a task of its own, so that exceptions of this block stay as they are."""
        end, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._serve(end, ready))
        try:
            self._client = await ready
            yield
        finally:
            end.set()
            self._client = None
            await asyncio.wait({task}, timeout=_END_TIMEOUT_S)
            task.cancel()

    async def _serve(self, end: asyncio.Event, ready: asyncio.Future[Any]) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        with tempfile.TemporaryFile() as output:
            try:
                server = StdioServerParameters(command=self._arguments[0], args=self._arguments[1:])
                async with asyncio.timeout(_START_TIMEOUT_S) as deadline:
                    async with Client(stdio_client(server, errlog=output)) as client:  # type: ignore[arg-type]
                        deadline.reschedule(None)
                        ready.set_result(client)
                        await end.wait()
            except Exception as error:
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                printed = output_tail(output, _TAIL_BYTES) or "nothing"
                if not ready.done():
                    text = f"{self._key}: the server {self._arguments} did not start: {error_line(error)}. It printed: "
                    ready.set_exception(ConfigError(text + printed))

    async def _call(self, name: str, **arguments: Any) -> str:
        if self._client is None:
            raise ToolError(f"the server of {name} is not running")
        result = await self._client.call_tool(name, arguments)
        others = {block.type for block in result.content} - {"text"}
        if others:
            raise ToolError(f"{name} returned {' and '.join(sorted(others))}, which is not text")
        text = "\n".join(block.text for block in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

"""An MCP server of a test: `python mcp_server.py [crash]`."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer
from mcp_types import ImageContent

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Raises an exception."""
    raise ValueError("not today")


@server.tool()
def environment() -> str:
    """Lists variables."""
    return ",".join(sorted(os.environ))


@server.tool()
def end() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def picture() -> ImageContent:
    """Returns an image."""
    return ImageContent(type="image", data="AAAA", mime_type="image/png")


if __name__ == "__main__":
    if "crash" in sys.argv:
        sys.exit("no config of the server")
    if "hang" in sys.argv:
        sys.stdin.read()
    server.run()

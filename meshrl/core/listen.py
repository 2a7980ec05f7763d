"""A port that others may connect to, each served in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


def listen(serve: Callable[[socket.socket], None]) -> socket.socket:
    """Listen on any free port of all interfaces, IPv4 and IPv6: a machine may know itself by another address than
    others do. serve gets each connection, and closes it; `stop_listening` ends it."""
    if socket.has_dualstack_ipv6():
        listening = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listening = socket.create_server(("", 0))
    threading.Thread(target=_accept, args=(listening, serve), daemon=True).start()
    return listening


def stop_listening(listening: socket.socket) -> None:
    """Take no more connections; those there are go on."""
    with contextlib.suppress(OSError):  # macOS: not for a socket that listens, but there close is enough
        listening.shutdown(socket.SHUT_RDWR)  # close alone does not end an accept that a thread stands in
    listening.close()


def _accept(listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            sock, _ = listening.accept()
        except OSError:
            return  # closed
        threading.Thread(target=serve, args=(sock,), daemon=True).start()

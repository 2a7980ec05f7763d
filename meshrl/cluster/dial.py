"""TCP connections between the controller and the machines of its ranks: who may connect, and how a lost one shows.

Both sides prove that they know the run's token before either reads a pickle of the other (a pickle runs code). The
token itself never crosses the connection. A machine that is switched off sends no end: the kernel's keepalive, some
LOST_AFTER_S of silence, ends the connection in its place.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from meshrl.cluster import channel
from meshrl.core.listen import listen, stop_listening

LOST_AFTER_S = 14
_HANDSHAKE_S = 20.0
_NONCE = 32
_ANSWER = hashlib.sha256().digest_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What the dialling side says first. control: commands to the rank's host; channel: the rank's own."""

    rank: int
    kind: Literal["control", "channel"]
    ip: str  # of its machine, on the way to the controller
    machine: str = field(default_factory=socket.gethostname)


class Listener:
    """The controller's end: calls `arrived(socket, hello)`, in a thread, for each connection that knows the token."""

    def __init__(self, host: str, token: bytes, arrived: Callable[[socket.socket, Hello], None]):
        """host: the address under which other machines reach this one."""
        self._token, self._arrived = token, arrived
        self._socket = listen(self._greet)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE)
            sock.sendall(nonce)
            theirs, answer = _read(sock, _NONCE), _read(sock, _ANSWER)
            if not hmac.compare_digest(answer, _prove(self._token, b"rank", nonce + theirs)):
                raise ConnectionError("it does not know the token")
            sock.sendall(_prove(self._token, b"controller", nonce + theirs))
            hello = channel.receive(sock)
        except (OSError, EOFError):  # a stranger, or a rank that has ended meanwhile
            sock.close()
            return
        _guard(sock)
        self._arrived(sock, hello)

    def close(self) -> None:
        """Take no more connections."""
        stop_listening(self._socket)


def dial(address: tuple[str, int], token: bytes, hello: Callable[[str], Hello]) -> socket.socket:
    """Connect to the controller; `hello` is made from the address that this machine has on the way there.

    Raises: ConnectionError when nobody listens there, or not the run's controller.
    """
    sock = socket.create_connection(address, timeout=_HANDSHAKE_S)
    nonce, mine = _read(sock, _NONCE), secrets.token_bytes(_NONCE)
    sock.sendall(mine + _prove(token, b"rank", nonce + mine))
    if not hmac.compare_digest(_read(sock, _ANSWER), _prove(token, b"controller", nonce + mine)):
        raise ConnectionError(f"what listens at {address[0]}:{address[1]} is not the controller of this run")
    channel.send(sock, hello(sock.getsockname()[0]))
    _guard(sock)
    return sock


def _prove(token: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, side + nonces, hashlib.sha256)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("the other side hung up during the handshake: it has another token, or has ended")
        data += part
    return data


def _guard(sock: socket.socket) -> None:
    """Block without limit, but end when the other machine has been silent for LOST_AFTER_S."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # commands are small, and somebody waits for each
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # macOS
    for name, value in ((idle, 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 1000 * LOST_AFTER_S)):
        if hasattr(socket, name):  # the last is Linux's: it does the same for bytes on their way
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

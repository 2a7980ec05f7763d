"""TCP connections between the processes of a run on several machines: authentication, and detection of lost machines.

Both sides prove that they know the run's token before either reads a pickle from the other (a pickle runs code). The
token itself is never sent. A machine that is switched off does not close its connections: the kernel's keepalive closes
them after about LOST_AFTER_S without an answer.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from meshrl.core.terminal import print_message
from meshrl.process import frames

LOST_AFTER_S = 14
_HANDSHAKE_S = 20.0
_BACKLOG = 1024  # all ranks of a large run connect at the same time
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


LOOPBACK = "127.0.0.1"


def listening_socket(host: str) -> socket.socket:
    """A socket that listens on a free port. host: the address at which others reach it: LOOPBACK, if only processes of
    this machine do. Otherwise it listens on all interfaces, IPv4 and IPv6: other machines may reach this one at an
    address that this machine does not know."""
    if host == LOOPBACK:
        return socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


class Listener:
    """The controller's end. Calls `connected(socket, hello)`, in a thread, for each connection that knows the token."""

    def __init__(self, host: str, token: bytes, connected: Callable[[socket.socket, Any], object]):
        """host: the address at which other machines reach this one."""
        self._token, self._connected, self._closed = token, connected, False
        self._socket = listening_socket(host)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        is_noted = False
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:  # also one of a connection that has failed before it was accepted
                if self._closed:
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE) and not is_noted:
                    print_message(f"connections of ranks wait: {error.strerror}; raise the limit (ulimit -n)")
                    is_noted = True
                time.sleep(0.1)
                continue
            threading.Thread(target=self._authenticate, args=(sock,), daemon=True).start()

    def _authenticate(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(nonce)
            theirs, proof = _receive(sock, _NONCE_BYTES), _receive(sock, _PROOF_BYTES)
            if not hmac.compare_digest(proof, _prove(self._token, b"rank", nonce + theirs)):
                raise ConnectionError("it does not know the token")
            sock.sendall(_prove(self._token, b"controller", nonce + theirs))
            hello = frames.receive(sock)
        except (OSError, EOFError):  # a process outside the run, or one that has ended meanwhile
            sock.close()
            return
        _detect_loss(sock)
        self._connected(sock, hello)

    def close(self) -> None:
        """Accept no more connections; existing ones stay open."""
        self._closed = True
        with contextlib.suppress(OSError):  # macOS refuses it for a listening socket, but there close is enough
            self._socket.shutdown(socket.SHUT_RDWR)  # close alone does not end an accept in another thread
        self._socket.close()


def connect(address: tuple[str, int], token: bytes, hello: Callable[[str], Any]) -> socket.socket:
    """Connect to the controller. `hello` gets this machine's address on it and returns the first message."""
    sock = socket.create_connection(address, timeout=_HANDSHAKE_S)
    nonce, ours = _receive(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(ours + _prove(token, b"rank", nonce + ours))
    if not hmac.compare_digest(_receive(sock, _PROOF_BYTES), _prove(token, b"controller", nonce + ours)):
        raise ConnectionError(f"the process at {address[0]}:{address[1]} is not the controller of this run")
    frames.send(sock, hello(sock.getsockname()[0]))
    _detect_loss(sock)
    return sock


def interface_of(ip: str) -> str | None:
    """Name of the network interface with this address. Without it, gloo would choose an interface by the host name."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if ip in [each.address for each in addresses]), None)


def _prove(token: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, side + nonces, hashlib.sha256)


def _receive(sock: socket.socket, size: int) -> bytes:
    try:
        return bytes(frames.receive_exactly(sock, size))
    except EOFError:
        raise ConnectionError(
            "the other side closed the connection during the handshake: it has another token, or has ended"
        ) from None


def _detect_loss(sock: socket.socket) -> None:
    """Block without limit, but fail when the other machine has not answered for LOST_AFTER_S."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # commands are small, and a caller waits for each
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # macOS
    for name, value in ((idle, 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 1000 * LOST_AFTER_S)):
        if hasattr(socket, name):  # the last exists only on Linux; it is the same limit for unacknowledged bytes
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

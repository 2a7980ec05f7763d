"""A SharedRing read from another machine: the sender serves its slots over TCP, the receiver fetches those it is told.

    sender:    ring = SharedRing(2, layout.staging_bytes); server = RingServer(ring, "10.0.0.1")
    receiver:  view = RemoteRingView(server.name, slot_bytes)
               on ("receive", ref): await engine.receive(view.bucket(ref))

A name is `HOST:PORT/TOKEN/RING`: receivers on the sender's machine open RING itself, see ring_of. Only bytes of slots
are served, and only to who knows the token; that they arrive as they were sent is the bucket's digest to prove.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

import torch

from meshrl.core.errors import SyncError
from meshrl.process.connect import listen, stop_listening
from meshrl.sync.receive import Bucket
from meshrl.sync.transport import BucketRef, SharedRing

_REQUEST = struct.Struct("<QQ")  # slot, bytes of it
_TOKEN_CHARACTERS = 64
_HANDSHAKE_S = 20.0


class RingServer:
    """Serves the slots of a ring, each receiver in a thread of its own, until close."""

    def __init__(self, ring: SharedRing, host: str):
        """host: the address under which other machines reach this one."""
        self._slots, self._token = ring.slots, secrets.token_hex(_TOKEN_CHARACTERS // 2)
        self._socket = listen(self._serve)
        self.name = f"{host}:{self._socket.getsockname()[1]}/{self._token}/{ring.name}"

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.settimeout(_HANDSHAKE_S)
                if not hmac.compare_digest(_read(sock, bytearray(_TOKEN_CHARACTERS)), self._token.encode()):
                    return
                sock.settimeout(None)
                while True:
                    slot, num_bytes = _REQUEST.unpack(_read(sock, bytearray(_REQUEST.size)))
                    sock.sendall(self._slots[slot][:num_bytes].numpy().data)
            except OSError:
                return  # the receiver has ended, or was none

    def close(self) -> None:
        """Take no more receivers; those there are end with their connections."""
        self._slots = []
        stop_listening(self._socket)


class RemoteRingView:
    """A receiver's end on another machine."""

    def __init__(self, name: str, slot_bytes: int):
        """Raises: SyncError when the sender can't be reached."""
        self.name = name
        address, token, _ = name.split("/")
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(token.encode())
        except OSError as error:
            raise SyncError(f"the sender of weights can't be reached at {address}: {error}") from error
        self._payload = torch.empty(slot_bytes, dtype=torch.uint8)

    def bucket(self, ref: BucketRef) -> Bucket:
        """Fetch the bucket; its payload is valid until the next is fetched. Raises: SyncError."""
        payload = self._payload[: ref.num_bytes]
        try:
            self._socket.sendall(_REQUEST.pack(ref.slot, ref.num_bytes))
            _read(self._socket, payload.numpy().data)
        except OSError as error:
            raise SyncError(f"bucket {ref.index} did not come from the sender of weights: {error}") from error
        return ref.at(payload)

    def close(self) -> None:
        self._socket.close()


def ring_of(name: str) -> str:
    """The SharedRing's own name, for receivers on the sender's machine."""
    return name.rpartition("/")[2]


def _read(sock: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    view, got = memoryview(into), 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if count == 0:
            raise ConnectionError("the other side hung up")
        got += count
    return into

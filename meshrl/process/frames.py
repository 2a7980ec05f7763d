"""Messages between two processes over a socket: Python objects with large arrays, or plain bytes.

An object's frame is a header, the arrays' sizes and a pickle, then the arrays. A frame of bytes is its length (4 bytes,
big-endian) and the bytes.

Reading a pickle runs its code. So read objects only from a trusted process: a child that was started here, the parent,
or a connection made by `connect.py`.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<QQ")  # bytes that follow, number of arrays outside the pickle
_LENGTH = struct.Struct("!I")
_LARGE_BYTES = 1 << 16  # arrays of at least this size are sent outside the pickle


def send(sock: socket.socket, obj: Any) -> None:
    """Write one object; blocks until the socket has accepted all of it."""
    buffers: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= _LARGE_BYTES:
            buffers.append(view)
        return view.nbytes < _LARGE_BYTES

    data = pickle.dumps(obj, protocol=5, buffer_callback=stays_inside)
    sizes = [b.nbytes for b in buffers]
    body = struct.pack(f"<{len(sizes)}Q", *sizes) + data
    sock.sendall(_HEADER.pack(len(body), len(sizes)) + body)
    for view in buffers:
        sock.sendall(view)


def receive(sock: socket.socket) -> Any:
    """Read one object; its large arrays are writable copies in this process. Raises: EOFError at the end."""
    head = sock.recv(_HEADER.size)
    if not head:
        raise EOFError("the other side closed the channel")
    size, count = _HEADER.unpack(head + receive_exactly(sock, _HEADER.size - len(head)))
    body = memoryview(receive_exactly(sock, size))
    sizes = struct.unpack_from(f"<{count}Q", body)
    return pickle.loads(body[8 * count :], buffers=[receive_exactly(sock, n) for n in sizes])


def send_bytes(sock: socket.socket, body: bytes) -> None:
    """Write one frame of bytes."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_bytes(sock: socket.socket, max_bytes: int) -> bytes:
    """Read one frame of bytes. Raises: EOFError at the end, or when the frame is longer than max_bytes."""
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if length > max_bytes:
        raise EOFError(f"a frame has {length} bytes; allowed: at most {max_bytes}")
    return bytes(receive_exactly(sock, length))


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Read exactly `size` bytes. Raises: EOFError when the stream ends before."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = sock.recv_into(rest)
        if count == 0:
            raise EOFError("the other side closed the channel in the middle of a frame")
        rest = rest[count:]
    return data

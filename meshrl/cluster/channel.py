"""Python objects between two processes over a socket. Over a Unix socket, large arrays go through shared memory; over
TCP they follow in the stream, straight from the array and straight into the new one.

A frame is a header, the arrays' sizes and a pickle, and then the arrays, or the descriptor of an unlinked file in
memory that holds them. No name exists that could leak: the memory goes when both sides have closed it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import tempfile
from typing import Any

_HEADER = struct.Struct("<QQ")  # bytes that follow, number of arrays beside the pickle
_BIG = 1 << 16  # an array from this size on travels beside the pickle
_MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None


def send(sock: socket.socket, obj: Any) -> None:
    """Write one frame; blocks until the other side has read enough of it."""
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _BIG:
            return True  # stays inside the pickle
        buffers.append(view)
        return False

    data = pickle.dumps(obj, protocol=5, buffer_callback=keep)
    sizes = [b.nbytes for b in buffers]
    body = struct.pack(f"<{len(sizes)}Q", *sizes) + data
    header = _HEADER.pack(len(body), len(sizes))
    if not sizes:
        sock.sendall(header + body)
        return
    if sock.family != socket.AF_UNIX:
        sock.sendall(header + body)
        for view in buffers:
            sock.sendall(view)
        return
    total = sum(sizes)
    with tempfile.TemporaryFile(dir=_MEMORY_FOLDER) as file:
        file.truncate(total)
        with mmap.mmap(file.fileno(), total) as memory:
            at = 0
            for view in buffers:
                memory[at : at + view.nbytes] = view
                at += view.nbytes
        socket.send_fds(sock, [header], [file.fileno()])
        sock.sendall(body)


def receive(sock: socket.socket) -> Any:
    """Read one frame; arrays from beside the pickle are writable copies of this process. Raises EOFError at the end."""
    head, fds, _, _ = socket.recv_fds(sock, _HEADER.size, 1)
    if not head:
        raise EOFError("the other side closed the channel")
    while len(head) < _HEADER.size:
        head += _read(sock, _HEADER.size - len(head))
    size, count = _HEADER.unpack(head)
    body = memoryview(_read(sock, size))
    if not count:
        return pickle.loads(body)
    sizes = struct.unpack_from(f"<{count}Q", body)
    if not fds:
        return pickle.loads(body[8 * count :], buffers=[_read(sock, n) for n in sizes])
    with open(fds[0], "rb") as file, mmap.mmap(file.fileno(), sum(sizes), access=mmap.ACCESS_READ) as memory:
        at, buffers = 0, []
        for n in sizes:
            buffers.append(bytearray(memory[at : at + n]))
            at += n
    return pickle.loads(body[8 * count :], buffers=buffers)


def _read(sock: socket.socket, size: int) -> bytearray:
    out = bytearray(size)
    view, got = memoryview(out), 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            raise EOFError("the other side closed the channel in the middle of a frame")
        got += n
    return out

"""A process that grades, started by `sandbox.py` as `python -m meshrl.reward.worker FD`. It imports no torch.

Two processes in a session of their own. The guard waits: when the other end of its standard input closes, because
the parent is gone however it ended, it kills the whole group; when the grader dies it tells the parent how. The
grader, forked from it, reads batches from the socket FD and answers each item as soon as it is graded.

Frames are a length (4 bytes, big-endian) and a body: pickle towards the worker, which trusts its parent, and JSON
back, so that no answer can run code in the parent.

    parent -> worker   dict(terms={term: (kind, args)}, timeout_s, max_memory_bytes), then lists of (term, payload)
    worker -> parent   {"ready": [async terms]} | {"config_error": text}, then for each item of a list
                       {"item": i, "value": float} | {"item": i, "failure": [kind, message]}, with "retire": true
                       where the process should not be used again; {"died": how} at any time
"""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any

from meshrl.core.errors import ConfigError
from meshrl.reward.kinds import Grader, make_grader

_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_CHARS = 400


def send_frame(link: socket.socket, body: bytes) -> None:
    """Send one length-prefixed frame."""
    link.sendall(_LENGTH.pack(len(body)) + body)


def read_frame(link: socket.socket, max_bytes: int = (1 << 32) - 1) -> bytes:
    """Read one frame. Raises: EOFError when the other end is closed or the frame is longer than max_bytes."""
    (length,) = _LENGTH.unpack(_read_exactly(link, _LENGTH.size))
    if length > max_bytes:
        raise EOFError(f"a frame of {length} bytes, allowed are {max_bytes}")
    return _read_exactly(link, length)


def _read_exactly(link: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = link.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other end is closed")
        parts += part
    return bytes(parts)

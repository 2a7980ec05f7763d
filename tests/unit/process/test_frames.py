"""Messages over a socket: any Python object, large arrays after its pickle; plain bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from meshrl.core.types import Request
from meshrl.process import frames

BIG = 1 << 17  # bytes: sent outside the pickle


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    if request.param == "unix":
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            a = socket.create_connection(server.getsockname())
            b, _ = server.accept()
    with a, b:
        yield a, b


def _over(pair: tuple[socket.socket, socket.socket], *objects: Any) -> list[Any]:
    """Send from another thread, because a socket's buffer is smaller than a frame."""
    sender = threading.Thread(target=lambda: [frames.send(pair[0], obj) for obj in objects])
    sender.start()
    got = [frames.receive(pair[1]) for _ in objects]
    sender.join(10)
    assert not sender.is_alive()
    return got


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {"a": [1, 2.5, "text", b"bytes"], "b": (None, True)},
        Request(id="r", context_ids=np.arange(5, dtype=np.int32)),
        "x" * 3_000_000,
    ],
    ids=["none", "plain", "record", "long text"],
)
def test_objects_come_back_equal(pair, obj):
    (got,) = _over(pair, obj)
    assert repr(got) == repr(obj)


BLOCK = np.arange(BIG // 2, dtype=np.float64).reshape(256, -1)
VIEWS = [BLOCK[::2], BLOCK.T, BLOCK[:, 3:], BLOCK[::-1], np.asfortranarray(BLOCK)]
SIZES = [np.random.default_rng(0).standard_normal(n // 8) for n in (0, 8, (1 << 16) - 8, 1 << 16, BIG, 5_000_000)]
SEVERAL = [np.full(BIG + i, i, np.uint8) for i in range(5)]


@pytest.mark.parametrize("is_writable", [True, False])
@pytest.mark.parametrize("arrays", [SIZES, VIEWS, SEVERAL], ids=["sizes", "views", "several"])
def test_arrays_come_back_to_the_bit_in_their_order(pair, arrays, is_writable):
    sent = [array.copy(order="K") if array.flags.c_contiguous else array for array in arrays]
    for array in sent:
        array.flags.writeable = is_writable
    ((got, again),) = _over(pair, (sent, sent))
    for array, first, second in zip(sent, got, again, strict=True):
        assert first.dtype == array.dtype and np.array_equal(array, first) and np.array_equal(array, second)
        if is_writable:
            first[:] = 77  # a copy in this process: the sender's array does not change
            assert array.size == 0 or not np.array_equal(array, first)


def test_many_frames_stay_apart(pair):
    sent_objects = [{"i": i, "x": np.full(i * 1000, i, np.float32)} for i in range(100)]
    for sent, got in zip(sent_objects, _over(pair, *sent_objects), strict=True):
        assert got["i"] == sent["i"] and np.array_equal(got["x"], sent["x"])


def test_the_end_of_the_stream_differs_from_an_incomplete_frame(pair):
    a, b = pair
    frames.send(a, "the last object")
    a.close()
    assert frames.receive(b) == "the last object"
    with pytest.raises(EOFError, match=r"closed the channel$"):
        frames.receive(b)


@pytest.mark.parametrize("cut", [5, 16, 40])
def test_an_end_in_the_middle_of_a_frame_raises_eof_error(pair, cut):
    a, b = pair
    c, d = socket.socketpair()
    with c, d:
        frames.send(c, list(range(100)))
        frame = d.recv(1 << 16)
    a.sendall(frame[:cut])
    a.close()
    with pytest.raises(EOFError, match="in the middle of a frame"):
        frames.receive(b)


def test_bytes_come_back_equal_and_frames_that_are_too_long_are_refused(pair):
    a, b = pair
    for body in (b"", b"text", bytes(range(256)) * 10):
        frames.send_bytes(a, body)
        assert frames.receive_bytes(b, 2560) == body
    frames.send_bytes(a, bytes(2561))
    with pytest.raises(EOFError, match="a frame has 2561 bytes; allowed: at most 2560"):
        frames.receive_bytes(b, 2560)

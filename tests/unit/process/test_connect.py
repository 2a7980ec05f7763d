"""Which processes may connect to the controller: no pickle is read before the token is proven, on either side."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import os
import pickle
import queue
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.process import frames
from meshrl.process.connect import Listener, connect

TOKEN = secrets.token_bytes(32)
Arrived = queue.SimpleQueue


@pytest.fixture
def listening() -> Iterator[tuple[Listener, Arrived]]:
    arrived: Arrived = queue.SimpleQueue()
    listener = Listener("127.0.0.1", TOKEN, lambda sock, hello: arrived.put((sock, hello)))
    yield listener, arrived
    listener.close()


def _hello(ip: str) -> tuple[int, str]:
    return 3, ip


class Touch:
    """A pickle that runs code."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_both_sides_know_the_token_and_can_talk(listening):
    listener, arrived = listening
    ours = connect(listener.address, TOKEN, _hello)
    theirs, hello = arrived.get(timeout=20)
    assert hello == (3, "127.0.0.1")
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        frames.send(sender, ["x"])
        assert frames.receive(receiver) == ["x"]
    ours.close()
    with pytest.raises(EOFError):
        frames.receive(theirs)
    theirs.close()


def test_another_token_is_refused(listening):
    listener, arrived = listening
    with pytest.raises((ConnectionError, OSError)):
        connect(listener.address, secrets.token_bytes(32), _hello)
    assert arrived.empty()


def test_a_pickle_from_a_process_without_the_token_is_not_read(listening, tmp_path):
    """And a process that sends other data does not prevent others from connecting."""
    listener, arrived = listening
    with socket.create_connection(listener.address) as outsider:
        outsider.recv(32)
        body = pickle.dumps(Touch(tmp_path / "touched"))
        outsider.sendall(bytes(64) + len(body).to_bytes(8, "little") + bytes(8) + body)
        with contextlib.suppress(ConnectionResetError):  # or the end, if the other side has read all of it
            assert outsider.recv(1) == b"", "the connection is closed"
    connect(listener.address, TOKEN, _hello).close()
    arrived.get(timeout=20)[0].close()
    assert not (tmp_path / "touched").exists()


def test_connections_are_accepted_again_after_the_limit_of_open_files_was_reached(listening, monkeypatch):
    listener, arrived = listening
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as waiting:
        free = os.dup(waiting.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # no descriptor of this number or above
        try:
            waiting.connect(listener.address)
            until = time.monotonic() + 20
            while "ulimit -n" not in stderr.getvalue() and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.3)  # more attempts
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert stderr.getvalue().count("ulimit -n") == 1
    connect(listener.address, TOKEN, _hello).close()
    arrived.get(timeout=20)[0].close()


def test_a_controller_that_does_not_know_the_token_gets_no_message():
    """It could send back the proof that it received, so each side's proof contains the side's name."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reflect() -> None:
            sock, _ = server.accept()
            with sock:
                nonce = secrets.token_bytes(32)
                sock.sendall(nonce)
                answer = sock.recv(64, socket.MSG_WAITALL)
                assert answer[32:] == hmac.digest(TOKEN, b"rank" + nonce + answer[:32], hashlib.sha256)
                sock.sendall(answer[32:])

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(ConnectionError, match="is not the controller of this run"):
            connect(server.getsockname(), TOKEN, _hello)
        thread.join()

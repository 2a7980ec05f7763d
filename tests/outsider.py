"""A script: a process of another user, which tries to run code in a run that torchrun has started.

    outsider.py HOST PORT FOLDER MARK

HOST and PORT are of torchrun's store, FOLDER is run.folder. It reads everything from the store, tries to read the file
with the token, and sends the controller a pickle that creates the file MARK: without authentication, and with each
secret that can be derived from what it has read. It prints a JSON object of what it has seen. Needs root to begin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from meshrl.process import frames
from meshrl.process.connect import connect

OTHER_USER = 65534


class Touch:
    """A pickle that runs code."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def _everything_in(store: dist.TCPStore) -> dict[str, str]:
    """All keys and values, as soon as the controller has written its own."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        keys = store.list_keys()
        if any("meshrl" in key for key in keys):
            return {key: store.get(key).decode(errors="replace") for key in keys}
        time.sleep(0.01)
    raise TimeoutError(f"the controller has written nothing; keys: {store.list_keys()}")


def _secrets(texts: list[str]) -> Iterator[bytes]:
    """What could be the key of a handshake."""
    for word in {word for text in texts for word in re.findall(r"[0-9a-zA-Z]{8,}", text)} | {""}:
        yield word.encode()
        yield hashlib.sha256(b"meshrl run token\0" + word.encode()).digest()
        with contextlib.suppress(ValueError):
            yield bytes.fromhex(word)


def main(host: str, port: str, folder: str, mark: str) -> None:
    host.encode("idna")  # loads a module that the other user may not be able to read
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    found = _everything_in(dist.TCPStore(host, int(port), is_master=False))
    texts, refused = [text for pair in found.items() for text in pair], {}
    for file in sorted(Path(folder).glob(".meshrl-token-*")):
        try:
            texts.append(file.read_text())
        except OSError as error:
            refused[file.name] = type(error).__name__
    (text,) = (value for key, value in found.items() if "meshrl/controller" in key)
    controller = re.search(r'([\w.:-]+)[\s",]+(?:"port": )?(\d+)', text)
    assert controller is not None, text
    address = controller[1], int(controller[2])
    with socket.create_connection(address) as sock:
        sock.recv(32)
        frames.send(sock, Touch(mark))
        sock.settimeout(30)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b"", "the connection is closed"
    accepted, tried = 0, 0
    for secret in _secrets(texts):
        tried += 1
        with contextlib.suppress(OSError):
            connect(address, secret, lambda ip: Touch(mark)).close()
            accepted += 1
    print(json.dumps({"store": found, "refused": refused, "tried": tried, "accepted": accepted}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The secret of a run whose processes a launcher such as torchrun has started: each has it without a connection.

It is the text of MESHRL_TOKEN where that is set. Otherwise the controller's process writes a random secret into a file
that only its user can read, in a folder that all processes share. The launcher's store, which every process of the
network can read and write, has the controller's address and a proof of it, which is made with the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from pathlib import Path

from meshrl.core.errors import MeshrlError

VARIABLE = "MESHRL_TOKEN"
_BY_VARIABLE = "-"  # in an announcement, in place of a file's id
_ANNOUNCEMENT = re.compile(r"(\S{1,255}) (\d{1,5}) ([0-9a-f]{32}|-) ([0-9a-f]{64})", re.ASCII)
_SECRET = re.compile(r"[0-9a-f]{64}")
_VISIBLE_S = 20.0  # a network file system may show a new file late
_REMEDY = (
    "All processes need the same run.folder, on a file system that their machines share and that keeps owners and "
    f"permissions; or set {VARIABLE} to the same secret in all of them, such as the output of `openssl rand -hex 32`"
)


class RunToken:
    """The controller's token. key: for `connect.Listener`. The file exists until `remove`."""

    def __init__(self, folder: Path):
        """folder: of the file; it is created if it does not exist."""
        self._path: Path | None = None
        self._file_id, secret = _BY_VARIABLE, _environment_secret()
        if secret is None:
            self._file_id, secret = secrets.token_hex(16), secrets.token_hex(32)
            folder.mkdir(parents=True, exist_ok=True)
            self._path = _path(folder, self._file_id)
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with open(fd, "w", encoding="ascii") as file:
                    file.write(secret)
                _read(self._path)
            except BaseException:
                self.remove()
                raise
        self.key = _key(secret)

    def announcement(self, name: str, address: tuple[str, int]) -> str:
        """The text for the launcher's store. name: its key there."""
        return f"{address[0]} {address[1]} {self._file_id} {_proof(self.key, name, *address, self._file_id)}"

    def remove(self) -> None:
        """Remove the file; safe to call twice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path = None


def read_announcement(text: bytes, name: str, folder: Path) -> tuple[tuple[str, int], bytes]:
    """(address of the controller, key) from the launcher's store, by a process that has the secret. Nothing in the
    text is used before its proof is checked, except the id of a file in `folder`."""
    match = _ANNOUNCEMENT.fullmatch(text.decode("ascii", errors="replace"))
    if match is None:
        raise MeshrlError(
            f"the launcher's store has {text[:200]!r} as the address of the controller; expected: HOST PORT FILE "
            "PROOF. Another process, or another version of meshrl, has written it. Use the same meshrl in all "
            "processes, and let no other machine reach MASTER_PORT"
        )
    host, port, file_id, proof = match[1], int(match[2]), match[3], match[4]
    secret = _environment_secret()
    if (secret is None) != (file_id != _BY_VARIABLE):
        has, lacks = ("this process", "the controller") if secret is not None else ("the controller", "this process")
        raise MeshrlError(f"{VARIABLE} is set in {has}, but not in {lacks}. {_REMEDY}")
    key = _key(_read(_path(folder, file_id), _VISIBLE_S) if secret is None else secret)
    if not hmac.compare_digest(proof, _proof(key, name, host, port, file_id)):
        raise MeshrlError(
            f"the launcher's store has {host}:{port} as the address of the controller, but its proof was not made with "
            "the secret of this process: the processes have different secrets, or a process outside the run has "
            f"written the address. {_REMEDY}"
        )
    return (host, port), key


def _environment_secret() -> str | None:
    return os.environ.get(VARIABLE) or None


def _path(folder: Path, file_id: str) -> Path:
    return folder / f".meshrl-token-{file_id}"


def _read(path: Path, wait_s: float = 0.0) -> str:
    """The secret in a file, which only this user could write and read. wait_s: for the file to appear."""
    until = time.monotonic() + wait_s
    while not os.path.lexists(path) and time.monotonic() < until:
        time.sleep(0.2)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise MeshrlError(f"{path}, the secret of this run, can't be read: {error.strerror}. {_REMEDY}") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        wrong = None
        if not stat.S_ISREG(status.st_mode):
            wrong = "it is not a regular file"
        elif status.st_uid != os.geteuid():
            wrong = f"its owner has the user id {status.st_uid}, this process has {os.geteuid()}"
        elif status.st_mode & 0o077:
            wrong = f"its permissions are {stat.S_IMODE(status.st_mode):03o}; allowed: none for group and others"
        secret = "" if wrong else file.read(65).decode("ascii", errors="replace")
    if wrong is None and not _SECRET.fullmatch(secret):
        wrong = "it does not contain 64 hexadecimal digits"
    if wrong is not None:
        raise MeshrlError(f"{path} can't be used as the secret of this run: {wrong}. {_REMEDY}")
    return secret


def _key(secret: str) -> bytes:
    return hashlib.sha256(b"meshrl run token\0" + os.fsencode(secret)).digest()


def _proof(key: bytes, name: str, host: str, port: int, file_id: str) -> str:
    message = "\0".join(["controller's address", name, host, str(port), file_id])
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()

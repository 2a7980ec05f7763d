"""Shared memory and temporary folders of dead processes are removed, those of running processes are not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.process import leases
from meshrl.process.leases import LeasedFolder, new_name, sweep
from meshrl.rollout.server.process import ServerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a boot id")

BINDS = """
import socket, tempfile, uuid
socket.socket(socket.AF_UNIX).bind(f"{tempfile.gettempdir()}/{uuid.uuid4()}")
print("bound")
"""

OWNER = """
import sys
from meshrl.process.leases import LeasedFolder
from meshrl.sync.shared_memory import SharedRing
ring, folder = SharedRing(2, 1000), LeasedFolder()
(folder.path / "deep").mkdir()
(folder.path / "deep" / "file").write_text("x")
print(ring.name, folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.parametrize("length", [10, 90])
def test_sockets_of_a_server_can_be_bound_also_with_a_long_folder_for_temporary_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, length: int
):
    """In TMPDIR a server makes sockets named by 36 characters; they need a folder whose path is short, which is swept
    like others."""
    long = Path(tempfile.mkdtemp(dir="/tmp"), "x" * length)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    server = ServerProcess("s", lambda folder: [sys.executable, "-c", BINDS], {})
    server.wait_until(lambda: server.ends_within(0.1), 60)
    assert "bound" in server.diagnosis() and server.folder.stat().st_mode & 0o777 == 0o700
    assert server.folder.parent == (long if length == 10 else Path("/tmp"))
    left = server.folder.with_name(new_name())
    left.mkdir()
    server.close()
    sweep()
    assert not server.folder.exists() and not left.exists()
    shutil.rmtree(long.parent)


@contextlib.contextmanager
def an_owner() -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """A process with a ring and a folder, and the paths of both; in its own session."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with owner:
        assert owner.stdout is not None
        name, folder = owner.stdout.readline().split()
        try:
            yield owner, Path("/dev/shm") / name, Path(folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(owner.pid, signal.SIGKILL)


def test_resources_of_a_killed_run_are_removed_and_those_of_a_running_one_are_not():
    from meshrl.sync.shared_memory import SharedRing

    ring, folder = SharedRing(2, 1000), LeasedFolder()
    held = [Path("/dev/shm") / ring.name, folder.path]
    with an_owner() as (dead, *left):
        assert all(path.exists() for path in left + held) and not sweep_of(*left, *held)
        os.killpg(dead.pid, signal.SIGKILL)
        dead.wait()
        assert all(path.exists() for path in left), "else there is nothing to sweep"
        assert sweep_of(*left) == {*left}
        assert not any(path.exists() for path in left) and all(path.exists() for path in held)
    ring.close()


def test_a_folder_is_removed_with_its_object():
    folder, dropped = LeasedFolder(), LeasedFolder()
    paths = folder.path, dropped.path
    assert all(path.is_dir() and path.stat().st_mode & 0o777 == 0o700 for path in paths) and not sweep_of(*paths)
    folder.close()
    folder.close()
    del dropped
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize("kind", ["folder", "segment"])
def test_a_sweep_between_creating_and_locking_makes_the_owner_create_another_resource(kind, monkeypatch):
    """The only moment when a resource of a running process has no lease."""
    from meshrl.sync.shared_memory import SharedRing

    real, taken = leases.fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not taken:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            taken.append(path)
            assert sweep_of(path) == {path}
        real(fd, how)

    monkeypatch.setattr(leases.fcntl, "flock", flock)
    if kind == "folder":
        made = LeasedFolder()
        path = made.path
    else:
        made = SharedRing(1, 64)
        path = Path("/dev/shm") / made.name
    assert path.exists() and path not in taken and not sweep_of(path)
    made.close()


def test_a_sweep_while_a_segment_closes_finds_its_lease(monkeypatch):
    """Otherwise the owner's own unlink fails, and the end of a run with it."""
    from meshrl.sync import shared_memory

    ring, unlink = shared_memory.SharedRing(1, 64), shared_memory._posixshmem.shm_unlink

    def after_a_sweep(name: str) -> None:
        assert not sweep_of(Path("/dev/shm") / ring.name)
        unlink(name)

    monkeypatch.setattr(shared_memory._posixshmem, "shm_unlink", after_a_sweep)
    ring.close()
    assert not (Path("/dev/shm") / ring.name).exists()


def test_resources_with_other_names_are_not_removed(temporary: Path):
    """They were made by another program, or on another machine that shares the disk: its locks are not visible here."""
    other_kernel = new_name().replace(new_name().split("_")[1], "0badcafe")
    paths = [temporary / name for name in ("meshrl_0123456789abcdef0123", "meshrl_k3jd83_a", other_kernel, "other")]
    for path in paths:
        path.mkdir()
    own = temporary / new_name()
    own.mkdir()
    assert sweep_of(*paths, own) == {own}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_symbolic_link_is_neither_followed_nor_removed(kind: str, temporary: Path):
    target, link = temporary / "precious", temporary / new_name()
    target.mkdir() if kind == "folder" else target.touch()
    link.symlink_to(target)
    assert not sweep_of(link) and target.exists() and link.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_resources_of_another_user_are_not_removed(temporary: Path):
    path = temporary / new_name()
    path.mkdir()
    os.chown(path, 65534, 65534)
    assert not sweep_of(path) and path.is_dir()


def sweep_of(*paths: Path) -> set[Path]:
    """Which of these paths a sweep removes."""
    before = {path for path in paths if path.exists()}
    sweep()
    return {path for path in before if not path.exists()}

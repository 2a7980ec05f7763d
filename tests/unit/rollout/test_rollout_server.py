"""A server as a child: it is waited for, its end is diagnosed, and nothing of it outlives its parent (P31)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from living_processes import is_living

from meshrl.core.errors import EngineFailure
from meshrl.process.leases import sweep
from meshrl.rollout.server.process import ServerProcess

PARENT_OF_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={session})
print(child.pid, flush=True)
time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def printed(server: ServerProcess) -> str:
    return (server.folder / "log.txt").read_text()


def gone(pid: int, within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not is_living(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_server_that_ends_before_it_is_ready_is_reported_with_what_it_wrote():
    server = ServerProcess("s", lambda folder: python("import sys; print('no such model'); sys.exit(3)"), {})
    with pytest.raises(EngineFailure, match=r"ended before it was ready \(exit code 3\).*\nno such model"):
        server.wait_until(lambda: False, 60)
    assert server.has_ended()
    server.close()


def test_a_server_that_is_killed_says_so():
    server = ServerProcess("s", lambda folder: python("import os; os.kill(os.getpid(), 9)"), {})
    with pytest.raises(EngineFailure, match=r"\(SIGKILL\); it wrote nothing"):
        server.wait_until(lambda: False, 60)
    server.close()


def test_a_server_that_is_never_ready_is_ended_at_its_deadline():
    server = ServerProcess("s", lambda folder: python("import time; time.sleep(600)"), {})
    with pytest.raises(EngineFailure, match=r"not ready after 0.3 s"):
        server.wait_until(lambda: False, 0.3)
    assert server.has_ended() and not server.folder.exists()


@pytest.mark.parametrize("session", [False, True])
def test_closing_ends_what_the_server_started_too(session: bool):
    server = ServerProcess("s", lambda folder: python(PARENT_OF_CHILD.format(session=session)), {})
    server.wait_until(lambda: printed(server).endswith("\n"), 60)
    child = int(printed(server))
    assert psutil.pid_exists(child)
    server.close()
    assert gone(child) and not server.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only there is anything swept")
@pytest.mark.parametrize("guard_ends", [False, True], ids=["the guard lives", "the guard is killed too"])
def test_no_sweep_takes_the_folder_of_a_server_whose_guard_still_lives(guard_ends: bool):
    """A parent that is killed leaves it to the guard, which may need a while; without both it is nobody's."""
    code = (
        "import time; from meshrl.rollout.server.process import ServerProcess\n"
        f"s = ServerProcess('s', lambda folder: {python('import time; time.sleep(600)')!r}, {{}})\n"
        "print(s.pid, s.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    guard, folder = parent.stdout.readline().split()
    with contextlib.closing(parent.stdout):
        os.kill(int(guard), signal.SIGSTOP)
        parent.kill()
        parent.wait()
    assert Path(folder) not in sweep() and Path(folder).is_dir()
    os.kill(int(guard), signal.SIGKILL if guard_ends else signal.SIGCONT)
    assert gone(int(guard))
    assert not guard_ends or Path(folder) in sweep()
    assert not Path(folder).exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path, how: signal.Signals):
    """Not even a worker in a session of its own; and no folder stays."""
    command = python(PARENT_OF_CHILD.format(session=True))
    code = (
        "import time; from meshrl.rollout.server.process import ServerProcess\n"
        f"s = ServerProcess('s', lambda folder: {command!r}, {{}})\n"
        "s.wait_until(lambda: (s.folder / 'log.txt').read_text().endswith('\\n'), 60)\n"
        "print((s.folder / 'log.txt').read_text().strip(), s.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, folder = parent.stdout.readline().split()
    with contextlib.closing(parent.stdout):
        os.kill(parent.pid, how)
        parent.wait()
    assert gone(int(child))
    until = time.monotonic() + 20
    while Path(folder).exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(folder).exists()

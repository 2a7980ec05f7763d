"""A server as a child process: waiting until it is ready, diagnosis of its end, and cleanup after its parent."""

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
from running_processes import is_running_process

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
        if not is_running_process(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_server_that_ends_before_it_is_ready_is_reported_with_its_output():
    server = ServerProcess("s", lambda folder: python("import sys; print('no such model'); sys.exit(3)"), {})
    with pytest.raises(EngineFailure, match=r"ended before it was ready \(exit code 3\).*\nno such model"):
        server.wait_until(lambda: False, 60)
    assert server.ends_within(0)
    server.close()


OUTPUT_OF_TWO_PROCESSES = """
(EngineCore pid=7) ERROR 11-25 10:11:12 [core.py:866] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-25 10:11:12 [core.py:866] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-25 10:11:12 [core.py:866]   File "core.py", line 857, in run_engine_core
(EngineCore pid=7) ERROR 11-25 10:11:12 [core.py:866]     raise ValueError("Error: too small")
(EngineCore pid=7) ERROR 11-25 10:11:12 [core.py:866] ValueError: the cache holds 4 tokens
Traceback (most recent call last):
  File "api_server.py", line 3, in main
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize("distance", [0, 5000], ids=["within the end", "before the end"])
def test_the_first_exception_is_shown_and_the_log_is_kept(tmp_path: Path, distance: int):
    """The exception of a server's main process only states that another process has failed."""
    code = f"import sys; sys.stdout.write({OUTPUT_OF_TWO_PROCESSES!r} + '.' * {distance}); sys.exit(1)"
    for attempt in range(2):
        command = python(code.replace("4 tokens", f"{attempt} tokens"))
        server = ServerProcess("s", lambda folder, command=command: command, {}, tmp_path)
        with pytest.raises(EngineFailure, match="ended before it was ready") as error:
            server.wait_until(lambda: False, 60)
        _, cause, rest = str(error.value).split("\n", 2)
        assert cause == f"ValueError: the cache holds {attempt} tokens"
        assert rest.startswith(f"The end of its output (all of it is in {tmp_path / 's.txt'}):")
    kept = (tmp_path / "s.txt").read_text()
    assert kept.count("See root cause above") == 2 and "holds 0 tokens" in kept and "holds 1 tokens" in kept


def test_a_server_has_no_variables_of_its_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """vLLM's own processes would use torchrun's store, in which their numbers collide with those of the ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("HF_HOME", "somewhere")
    code = "import os; print(*sorted(n for n in os.environ if n.startswith(('TORCHELASTIC', 'MASTER_', 'HF_HOME'))))"
    server = ServerProcess("s", lambda folder: python(code), {}, tmp_path)
    assert server.ends_within(60)
    assert (tmp_path / "s.txt").read_text().split() == ["HF_HOME"]
    server.close()


def test_a_killed_server_is_reported_with_its_signal():
    server = ServerProcess("s", lambda folder: python("import os; os.kill(os.getpid(), 9)"), {})
    with pytest.raises(EngineFailure, match=r"\(SIGKILL\); it wrote no output"):
        server.wait_until(lambda: False, 60)
    server.close()


def test_a_server_that_is_never_ready_is_ended_at_its_deadline():
    server = ServerProcess("s", lambda folder: python("import time; time.sleep(600)"), {})
    with pytest.raises(EngineFailure, match=r"not ready after 0.3 s"):
        server.wait_until(lambda: False, 0.3)
    assert server.ends_within(0) and not server.folder.exists()


@pytest.mark.parametrize("session", [False, True])
def test_closing_also_ends_processes_that_the_server_started(session: bool):
    server = ServerProcess("s", lambda folder: python(PARENT_OF_CHILD.format(session=session)), {})
    server.wait_until(lambda: printed(server).endswith("\n"), 60)
    child = int(printed(server))
    assert psutil.pid_exists(child)
    server.close()
    assert gone(child) and not server.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="folders are swept on Linux only")
@pytest.mark.parametrize("guard_ends", [False, True], ids=["the guard lives", "the guard is killed too"])
def test_no_sweep_removes_the_folder_of_a_server_with_a_living_guard(guard_ends: bool):
    """After the parent was killed, the guard still has the lease of the folder; after both were killed, no process has
    it."""
    code = (
        "import time; from meshrl.rollout.server.process import ServerProcess\n"
        f"s = ServerProcess('s', lambda folder: {python('import time; time.sleep(600)')!r}, {{}})\n"
        "print(s._process.pid, s.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    guard, folder = parent.stdout.readline().split()
    with contextlib.closing(parent.stdout):
        os.kill(int(guard), signal.SIGSTOP)
        parent.kill()
        parent.wait()
    sweep()
    assert Path(folder).is_dir()
    os.kill(int(guard), signal.SIGKILL if guard_ends else signal.SIGCONT)
    assert gone(int(guard))
    until = time.monotonic() + 20
    while guard_ends and Path(folder).exists() and time.monotonic() < until:
        sweep()  # a run in another test process may sweep first, and a child has the lease until its exec
        time.sleep(0.05)
    assert not Path(folder).exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_no_process_or_folder_outlives_a_killed_parent(tmp_path: Path, how: signal.Signals):
    """Not even a worker in its own session survives, and the folder is removed."""
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

"""Stands guard over a server: `python -m meshrl.rollout.guard FOLDER COMMAND ...`, started by
`server/process.py` in a session of its own. It imports no torch.

It waits. When the other end of its standard input closes, because the parent is gone however it ended, it kills all
that descends from it and removes the server's folder; when the command ends it kills what is left, and ends as the
command did. On Linux it inherits whatever the command leaves behind, so that no worker of the server outlives it, not
even one with a session of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

from meshrl.monitor.processes import kill_descendants

_ending = threading.Lock()  # held by whoever ends everything: the other one waits for its own end
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def main(folder: str, command: list[str]) -> None:
    """Run the command until it ends or the parent does. Does not return."""
    _linux_prctl(_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _linux_prctl(_SET_PDEATHSIG, signal.SIGKILL)
    )
    threading.Thread(target=_outlive_no_parent, args=(folder,), daemon=True).start()
    status = server.wait()
    _ending.acquire()
    kill_descendants(os.getpid())
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _outlive_no_parent(folder: str) -> None:
    os.read(0, 1)  # the parent never writes: this returns when its end closes
    _ending.acquire()
    kill_descendants(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _linux_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

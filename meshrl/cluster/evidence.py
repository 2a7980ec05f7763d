"""What can be found out about a rank's process that failed or gives no answer: how it ended, and where it stands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import IO

from meshrl.cluster.forked_process import ForkedProcess

Process = subprocess.Popen[bytes] | ForkedProcess
_FRAMES_SHOWN = 8
_COLLECTIVE = re.compile(r'File "[^"]*/torch/distributed/(?!algorithms/)')
_INNERMOST = 4  # frames that tell a wait in a collective: the call, its wrapper, and torch's dispatch


class StackFile:
    """An unnamed file into which a rank's faulthandler writes all its threads' stacks when it gets SIGUSR1."""

    def __init__(self, file: IO[bytes]):
        self._file, self._seen = file, 0

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def forget(self) -> None:
        """What stands there now is no longer news."""
        self._seen = os.fstat(self.fd).st_size

    def size(self) -> int:
        return os.fstat(self.fd).st_size - self._seen

    def read(self) -> str:
        return os.pread(self.fd, 1 << 20, self._seen).decode(errors="replace").strip()

    def close(self) -> None:
        self._file.close()


def how_it_ended(process: Process, oom_kills_before: int | None) -> str:
    """One line about a process whose channel is closed. oom_kills_before: `oom_kills()` when it was started."""
    try:
        code = process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        return "closed its channel, but its process still runs"
    if code >= 0:
        return f"its process ended with exit code {code}"
    cause = f"its process was killed by {signal.Signals(-code).name}"
    if -code != signal.SIGKILL:
        return cause
    now = oom_kills()
    if now is None or oom_kills_before is None:
        return f"{cause} (often the kernel, for lack of memory; see dmesg)"
    if now > oom_kills_before:
        num_kills = f"{now - oom_kills_before} such kill" + ("s" if now - oom_kills_before > 1 else "")
        return f"{cause}, by the kernel for lack of memory (its cgroup counts {num_kills})"
    return f"{cause} (not by its cgroup's memory limit, which has killed nobody)"


def oom_kills(system: Path = Path("/")) -> int | None:
    """How many processes of this one's cgroup the kernel has killed for lack of memory; None where nobody counts.
    system: what /proc and /sys lie in."""
    groups = system / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = system / "sys/fs/cgroup", "memory.events"
        elif controllers == "memory":
            root, name = system / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        for file in (root / path.lstrip("/") / name, root / name):  # inside a container the path may be the host's
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
            if found:
                return int(found[1])
    return None


def handles(process: Process, number: int) -> bool:
    """Whether the process has a handler for the signal yet, which would end it otherwise. True where nobody says."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.parent.parent.joinpath("self").exists():
        return True
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def waits_for_others(stacks: str) -> bool:
    """Whether the thread that runs the commands stands in a collective of torch.distributed."""
    return any(_COLLECTIVE.search(line) for line in _main_thread(stacks)[:_INNERMOST])


def shortened(stacks: str) -> str:
    """The innermost frames of the thread that runs the commands."""
    frames = _main_thread(stacks)
    more = [f"  ... {len(frames) - _FRAMES_SHOWN} more"] if len(frames) > _FRAMES_SHOWN else []
    return "\n".join(frames[:_FRAMES_SHOWN] + more)


def _main_thread(stacks: str) -> list[str]:
    """Its frames, innermost first: faulthandler lists it last."""
    last = re.split(r"^(?:Current thread|Thread) 0x\w+.*\n", stacks, flags=re.MULTILINE)[-1]
    return [line for line in last.splitlines() if line.startswith("  ")]

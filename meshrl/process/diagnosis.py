"""The processes of a run on this machine: their names and memory; and the diagnosis of one that failed or does not
answer: how it ended, its output, and its threads' stacks."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

_DUMP_S = 2.0  # writing stacks takes milliseconds; a process that needs longer can't write them
_RECORDER_S = 2.0  # as _DUMP_S
_FRAMES_SHOWN = 8
_COLLECTIVE = re.compile(r'File "[^"]*/torch/distributed/(?!algorithms/)')
_MOST_SEARCHED = 8 << 20  # bytes of an output
# The line that ends a traceback, after what a logger may write before it: "ERROR 11-25 10:11:12 [core.py:7] ".
_RAISED = re.compile(
    r"^(?:.*?[\])] ?)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout)\b(?::.*)?)$", re.M
)
_INNERMOST = 4  # frames that show a wait in a collective: the call, its wrapper, and torch's dispatch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a process. is_stopped: by a signal (SIGSTOP) or a debugger. stacks: of all threads; "" if it could
    not write them. collective: its last one, by torch's flight recorder; None for a process that does not serve it."""

    is_stopped: bool = False
    stacks: str = ""
    collective: str | None = None


def snapshot(pid: int, send_signal: Callable[[int], None], file: IO[bytes], recorder: str = "") -> Snapshot:
    """Make a process write its stacks to this file: it has registered faulthandler for SIGUSR1. Blocks for at most
    _DUMP_S. The handler is C code: it needs neither the GIL nor a thread that answers. recorder: the socket on which
    it serves torch's flight recorder, which takes at most _RECORDER_S more."""
    if is_stopped(pid):
        return Snapshot(is_stopped=True)
    collective = last_collective(recorder) if recorder else None
    if not handles(pid, signal.SIGUSR1):
        return Snapshot(collective=collective)
    start, size = os.fstat(file.fileno()).st_size, 0
    send_signal(signal.SIGUSR1)
    until = time.monotonic() + _DUMP_S
    while time.monotonic() < until:
        time.sleep(0.1)
        before, size = size, os.fstat(file.fileno()).st_size - start
        if size and size == before:
            break
    stacks = os.pread(file.fileno(), 1 << 20, start).decode(errors="replace").strip()
    return Snapshot(stacks=stacks, collective=collective)


def last_collective(recorder: str) -> str:
    """One line about the last collective of the process that serves torch's flight recorder on this socket."""
    problem = "it has none for this backend"
    try:
        for handler in ("dump_nccl_trace_json", "fr_trace_json"):  # NCCL has a recorder of its own
            connection = http.client.HTTPConnection("localhost")
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(_RECORDER_S)
                sock.connect(recorder)
                connection.sock = sock
                connection.request("POST", f"/handler/{handler}")
                answer = connection.getresponse()
                if answer.status == http.HTTPStatus.OK:
                    return collective_text(json.loads(answer.read()))
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        problem = str(error) or type(error).__name__
    return f"not known: no records of the flight recorder ({problem})"


def collective_text(records: Mapping[str, Any]) -> str:
    """The collective that the process waits for: of the records of torch's flight recorder (version 2), the oldest that
    has not ended, else the last."""
    entries = sorted(records.get("entries") or (), key=lambda entry: entry["record_id"])
    if not entries:
        return "none is recorded"
    waiting = [entry for entry in entries if entry["state"] != "completed" and not entry["retired"]]
    entry = (waiting or entries[-1:])[0]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    name, group, sizes = entry["profiling_name"], entry["process_group"][-1], entry["input_sizes"]
    text = f"{name}, number {number} of group {group}, of {sizes}"
    if not waiting:
        return f"{text}, has ended"
    return f"{text}, {entry['state']}" + (f"; {len(waiting) - 1} later ones wait" if len(waiting) > 1 else "")


def rank_at_fault(first: int, busy: Mapping[int, Snapshot]) -> tuple[int, str]:
    """The rank that is the cause of a missed deadline, and a note for the error: a stopped rank, else one for which the
    others wait in a collective. first: the rank that missed the deadline. busy: the ranks that run a command."""
    stopped = [rank for rank, taken in busy.items() if taken.is_stopped]
    if stopped:
        return stopped[0], "; its process is stopped (SIGSTOP, or a debugger)"
    at_work = [rank for rank, taken in busy.items() if not waits_for_others(taken.stacks)]
    if len(at_work) > 1 and any(busy[rank].collective is not None for rank in at_work):
        return first, (
            "; which rank is the cause can't be determined, because on accelerators the stacks of ranks "
            f"{', '.join(map(str, at_work))} do not show whether they compute or wait for others. Compare their last "
            "collectives"
        )
    if first in at_work or not at_work:
        return first, ""
    return at_work[0], f", and rank {first} waits for it"


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped the process."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def handles(pid: int, number: int) -> bool:
    """Whether the process has installed a handler for the signal; without one, the signal would end it. True if the
    system does not report this."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return sys.platform != "linux"
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def exit_text(code: int) -> str:
    """Text such as `exit code 3`, or the name of the signal that killed the process, such as `SIGKILL`."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def how_it_ended(code: int, oom_kills_before: int | None) -> str:
    """One line about a process that has ended. oom_kills_before: `oom_kills()` when it was started."""
    if code >= 0:
        return f"its process ended with {exit_text(code)}"
    cause = f"its process was killed by {exit_text(code)}"
    if -code != signal.SIGKILL:
        return cause
    now = oom_kills()
    if now is None or oom_kills_before is None:
        return f"{cause} (often the kernel, for lack of memory; see dmesg)"
    if now > oom_kills_before:
        num_kills = f"{now - oom_kills_before} such kill" + ("s" if now - oom_kills_before > 1 else "")
        return f"{cause}, by the kernel for lack of memory (its cgroup counts {num_kills})"
    return f"{cause} (not by its cgroup's memory limit, which has killed no process)"


def oom_kills(system: Path = Path("/")) -> int | None:
    """How many processes of this process's cgroup the kernel has killed for lack of memory; None if it does not count
    them. system: the folder that contains /proc and /sys."""
    for text in of_cgroup("memory.events", "memory.oom_control", system):
        if match := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(match[1])
    return None


def memory_limit(system: Path = Path("/")) -> int:
    """Bytes that the processes of this machine may use: its memory, or the limit of this process's cgroup if that is
    less. system: as in oom_kills."""
    limits = (text.strip() for text in of_cgroup("memory.max", "memory.limit_in_bytes", system))
    return min([psutil.virtual_memory().total, *(int(text) for text in limits if text.isdecimal())])


def of_cgroup(name: str, name_in_version_1: str, system: Path) -> Iterator[str]:
    """The contents of a file of the cgroup of this process, from its group to the root. system: as in oom_kills."""
    groups = system / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = system / "sys/fs/cgroup" / controllers
        for folder in (root / path.lstrip("/"), root):  # inside a container the path may be the host's
            file = folder / (name_in_version_1 if controllers else name)
            if file.is_file():
                yield file.read_text()


def output_tail(output: IO[bytes], max_bytes: int, start: int = 0) -> str:
    """The last bytes of a process's output file, as text. start: where its output begins in the file."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), max_bytes, max(start, size - max_bytes)).decode(errors="replace").strip()


def first_exception(output: IO[bytes], start: int = 0) -> str:
    """The last line of the first Python traceback in a process's output, or "". Servers of several processes log the
    traceback that is the cause first, and then those of the processes that waited for it."""
    text = os.pread(output.fileno(), _MOST_SEARCHED, start).decode(errors="replace")
    _, traceback, after = text.partition("Traceback (most recent call last):")
    raised = _RAISED.search(after)
    return raised[1].strip() if traceback and raised is not None else ""


def waits_for_others(stacks: str) -> bool:
    """Whether the main thread is in a collective of torch.distributed."""
    return any(_COLLECTIVE.search(line) for line in _main_thread(stacks)[:_INNERMOST])


def innermost_frames(stacks: str) -> str:
    """The innermost frames of the main thread."""
    frames = _main_thread(stacks)
    more = [f"  ... {len(frames) - _FRAMES_SHOWN} more"] if len(frames) > _FRAMES_SHOWN else []
    return "\n".join(frames[:_FRAMES_SHOWN] + more)


def _main_thread(stacks: str) -> list[str]:
    """The main thread's frames, innermost first. faulthandler lists the main thread last."""
    last = re.split(r"^(?:Current thread|Thread) 0x\w+.*\n", stacks, flags=re.MULTILINE)[-1]
    return [line for line in last.splitlines() if line.startswith("  ")]


_NAMES = {
    "meshrl.cluster.worker": "rank",
    "meshrl.reward.worker": "reward",
    "meshrl.process.fork_server": "fork_server",
}


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """A process and its resident memory. name: rank_0, reward, fork_server; "other" if meshrl did not start it."""

    pid: int
    name: str
    rss_bytes: int


def family(pid: int) -> Iterator[FamilyMember]:
    """A process and all its descendants, except those that end meanwhile."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            yield FamilyMember(process.pid, _name(process), process.memory_info().rss)
        except psutil.NoSuchProcess:  # it has ended since it was listed
            continue


_most_resident = 0


def own_memory() -> dict[str, int]:
    """Resident memory of this process: now, at its peak, which the system updates later, and on Linux at its peak since
    the last call."""
    global _most_resident
    now, unit = psutil.Process().memory_info().rss, 1 if sys.platform == "darwin" else 1024
    since = max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    _most_resident = max(_most_resident, since)
    parts = {"resident_bytes": now, "peak_resident_bytes": _most_resident}
    with suppress(OSError):
        text = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        parts["peak_bytes"] = max(now, int(re.search(r"VmHWM:\s+(\d+)", text)[1]) << 10)  # type: ignore[index]
    return parts


def _name(process: psutil.Process) -> str:
    try:
        arguments = process.cmdline()
    except psutil.AccessDenied:
        return "other"
    for module, name in _NAMES.items():
        if module in arguments:
            return next((word for word in arguments if re.fullmatch(rf"{name}_\d+", word)), name)
    return "other"


def has_open(pid: int, path: Path) -> bool:
    """Whether a process of this user has this file open."""
    try:
        return any(path.samefile(opened.path) for opened in psutil.Process(pid).open_files())
    except (psutil.Error, OSError):
        return False

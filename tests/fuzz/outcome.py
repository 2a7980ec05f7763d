"""The results of reading damaged files: an error of meshrl that names the file, or a value; all else is a finding."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from damage import Damage

from meshrl.core.errors import MeshrlError

CPU_LIMIT_S = 20.0  # CPU seconds for one reading, which takes milliseconds
WAIT_LIMIT_S = 100.0  # seconds for one reading that waits, as for the other end of a pipe
ROOM_BYTES = 3 << 30  # address space for one reading, in addition to the process's


class Hung(BaseException):
    """Not an Exception, so that no code handles it as an error of a library."""


def check(*args: Any, **kwargs: Any) -> None:
    """Fails with a summary of `findings`."""
    found = findings(*args, **kwargs)
    if found:
        raise AssertionError("\n".join(f"{text:.700}" for text in found[:20]) + f"\n({len(found)} findings)")


def findings(
    folder: Path,
    name: str,
    damages: Iterable[Damage],
    read: Callable[[Path], Any],
    judge: Callable[[Damage, Any], str | None] = lambda damage, value: None,
    named: Iterable[str] = (),
) -> list[str]:
    """Damage the file `name` in a copy of `folder`, with one damage at a time, and read the copy. Returns the faults.

    read: gets the copy. judge: the fault of a value that was read, None when it is right. named: texts; an error must
    contain one of them; by default the file's name.
    """
    found, named = [], [*named] or [Path(name).name]
    copy = folder.with_name(folder.name + "-damaged")
    for damage in damages:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, symlinks=True)
        damage.put(copy / name)
        fault = _fault_of(damage, copy, read, judge, named)
        if fault is not None:
            found.append(f"{name}, {damage.name}: {fault}")
    shutil.rmtree(copy, ignore_errors=True)
    return found


def _fault_of(damage: Damage, copy: Path, read: Any, judge: Any, named: list[str]) -> str | None:
    began, before = time.monotonic(), listing(copy)
    try:
        with limits():
            value = read(copy)
    except MeshrlError as error:
        if listing(copy) != before:
            return f"refused, but left {sorted(listing(copy) ^ before)}"
        if damage.kind == "harmless":
            return f"refused, although nothing is wrong: {error}"
        if not any(text in str(error) for text in named):
            return f"the error does not name {' or '.join(named)}: {type(error).__name__}: {error}"
        return None if len(str(error)) < 20_000 else f"an error of {len(str(error))} characters"
    except Hung:
        return f"no answer in {time.monotonic() - began:.0f} s"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error!s:.300}"
    return judge(damage, value)


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limits of time and address space for the block, which must run in the main thread."""

    def hung(*_: Any) -> None:
        raise Hung

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    timers = {signal.SIGPROF: (signal.ITIMER_PROF, CPU_LIMIT_S), signal.SIGALRM: (signal.ITIMER_REAL, WAIT_LIMIT_S)}
    previous = {number: signal.signal(number, hung) for number in timers}
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, hard))
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in previous.items():
            signal.signal(number, handler)

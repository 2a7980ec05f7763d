"""A process that grades, started by `sandbox.py` as `python -m meshrl.reward.worker FD`, below a guard
(process/guard.py). It imports no torch. It reads batches from the socket FD and answers each item as soon as it is
graded.

math_answer evaluates what a model wrote, so its work is unbounded. A grading of it has a limit of CPU time, which the
load of the machine doesn't change, and the kernel enforces it with SIGPROF, which also ends a hang in C. The
process dies instead of raising an exception: one inside of SymPy leaves caches behind that change later results.

Frames are bytes (process/frames.py): pickle towards the worker, which trusts its parent, and JSON back, so that no
answer can run code in the parent.

    parent -> worker   dict(terms={term: (kind, args)}, functions={term: pickled function}, timeout_s,
                       max_memory_bytes), then lists of (term, payload)
    worker -> parent   {"ready": [async terms], "cpu_limited": [terms]} | {"config_error": text}, then for each item of
                       a list {"item": i, "value": float} | {"item": i, "failure": [kind, message]}, with
                       "retire": true where the process should not be used again
"""

from __future__ import annotations

import json
import math
import numbers
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from meshrl.core.errors import ConfigError
from meshrl.process.frames import receive_bytes, send_bytes
from meshrl.process.guard import fork_below_guard
from meshrl.reward.kinds import Grader, make_grader
from meshrl.reward.math_answer import math_answer

MATH_CPU_S = 1.0
"""CPU seconds of one grading by math_answer; nearly all take less than a tenth."""

_MAX_MESSAGE_CHARS = 400


def main(fd: int) -> NoReturn:
    """Serve below a guard, which ends as this process does."""
    fork_below_guard()
    serve(socket.socket(fileno=fd))
    os._exit(0)


def serve(link: socket.socket) -> None:
    """Read the setup, say ready, grade batches until the parent closes the socket."""
    setup = pickle.loads(receive_bytes(link))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, setup["max_memory_bytes"])
    sys.path.append(os.getcwd())
    try:
        functions = setup["functions"]
        graders = {t: make_grader(t, kind, args, functions.get(t)) for t, (kind, args) in setup["terms"].items()}
    except ConfigError as error:
        _send(link, config_error=str(error))
        return
    _drop_output()
    cpu_s = min(MATH_CPU_S, setup["timeout_s"] / 2)  # before the parent's clock, also on a busy machine
    cpu_limits = {term: cpu_s for term, grader in graders.items() if grader.function is math_answer}
    _send(link, ready=[term for term, grader in graders.items() if grader.is_async], cpu_limited=list(cpu_limits))
    keeps_children = _has_children()  # a user's module may start a helper process at import
    loop = None
    while True:
        try:
            batch = pickle.loads(receive_bytes(link))
        except EOFError:
            return
        if not graders[batch[0][0]].is_async:
            _grade_in_order(link, graders, cpu_limits, batch, keeps_children)
            continue
        if loop is None:
            import asyncio  # the slowest import here by far, and most workers never need it

            loop = asyncio.new_event_loop()
        loop.run_until_complete(_grade_together(link, graders, batch, setup["timeout_s"]))


def _grade_in_order(
    link: socket.socket, graders: dict[str, Grader], cpu_limits: dict[str, float], batch: list, keeps_children: bool
) -> None:
    """One item after the other; the parent holds the clock, which each answer restarts."""
    pid = os.getpid()
    for index, (term, payload) in enumerate(batch):
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_limits.get(term, 0.0))  # 0 = no limit
            reply = _judged(graders[term](payload))
        except BaseException as error:  # user code: SystemExit and KeyboardInterrupt included
            reply = _failed(error)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if os.getpid() != pid:
            os._exit(0)  # the function forked, and this is the child coming back from it
        if not keeps_children and _has_children():
            reply["retire"] = True  # what it left running is killed with this process group
        _send(link, item=index, **reply)
        if "retire" in reply:
            return


async def _grade_together(link: socket.socket, graders: dict[str, Grader], batch: list, timeout_s: float) -> None:
    """All items at once: they mostly wait for an endpoint. Each has its own clock from now on."""
    import asyncio

    async def one(index: int, term: str, payload: dict[str, Any]) -> None:
        clock = asyncio.timeout(timeout_s)
        try:
            async with clock:
                value = await graders[term](payload)
            reply = _judged(value)
        except BaseException as error:  # user code
            reply = _failed(error)
            if clock.expired():
                reply = {"failure": ["timeout", f"no answer within {timeout_s:g} s"]}
        _send(link, item=index, **reply)

    await asyncio.gather(*(one(index, term, payload) for index, (term, payload) in enumerate(batch)))


def _judged(value: Any) -> dict[str, Any]:
    """The reply for what a reward function returned: a finite number, or a failure that shows the value."""
    if isinstance(value, bool | numbers.Real) and math.isfinite(value):
        return {"value": float(value)}
    text = repr(value)[:100]
    return {"failure": ["bad_value", f"returned {text} ({type(value).__name__}); a reward is a finite number"]}


def _failed(error: BaseException) -> dict[str, Any]:
    """The reply for what a reward function raised, with the place in the user's code."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {where[0].filename}:{where[0].lineno}" if where else ""
    message = " ".join(f"{type(error).__name__}: {error}{place}".split())[:_MAX_MESSAGE_CHARS]
    if isinstance(error, MemoryError):
        return {"failure": ["memory", message], "retire": True}
    return {"failure": ["crash", message]}


def _has_children() -> bool:
    """Whether this process has children, running or not yet waited for. Never True where waitid is missing."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _drop_output() -> None:
    """From here on, what a function prints goes nowhere; before, it explains why a worker did not start."""
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _send(link: socket.socket, **reply: Any) -> None:
    send_bytes(link, json.dumps(reply).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A process that grades, started by `sandbox.py` as `python -m meshrl.reward.worker FD`, below a guard
(process/guard.py). It imports no torch. It reads batches from the socket FD and answers each item as soon as it is
graded.

math_answer evaluates expressions that a model wrote, so its work is unbounded. Each of its gradings has a limit of CPU
time, which does not depend on the machine's load. The kernel enforces the limit with SIGPROF, which also ends a hang in
C. The process dies and raises no exception: an exception inside SymPy leaves caches that change later results.

Messages (process/frames.py) are objects to the worker, which trusts its parent, and JSON back, so that no answer can
run code in the parent.

    parent -> worker   dict(request=name, terms={term: (kind, args)}, functions={term: pickled function}, timeout_s,
                       max_memory_bytes, max_reward), then (name, list of (term, payload)) for each batch
    worker -> parent   {"request": name} with "async": [terms], "cpu_limited": [terms], "of_tokens": [terms] |
                       "config_error": text, then for each item of a batch {"request": name, "item": i} with "value":
                       float or null (it abstains) | "failure": [kind, message], and with "retire": true where the
                       process should not be used again.
"""

from __future__ import annotations

import io
import json
import math
import numbers
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from meshrl.core.errors import ConfigError, RewardError
from meshrl.process.frames import receive, send_bytes
from meshrl.process.guard import fork_below_guard
from meshrl.reward.kinds import OF_TOKENS, Grader, make_grader
from meshrl.reward.math_answer import math_answer
from meshrl.reward.replies import error_line, one_line

MATH_CPU_S = 1.0
"""CPU seconds of one grading by math_answer; nearly all gradings take less than a tenth of it."""


def main(fd: int) -> NoReturn:
    """Serve below a guard process, which ends with this process."""
    fork_below_guard()
    serve(socket.socket(fileno=fd))
    os._exit(0)


def serve(link: socket.socket) -> None:
    """Read the setup, report ready, grade batches until the parent closes the socket."""
    setup = receive(link)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a worker that is killed has printed its lines
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, setup["max_memory_bytes"])
    sys.path.append(os.getcwd())
    try:
        functions = setup["functions"]
        graders = {t: make_grader(t, kind, args, functions.get(t)) for t, (kind, args) in setup["terms"].items()}
    except ConfigError as error:
        _send(link, request=setup["request"], config_error=str(error))
        return
    cpu_s = min(MATH_CPU_S, setup["timeout_s"] / 2)  # ends before the parent's timeout, also on a busy machine
    cpu_limits = {term: cpu_s for term, grader in graders.items() if grader.function is math_answer}
    is_async = [term for term, grader in graders.items() if grader.is_async]
    of_tokens = [term for term, grader in graders.items() if {*grader.takes} & {*OF_TOKENS}]
    terms = {"async": is_async, "cpu_limited": list(cpu_limits), "of_tokens": of_tokens}
    _send(link, request=setup["request"], **terms)
    keeps_children = _has_children()  # a user's module may start a helper process at import
    loop, max_reward = None, setup["max_reward"]
    while True:
        try:
            name, items = receive(link)
        except EOFError:
            return
        answer = partial(_send, link, request=name)
        if not graders[items[0][0]].is_async:
            _grade_in_order(answer, graders, cpu_limits, items, keeps_children, max_reward)
            continue
        if loop is None:
            import asyncio  # by far the slowest import here, and most workers do not need it

            loop = asyncio.new_event_loop()
        loop.run_until_complete(_grade_together(answer, graders, items, setup["timeout_s"], max_reward))


def _grade_in_order(
    answer: Callable[..., None],
    graders: dict[str, Grader],
    cpu_limits: dict[str, float],
    items: list,
    keeps_children: bool,
    max_reward: float,
) -> None:
    """Grade one item after the other; the parent measures the time, from one answer to the next."""
    pid = os.getpid()
    for index, (term, payload) in enumerate(items):
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_limits.get(term, 0.0))  # 0 = no limit
            reply = _value_reply(graders[term](payload), max_reward)
        except BaseException as error:  # user code: SystemExit and KeyboardInterrupt included
            reply = _failure_reply(error)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if os.getpid() != pid:
            os._exit(0)  # the function forked, and this is its child process
        if not keeps_children and _has_children():
            reply["retire"] = True  # children that still run are killed with this process group
        answer(item=index, **reply)
        if "retire" in reply:
            return


async def _grade_together(
    answer: Callable[..., None], graders: dict[str, Grader], items: list, timeout_s: float, max_reward: float
) -> None:
    """Grade all items at once, or those of a term with an argument max_parallel up to this number: they mostly wait for
    an endpoint. The time of each starts with its call."""
    import asyncio

    limits = {term: graders[term].args.get("max_parallel") for term, _ in items}
    gates = {t: asyncio.Semaphore(n if type(n) is int and n > 0 else len(items)) for t, n in limits.items()}

    async def grade(index: int, term: str, payload: dict[str, Any]) -> None:
        async with gates[term]:
            clock = asyncio.timeout(timeout_s)
            try:
                async with clock:
                    value = await graders[term](payload)
                reply = _value_reply(value, max_reward)
            except BaseException as error:  # user code
                reply = _failure_reply(error)
                if clock.expired():
                    reply = {"failure": ["timeout", f"no answer within {timeout_s:g} s"]}
        answer(item=index, **reply)

    await asyncio.gather(*(grade(index, term, payload) for index, (term, payload) in enumerate(items)))


def _value_reply(value: Any, max_reward: float) -> dict[str, Any]:
    """The reply for a returned value: a number within the limit, None, or a failure that shows another value."""
    if value is None:
        return {"value": None}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # np.bool_ is no number for Python, and the smallest int64 has no absolute value
    size: Any = abs(value) if isinstance(value, bool | numbers.Real) else math.inf
    if size <= max_reward:  # False for NaN
        return {"value": float(value)}
    allowed = f"a reward is a finite number, of at most {max_reward:g} in size"
    return {"failure": ["bad_value", one_line(f"returned {repr(value)[:100]} ({type(value).__name__}); {allowed}")]}


def _failure_reply(error: BaseException) -> dict[str, Any]:
    """The reply for an exception of a reward function, with file and line of the user's code."""
    if isinstance(error, RewardError):
        return {"failure": ["judge", one_line(str(error))]}
    message = error_line(error)
    if isinstance(error, MemoryError):
        return {"failure": ["memory", message], "retire": True}
    return {"failure": ["crash", message]}


def _has_children() -> bool:
    """Whether this process has children, running or not yet waited for. Always False where waitid is missing."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _send(link: socket.socket, **reply: Any) -> None:
    send_bytes(link, json.dumps(reply).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))

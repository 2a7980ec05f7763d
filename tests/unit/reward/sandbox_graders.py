"""Reward functions with all kinds of bad behaviour; loaded in workers by dotted path."""

import asyncio
import ctypes
import json
import logging
import os
import re
import signal
import struct
import sys
import threading
import time
from fractions import Fraction

RETURNED = {
    "nan": float("nan"),
    "inf": float("-inf"),
    "text": "1.0",
    "none": None,
    "list": [1.0, 0.0],
    "complex": 1j,
    "true": True,
    "int": 3,
    "fraction": Fraction(1, 2),
    "huge": -1e300,
    "largest": 1e12,
    "huge_int": 10**400,
    "surrogate": "\ud800",
}


def behave(completion, answer):
    """Do the action that the completion names; the reward of any other completion is 1."""
    if completion in RETURNED:
        return RETURNED[completion]
    if completion in ("leave_a_child", "leave_a_daemon"):
        return leave_a_child(answer, daemon=completion == "leave_a_daemon")
    if completion == "hang_in_a_session":
        os.setsid()
        leave_a_child(answer, daemon=True)
        loop_forever()
    if completion.startswith("forge"):
        return forge(*completion.split(" ", 1))
    if completion.startswith("answer_as"):
        return answer_as(int(completion.split()[1]))
    if completion == "die_once":
        return die_once(answer)
    return ACTIONS.get(completion, lambda: 1.0)()


def fails(completion, answer):
    raise ValueError(completion)


def loop_forever():
    while True:
        pass


def hang_in_c():
    """One C call that holds the interpreter's lock, so that no signal handler and no thread can run."""
    return bool(re.fullmatch(r"(a|a)*b", "a" * 60))


def wait_for_a_forked_child():
    pid = os.fork()
    if pid == 0:
        loop_forever()
    os.waitpid(pid, 0)


def come_back_twice():
    """The child of the fork returns from the grader too."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return 1.0 if pid else 0.0


def leave_a_child(pid_file, daemon=False):
    """Return, and leave a running child; as a daemon, it has another session and no parent in this process group."""
    size = os.path.getsize(pid_file) if os.path.exists(pid_file) else 0
    pid = os.fork()
    if pid == 0:
        if daemon:
            os.setsid()
            if os.fork():
                os._exit(0)
        with open(pid_file, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(600)
    if daemon:
        os.waitpid(pid, 0)
    while not os.path.exists(pid_file) or os.path.getsize(pid_file) == size:
        time.sleep(0.01)
    return 1.0


def die_once(marker):
    """As when the kernel kills this process because others need the memory."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5


def write_frame(body):
    """Write a frame to this worker's socket, as the worker does."""
    os.write(int(sys.argv[1]), struct.pack("!I", len(body)) + body)


def answer_as(item):
    """Answer another item with the worker's own function and the name of the request."""
    frame = sys._getframe()
    while "answer" not in frame.f_locals or "request" not in getattr(frame.f_locals["answer"], "keywords", ()):
        frame = frame.f_back
    frame.f_locals["answer"](item=item, value=7.0)
    return 0.25


def forge(how, reply):
    body = reply.encode().decode("unicode_escape").encode("latin-1")
    if how == "forge_later":  # when the answer is sent and no batch is open
        threading.Timer(0.2, write_frame, [body]).start()
    elif how == "forge_bytes":
        os.write(int(sys.argv[1]), body)
    else:
        write_frame(body)
    return 0.25


def allocate_two_gigabytes():
    return float(len(bytearray(2 << 30)))


def segfault():
    ctypes.string_at(0)


def flood():
    for _ in range(200):
        print("x" * 50_000)
        os.write(1, b"y" * 50_000)
        os.write(2, b"z" * 50_000)
    return 1.0


def chat():
    """Writes a line in each of the usual ways, then dies without a chance to flush."""
    print("printed \x1b[2J")
    logging.warning("logged")
    sys.stderr.write("of stderr\n")
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS = {
    "loop": loop_forever,
    "hang_in_c": hang_in_c,
    "fork_and_wait": wait_for_a_forked_child,
    "come_back_twice": come_back_twice,
    "memory": allocate_two_gigabytes,
    "raise": lambda: int("twelve"),
    "raise_in_a_library": lambda: json.loads("no JSON"),
    "sys_exit": lambda: sys.exit(0),
    "os_exit": lambda: os._exit(3),
    "segfault": segfault,
    "sigprof": lambda: os.kill(os.getpid(), signal.SIGPROF),
    "flood": flood,
    "chat": chat,
}


def libraries(completion, answer):
    return float("torch" in sys.modules or "numpy" in sys.modules)


def offered(completion, answer, *, prompt, num_tokens, bonus=0.0):
    return prompt["meta"]["base"] + num_tokens + bonus


def everything(completion, answer, **rest):
    return float(sorted(rest) == ["messages", "num_tokens", "prompt", "stop_reason"])


waiting = []


async def meet(completion, answer):
    """Return only once `answer` calls are waiting at the same time."""
    waiting.append(completion)
    while len(waiting) < answer:
        await asyncio.sleep(0)
    return 1.0


async def slow(completion, answer):
    if completion == "never":
        await asyncio.sleep(600)
    if completion == "block":
        time.sleep(600)
    if completion == "raise":
        raise ConnectionError("judge is down")
    return 1.0


no_function = 7


def no_arguments():
    return 1.0


def no_answer(completion, *, prompt):
    return 1.0


def prompt_second(completion, prompt):
    return 1.0


class Judge:
    """A client object whose call is async."""

    async def __call__(self, completion, answer):
        return 1.0


judge = Judge()


def swapped(prompt, completion):
    """Expects its arguments in another order."""
    return 1.0


def pops(completion, answer, *, prompt, messages, seen):
    """1 when all arguments are as they were sent; changes all of them."""
    unchanged = len(answer) == 2 and len(prompt["messages"]) == 1 and len(messages) == 1 and not seen
    unchanged = unchanged and prompt["meta"].pop("base", None) == 1.0
    for each in (answer, prompt["messages"], messages):
        each.pop()
    seen.append(completion)
    return float(unchanged)


async def pops_async(completion, answer, *, prompt, messages, seen):
    return pops(completion, answer, prompt=prompt, messages=messages, seen=seen)

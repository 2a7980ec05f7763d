"""Grading in processes that can be killed: the result of each item is a number, None (the term does not apply) or a
typed Failure, in any case.

A thread for each worker process does the communication and measures the time, so that a busy event loop neither delays
a grader nor counts its own pauses as a grader's. A worker that hangs, dies or runs out of memory is killed with all
processes that it started, and is replaced; only the item that it was grading fails. The item need not be the cause of a
worker's death (when memory is short, the kernel kills any process), so it is graded once more before it fails. An
answer that math_answer can't evaluate within its CPU time is wrong, not failed: its reward is 0.0. The isolation is
against accidents, not malice: a grader has the user's rights and files.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

from meshrl.config.reward import MAX_REWARD, RewardConfig
from meshrl.core.errors import ConfigError, Failure, Graded, RewardError
from meshrl.process.diagnosis import exit_text
from meshrl.process.frames import receive_bytes, send
from meshrl.process.guard import GuardedProcess
from meshrl.reward.replies import Ready, one_line, parse_ready, parse_reply

Log = Callable[..., None]
"""Called with lines of text."""

BYTES_PER_S = 1 << 16  # of a worker; what exceeds it is left out
_LINE_BYTES = 4096  # longer lines are divided
_TAIL_BYTES = 2000


class WorkerOutput:
    """A pipe for stdout and stderr of the process `name`, and a thread that reads it until all processes with its write
    end have ended."""

    def __init__(self, name: str, log: Log | None):
        self._name, self._log, self._tail = name, log, b""
        reader, writer = os.pipe()
        self.write_end: IO[bytes] = open(writer, "wb", buffering=0)  # noqa: SIM115, its user closes it
        self._thread = threading.Thread(target=self._copy, args=(reader,), daemon=True)
        self._thread.start()

    def tail(self, wait_s: float) -> str:
        """The last output, after waiting for its end at most so long."""
        self._thread.join(wait_s)
        return self._tail.decode(errors="replace").strip()

    def _copy(self, reader: int) -> None:
        rest, left_out, second, room = b"", 0, 0, 0
        with open(reader, "rb", buffering=0) as pipe:
            while chunk := pipe.read(BYTES_PER_S):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                now = int(time.monotonic())
                if now != second:
                    second, room = now, BYTES_PER_S
                room -= len(chunk)
                if room < 0:
                    left_out += len(chunk)
                    continue
                rest = self._write(rest, left_out, chunk)
                left_out = 0
        self._write(rest, left_out, b"\n")

    def _write(self, rest: bytes, left_out: int, chunk: bytes) -> bytes:
        """Log the complete lines of `rest` and `chunk`, between which bytes are left out. Returns the other bytes."""
        mark = f"\n[{left_out} bytes of output left out]\n".encode() if left_out else b""
        *lines, rest = (rest + mark + chunk).split(b"\n")
        while len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest[:_LINE_BYTES]], rest[_LINE_BYTES:]
        parts = [line[i : i + _LINE_BYTES] for line in lines for i in range(0, len(line), _LINE_BYTES)]
        if parts and self._log is not None:
            self._log(*(f"{self._name}: {part.decode(errors='replace')}" for part in parts))
        return rest


Item = tuple[str, dict[str, Any]]
"""(term, payload): payload has completion, answer and the keywords in kinds.py that a term takes."""

_START_TIMEOUT_S = 300.0  # of the imports of the user's modules, which may load a reward model
_END_TIMEOUT_S = 2.0  # from the end of a socket to the end of its process
_ASYNC_GRACE_S = 1.0  # the worker times async graders; if it takes this much longer, its event loop hangs
_MAX_BATCH = 64  # items of one message, and async graders that wait together in one worker
_MAX_REPLY_BYTES = 1 << 16

EVENTS = {
    "reward/workers_killed": "processes",  # because of an item; each is replaced when it is needed again
    "reward/gradings_retried": "gradings",  # because their worker died
    "reward/math_timeouts": "gradings",  # wrong, because math_answer reached its limit of CPU time
}
"""Metric of an event that a sandbox counts -> unit."""


class Sandbox:
    """A pool of worker processes that grade items with the functions of `cfg.terms`.

    functions: Python objects in place of a term's kind, by term. Functions that a worker can't import, such as lambdas
    and functions of a script or a notebook, are sent by value.
    Workers search a user's modules where this process does, then in the working folder. log: called with lines of their
    output, from several threads; None = it is dropped.
    """

    def __init__(
        self, cfg: RewardConfig, functions: Mapping[str, Callable[..., Any]] | None = None, log: Log | None = None
    ):
        setup = {
            "terms": {name: (term.kind, dict(term.args)) for name, term in cfg.terms.items()},
            "functions": {term: _pickled(term, function) for term, function in (functions or {}).items()},
            "timeout_s": cfg.timeout_s,
            "max_memory_bytes": cfg.max_memory_bytes,  # of a worker's address space; enforced on Linux
            "max_reward": MAX_REWARD,
        }
        self._workers = [_Worker(setup, f"worker {i}", log) for i in range(cfg.num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(cfg.num_workers, thread_name_prefix="reward")
        self._starting = asyncio.Lock()
        self._started = self._closed = False

    @property
    def terms_of_tokens(self) -> frozenset[str]:
        """The terms whose function has a parameter of OF_TOKENS; known once started."""
        return self._workers[0].ready.terms_of_tokens

    @property
    def counts(self) -> Counter[str]:
        """The numbers so far of the events in EVENTS."""
        return sum((worker.counts for worker in self._workers), Counter[str]())

    async def start(self) -> None:
        """Start all workers at once and wait until each has loaded every function; a second call does nothing."""
        async with self._starting:
            if self._closed:
                raise RewardError(_CLOSED)
            if not self._started:
                await self._with_workers([_Worker.start] * len(self._workers))
                self._started = True

    async def grade(self, items: Sequence[Item]) -> list[Graded]:
        """One number, None or Failure for each item, in order; starts the workers if they have not been started.

        Items are sent in batches, so that many quick gradings need few round trips; each item has its own timeout.
        """
        await self.start()
        batches = self._batches(items)
        graded = await self._with_workers(
            [functools.partial(_Worker.grade, items=[items[i] for i in batch]) for batch in batches]
        )
        results = {i: result for batch, part in zip(batches, graded) for i, result in zip(batch, part)}
        return [results[i] for i in range(len(items))]

    async def close(self) -> None:
        """Kill all workers and the processes that they started. Running gradings raise RewardError. A second call does
        nothing."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.end()
        await asyncio.to_thread(self._threads.shutdown)  # waits for gradings: not long, since the workers were killed
        for worker in self._workers:
            worker.release()

    def _batches(self, items: Sequence[Item]) -> list[list[int]]:
        """Item indices of each message: sync and async items separately, sync ones in two rounds to balance workers."""
        is_async = [term in self._workers[0].ready.async_terms for term, _ in items]
        batches = []
        for kind, rounds in ((False, 2), (True, 1)):
            indices = [i for i in range(len(items)) if is_async[i] == kind]
            size = max(1, min(_MAX_BATCH, math.ceil(len(indices) / (rounds * len(self._workers)))))
            batches += [indices[start : start + size] for start in range(0, len(indices), size)]
        return batches

    async def _with_workers(self, uses: Sequence[Callable[[_Worker], Any]]) -> list[Any]:
        """Each use in a thread. First in, first out: N uses at once, as at the start, get N different workers."""

        def run(use: Callable[[_Worker], Any]) -> Any:
            worker = self._idle.get()  # there are as many threads as workers, so one is idle
            try:
                return use(worker)
            finally:
                self._idle.put(worker)

        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(self._threads, run, use) for use in uses))


@dataclass(slots=True)
class _Running:
    """A started process, the parent's end of the socket to it, and its output."""

    process: GuardedProcess
    link: socket.socket
    output: WorkerOutput


class _Worker:
    """One worker process and the communication with it. Used by one thread at a time; any thread may call `end`."""

    def __init__(self, setup: dict[str, Any], name: str, log: Log | None):
        self._setup, self._name, self._log = setup, name, log
        self._lock = threading.Lock()  # guards _running and _ended: `end` may be called during a restart
        self._ended = False
        self._running: _Running | None = None
        self.ready = Ready()
        self.counts = Counter[str]()

    def start(self) -> _Running:
        """The running process, started and ready."""
        if self._running is not None:
            return self._running
        running = self._spawn()
        try:
            running.link.settimeout(_START_TIMEOUT_S)
            request = secrets.token_hex(8)
            send(running.link, {"request": request, **self._setup})
            ready = parse_ready(receive_bytes(running.link, _MAX_REPLY_BYTES), request, self._setup["terms"])
            if not ready.error:
                self.ready = ready
                return running
        except (OSError, EOFError, ValueError) as error:
            code = running.process.exit_code(0.0 if isinstance(error, TimeoutError | ValueError) else _END_TIMEOUT_S)
            outcome = f"{type(error).__name__}: {error}" if code is None else exit_text(code)
            if isinstance(error, TimeoutError):
                outcome = f"the imports of the reward functions took more than {_START_TIMEOUT_S:g} s"
            ready = None
        self.release()
        if ready is not None:
            raise ConfigError(ready.error)
        printed = running.output.tail(_END_TIMEOUT_S) or "nothing"
        raise RewardError(
            f"a reward worker did not start: {outcome}. It printed: {printed}\nIf memory ran out while it "
            f"imported the reward functions, raise reward.max_memory_bytes ({self._setup['max_memory_bytes']})"
        )

    def _spawn(self) -> _Running:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with self._lock:
            if self._ended:
                raise RewardError(_CLOSED)
            ours, theirs = socket.socketpair()
            output = WorkerOutput(self._name, self._log)
            with theirs, output.write_end:
                process = GuardedProcess(
                    "meshrl.reward.worker",
                    [str(theirs.fileno())],
                    output=output.write_end,
                    environment={**_ENVIRONMENT, "PYTHONPATH": path},
                    pass_fds=[theirs.fileno()],
                )
            self._running = _Running(process, ours, output)
            return self._running

    def grade(self, items: list[Item]) -> list[Graded]:
        """Grade a batch that is all sync or all async, with a new process after each one that breaks."""
        is_async = items[0][0] in self.ready.async_terms
        results: dict[int, Graded] = {}
        todo = list(range(len(items)))
        one_by_one = False
        again: set[int] = set()
        while todo:
            running = self.start()
            sent = todo[:1] if one_by_one else todo
            answered, broken = self._exchange(running, [items[i] for i in sent])
            if self._ended:
                raise RewardError(_CLOSED)
            results |= {sent[place]: result for place, result in answered.items()}
            todo = [i for i in todo if i not in results]
            if broken is not None and is_async and len(sent) > 1:
                one_by_one = True  # any of the running items may be the cause: each is graded alone
            elif broken is not None and broken.kind == "crash" and todo[0] not in again:
                again.add(todo[0])
                self.counts["reward/gradings_retried"] += 1
            elif broken is not None:
                results[todo.pop(0)] = broken
        return [results[i] for i in range(len(items))]

    def _exchange(self, running: _Running, items: list[Item]) -> tuple[dict[int, Graded], Failure | None]:
        """Send items and collect answers by index, until all are complete or the process breaks; then it is killed."""
        timeout_s = self._setup["timeout_s"]
        answered: dict[int, Graded] = {}
        broken = None
        retire, request, is_async = False, secrets.token_hex(8), items[0][0] in self.ready.async_terms
        try:
            running.link.settimeout(timeout_s + (_ASYNC_GRACE_S if is_async else 0.0))
            send(running.link, (request, items))
            while len(answered) < len(items) and not retire:
                data = receive_bytes(running.link, _MAX_REPLY_BYTES)
                open_items = {*range(len(items))} - answered.keys() if is_async else {len(answered)}  # sync: in order
                reply = parse_reply(data, request, open_items, self._setup["max_reward"])
                answered[reply.item], retire = reply.result, reply.retire
        except TimeoutError:
            broken = Failure(kind="timeout", message=f"no answer within {timeout_s:g} s; its worker was killed")
        except (OSError, EOFError, ValueError) as error:
            code = running.process.exit_code(0.0 if isinstance(error, ValueError) else _END_TIMEOUT_S)
            if code == -signal.SIGPROF and items[len(answered)][0] in self.ready.cpu_limited_terms:
                answered[len(answered)] = 0.0  # items are graded in order
                self.counts["reward/math_timeouts"] += 1
                retire = True
            else:
                invalid = f"the worker's answer is not valid: {type(error).__name__}: {error}"
                died = None if code is None else f"the worker died with {exit_text(code)}"
                broken = Failure(kind="crash", message=one_line(died or invalid))
        if broken or retire:
            self.release()
            self.counts["reward/workers_killed"] += 1
        return answered, broken

    def end(self) -> None:
        """Kill the process and do not restart it. A thread that waits for an answer gets an end of file."""
        with self._lock:
            self._ended = True
            if self._running is not None:
                self._running.process.kill()

    def release(self) -> None:
        """Kill the process and close its socket; only for the thread that uses the worker."""
        if self._running is not None:
            self._running.process.kill()
            self._running.link.close()
            self._running.output.tail(_END_TIMEOUT_S)  # what it printed last is logged before the next process starts
            self._running = None


def _pickled(term: str, function: Callable[..., Any]) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # pickling any object that the function uses may raise anything
        raise ConfigError(
            f"reward.terms.{term}: the function can't be sent to a worker process: {type(error).__name__}: {error}. "
            "Let the function create or import such objects in its body"
        ) from error


_CLOSED = "the reward workers are closed; start a new Scorer to grade more"

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Numeric libraries reserve address space for each thread, which could exceed the memory limit on a large machine."""

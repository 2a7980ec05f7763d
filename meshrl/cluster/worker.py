"""The process of one rank: reads commands from its socket, runs them on a RankWorker, sends the answers back.

One asyncio loop, one thread. Plain methods run to their end where they stand (the train lane); coroutine methods
(the sampler) become tasks and interleave. Answers of one tick leave together.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from meshrl.core.errors import EngineEnded
from meshrl.process import frames


class _Server:
    def __init__(self, sock: socket.socket, worker: Any):
        self.sock, self.worker = sock, worker
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.answers: list[tuple[int, bool, Any]] = []
        self.tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    def readable(self) -> None:
        try:
            calls = frames.receive(self.sock)
        except EOFError:
            self.loop.remove_reader(self.sock.fileno())
            self.done.set_result(None)
            return
        for call_id, method, args in calls:  # method: a function of RankWorker, pickled by reference
            if inspect.iscoroutinefunction(method):
                task = self.loop.create_task(self.run(call_id, method, args))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                try:
                    self.answer(call_id, True, method(self.worker, *args))
                except Exception as error:
                    self.answer(call_id, False, _portable(error))

    async def run(self, call_id: int, method: Any, args: tuple[Any, ...]) -> None:
        try:
            self.answer(call_id, True, await method(self.worker, *args))
        except EngineEnded as error:
            if not self.worker.spec.trains:  # what this rank is for is gone; whoever started it can start another
                print(f"rank {self.worker.spec.rank}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            self.answer(call_id, False, _portable(error))
        except Exception as error:
            self.answer(call_id, False, _portable(error))

    def answer(self, call_id: int, ok: bool, value: Any) -> None:
        if not self.answers:
            self.loop.call_soon(self.flush)
        self.answers.append((call_id, ok, value))

    def flush(self) -> None:
        answers, self.answers = self.answers, []
        frames.send(self.sock, answers)


def _portable(error: Exception) -> tuple[Exception | None, str]:
    """The error and its traceback; an error that can't be pickled travels as text alone."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None, text
    return error, text


async def _serve(sock: socket.socket, spec: Any) -> None:
    from meshrl.cluster.actors import RankWorker

    server = _Server(sock, RankWorker(spec))
    server.loop.set_exception_handler(_end_if_broken)
    server.loop.add_reader(sock.fileno(), server.readable)
    await server.done


def _end_if_broken(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A command that can't be read or an answer that can't be sent leaves its caller waiting; the rank's end tells it
    at once. What was wrong stands on stderr."""
    loop.default_exception_handler(context)
    if "handle" in context:  # a callback of the server's own; a task's error has been answered, or is its owner's
        os._exit(1)


def end_with(parent: int | None) -> None:
    """Have the kernel kill this process when its parent ends, or, with None, no longer do so. Elsewhere than on Linux
    the end of the socket ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL if parent is not None else 0)  # PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def command(channel: int, stacks: int, parent: int, name: str) -> list[str]:
    """What starts a rank: the descriptors of its channel and of the file for its stacks, the id of the process that it
    must not outlive, and its name, for `ps`."""
    return [sys.executable, "-m", "meshrl.cluster.worker", str(channel), str(stacks), str(parent), name]


def run_rank(sock: socket.socket, stacks: int) -> NoReturn:
    """Serve commands until the channel closes, then end the process."""
    spec = frames.receive(sock)
    for number in (signal.SIGINT, signal.SIGTERM):  # which go to a whole group; the controller decides
        signal.signal(number, lambda *_: None)  # and not SIG_IGN, which a server that this rank starts would keep
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    asyncio.run(_serve(sock, spec))
    os._exit(0)  # libraries' exit handlers may wait for peers that are gone


def main() -> None:
    """Arguments: see `command`."""
    descriptor, stacks, parent = (int(word) for word in sys.argv[1:4])
    end_with(parent)
    run_rank(socket.socket(fileno=descriptor), stacks)


if __name__ == "__main__":
    main()

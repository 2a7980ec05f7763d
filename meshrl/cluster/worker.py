"""The process of one rank: reads commands from its socket, runs them on a RankWorker, sends the answers back.

One asyncio loop, one thread. Plain methods run to their end where they stand (the train lane); coroutine methods
(the sampler) become tasks and interleave. Answers of one tick leave together.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import sys
import traceback
from typing import Any, NoReturn

from meshrl.core.errors import EngineEnded
from meshrl.process import frames
from meshrl.process.spawn import inherited_channel


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
            if not self.worker.spec.trains:  # the controller can start another rank
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
    """A command that can't be read or an answer that can't be sent would leave its caller waiting, so this rank ends.
    The error is printed on stderr."""
    loop.default_exception_handler(context)
    if "handle" in context:  # a callback of the server's own; a task's error has been answered, or is its owner's
        os._exit(1)


def main() -> NoReturn:
    """Serve commands until the channel closes, then end the process."""
    sock = inherited_channel()
    asyncio.run(_serve(sock, frames.receive(sock)))
    os._exit(0)  # libraries' exit handlers may wait for peers that are gone


if __name__ == "__main__":
    main()

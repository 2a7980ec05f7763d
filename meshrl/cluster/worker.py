"""The process of one rank: how it is prepared, and its program, which reads commands from its socket, runs them on a
RankWorker, and sends the answers back.

One asyncio loop, one thread. Plain methods (training) block the loop until they return; coroutine methods (sampling)
become tasks and interleave. Answers of one iteration of the loop are sent together. Importing this file imports no
torch, so that the processes of a run can import it while the controller still does.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

from meshrl.config.cluster import ClusterConfig
from meshrl.core.errors import EngineEnded
from meshrl.core.terminal import open_standard_streams, print_message
from meshrl.process import frames
from meshrl.process.spawn import Program, inherited_channel, prepare, use_private_caches

RANK = Program(
    "meshrl.cluster.worker",
    preload=("meshrl.cluster.actors", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
)


def common_environment() -> dict[str, str]:
    """Environment variables of every rank: it must find all modules that its controller finds."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TOKENIZERS_PARALLELISM": "false"}


def prepare_ranks(cluster: ClusterConfig) -> None:
    """Let modules of the working folder be found, and start the imports of this machine's ranks. Under torchrun they
    start later, with environment variables that the controller sends. Safe to call again."""
    open_standard_streams()  # ranks inherit them
    use_private_caches()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a dotted path in the config may name a module in the working folder
    if cluster.executor == "processes" and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        prepare(RANK, common_environment())


_REPORT_S = 0.5


class _Server:
    def __init__(self, sock: socket.socket, make_worker: Callable[[Callable[[int], None]], Any]):
        self.sock, self.worker = sock, make_worker(self.report_batches)
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.answers: list[tuple[int | None, bool, Any]] = []
        self.reported_tokens = 0
        self.reported_at = 0.0  # by report_batches
        self.tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    def readable(self) -> None:
        try:
            calls = frames.receive(self.sock)
        except EOFError:
            self.loop.remove_reader(self.sock.fileno())
            self.done.set_result(None)
            return
        for call_id, method, args, kwargs in calls:  # method: a function of RankWorker, pickled by reference
            call = partial(method, self.worker, *args, **kwargs)
            if inspect.iscoroutinefunction(method):
                task = self.loop.create_task(self.run(call_id, call))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                try:
                    self.answer(call_id, True, call())
                except Exception as error:
                    self.answer(call_id, False, _portable(error))

    async def run(self, call_id: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.answer(call_id, True, await call())
        except Exception as error:
            if isinstance(error, EngineEnded) and not self.worker.spec.trains:  # the controller can replace this rank
                print_message(f"rank {self.worker.spec.rank}: {error}")
                os._exit(1)
            self.answer(call_id, False, _portable(error))

    def report_progress(self) -> None:
        """Send, as the answer to no call, the number of tokens that the sampler has computed, whenever it has grown."""
        if (tokens := self.worker.computed_tokens) > self.reported_tokens:
            self.reported_tokens = tokens
            self.answer(None, True, ("tokens", tokens))
        self.loop.call_later(_REPORT_S, self.report_progress)

    def report_batches(self, count: int) -> None:
        """Send at once, in the middle of a command, how many of its micro-batches have ended."""
        if self.loop.time() - self.reported_at >= _REPORT_S:
            self.reported_at = self.loop.time()
            frames.send(self.sock, [(None, True, ("micro-batches", count))])

    def answer(self, call_id: int | None, ok: bool, value: Any) -> None:
        if not self.answers:
            self.loop.call_soon(self.flush)
        self.answers.append((call_id, ok, value))

    def flush(self) -> None:
        answers, self.answers = self.answers, []
        frames.send(self.sock, answers)


def _portable(error: Exception) -> tuple[Exception | None, str]:
    """The error and its traceback; only the traceback if the error can't be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None, text
    return error, text


async def _serve(sock: socket.socket, spec: Any) -> None:
    from meshrl.cluster.actors import RankWorker

    server = _Server(sock, partial(RankWorker, spec))
    server.loop.set_exception_handler(_end_if_broken)
    server.loop.add_reader(sock.fileno(), server.readable)
    server.report_progress()
    await server.done


def _end_if_broken(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End this rank if a command can't be read or an answer can't be sent: otherwise its caller would wait for
    ever. The error is printed on stderr."""
    loop.default_exception_handler(context)
    if "handle" in context:  # a callback of _Server; errors of tasks are handled elsewhere
        os._exit(1)


def main() -> NoReturn:
    """Serve commands until the channel closes, then end the process."""
    sock = inherited_channel()
    asyncio.run(_serve(sock, frames.receive(sock)))
    os._exit(0)  # exit handlers of libraries may wait for processes that have ended


if __name__ == "__main__":
    main()

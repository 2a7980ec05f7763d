"""Executor `processes`: one process a rank on this machine, torch.distributed inside. No Ray needed.

Controller side: for each rank one thread reads its answers and one writes its commands, so a rank that is busy
training never blocks the event loop, and neither side can wait for the other to read. What unblocks a call: the
rank's answer, the rank's death (its socket ends), or the deadline. The first failure ends every rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.cluster import channel
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec
from meshrl.core.errors import MeshrlError, RankFailure

_STOP_GRACE_S = 5.0


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    sock: socket.socket
    commands: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    pending: dict[int, tuple[str, asyncio.Future[Any]]] = field(default_factory=dict)
    outbox: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)


class ProcessExecutor:
    """Spawns `python -m meshrl.cluster.worker` once a rank, each with one end of a socket pair."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        self.specs = specs
        self._ranks: list[_Rank] = []
        self._ids = itertools.count()
        self._failure: RankFailure | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start all ranks and wait until each has built its engines."""
        self._loop = asyncio.get_running_loop()
        for spec in self.specs:
            self._ranks.append(self._spawn(spec))
        await asyncio.gather(*(self.call(spec.rank, RankWorker.start) for spec in self.specs))

    def _spawn(self, spec: WorkerSpec) -> _Rank:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-m", "meshrl.cluster.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "TOKENIZERS_PARALLELISM": "false",
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
            },
        )
        theirs.close()
        channel.send(ours, (os.getpid(), spec))
        rank = _Rank(process, ours)
        for target in (self._read, self._write):
            threading.Thread(target=target, args=(spec.rank, rank), daemon=True).start()
        return rank

    async def call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        assert self._loop is not None, "call comes after start"
        state, call_id = self._ranks[rank], next(self._ids)
        future: asyncio.Future[Any] = self._loop.create_future()
        state.pending[call_id] = (method.__name__, future)
        if not state.outbox:
            self._loop.call_soon(self._flush, state)
        state.outbox.append((call_id, method, args))
        try:
            return await asyncio.wait_for(future, self.specs[rank].timeout_s)
        except TimeoutError:
            cause = f"no answer within cluster.timeout_s = {self.specs[rank].timeout_s:g} s"
            self._fail(RankFailure(rank, method.__name__, cause))
            raise self._failure from None  # type: ignore[misc]

    def _flush(self, state: _Rank) -> None:
        """Send all calls of this tick as one message, so that a rank sees them together."""
        state.commands.put(state.outbox)
        state.outbox = []

    def _write(self, index: int, rank: _Rank) -> None:
        while (calls := rank.commands.get()) is not None:
            try:
                channel.send(rank.sock, calls)
            except OSError:
                return  # the reader sees the end of the socket and says who died
            except Exception as error:  # an argument that can't be pickled: nobody would ever answer
                assert self._loop is not None
                names = ", ".join(method.__name__ for _, method, _ in calls)
                cause = f"the command could not be sent: {type(error).__name__}: {error}"
                self._loop.call_soon_threadsafe(self._fail, RankFailure(index, names, cause))
                return

    def _read(self, index: int, rank: _Rank) -> None:
        assert self._loop is not None
        while True:
            try:
                answers = channel.receive(rank.sock)
            except (EOFError, OSError):
                answers = None
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._answered, index, rank, answers)
            if answers is None:
                return

    def _answered(self, index: int, rank: _Rank, answers: list[tuple[int, bool, Any]] | None) -> None:
        if answers is None:
            if not self._closing:
                phases = sorted({name for name, _ in rank.pending.values()}) or ["idle"]
                self._fail(RankFailure(index, ", ".join(phases), _how_it_ended(rank.process)))
            return
        for call_id, ok, value in answers:
            name, future = rank.pending.pop(call_id)
            if future.done():
                continue
            if ok:
                future.set_result(value)
                continue
            error, text = value
            if isinstance(error, MeshrlError):
                error.add_note(f"in rank {index}, {name}:\n{text}")
                future.set_exception(error)
            else:
                self._fail(RankFailure(index, name, text))
                future.set_exception(self._failure)  # it no longer stands among the pending

    def _fail(self, failure: RankFailure) -> None:
        """The first failure wins: everybody who waits gets it, and every rank is ended."""
        if self._failure is not None:
            return
        self._failure = failure
        for rank in self._ranks:
            rank.process.kill()
            for _, future in rank.pending.values():
                if not future.done():
                    future.set_exception(failure)

    async def close(self) -> None:
        """End all ranks: politely at first, by SIGKILL after a few seconds. No child is left behind."""
        self._closing = True
        if self._failure is None:
            stops = [self.call(spec.rank, RankWorker.stop) for spec in self.specs]
            await asyncio.wait([asyncio.ensure_future(s) for s in stops], timeout=_STOP_GRACE_S)
        for rank in self._ranks:
            rank.commands.put(None)
            with contextlib.suppress(OSError):  # a dead rank's socket is not connected any more
                rank.sock.shutdown(socket.SHUT_RDWR)  # close alone does not end a recv that the reader stands in
            rank.sock.close()
        await asyncio.gather(*(asyncio.to_thread(_end, rank.process) for rank in self._ranks))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _loopback() -> str:
    """Name of the loopback interface: ranks of one machine need no other, and a laptop may have none."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        return "closed its channel, but its process still runs"
    if code >= 0:
        return f"its process ended with exit code {code}"
    hint = " (often the kernel, for lack of memory)" if -code == signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-code).name}{hint}"

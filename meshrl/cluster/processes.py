"""Executor `processes`: one process for each rank on this machine, with torch.distributed inside. It needs no Ray.

In the controller, one thread for each rank reads its answers and one writes its commands, so a rank that is busy
training never blocks the event loop, and the two sides can't deadlock by waiting for each other to read. An exception,
the end of a process (its socket closes, also when no call waits) and a missed deadline start a diagnosis. It finds the
rank that caused the failure, and ends the ranks that are lost with it (see Executor).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Any, Literal

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec, ignored, phase, phase_of
from meshrl.cluster.node_agent import RemoteProcess
from meshrl.cluster.worker import RANK, common_environment
from meshrl.core.device import device_type
from meshrl.core.errors import MeshrlError, RankFailure
from meshrl.monitor.recorder import latest_span
from meshrl.monitor.status import RankProcess
from meshrl.process import frames
from meshrl.process.connect import LOOPBACK, interface_of
from meshrl.process.diagnosis import Snapshot, innermost_frames, rank_at_fault
from meshrl.process.leases import LeasedFolder
from meshrl.process.spawn import SpawnedProcess

_STOP_GRACE_S = 5.0
_SETTLE_S = 1.5  # an exception may result from another rank's death, which is detected within this time
_WITH_PROGRESS = ("rollout", "eval", "annotate", "train")  # their deadline is extended while the rank reports progress
_REAP_S = 2.0  # a channel closes shortly before its process has ended


@dataclass(slots=True)
class _Call:
    """occupies: the rank runs no other command before it has answered this one. timer: of its deadline."""

    phase: str
    future: asyncio.Future[Any]
    occupies: bool
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class RankConnection:
    """The controller's state of a rank: its process, its channel, and the calls that wait for an answer."""

    index: int
    process: SpawnedProcess | RemoteProcess
    sock: socket.socket
    commands: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    pending: dict[int, _Call] = field(default_factory=dict)
    outbox: list[tuple[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    computed_tokens: int = 0  # of its sampler, by its last report
    progressed_at: float = -math.inf  # when it last reported tokens or micro-batches, on the event loop's clock
    lost: RankFailure | None = None  # set until the rank is replaced
    replaces: RankFailure | None = None  # of this rank's former process, until this one has started
    recorder: str = ""  # the socket on its machine of its flight recorder, if it serves one
    processes: Sequence[RankProcess] = ()

    @property
    def phases(self) -> str:
        """The phases of its running commands; the run's phase if it has none."""
        return ", ".join(sorted({call.phase for call in self.pending.values()})) or latest_span() or "start"


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A sign of a failure of a rank. cause: one line; details: a traceback. call: the one that missed its deadline."""

    rank: RankConnection
    phase: str
    kind: Literal["raised", "ended", "silent"]
    cause: str
    details: str = ""
    call: _Call | None = None


class ProcessExecutor:
    """Starts one process for each rank; a socket pair connects it with this process."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        self.specs = specs
        self._ranks: dict[int, RankConnection] = {}
        self._ids = itertools.count()
        self._failure: RankFailure | None = None
        self._suspicions: list[_Suspicion] = []
        self._diagnosis: asyncio.Task[None] | None = None  # handles the suspicions in order
        self._closing = False
        self._store: Any = None  # of the train ranks' process group; it exists as long as this object
        self._rendezvous: str | tuple[str, int] = ""
        self._on_lost: Callable[[RankFailure], None] = ignored
        self._on_batches: Callable[[int], None] = ignored
        self.can_restart_trainers = True
        self._loop: asyncio.AbstractEventLoop  # set by `start`
        self.interface = interface_of(LOOPBACK) or "lo"  # for collectives; a laptop may have no other
        self.address = ""  # at which other machines reach the ranks of this machine

    async def start(
        self, on_lost: Callable[[RankFailure], None] = ignored, on_batches: Callable[[int], None] = ignored
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._new_store()
        await self._start_ranks(range(len(self.specs)))  # raises the loss of a rank that starts
        self._on_lost, self._on_batches = on_lost, on_batches

    def failure_of(self, rank: int) -> RankFailure | None:
        return self._ranks[rank].lost or self._ranks[rank].replaces

    def processes(self) -> Sequence[RankProcess]:
        return [process for _, rank in sorted(self._ranks.items()) for process in rank.processes]

    def computed_tokens(self, rank: int) -> int:
        return self._ranks[rank].computed_tokens

    async def restart(self, ranks: Sequence[int]) -> None:
        if self._failure is not None:
            raise self._failure
        if self.specs[ranks[0]].trains:
            self._new_store()
        await self._end([self._ranks[rank] for rank in ranks])
        try:
            await self._start_ranks(ranks)
        except RankFailure as failure:
            for rank in ranks:  # also those that have started: the others will not join them
                if self._ranks[rank].lost is None:
                    _mark_lost(self._ranks[rank], failure)
            raise

    def _new_store(self) -> None:
        """For each generation of train ranks: a process group must not read keys that the last one has left."""
        self._store = LeasedFolder()
        self._rendezvous = str(self._store.path / "store")

    async def _start_ranks(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self._closing:
                raise self._ranks[rank].lost or RankFailure(rank, "start", "the run has ended meanwhile")
            failure = self.failure_of(rank) if rank in self._ranks else None
            self._ranks[rank] = await self._spawn(self.specs[rank])
            self._ranks[rank].replaces = failure
        recorders = await asyncio.gather(*(self.call(rank, serve_recorder) for rank in ranks))
        for rank, recorder in zip(ranks, recorders, strict=True):
            self._ranks[rank].recorder = recorder
        started = await asyncio.gather(*(self.call(rank, RankWorker.start) for rank in ranks))
        for rank, processes in zip(ranks, started, strict=True):
            self._ranks[rank].replaces, self._ranks[rank].processes = None, processes

    async def _spawn(self, spec: WorkerSpec) -> RankConnection:
        """Start the process of a rank and open its channel."""
        ours, theirs = socket.socketpair()
        environment = {
            **common_environment(),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", self.interface),
        }
        process = SpawnedProcess(RANK, f"rank_{spec.rank}", environment, theirs)
        return self._attach(spec, process, ours, self.address)

    def _attach(
        self, spec: WorkerSpec, process: SpawnedProcess | RemoteProcess, sock: socket.socket, address: str
    ) -> RankConnection:
        """Start the threads that read and write a channel. address: of the rank's machine."""
        rank = RankConnection(spec.rank, process, sock)
        # Sent by the writer thread: a rank that never reads must not block this one.
        rank.commands.put(dataclasses.replace(spec, rendezvous=self._rendezvous, address=address))
        for target in (self._read, self._write):
            threading.Thread(target=target, args=(rank,), daemon=True).start()
        return rank

    async def call(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = self._ranks[rank]
        failure = state.lost if method in (serve_recorder, RankWorker.start) else self.failure_of(rank)
        if failure is not None:
            raise failure
        occupies = not inspect.iscoroutinefunction(method)
        call_id, call = next(self._ids), _Call(phase_of(method), self._loop.create_future(), occupies)
        # The caller may have been cancelled, or have raised another failure: mark the exception as retrieved.
        call.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        state.pending[call_id] = call
        if not state.outbox:
            self._loop.call_soon(self._flush, state)
        state.outbox.append((call_id, method, args, kwargs))
        call.timer = self._loop.call_later(self.specs[rank].deadline_s(call.phase), self._silent, state, call)
        try:
            return await call.future
        finally:
            call.timer.cancel()

    def _flush(self, state: RankConnection) -> None:
        """Send all calls of this tick as one message, so that a rank sees them together."""
        state.commands.put(state.outbox)
        state.outbox = []

    def _write(self, rank: RankConnection) -> None:
        while (calls := rank.commands.get()) is not None:
            try:
                frames.send(rank.sock, calls)
            except OSError:
                return  # the reader thread detects the closed socket and reports it
            except Exception as error:  # an argument can't be pickled: the call would never be answered
                cause = f"the command could not be sent: {type(error).__name__}: {error}"
                suspicion = _Suspicion(rank, rank.phases, "raised", cause)
                self._loop.call_soon_threadsafe(self._suspect, suspicion)
                return

    def _read(self, rank: RankConnection) -> None:
        while True:
            try:
                answers = frames.receive(rank.sock)
            except (EOFError, OSError):
                answers = None
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._answered, rank, answers)
            if answers is None:
                return

    def _answered(self, rank: RankConnection, answers: list[tuple[int | None, bool, Any]] | None) -> None:
        if answers is None:
            if rank.lost is None and not self._closing:
                self._suspect(_ended(rank))
            return
        for call_id, ok, value in answers:
            if call_id is None:
                counted, number = value
                rank.progressed_at = self._loop.time()
                if counted == "tokens":
                    rank.computed_tokens = number
                elif rank.index == 0:
                    self._on_batches(number)
                continue
            call = rank.pending.pop(call_id)
            if call.future.done():
                continue
            if ok:
                call.future.set_result(value)
                continue
            error, text = value
            if isinstance(error, MeshrlError):
                error.add_note(f"in rank {rank.index}, phase {call.phase!r}")
                error.__cause__ = RemoteTraceback(text)
                call.future.set_exception(error)
            else:
                rank.pending[call_id] = call  # until the diagnosis has ended
                last = next((line for line in reversed(text.splitlines()) if line.strip()), "an exception")
                self._suspect(_Suspicion(rank, call.phase, "raised", f"raised {last}", text))

    # ---- failures

    def _silent(self, rank: RankConnection, call: _Call) -> None:
        spec, phase = self.specs[rank.index], call.phase
        left_s = rank.progressed_at + spec.deadline_s(phase) - self._loop.time()
        if phase in _WITH_PROGRESS and left_s > 0:
            call.timer = self._loop.call_later(left_s, self._silent, rank, call)
            return
        key = f"cluster.deadlines.{phase}" if phase in spec.deadlines else "cluster.timeout_s"
        cause = f"no answer within {key} = {spec.deadline_s(phase):g} s"
        self._suspect(_Suspicion(rank, phase, "silent", cause, call=call))

    def _suspect(self, suspicion: _Suspicion) -> None:
        if self._closing or self._failure is not None:
            return
        self._suspicions.append(suspicion)
        if self._diagnosis is None or self._diagnosis.done():
            self._diagnosis = self._loop.create_task(self._diagnose())

    async def _diagnose(self) -> None:
        """Handle suspicions in order, except those of ranks that have been ended or replaced meanwhile."""
        while self._suspicions and self._failure is None:
            suspicion = self._suspicions.pop(0)
            if suspicion.rank.lost is None:
                await self._handle(suspicion)

    async def _handle(self, first: _Suspicion) -> None:
        """Find the rank that caused the failure, record the stacks of the others, and end the ranks that have to end.

        Waits for: a death within _SETTLE_S if the first sign is an exception, and the ranks' stacks. Unblocks: all
        calls of the ranks that it ends.
        """
        culprit = first
        if first.kind != "ended":
            until = time.monotonic() + (_SETTLE_S if first.kind == "raised" else 0.0)
            while True:
                partners = (rank for rank in self._partners(first.rank) if rank.lost is None)
                dead = next((rank for rank in partners if rank.process.ending() is not None), None)
                if dead is not None or time.monotonic() >= until:
                    break
                await asyncio.sleep(0.05)
            culprit = first if dead is None else _ended(dead)
        snapshots = await self._take_snapshots()
        if culprit.kind == "silent":
            if first.call not in first.rank.pending.values():  # it waited for a rank that has been handled first
                return
            ranks = (rank for rank in self._partners(first.rank) if rank.index in snapshots and rank.pending)
            index, note = rank_at_fault(first.rank.index, {rank.index: snapshots[rank.index] for rank in ranks})
            at_fault = self._ranks[index]
            culprit = _Suspicion(at_fault, at_fault.phases, "silent", first.cause + note)
        failure = self._failure_of(culprit, snapshots)
        lost = self._partners(culprit.rank)
        if culprit.kind == "raised":
            self._failure, lost = failure, [*self._ranks.values()]
        for rank in lost:
            _mark_lost(rank, failure)
        self._on_lost(failure)

    def _partners(self, rank: RankConnection) -> list[RankConnection]:
        """The ranks that can make this one wait or fail: train ranks each other, by collectives; samplers none."""
        if not self.specs[rank.index].trains:
            return [rank]
        return [other for other in self._ranks.values() if self.specs[other.index].trains]

    async def _take_snapshots(self) -> dict[int, Snapshot]:
        """Snapshots of all live ranks, taken at the same time."""
        alive = [rank for rank in self._ranks.values() if rank.lost is None and rank.process.ending() is None]
        threads = ThreadPoolExecutor(max(1, len(alive)))
        run = functools.partial(self._loop.run_in_executor, threads)
        taken = await asyncio.gather(*(run(rank.process.snapshot, rank.recorder) for rank in alive))
        threads.shutdown(wait=False)
        return {rank.index: snapshot for rank, snapshot in zip(alive, taken, strict=True)}

    def _failure_of(self, culprit: _Suspicion, snapshots: dict[int, Snapshot]) -> RankFailure:
        """The error for users: the culprit's traceback or stacks, then the innermost frames of the other ranks."""
        heads = {i: f"rank {i}, in phase {self._ranks[i].phases!r}:" for i in snapshots}
        stacks = {
            i: "the process is stopped (SIGSTOP, or a debugger)" if s.is_stopped else s.stacks or "it wrote no stack"
            for i, s in snapshots.items()
        }
        heads |= {i: f"{heads[i]}\n  last collective: {s.collective}" for i, s in snapshots.items() if s.collective}
        shown = [i for i in stacks if i != culprit.rank.index or culprit.kind == "silent"]
        details = [culprit.details.rstrip(), *(f"{heads[i]}\n{innermost_frames(stacks[i])}" for i in shown)]
        full = "\n\n".join(f"{heads[i]}\n{text}" for i, text in stacks.items())
        cause = culprit.cause + culprit.rank.process.place
        text = "\n".join(details).lstrip("\n")
        return RankFailure(culprit.rank.index, culprit.phase, cause, text, full, culprit.kind)

    # ---- the end

    async def close(self) -> None:
        """End all ranks: by request, then by SIGKILL after a few seconds; at once if a rank is still busy with a
        command. No child process is left."""
        living = [rank for rank in self._ranks.values() if rank.lost is None]
        if any(call.occupies for rank in living for call in rank.pending.values()):
            self._closing = True
            for rank in living:
                rank.process.kill()
        elif self._failure is None:
            stops = (self.call(rank.index, RankWorker.stop) for rank in living)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*stops, return_exceptions=True), _STOP_GRACE_S)
        self._closing = True
        if self._diagnosis is not None:
            self._diagnosis.cancel()
        await self._end([*self._ranks.values()])
        self._store = None

    async def _end(self, ranks: Sequence[RankConnection]) -> None:
        """Close the channels, which ends the ranks; kill those that still run after _STOP_GRACE_S."""
        for rank in ranks:
            rank.commands.put(None)
            with contextlib.suppress(OSError):  # the socket of a dead rank is not connected
                rank.sock.shutdown(socket.SHUT_RDWR)  # close alone does not end a recv in the reader thread
            rank.sock.close()
        await asyncio.gather(*(asyncio.to_thread(rank.process.end, _STOP_GRACE_S) for rank in ranks))


@phase("start")
def serve_recorder(worker: RankWorker) -> str:
    """Serve torch's flight recorder, which stores the last collectives of a rank, if the rank trains on an accelerator;
    returns the socket, which only this user can reach, else "". Threads of torch answer: they need neither the GIL nor
    the main thread, which may wait for the device. Nothing has to be set: it records 2,000 collectives unless
    TORCH_FR_BUFFER_SIZE has another number. The return also shows that the rank accepts commands."""
    if not worker.spec.trains or device_type() == "cpu":
        return ""
    folder = LeasedFolder()
    path = str(folder.path / "records")
    # A build of torch without the server, or a path that is too long: then the diagnosis has no records.
    with contextlib.suppress(ImportError, RuntimeError):
        from torch._C._distributed_c10d import _WorkerServer

        worker.recorder = folder, _WorkerServer(path)
    return path


def _ended(rank: RankConnection) -> _Suspicion:
    ending = rank.process.ending(_REAP_S) or "its channel is closed, but its process has not ended"
    return _Suspicion(rank, rank.phases, "ended", ending)


def _mark_lost(rank: RankConnection, failure: RankFailure) -> None:
    """Kill a rank; its running and later calls raise the failure."""
    rank.lost = failure
    rank.process.kill()
    for call in rank.pending.values():
        if not call.future.done():
            call.future.set_exception(failure)

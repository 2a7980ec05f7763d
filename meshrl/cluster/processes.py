"""Executor `processes`: one process a rank on this machine, torch.distributed inside. No Ray needed.

Controller side: for each rank one thread reads its answers and one writes its commands, so a rank that is busy
training never blocks the event loop, and neither side can wait for the other to read. What unblocks a call: the
rank's answer, the rank's death (its socket ends), or the deadline of the call's phase. The last two, and an exception,
start an inquiry into who is to blame; its verdict ends every rank, all that train, or the one that only samples. A
death starts it even when no call waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import RemoteTraceback
from typing import Any, Literal

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.evidence import shortened, waits_for_others
from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.phases import phase_of
from meshrl.cluster.rank_process import LocalProcess, RankProcess, python_path
from meshrl.core.errors import MeshrlError, RankFailure
from meshrl.monitor.spans import latest_span
from meshrl.process import frames

_STOP_GRACE_S = 5.0
_SETTLE_S = 1.5  # an exception may be the echo of another rank's death, which shows within this time
_DUMP_S = 2.0  # writing stacks takes milliseconds; a process that doesn't within this time can't


@dataclass(slots=True)
class _Call:
    """occupies: the rank takes no other command before it has answered this one."""

    phase: str
    future: asyncio.Future[Any]
    occupies: bool


@dataclass(slots=True)
class Connected:
    """A rank as the controller sees it: its process, its channel, and the calls that wait for an answer."""

    process: RankProcess
    sock: socket.socket
    commands: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    pending: dict[int, _Call] = field(default_factory=dict)
    outbox: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    lost: RankFailure | None = None  # ended alone, and not replaced yet

    @property
    def phases(self) -> str:
        """Of its commands; of the run where it has none."""
        return ", ".join(sorted({call.phase for call in self.pending.values()})) or latest_span() or "start"


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A sign that something is wrong with a rank. cause: one line; details: a traceback. call: not answered in time."""

    index: int
    rank: Connected
    phase: str
    kind: Literal["raised", "ended", "silent"]
    cause: str
    details: str = ""
    call: _Call | None = None

    @property
    def is_over(self) -> bool:
        """Whether the call has been answered since: the rank had waited for another, which was judged before it."""
        return self.call is not None and self.call not in self.rank.pending.values()


class ProcessExecutor:
    """Starts one process for each rank, each with one end of a socket pair."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        self.specs = specs
        self._ranks: list[Connected] = []
        self._ids = itertools.count()
        self._failure: RankFailure | None = None
        self._suspicions: list[_Suspicion] = []
        self._inquiry: asyncio.Task[None] | None = None  # looks into them, one after the other
        self._closing = False
        self._generations = itertools.count(1)  # of train ranks, each with a process group of its own
        self.on_lost: Callable[[RankFailure], None] = lambda failure: None
        self.can_restart_trainers = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self.interface = _loopback()  # for the collectives of ranks on this machine

    async def start(self) -> None:
        """Start all ranks and wait until each has built its engines."""
        self._loop = asyncio.get_running_loop()
        for spec in self.specs:
            self._ranks.append(await self._bring_up(spec))
        await asyncio.gather(*(self.call(spec.rank, came_up) for spec in self.specs))
        await asyncio.gather(*(self.call(spec.rank, RankWorker.start) for spec in self.specs))

    async def restart(self, rank: int) -> None:
        """Replace a lost rank that only samples. Raises: RankFailure, the run's own once it has failed."""
        if self._failure is not None:
            raise self._failure
        await self._replace([rank])

    async def restart_trainers(self) -> None:
        """Replace all train ranks, with a new place to meet. Raises: RankFailure, the run's own once it has failed."""
        if self._failure is not None:
            raise self._failure
        rendezvous = self._new_rendezvous()
        self.specs = [dataclasses.replace(spec, rendezvous=rendezvous) for spec in self.specs]
        ranks = [spec.rank for spec in self.specs if spec.trains]
        try:
            await self._replace(ranks)
        except RankFailure as failure:
            for rank in ranks:  # also those that came up: the others will not join them
                if self._ranks[rank].lost is None:
                    _lose(self._ranks[rank], failure)
            raise

    def _new_rendezvous(self) -> str:
        """Where a new generation of train ranks meets: what the last one left in its store must not be met again."""
        return f"{self.specs[0].rendezvous}.{next(self._generations)}"

    async def _replace(self, ranks: Sequence[int]) -> None:
        """New processes in the place of lost ones, as `start` leaves them."""
        lost = [self._ranks[rank] for rank in ranks]
        for rank in lost:
            _hang_up(rank)
        await asyncio.gather(*(asyncio.to_thread(rank.process.end, _STOP_GRACE_S) for rank in lost))
        for index in ranks:
            if self._closing:
                raise self._ranks[index].lost or RankFailure(index, "start", "the run has ended meanwhile")
            self._ranks[index] = await self._bring_up(self.specs[index])
        await asyncio.gather(*(self.call(rank, came_up) for rank in ranks))
        await asyncio.gather(*(self.call(rank, RankWorker.start) for rank in ranks))

    async def _bring_up(self, spec: WorkerSpec) -> Connected:
        """Start the process of a rank and open its channel."""
        ours, theirs = socket.socketpair()
        environment = {
            "PYTHONPATH": python_path(),
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", self.interface),
        }
        return self._attach(spec, LocalProcess(theirs, f"rank_{spec.rank}", environment), ours)

    def _attach(self, spec: WorkerSpec, process: RankProcess, sock: socket.socket) -> Connected:
        """Begin to read and write a channel."""
        rank = Connected(process, sock)
        rank.commands.put(spec)  # by the writer: a rank that never reads must not hold this thread
        for target in (self._read, self._write):
            threading.Thread(target=target, args=(spec.rank, rank), daemon=True).start()
        return rank

    async def call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        state = self._ranks[rank]
        if state.lost is not None:
            raise state.lost
        assert self._loop is not None, "call comes after start"
        occupies = not inspect.iscoroutinefunction(method)
        call_id, call = next(self._ids), _Call(phase_of(method), self._loop.create_future(), occupies)
        call.future.add_done_callback(_heard)
        state.pending[call_id] = call
        if not state.outbox:
            self._loop.call_soon(self._flush, state)
        state.outbox.append((call_id, method, args))
        deadline_s = self.specs[rank].deadline_s(call.phase)
        timer = self._loop.call_later(deadline_s, self._silent, rank, state, call)
        try:
            return await call.future
        finally:
            timer.cancel()

    def _flush(self, state: Connected) -> None:
        """Send all calls of this tick as one message, so that a rank sees them together."""
        state.commands.put(state.outbox)
        state.outbox = []

    def _write(self, index: int, rank: Connected) -> None:
        while (calls := rank.commands.get()) is not None:
            try:
                frames.send(rank.sock, calls)
            except OSError:
                return  # the reader sees the end of the socket and says who died
            except Exception as error:  # an argument that can't be pickled: nobody would ever answer
                assert self._loop is not None
                cause = f"the command could not be sent: {type(error).__name__}: {error}"
                suspicion = _Suspicion(index, rank, rank.phases, "raised", cause)
                self._loop.call_soon_threadsafe(self._suspect, suspicion)
                return

    def _read(self, index: int, rank: Connected) -> None:
        assert self._loop is not None
        while True:
            try:
                answers = frames.receive(rank.sock)
            except (EOFError, OSError):
                answers = None
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._answered, index, rank, answers)
            if answers is None:
                return

    def _answered(self, index: int, rank: Connected, answers: list[tuple[int, bool, Any]] | None) -> None:
        if answers is None:
            if rank.lost is None and not self._closing:
                self._suspect(self._ended(index))
            return
        for call_id, ok, value in answers:
            call = rank.pending.pop(call_id)
            if call.future.done():
                continue
            if ok:
                call.future.set_result(value)
                continue
            error, text = value
            if isinstance(error, MeshrlError):
                error.add_note(f"in rank {index}, phase {call.phase!r}")
                error.__cause__ = RemoteTraceback(text)
                call.future.set_exception(error)
            else:
                rank.pending[call_id] = call  # it waits for the verdict
                last = next((line for line in reversed(text.splitlines()) if line.strip()), "an exception")
                self._suspect(_Suspicion(index, rank, call.phase, "raised", f"raised {last}", text))

    # ---- failures

    def _silent(self, index: int, rank: Connected, call: _Call) -> None:
        spec, phase = self.specs[index], call.phase
        key = f"cluster.deadlines.{phase}" if phase in spec.deadlines else "cluster.timeout_s"
        cause = f"no answer within {key} = {spec.deadline_s(phase):g} s"
        self._suspect(_Suspicion(index, rank, phase, "silent", cause, call=call))

    def _ended(self, index: int) -> _Suspicion:
        rank = self._ranks[index]
        return _Suspicion(index, rank, rank.phases, "ended", rank.process.how_it_ended())

    def _suspect(self, suspicion: _Suspicion) -> None:
        if self._closing or self._failure is not None:
            return
        self._suspicions.append(suspicion)
        if self._inquiry is None or self._inquiry.done():
            assert self._loop is not None
            self._inquiry = self._loop.create_task(self._inquire())

    async def _inquire(self) -> None:
        """Judge what is suspected, in order; what a verdict has ended or replaced meanwhile is settled."""
        while self._suspicions and self._failure is None:
            suspicion = self._suspicions.pop(0)
            if suspicion.rank.lost is None:
                await self._judge(suspicion)

    async def _judge(self, first: _Suspicion) -> None:
        """Find the rank that is to blame, take down where the others stand, and end what has to end.

        Waits for: a death within _SETTLE_S where the first sign is an exception, and the ranks' stacks. Unblocks: every
        call, of all ranks, or of the one that can be replaced.
        """
        culprit = first
        if first.kind != "ended":
            until = time.monotonic() + (_SETTLE_S if first.kind == "raised" else 0.0)
            while (dead := self._dead_partner(first.index)) is None and time.monotonic() < until:
                await asyncio.sleep(0.05)
            culprit = first if dead is None else self._ended(dead)
        stacks = await self._take_stacks()
        if culprit.kind == "silent":
            if first.is_over:
                return
            culprit = self._silent_one(first, stacks)
        failure = self._told(culprit, stacks)
        lost = self._ranks
        if culprit.kind == "raised":
            self._failure = failure
        else:
            lost = [self._ranks[index] for index in self._partners(culprit.index)]
        for rank in lost:
            _lose(rank, failure)
        self.on_lost(failure)

    def _partners(self, index: int) -> list[int]:
        """The ranks that can make this one wait or fail: train ranks each other, by collectives; a sampler none."""
        return [spec.rank for spec in self.specs if spec.trains] if self.specs[index].trains else [index]

    def _dead_partner(self, index: int) -> int | None:
        """A rank whose process has ended and that is not lost yet."""
        ranks = ((i, self._ranks[i]) for i in self._partners(index))
        return next((i for i, rank in ranks if rank.lost is None and rank.process.has_ended()), None)

    async def _take_stacks(self) -> dict[int, str]:
        """The Python stacks of every rank that lives, by rank; a line in their place where there are none. The handler
        of the signal is C: it needs neither the interpreter's lock nor an answer."""
        alive = {i: r for i, r in enumerate(self._ranks) if r.lost is None and not r.process.has_ended()}
        found = {
            i: "the process is stopped (SIGSTOP, or a debugger)" for i, r in alive.items() if r.process.is_stopped()
        }
        asked = {i: r for i, r in alive.items() if i not in found and r.process.ask_stacks()}
        sizes: dict[int, int] = {}
        until = time.monotonic() + _DUMP_S
        while asked and time.monotonic() < until:
            await asyncio.sleep(0.1)
            before, sizes = sizes, {i: rank.process.num_stack_bytes() for i, rank in asked.items()}
            if all(sizes.values()) and sizes == before:
                break
        found |= {i: rank.process.stacks() for i, rank in asked.items()}
        return {i: found.get(i) or "it has written no stack" for i in sorted(alive)}

    def _silent_one(self, first: _Suspicion, stacks: dict[int, str]) -> _Suspicion:
        """Of ranks that give no answer: one that is stopped, else one that the others wait for in a collective."""
        busy = [i for i in self._partners(first.index) if i in stacks and self._ranks[i].pending]
        stopped = [i for i in busy if self._ranks[i].process.is_stopped()]
        at_work = [i for i in busy if not waits_for_others(stacks[i])]
        if stopped:
            index, note = stopped[0], "; its process is stopped (SIGSTOP, or a debugger)"
        elif first.index in at_work or not at_work:
            index, note = first.index, ""
        else:
            index, note = at_work[0], f", and rank {first.index} waits for it"
        rank = self._ranks[index]
        return _Suspicion(index, rank, rank.phases, "silent", first.cause + note)

    def _told(self, culprit: _Suspicion, stacks: dict[int, str]) -> RankFailure:
        """The verdict for people: its traceback or where it stands, then the others' innermost frames."""
        heads = {i: f"rank {i}, in phase {self._ranks[i].phases!r}:" for i in stacks}
        shown = [i for i in stacks if i != culprit.index or culprit.kind == "silent"]
        details = [culprit.details.rstrip(), *(f"{heads[i]}\n{shortened(stacks[i])}" for i in shown)]
        full = "\n\n".join(f"{heads[i]}\n{text}" for i, text in stacks.items())
        cause = culprit.cause + culprit.rank.process.place
        text = "\n".join(details).lstrip("\n")
        return RankFailure(culprit.index, culprit.phase, cause, text, full, culprit.kind)

    # ---- the end

    async def close(self) -> None:
        """End all ranks: politely at first, by SIGKILL after a few seconds, or at once where one is in the middle of a
        command that nobody waits for any more. No child is left behind."""
        living = [i for i, rank in enumerate(self._ranks) if rank.lost is None]
        if any(call.occupies for i in living for call in self._ranks[i].pending.values()):
            self._closing = True
            for i in living:
                self._ranks[i].process.kill()
        elif self._failure is None:
            stops = [asyncio.ensure_future(self.call(rank, RankWorker.stop)) for rank in living]
            if stops:
                await asyncio.wait(stops, timeout=_STOP_GRACE_S)
            for stop in stops:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)
        self._closing = True
        if self._inquiry is not None:
            self._inquiry.cancel()
        for rank in self._ranks:
            _hang_up(rank)
        await asyncio.gather(*(asyncio.to_thread(rank.process.end, _STOP_GRACE_S) for rank in self._ranks))


def came_up(worker: RankWorker) -> int:
    """The process id of a rank that takes commands."""
    return os.getpid()


def _lose(rank: Connected, failure: RankFailure) -> None:
    """End a rank; its calls, under way and later, get the failure."""
    rank.lost = failure
    rank.process.kill()
    for call in rank.pending.values():
        if not call.future.done():
            call.future.set_exception(failure)


def _heard(future: asyncio.Future[Any]) -> None:
    """A caller who has left (cancelled, or told by another failure) will not ask for the exception."""
    if not future.cancelled():
        future.exception()


def _hang_up(rank: Connected) -> None:
    """Let go of the rank's channel; its threads end, and so does the rank."""
    rank.commands.put(None)
    with contextlib.suppress(OSError):  # a dead rank's socket is not connected any more
        rank.sock.shutdown(socket.SHUT_RDWR)  # close alone does not end a recv that the reader stands in
    rank.sock.close()
    rank.process.close()


def _loopback() -> str:
    """Name of the loopback interface: ranks of one machine need no other, and a laptop may have none."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")

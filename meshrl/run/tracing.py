"""RUN/traces/: when torch.profiler runs in the ranks, and when ranks and controller write what they have recorded."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import Executor
from meshrl.core.errors import MeshrlError
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.recorder import Spans
from meshrl.monitor.trace import FOLDER, ClockReading, ControllerTrace, Phase, RankFacts, Step, write_controller

T = TypeVar("T")
_BEFORE = 2  # steps before the profiler starts: the first ones are slower, and the last of them shows its slow-down
_EARLY = 3  # without the profiler, traces/ is written after this number of steps, and at the end of the run


class Tracing:
    """The trace of one run. It never ends the run: failed writes are counted, and lost ranks are left out."""

    def __init__(
        self, folder: Path, num_steps: int, trace_steps: int, spans: Spans, writes: FailedWrites, facts: dict[str, Any]
    ):
        self._folder, self._spans, self._writes, self._facts = folder / FOLDER, spans, writes, facts
        self._num_steps, self._trace_steps = num_steps, trace_steps
        self._steps: deque[Step] = deque(maxlen=64)
        self._first: int | None = None  # finished steps when this process started or continued the run
        self._since_ns = 0
        self._profiling = self._is_complete = False
        self._clocks: dict[int, list[ClockReading]] = {}

    def step_ended(self, step: int, sync: Mapping[str, float]) -> None:
        """sync: the metrics sync/* of this step, without the prefix."""
        now = time.time_ns()
        while self._steps and self._steps[-1].step >= step:  # the run has returned to an earlier step
            self._steps.pop()
        self._steps.append(Step(step, self._since_ns, now, self._profiling, sync))
        self._since_ns = now

    async def between_steps(self, executor: Executor, step: int, is_over: bool) -> None:
        """Start the profiler or write the trace, if it is time. step: finished steps."""
        if self._first is None:
            self._first, self._since_ns = step, time.time_ns()
        done, count = step - self._first, self._trace_steps
        begin = min(_BEFORE, max(0, self._num_steps - self._first - count))
        is_time = self._profiling and done >= begin + count if count else done == _EARLY
        if (is_over or is_time) and not self._is_complete:
            with self._spans("trace"):
                await self._write(executor)
            self._profiling, self._is_complete = False, count > 0
        elif count and done >= begin and not (self._profiling or self._is_complete):
            with self._spans("trace"):
                await self._read_clocks(executor)
                await _everywhere(executor, lambda rank: executor.call(rank, RankWorker.start_profiler))
            self._profiling = True

    async def _write(self, executor: Executor) -> None:
        with self._writes.attempt(FOLDER):
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.glob("rank_*"):  # of an earlier part of the run, with other ranks
                path.unlink()
        answers = await _everywhere(executor, lambda rank: executor.call(rank, RankWorker.write_trace, self._folder))
        await self._read_clocks(executor)
        ranks = {}
        for rank, (host, device, error) in answers.items():
            spec, clock = executor.specs[rank], self._clocks.get(rank, [])
            ranks[rank] = RankFacts(host=host, device=device, trains=spec.trains, samples=spec.samples, clock=clock)
            with self._writes.attempt(FOLDER):
                if error:
                    raise OSError(error)
        phases = [Phase(*interval) for interval in self._spans.intervals]
        with self._writes.attempt(FOLDER):
            trace = ControllerTrace(phases=phases, steps=[*self._steps], ranks=ranks, facts=self._facts)
            write_controller(self._folder, trace)

    async def _read_clocks(self, executor: Executor) -> None:
        """Add the offset of each rank's clock, measured over the command channel."""

        async def exchange(rank: int) -> ClockReading:
            before = time.time_ns()
            theirs = await executor.call(rank, RankWorker.clock)
            after = time.time_ns()
            middle = (before + after) // 2
            return ClockReading(middle, theirs - middle, (after - before + 1) // 2)

        best: dict[int, ClockReading] = {}
        for _ in range(16):  # of clocks; the one with the shortest round trip counts
            for rank, reading in (await _everywhere(executor, exchange)).items():
                if rank not in best or reading.error_ns < best[rank].error_ns:
                    best[rank] = reading
        for rank, reading in best.items():
            self._clocks.setdefault(rank, []).append(reading)


async def _everywhere(executor: Executor, call: Callable[[int], Awaitable[T]]) -> dict[int, T]:
    """The answers of all ranks, except those that are lost: the next command reports their failure."""
    ranks = [spec.rank for spec in executor.specs]
    outcomes = await asyncio.gather(*map(call, ranks), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, MeshrlError):
            raise outcome
    return {
        rank: outcome for rank, outcome in zip(ranks, outcomes, strict=True) if not isinstance(outcome, BaseException)
    }

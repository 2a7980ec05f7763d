"""When a run traces, what RUN/traces/ contains then, and that a failure there ends no run."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import itertools
import json
import time

import pytest
import torch
from tiny_specs import worker_spec

from meshrl.cluster.actors import RankWorker
from meshrl.core.errors import RankFailure
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.recorder import CONTROLLER, PROFILE_FILE, SPANS_FILE, Spans, read_controller, read_rank, recorder
from meshrl.run.outputs import Tracing


class Ranks:
    """An executor whose ranks are in this process, without engines; `lost` ranks fail."""

    def __init__(self, num_ranks=1):
        self.specs = [worker_spec(rank=rank, num_train_ranks=num_ranks) for rank in range(num_ranks)]
        self.workers = [RankWorker(spec) for spec in self.specs]
        self.lost = set()

    async def call(self, rank, method, *args):
        if rank in self.lost:
            raise RankFailure(rank, "report", "died")
        result = getattr(self.workers[rank], method.__name__)(*args)
        return await result if inspect.isawaitable(result) else result


class Run:
    def __init__(self, folder, num_steps, trace_steps, first=0):
        self.folder, self.num_steps, self.first = folder, num_steps, first
        self.spans, self.writes = Spans(), FailedWrites()
        self.tracing = Tracing(folder, num_steps, trace_steps, self.spans, self.writes, {"kind": "train"})
        self.written = []  # finished steps when the controller's file is new

    def run(self, executor, until=None, at_step=lambda step: None):
        asyncio.run(self._run(executor, until or self.num_steps, at_step))
        return self

    async def _run(self, executor, until, at_step):
        path, last = self.folder / "traces" / CONTROLLER, None
        for step in range(self.first, until + 1):
            await self.tracing.between_steps(executor, step, step == until)
            if path.is_file() and path.stat().st_mtime_ns != last:
                last = path.stat().st_mtime_ns
                self.written.append(step)
            if step == until:
                return
            at_step(step + 1)
            with self.spans("train"), recorder.span("train", "phase"):
                torch.ones(3).sum()
            self.tracing.step_ended(step + 1, {"cast_s": 1.0})

    def read(self):
        return read_controller(self.folder / "traces" / CONTROLLER)


@pytest.fixture(autouse=True)
def empty_recorder():
    recorder.clear()
    yield
    recorder.clear()


def test_the_profiler_records_n_steps_after_two_others(tmp_path):
    run = Run(tmp_path, num_steps=6, trace_steps=2).run(Ranks())
    assert run.written == [4]  # not again at the end of the run
    trace = run.read()
    assert [(s.step, s.traced) for s in trace.steps] == [(1, False), (2, False), (3, True), (4, True)]
    assert all(a.end_ns == b.start_ns for a, b in zip(trace.steps, trace.steps[1:]))
    assert trace.steps[0].sync == {"cast_s": 1.0} and trace.facts == {"kind": "train"}
    assert [p.name for p in trace.phases] == ["train", "train", "trace", "train", "train"]
    assert len(trace.ranks[0].clock) == 2 and trace.ranks[0].device == "cpu"
    spans = read_rank(tmp_path / "traces" / SPANS_FILE.format(0)).spans
    assert [s.name for s in spans] == ["train", "train"]  # those of the traced steps


def test_the_profile_has_the_spans_at_their_unix_times(tmp_path):
    Run(tmp_path, num_steps=6, trace_steps=2).run(Ranks())
    spans = read_rank(tmp_path / "traces" / SPANS_FILE.format(0)).spans
    with gzip.open(tmp_path / "traces" / PROFILE_FILE.format(0)) as file:
        profile = json.load(file)
    events = sorted((e for e in profile["traceEvents"] if e.get("name") == "train"), key=lambda e: e["ts"])
    assert len(events) == len(spans) == 2
    for event, span in zip(events, spans, strict=True):
        assert abs(profile["baseTimeNanoseconds"] + 1000 * event["ts"] - span.start_ns) < 20e6


def test_without_the_profiler_spans_are_written_early_and_at_the_end(tmp_path):
    run = Run(tmp_path, num_steps=6, trace_steps=0).run(Ranks())
    assert run.written == [3, 6]
    assert not any(s.traced for s in run.read().steps) and len(run.read().steps) == 6
    assert not (tmp_path / "traces" / PROFILE_FILE.format(0)).exists()


@pytest.mark.parametrize(("num_steps", "traced"), [(1, [1]), (2, [1, 2]), (3, [2, 3])])
def test_a_short_run_traces_its_last_steps(tmp_path, num_steps, traced):
    run = Run(tmp_path, num_steps, trace_steps=2).run(Ranks())
    assert run.written == [num_steps] and [s.step for s in run.read().steps if s.traced] == traced


def test_a_run_that_ends_while_it_is_profiled_writes_what_it_has(tmp_path):
    run = Run(tmp_path, num_steps=100, trace_steps=5).run(Ranks(), until=4)
    assert [s.step for s in run.read().steps if s.traced] == [3, 4]
    assert (tmp_path / "traces" / PROFILE_FILE.format(0)).is_file()


def test_a_resumed_run_counts_from_its_first_step_and_replaces_the_files(tmp_path):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / SPANS_FILE.format(9)).write_text("of an earlier part")
    run = Run(tmp_path, num_steps=20, trace_steps=1, first=10).run(Ranks())
    assert [s.step for s in run.read().steps if s.traced] == [13]
    assert not (tmp_path / "traces" / SPANS_FILE.format(9)).exists()


def test_a_step_that_is_repeated_after_a_restart_is_there_once(tmp_path):
    run, executor = Run(tmp_path, num_steps=6, trace_steps=0), Ranks()
    run.run(executor, until=4)
    run.first = 2
    run.run(executor)
    assert [s.step for s in run.read().steps] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("trace_steps", [0, 2])
def test_files_that_cant_be_written_are_counted_and_end_no_run(tmp_path, trace_steps):
    (tmp_path / "traces").write_text("a file where the folder should be")
    executor = Ranks()
    run = Run(tmp_path, 6, trace_steps).run(executor)
    assert run.writes.counts["traces"] >= 1 and run.written == []
    assert executor.workers[0]._profiler is None


def test_a_lost_rank_is_left_out(tmp_path):
    executor = Ranks(2)
    run = Run(tmp_path, 6, 0).run(executor, at_step=lambda step: executor.lost.update({1} if step == 2 else ()))
    assert list(run.read().ranks) == [0] and run.writes.counts == {}
    assert (tmp_path / "traces" / SPANS_FILE.format(0)).is_file()
    assert not (tmp_path / "traces" / SPANS_FILE.format(1)).exists()


def test_the_offset_of_a_clock_is_known_within_its_error(tmp_path):
    executor, ahead_ns, calls = Ranks(2), 7_000_000_000, itertools.count()
    theirs = executor.workers[1].clock

    def clock():
        time.sleep(0.0 if next(calls) % 16 else 0.2)  # the first exchange of each reading is slow
        return theirs() + ahead_ns

    executor.workers[1].clock = clock
    facts = Run(tmp_path, 6, 1).run(executor).read().ranks
    for reading in facts[1].clock:
        assert abs(reading.offset_ns - ahead_ns) <= reading.error_ns < 0.1e9
    for reading in facts[0].clock:
        assert abs(reading.offset_ns) <= reading.error_ns

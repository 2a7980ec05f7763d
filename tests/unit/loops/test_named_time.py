"""Each part of a step has its phase. The clock counts calls of functions in the main thread, so that the coverage does
not depend on how fast the machine is."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import train, write_run

import meshrl
from meshrl.run.outputs import Tracing
from meshrl.tools.diagnose.read import Trace, overlap, read_trace

LEAST = 0.97


@pytest.fixture
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """time.time_ns, which spans read, is the number of calls and returns in this thread since the first step."""
    count, between = itertools.count(1), Tracing.between_steps

    async def between_steps(tracing: Tracing, executor: Any, step: int, is_over: bool) -> None:
        await between(tracing, executor, step, is_over)
        sys.setprofile(None if is_over else lambda frame, event, value: next(count))

    monkeypatch.setattr(time, "time_ns", count.__next__)
    monkeypatch.setattr(Tracing, "between_steps", between_steps)
    yield
    sys.setprofile(None)


def names_by_step(trace: Trace) -> list[list[str]]:
    """The phases of each step, in the order of their starts; one that two steps share is listed in both."""
    phases = sorted(trace.control.phases, key=lambda phase: phase.start_ns)
    return [
        [p.name for p in phases if overlap([(p.start_ns, p.end_ns)], [(step.start_ns, step.end_ns)])]
        for step in trace.control.steps
    ]


STEP = ["rollout", "reward", "flatten", "batch_plan", "train", "log", "sync", "log"]


def test_phases_cover_a_step_of_grpo(tmp_path: Path, counted_calls: None) -> None:
    """The report of a step ends in the time of the next one."""
    config = write_run(tmp_path)
    (tmp_path / "held_out.jsonl").write_text('{"question": "1+2", "answer": "3"}\n')
    options = ("cluster.executor=inline", f"data.eval_path={tmp_path}/held_out.jsonl", "loop.eval_every_steps=1")
    trace = read_trace(train(config, "named", *options))
    assert names_by_step(trace) == [STEP, ["log", "eval", "log", "export", "save", *STEP]]
    assert trace.named_share >= LEAST


def test_phases_cover_a_step_of_sft(tmp_path: Path, counted_calls: None) -> None:
    sections = json.loads(write_run(tmp_path).read_text())
    rows = {"path": str(tmp_path / "rows.jsonl"), "prompt": "question", "rows_per_step": 4, "max_row_tokens": 64}
    config = {"train": sections["train"], "run": sections["run"], "cluster": {"executor": "inline"}}
    config |= {"model": {"path": str(tmp_path / "model"), "dtype": "float32"}, "sft": rows | {"num_steps": 2}}
    trace = read_trace(meshrl.sft(config, quiet=True).folder)
    step = ["data", "batch_plan", "train", "log"]
    assert names_by_step(trace) == [step, ["log", *step]]
    assert trace.named_share >= LEAST

"""The metrics of a step, and the moment at which a step is counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_samplers import Samplers, job_of, turn
from tiny_samples import random_samples

from meshrl.core.types import Metric, Prompt, Trajectory
from meshrl.loops.finish_step import finish_step, rollout_metrics
from meshrl.loops.job import Job
from meshrl.loops.sync_and_probe import _changes
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.metrics import divide, merge
from meshrl.sync.layout import Ack


def answers(*lengths: int) -> list[Trajectory]:
    prompt = Prompt(id="p", ordinal=0, ids=np.array([1], np.int32))
    return [
        Trajectory(prompt=prompt, group_id="p@0", index=index, turns=[turn([0] * length)])
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, {}),
        ({"num_changed": 0}, {"sync/changed_tensors": 0.0}),
        ({"num_changed": 1}, {"sync/changed_tensors": 0.5}),
        ({"num_changed": 2, "num_changed_elements": 0}, {"sync/changed_tensors": 1.0, "sync/changed_elements": 0.0}),
        ({"num_changed_elements": 3}, {"sync/changed_elements": 0.25}),
        ({"num_shared": 1}, {"sync/shared_tensors": 0.5}),
    ],
)
def test_a_sync_that_changes_nothing_is_reported_as_zero_and_an_unknown_number_is_not_reported(counts, expected):
    """The two tensors have 12 elements."""
    job: Any = SimpleNamespace(
        layout=SimpleNamespace(tensors=[SimpleNamespace(shape=(2, 4)), SimpleNamespace(shape=(4,))])
    )
    ack = Ack(version=2, receiver="rank 1", wire=True, read_back=True, num_bytes=96, num_tensors=2, **counts)
    assert {metric.name: metric.sum for metric in _changes(job, ack)} == expected


def test_trained_tokens_include_the_prompts_and_sampled_ones_do_not():
    samplers = Samplers()
    samplers.replacement_metrics = list
    job = job_of(samplers, 1)
    values = divide(merge(rollout_metrics(job, answers(3, 5), random_samples(0, [10, 20, -30]))))
    assert values["rollout/num_tokens"] == 8 and values["train/num_tokens"] == 60


def test_the_calls_that_tools_answered_are_counted_for_agents_with_tools():
    samplers = Samplers()
    samplers.replacement_metrics = list
    job, trajectories = job_of(samplers, 1), answers(3, 5)
    trajectories[1].turns[0].messages = [{"role": "tool"}, {"role": "assistant"}, {"role": "tool"}, {"role": "tool"}]
    counted = []
    for tools in ([{"name": "add"}], []):
        job.task = SimpleNamespace(agent=SimpleNamespace(tools=tools))
        counted.append(divide(merge(rollout_metrics(job, trajectories, []))).get("rollout/tool_calls_mean"))
    assert counted == [1.5, None]


def finishable() -> tuple[Job, list[int]]:
    """A job in its third step, and the steps that it reports."""
    samplers, reported = Samplers(), list[int]()
    job = job_of(samplers, 1, step=2)

    def report(step: int, metrics: list[Metric]) -> dict[str, float]:
        reported.append(step)
        return {"reward/mean": 0.5}

    async def memory() -> list[Any]:
        return []

    job.run.report, job.run.writes, job.trainer.memory = report, FailedWrites(), memory
    job.run.record_step = lambda step, record: reported.append(step)
    job.rollout_log = SimpleNamespace(write=lambda step, trajectories, trainer: None)
    return job, reported


def test_a_finished_step_is_reported_under_its_number_and_has_the_cursor_after_its_prompts():
    job, reported = finishable()
    asyncio.run(finish_step(job, answers(1), [], {"next_ordinal": 6}))
    assert (job.step, job.cursor, job.rewards, reported) == (3, {"next_ordinal": 6}, [0.5], [3, 3])


@pytest.mark.parametrize("error", [TypeError("a lock is not JSON"), ValueError("a circular message")])
def test_a_step_whose_messages_are_not_json_is_counted_before_the_error(error):
    """Its weights are trained and its metrics are reported, so that a resume must not repeat it."""

    def write(step: int, trajectories: list[Trajectory], trainer: None) -> None:
        raise error

    job, reported = finishable()
    job.rollout_log = SimpleNamespace(write=write)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(finish_step(job, answers(1), [], {"next_ordinal": 6}))
    assert (job.step, job.cursor, job.rewards, reported) == (3, {"next_ordinal": 6}, [0.5], [3, 3])

"""The state of a loop that a checkpoint records and a resume restores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshrl.config.run import RunConfig
from meshrl.core.types import Prompt
from meshrl.data.order import PromptSource
from meshrl.loops.job import Job

SECTIONS: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": "d"},
    "loop": {"num_steps": 9},
    "reward": {"terms": {"right": {"kind": "exact_match"}}},
}


class Trainer:
    """Stands in for the train ranks."""

    def __init__(self) -> None:
        self.version, self.is_synced = 0, True
        self.loaded: list[tuple[Any, int]] = []

    async def load(self, state: Any, version: int) -> None:
        self.loaded.append((state, version))


def job_of(changes: Sequence[tuple[str, str, Any]] = ()) -> Job:
    """changes: (section, key, value) of the config."""
    sections = json.loads(json.dumps(SECTIONS))
    for section, key, value in changes:
        sections.setdefault(section, {})[key] = value
    source = PromptSource([Prompt(id=str(i), ordinal=0) for i in range(9)], seed=0, shuffle=True)
    task: Any = SimpleNamespace(train_prompts=source)
    parts: dict[str, Any] = dict.fromkeys(("run", "keeper", "rollouts", "scorer", "layout", "rollout_log"))
    return Job(cfg=RunConfig.model_validate(sections), task=task, trainer=Trainer(), **parts)


def saved_state() -> dict[str, Any]:
    """As a checkpoint records it after step 3."""
    job = job_of()
    job.feed.next(6)
    job.step, job.cursor = 3, job.feed.state()
    job.trainer.version, job.trainer.is_synced, job.proof.threshold = 3, True, 0.25
    job.rewards, job.evals = [0.5, 0.25, 1.0], [(0, 0.125), (2, 0.75)]
    return json.loads(json.dumps({**job.snapshot(), "config": job.cfg.model_dump(mode="json")}))


@pytest.mark.parametrize(
    ("changes", "threshold"),
    [
        ([], 0.25),
        ([("train", "updates_per_step", 2), ("loop", "num_steps", 20), ("cluster", "max_restarts", 7)], 0.25),
        ([("model", "dtype", "float32")], None),
        ([("model", "path", "other")], None),
        ([("rollout", "engine", "vllm")], None),
        ([("rollout", "max_running_requests", 7)], None),
        ([("rollout", "sampling", {"max_new_tokens": 7})], None),
    ],
)
def test_the_limit_of_the_proof_is_measured_again_when_model_or_sampler_changes(changes, threshold):
    """Another engine or dtype rounds otherwise; a limit that is too high would hide stale weights."""
    job = job_of(changes)
    job.proof.threshold = 0.5
    asyncio.run(job.restore(3, saved_state(), None))
    assert job.proof.threshold == threshold


def test_a_restored_job_continues_with_the_state_that_was_saved():
    job, before = job_of(), job_of()
    before.feed.next(6)
    asyncio.run(job.restore(3, saved_state(), None))
    assert (job.step, job.trainer.loaded) == (3, [(None, 3)])
    assert (job.rewards, job.evals) == ([0.5, 0.25, 1.0], [(0, 0.125), (2, 0.75)])
    assert [prompt.id for prompt in job.feed.next(3)] == [prompt.id for prompt in before.feed.next(3)]


@pytest.mark.parametrize(("is_synced", "version"), [(True, 3), (False, 4)])
def test_a_checkpoint_before_the_sync_of_its_step_records_the_version_of_that_sync(is_synced, version):
    """The next sync commits this number, in the run itself and after a resume."""
    job = job_of()
    job.trainer.version, job.trainer.is_synced = 3, is_synced
    assert job.snapshot()["version"] == version


def test_a_snapshot_is_a_copy_and_a_restore_too():
    """A checkpoint is written while the run continues."""
    job = job_of()
    state = job.snapshot()
    job.rewards.append(1.0)
    job.evals.append((0, 1.0))
    assert state["rewards"] == [] == state["evals"]
    saved = saved_state()
    asyncio.run(job.restore(3, saved, None))
    job.rewards.append(0.0)
    job.evals.append((4, 1.0))
    assert saved == saved_state()


def test_a_run_that_returns_to_a_checkpoint_drops_the_probe_of_weights_that_it_has_lost():
    async def scenario() -> None:
        job = job_of()
        job.probe, job.probed = asyncio.create_task(asyncio.sleep(60, [])), [np.arange(3)]
        probe = job.probe
        await job.restore(3, saved_state(), None)
        assert job.probe is None and job.probed, "the next sync sends these weights again"
        await asyncio.sleep(0)
        assert probe.cancelled()

    asyncio.run(scenario())


@pytest.mark.parametrize(("rows", "evals"), [("a", [(0, 0.125), (2, 0.75)]), ("b", [])])
def test_evaluations_of_another_identity_are_not_restored_and_one_is_due_at_once(rows, evals):
    job, notes = job_of(), list[str]()
    job.run, job.evaluation = SimpleNamespace(note=notes.append), {"rows": rows, "sampling": "c"}
    asyncio.run(job.restore(3, {**saved_state(), "evaluation": {"rows": "a", "sampling": "c"}}, None))
    assert job.evals == evals and job.first_eval == (0 if evals else 3)
    assert notes == ([] if evals else ["the evaluations have other rows, so earlier scores are not compared"])

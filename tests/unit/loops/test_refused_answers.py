"""Steps in which the engine refuses every answer, or the agent raises exceptions: the run does not end as a success,
and the reason is printed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.config.run import RunConfig
from meshrl.core.errors import AgentError, Failure, MeshrlError, RewardError
from meshrl.core.types import Prompt, Trajectory
from meshrl.loops.job import Job
from meshrl.loops.train_step import train_step
from meshrl.monitor.recorder import Spans


def job_of(notes: list[str]) -> Job:
    sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "loop": {"num_steps": 9}}
    sections |= {"reward": {"terms": {"right": {"kind": "exact_match"}}}}
    parts: dict[str, Any] = dict.fromkeys(("keeper", "layout"))
    parts |= {"trainer": SimpleNamespace(version=0), "rollout_log": SimpleNamespace(has_file=bool)}
    parts["task"] = SimpleNamespace(agent=SimpleNamespace(tools=[]))
    parts |= {"cfg": RunConfig.model_validate(sections), "run": SimpleNamespace(note=notes.append, spans=Spans())}
    parts |= {"rollouts": SimpleNamespace(replacement_metrics=list)}
    return Job(**parts, scorer=SimpleNamespace(check_failures=lambda trajectories: None))


def refused(kind: str) -> Trajectory:
    failure = Failure(kind=kind, message="the server answered 401: no such key")
    return Trajectory(
        prompt=Prompt(id="p", ordinal=0), group_id="p@0", index=0, turns=[], status="failed", failure=failure
    )


def test_three_steps_without_an_answer_end_the_run_with_the_reason():
    notes: list[str] = []
    job = job_of(notes)
    for _ in range(2):
        asyncio.run(train_step(job, [refused("engine")] * 4))
    with pytest.raises(MeshrlError, match=r"in 3 steps .* every request\. First error: the server answered 401"):
        asyncio.run(train_step(job, [refused("engine")] * 4))
    assert len(notes) == 2 and all("The engine refused 4 of them, such as: the server answered 401" in n for n in notes)


@pytest.mark.parametrize("failures", [("agent",), ("engine", "agent")])
def test_other_failures_do_not_end_the_run(failures):
    notes: list[str] = []
    job = job_of(notes)
    for _ in range(5):
        asyncio.run(train_step(job, [refused(kind) for kind in failures]))
    assert len(notes) == 5 and ("refused 1 of them" in notes[0]) == ("engine" in failures)


def test_exceptions_of_the_agent_in_too_many_attempts_end_the_run():
    job = job_of([])
    with pytest.raises(AgentError, match=r"agent single_turn failed in 2 of 4 attempts, .* 0\.2"):
        asyncio.run(train_step(job, [refused("crash")] * 2 + [refused("agent")] * 2))


def test_three_steps_in_which_every_answer_abstained_end_the_run():
    notes: list[str] = []
    job = job_of(notes)
    abstained = Trajectory(prompt=Prompt(id="p", ordinal=0), group_id="p@0", index=0, has_abstained=True)
    for _ in range(2):
        asyncio.run(train_step(job, [abstained] * 4))
    with pytest.raises(RewardError, match=r"in 3 steps .* no answer has a reward, .* right returned None"):
        asyncio.run(train_step(job, [abstained] * 4))
    assert len(notes) == 2 and all("returned None for 4 of them" in note for note in notes)


def test_failed_gradings_are_checked_before_anything_is_trained():
    def too_many(trajectories: list[Trajectory]) -> None:
        raise RewardError(f"{len(trajectories)} failed")

    job = job_of([])
    job.scorer = SimpleNamespace(check_failures=too_many)
    with pytest.raises(RewardError, match="3 failed"):
        asyncio.run(train_step(job, [refused("agent")] * 3))

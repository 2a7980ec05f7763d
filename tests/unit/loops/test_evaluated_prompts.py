"""Evaluations in a loop: when they are due, and which requests they send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshrl.agent.loop import AgentContext, start_trajectory
from meshrl.config.run import RunConfig
from meshrl.core.errors import RewardError
from meshrl.core.types import Generate, Metric, Prompt, Trajectory, Turn
from meshrl.loops.evaluate import evaluate_if_due
from meshrl.loops.job import Job
from meshrl.monitor.metrics import divide, merge
from meshrl.monitor.recorder import Spans


class Evaluations:
    """Stands in for agent, grader and run, and records what they get. scores: of the answers to each prompt."""

    def __init__(self, data: dict[str, Any] | None = None, names: Sequence[str] = "ab", **loop: Any):
        self.asked: list[tuple[str, int, AgentContext]] = []
        self.reported: list[tuple[int, dict[str, float]]] = []
        self.best: list[tuple[int, float]] = []
        self.files: list[int] = []
        self.shown: list[str] = []
        self.scores, self.ended_sessions = [1.0], list[str]()
        self.has_failed = False
        self.note, self.spans, self.ends_early = (lambda text: None), Spans(), False
        self.progress = self.shown.append
        sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d", **(data or {"eval_path": "e"})}}
        sections |= {"reward": {"terms": {"right": {"kind": "exact_match"}}}, "loop": {"num_steps": 7, **loop}}
        sections |= {"rollout": {"sampling": {"temperature": 0.7}}}
        prompts = [Prompt(id=name, ordinal=i, answer=name) for i, name in enumerate(names)]
        task = SimpleNamespace(agent=self, tokenizer=None, stop_token_ids=(5,), max_context_tokens=9)
        task.eval_prompts = prompts
        routes = SimpleNamespace(end_session=self.ended_sessions.append)
        rollouts = SimpleNamespace(generate=None, routes=routes, computed_tokens=lambda: 0)
        parts: dict[str, Any] = {"cfg": RunConfig.model_validate(sections), "run": self, "keeper": self, "task": task}
        parts |= {"rollouts": rollouts, "scorer": self, "rollout_log": self, "layout": None}
        self.job = Job(**parts, trainer=SimpleNamespace(version=0))

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        self.asked.append((prompt.id, index, ctx))
        trajectory = start_trajectory(prompt, index, ctx)
        ids = np.zeros(1, np.int32)
        answer: dict[str, Any] = {"messages": [{"role": "assistant", "content": "no"}], "stop_reason": "stop"}
        empty = np.zeros(1, np.float32)
        trajectory.turns = [Turn(parent=-1, context_ids=ids, output_ids=ids, logprobs=empty, versions=ids, **answer)]
        return trajectory

    async def score(self, trajectories: list[Trajectory]) -> list[Metric]:
        for trajectory in trajectories:
            trajectory.reward = self.scores[trajectory.prompt.ordinal % len(self.scores)]
            trajectory.rewards["right"] = trajectory.reward
        return []

    def check_failures(self, trajectories: list[Trajectory]) -> None:
        if self.has_failed:
            raise RewardError("2 of 2 calls of reward functions failed")

    def write(self, step: int, trajectories: list[Trajectory], name: str) -> None:
        self.files.append(step)

    def report(self, step: int, metrics: list[Metric], evaluation: dict[str, str]) -> dict[str, float]:
        values = divide(merge(metrics))
        self.reported.append((step, values))
        return values

    async def keep_best(self, step: int, score: float) -> None:
        self.best.append((step, score))

    def evaluate(self, step: int, version: int) -> None:
        self.job.step, self.job.trainer.version = step, version
        asyncio.run(evaluate_if_due(self.job))


@pytest.mark.parametrize(
    ("every", "steps"), [(0, [0, 7]), (1, [*range(8)]), (2, [0, 2, 4, 6, 7]), (7, [0, 7]), (9, [0, 7])]
)
def test_an_evaluation_is_due_at_the_start_at_the_end_and_every_n_steps(every, steps):
    run = Evaluations(eval_every_steps=every)
    for step in range(8):
        run.evaluate(step, version=step)
        run.evaluate(step, version=step)  # a loop that has restarted at this step does not repeat it
    assert run.files == steps and [step for step, _ in run.job.evals] == steps
    assert [step for step, _ in run.reported] == steps
    assert run.shown == ["1 of 2 prompts", "2 of 2 prompts"] * len(steps)


def test_a_run_that_ends_early_is_evaluated_at_its_end():
    run = Evaluations()
    run.evaluate(3, version=3)
    run.ends_early = True
    run.evaluate(3, version=3)
    assert run.files == [3]


def test_a_model_with_one_answer_for_all_prompts_is_noted_once():
    run, notes = Evaluations(eval_samples=10, eval_every_steps=1), list[str]()
    run.note = notes.append
    for step in (0, 1):
        run.evaluate(step, version=step)
    assert [note.partition(", while")[0] for note in notes if "the same" in note] == [
        "step 0: 20 of 20 held-out answers are the same, 'no'"
    ]


@pytest.mark.parametrize(("num_samples", "temperature"), [(1, 0.0), (3, 0.7)])
def test_an_evaluation_asks_for_the_weights_of_the_trainer(num_samples, temperature):
    """Weights that a sampler has from before the last sync must not answer. A single answer is greedy."""
    run = Evaluations(eval_samples=num_samples)
    for step, version in ((0, 0), (7, 8)):
        run.asked.clear()
        run.evaluate(step, version)
        assert [(name, index) for name, index, _ in run.asked] == [(n, i) for n in "ab" for i in range(num_samples)]
        contexts = [ctx for _, _, ctx in run.asked]
        assert {ctx.min_version for ctx in contexts} == {version}
        assert {ctx.purpose for ctx in contexts} == {"eval"}
        assert {ctx.sampling.temperature for ctx in contexts} == {temperature}
        assert {ctx.group_id for ctx in contexts} == {"eval:a@0", "eval:b@1"} == {*run.ended_sessions}


def test_each_held_out_set_has_its_own_sampling_and_score():
    sets = {"gsm": {"path": "e"}, "aime": {"path": "f", "samples": 3, "sampling": {"max_new_tokens": 99}}}
    run, notes = Evaluations({"eval_sets": sets}, ["gsm/e-1", "gsm/e-2", "aime/f-1"]), list[str]()
    run.note, run.scores = notes.append, [0.0, 1.0, 0.5]
    run.evaluate(0, version=0)
    asked = [(name, ctx.sampling.temperature, ctx.max_new_tokens) for name, _, ctx in run.asked]
    assert asked == [("gsm/e-1", 0.0, 256), ("gsm/e-2", 0.0, 256), *[("aime/f-1", 0.7, 99)] * 3]
    assert run.shown == ["1 of 3 prompts", "2 of 3 prompts", "3 of 3 prompts"]
    ((_, values),) = run.reported
    assert values["eval/by/gsm/mean_at_k"] == values["eval/by/aime/mean_at_k"] == values["eval/mean_at_k"] == 0.5
    assert "mean@k 0.500" in notes[0] and "(gsm: greedy; aime: 3 samples each)" in notes[0]


def test_an_evaluation_whose_grader_fails_ends_the_run():
    """A failed grading is no score of 0, and such an evaluation is not reported."""
    run = Evaluations()
    run.has_failed = True
    with pytest.raises(RewardError, match="2 of 2 calls"):
        run.evaluate(0, version=0)
    assert run.reported == [] == run.job.evals


@pytest.mark.parametrize("save_best", [False, True])
def test_the_score_of_an_evaluation_decides_the_best_model(save_best):
    """It is given again when the loop restarts at this step, because the model may not have been written."""
    run = Evaluations(save_best=save_best)
    run.scores = [1.0, 0.5]
    run.evaluate(0, version=0)
    run.evaluate(0, version=0)
    assert run.best == ([(0, 0.75)] * 2 if save_best else [])

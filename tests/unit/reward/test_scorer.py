"""Rewards of trajectories; a failure of a grader is counted, and never a reward of 0."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.errors import Failure, RewardError
from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.reward.score import Scorer


def make_trajectory(text, answer="4", **fields):
    """One turn of three tokens whose parsed message has this content; None leaves no message."""
    messages = [] if text is None else [{"role": "assistant", "content": text}]
    turn = Turn(
        context_ids=np.array([1], np.int32),
        output_ids=np.array([2, 3, 4], np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        stop_reason="stop",
        messages=messages,
    )
    prompt = Prompt(
        id="p", ordinal=0, messages=[{"role": "user", "content": "2+2="}], answer=answer, meta={"base": 1.0}
    )
    return Trajectory(prompt=prompt, group_id="p#0", index=0, turns=[turn], **fields)


def score(trajectories, **cfg):
    async def run():
        scorer = Scorer(RewardConfig(**cfg))
        try:
            metrics = await scorer.score(trajectories)
            scorer.check_failures(trajectories)
            return metrics
        finally:
            await scorer.close()

    return {m.name.removeprefix("reward/"): m for m in asyncio.run(run())}


EXACT = RewardTerm(kind="math_answer", args={"rule": "exact"})
DIGITS = RewardTerm(kind="format", weight=0.5, args={"regex": "[0-9]+"})
BEHAVE = RewardTerm(kind="sandbox_graders:behave")


def test_the_reward_is_the_weighted_sum_of_its_terms():
    trajectories = [make_trajectory(text) for text in ("4", "5", "four")]
    metrics = score(trajectories, terms={"answer": EXACT, "form": DIGITS})
    assert [t.rewards for t in trajectories] == [
        {"answer": 1.0, "form": 1.0},
        {"answer": 0.0, "form": 1.0},
        {"answer": 0.0, "form": 0.0},
    ]
    assert [t.reward for t in trajectories] == [1.5, 0.5, 0.0]
    assert (metrics["term/answer"].sum, metrics["term/answer"].weight) == (1.0, 3)
    assert (metrics["term/form"].sum, metrics["term/form"].weight) == (2.0, 3)
    assert (metrics["failed"].sum, metrics["failed"].weight) == (0, 6)


def test_the_rewards_of_turns_are_added_to_the_reward():
    """A group whose answers differ only in what the agent observed has a signal."""
    trajectories = [make_trajectory("4") for _ in range(4)]
    for value, trajectory in zip((None, 1, -2.5, np.float32(3)), trajectories):
        trajectory.turns = [trajectory.turns[0], replace(trajectory.turns[0], reward=0.5)]
        trajectory.turns[0].reward = value
    trajectories[0].metrics, trajectories[2].metrics = {"steps": 2.0}, {"steps": 7}
    metrics = score(trajectories, terms={"answer": EXACT})
    assert [t.reward for t in trajectories] == [1.5, 2.5, -1.0, 4.5]
    assert [t.rewards for t in trajectories] == [{"answer": 1.0}] * 4
    assert (metrics["turns"].sum, metrics["turns"].weight) == (3.5, 4)
    assert (metrics["metric/steps"].sum, metrics["metric/steps"].weight) == (9.0, 2), "of those that have it"
    assert "turns" not in score([make_trajectory("4")], terms={"answer": EXACT})


def test_a_term_with_envs_grades_the_rows_of_these_sources_alone():
    trajectories = [make_trajectory("raise") for _ in range(3)]
    for env, trajectory in zip(("maths", "code", "other"), trajectories):
        trajectory.prompt = replace(trajectory.prompt, env=env)
    terms = {"answer": RewardTerm(kind="math_answer", envs=["maths", "code"])}
    terms["other"] = RewardTerm(kind="sandbox_graders:behave", envs=["code"])  # its call fails
    metrics = score(trajectories, terms=terms, max_failure_fraction=0.7)
    assert [t.reward for t in trajectories] == [0.0, None, None]
    assert [list(t.rewards) for t in trajectories] == [["answer", "other"]] * 3
    assert trajectories[0].rewards == {"answer": 0.0, "other": None}
    assert trajectories[2].rewards == {"answer": None, "other": None} and trajectories[2].has_abstained
    assert (metrics["abstained/other"].sum, metrics["failed"].sum) == (2, 1)


def test_a_failed_grading_leaves_no_reward_and_is_counted():
    trajectories = [make_trajectory("nan"), make_trajectory("raise"), make_trajectory("fine")]
    metrics = score(trajectories, terms={"answer": EXACT, "other": BEHAVE}, max_failure_fraction=0.7)
    assert [t.reward for t in trajectories] == [None, None, 1.0]
    assert trajectories[0].rewards["answer"] == 0.0 and trajectories[0].rewards["other"].kind == "bad_value"
    assert (metrics["failed"].sum, metrics["failed"].weight) == (2, 6)
    assert metrics["failed_bad_value"].sum == 1 and metrics["failed_crash"].sum == 1
    assert (metrics["term/other"].sum, metrics["term/other"].weight) == (1.0, 1)


def test_a_weighted_sum_that_is_too_large_is_a_failure_of_its_largest_term():
    trajectories = [make_trajectory("largest"), make_trajectory("4")]
    terms = {"answer": EXACT, "other": RewardTerm(kind="sandbox_graders:behave", weight=2.0)}
    metrics = score(trajectories, terms=terms, max_failure_fraction=0.5)
    assert [t.reward for t in trajectories] == [None, 3.0]
    failure = trajectories[0].rewards["other"]
    assert failure.kind == "bad_value" and "sum of the terms is 2e+12" in failure.message and "1e+12" in failure.message
    assert (metrics["failed"].sum, metrics["failed"].weight) == (1, 4)


def test_an_answer_that_math_answer_can_not_evaluate_in_its_cpu_time_is_wrong_and_counted():
    """It is not a failure, which would be masked and counted in max_failure_fraction."""
    compared_in_c = "\\boxed{(9^{9^{9}}, 9^{9^{9^9}})}"  # an interval, whose ends are compared as it is parsed
    trajectories = [make_trajectory(text) for text in ("\\boxed{4}", compared_in_c, "\\boxed{4}")]
    metrics = score(trajectories, terms={"answer": RewardTerm(kind="math_answer")}, max_failure_fraction=0.0)
    assert [t.reward for t in trajectories] == [1.0, 0.0, 1.0]
    assert metrics["math_timeouts"].sum == 1 and metrics["failed"].sum == 0
    assert metrics["gradings_retried"].sum == 0


def test_too_many_failures_end_the_run_with_examples():
    with pytest.raises(RewardError) as ended:
        score([make_trajectory("raise"), make_trajectory("fine")], terms={"other": BEHAVE}, max_failure_fraction=0.4)
    text = str(ended.value)
    assert "1 of 2 answers have no reward" in text and "(1 crash)" in text and "max_failure_fraction = 0.4" in text
    assert "reward.terms.other failed on 1 of them, first on row p, answer 0, term 'other': crash: ValueError" in text


def test_failures_are_counted_by_answers_so_that_a_dead_term_among_five_ends_the_run():
    terms = {name: DIGITS for name in "bcde"} | {"main": BEHAVE}
    with pytest.raises(RewardError, match=r"2 of 4 answers .*\n.*reward.terms.main failed on 2 of them"):
        score([make_trajectory(text) for text in ("raise", "raise", "4", "5")], terms=terms, max_failure_fraction=0.4)


def test_a_term_of_weight_0_loses_no_answer():
    trajectories = [make_trajectory(text) for text in ("raise", "4")]
    shown = RewardTerm(kind="sandbox_graders:behave", weight=0)
    metrics = score(trajectories, terms={"form": DIGITS, "shown": shown}, max_failure_fraction=0.0)
    assert [t.reward for t in trajectories] == [0.0, 0.5] and trajectories[0].rewards["shown"].kind == "crash"
    assert (metrics["failed/shown"].sum, metrics["failed/shown"].weight, metrics["failed/form"].sum) == (1, 2, 0)


def test_a_term_that_returns_none_does_not_apply():
    """As in TRL, the reward is the sum of the others. An answer to which none applies is neither failed nor trained."""
    terms = {"form": DIGITS, "other": RewardTerm(kind="sandbox_graders:behave", weight=2.0)}
    trajectories = [make_trajectory(text) for text in ("none", "int")]
    metrics = score(trajectories, terms=terms, max_failure_fraction=0.0)
    assert [t.reward for t in trajectories] == [0.0, 6.0] and trajectories[0].rewards == {"form": 0.0, "other": None}
    assert (metrics["abstained/other"].sum, metrics["abstained/other"].weight, metrics["abstained"].sum) == (1, 2, 0)
    assert (metrics["term/other"].sum, metrics["term/other"].weight, metrics["failed"].sum) == (3.0, 1, 0)
    alone = [make_trajectory("none"), make_trajectory("none")]
    alone[1].turns[0].reward = 0.25
    for shown in (RewardTerm(kind="format", args={"regex": "[0-9]+"}), RewardTerm(kind="sandbox_graders:fails")):
        terms = {"other": BEHAVE, "shown": shown.model_copy(update={"weight": 0.0})}
        metrics = score(alone, terms=terms, max_failure_fraction=0.0)
        assert [(t.reward, t.has_abstained) for t in alone] == [(None, True), (0.25, False)]
        assert (metrics["abstained"].sum, metrics["abstained"].weight) == (1, 2)
    score(alone, terms={"other": BEHAVE, "lost": shown}, max_failure_fraction=1.0)
    assert [(t.reward, t.has_abstained) for t in alone] == [(None, False), (None, False)]


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("kind", ["pops", "pops_async"])
def test_no_grading_sees_what_another_has_changed_in_its_arguments(num_workers, kind):
    trajectories = [make_trajectory("4", answer=["4", "x"]) for _ in range(8)]
    for trajectory in trajectories[1:]:
        trajectory.prompt = trajectories[0].prompt
    terms = {f"t{i}": RewardTerm(kind=f"sandbox_graders:{kind}", args={"seen": []}) for i in range(2)}
    score(trajectories, terms=terms, num_workers=num_workers)
    assert [t.reward for t in trajectories] == [2.0] * 8
    assert trajectories[0].prompt.answer == ["4", "x"] and trajectories[0].prompt.meta == {"base": 1.0}


ADVICE = {
    "raise": "Fix the reward function at the file and line",
    "nan": "return a finite number",
    "loop": "reward.timeout_s (0.3)",
    "memory": "reward.max_memory_bytes (1073741824)",
    None: "Let the agent put",
}


@pytest.mark.parametrize("text", ADVICE)
def test_the_error_for_failures_advises_by_their_kind(text):
    with pytest.raises(RewardError) as ended:
        score([make_trajectory(text)], terms={"t": BEHAVE}, timeout_s=0.3, max_memory_bytes=1 << 30)
    advice = str(ended.value).splitlines()[-1]
    assert [each for each in ADVICE.values() if each in advice] == [ADVICE[text]]


def test_events_of_the_workers_are_counted_once_when_groups_are_scored_at_the_same_time():
    async def run():
        scorer = Scorer(RewardConfig(terms={"t": BEHAVE}, max_failure_fraction=1.0, timeout_s=5.0))
        try:
            groups = [[make_trajectory(text)] for text in ("segfault", "fine", "fine", "fine")]
            return await asyncio.gather(*(scorer.score(group) for group in groups))
        finally:
            await scorer.close()

    killed = [m.sum for metrics in asyncio.run(run()) for m in metrics if m.name == "reward/workers_killed"]
    assert len(killed) == 4 and sum(killed) == 2  # the grading was tried again once


def test_the_threshold_itself_is_still_allowed():
    assert score([make_trajectory("nan"), make_trajectory("x")], terms={"t": BEHAVE}, max_failure_fraction=0.5)


def test_trajectories_that_failed_before_are_not_graded_and_not_counted_as_failed_gradings():
    failed = make_trajectory("4", status="failed", failure=Failure(kind="engine", message="gone"), reward=1.0)
    truncated = make_trajectory("4", status="truncated")
    metrics = score([failed, truncated], terms={"answer": EXACT}, max_failure_fraction=0.0)
    assert [t.reward for t in (failed, truncated)] == [None, 1.0]
    assert failed.rewards == {} and metrics["failed"].weight == 1


def test_a_trajectory_without_a_message_is_a_failure_of_its_agent():
    trajectories = [make_trajectory(None), make_trajectory("4")]
    score(trajectories, terms={"answer": EXACT}, max_failure_fraction=0.5)
    assert trajectories[0].rewards["answer"].kind == "agent" and trajectories[0].reward is None
    assert trajectories[1].reward == 1.0


def test_the_text_parts_of_a_message_are_graded():
    parts = make_trajectory([{"type": "text", "text": "4"}, {"type": "image"}, {"type": "text", "text": "2"}], "42")
    score([parts], terms={"answer": EXACT})
    assert parts.reward == 1.0


def test_user_functions_see_prompt_and_length():
    trajectory = make_trajectory("x")
    score([trajectory], terms={"t": RewardTerm(kind="sandbox_graders:offered", args={"bonus": 0.25})})
    assert trajectory.reward == 1.0 + 3 + 0.25


def test_nothing_to_score_is_fine():
    assert score([], terms={"answer": EXACT})["failed"].weight == 0


def test_the_reward_package_imports_no_torch_and_no_sympy():
    code = (
        "import sys, meshrl.reward.score, meshrl.reward.worker, meshrl.reward.math_answer\n"
        "assert not {'torch', 'sympy', 'math_verify'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_failed_gradings_are_noted_with_their_number_and_the_first_reason_at_1_10_and_at_the_end():
    notes = []

    async def run():
        scorer = Scorer(RewardConfig(terms={"t": BEHAVE}, max_failure_fraction=1.0), note=notes.append)
        try:
            for texts in (["raise"], ["raise"] * 4, ["fine"], ["nan"] * 5, ["raise"] * 2):
                await scorer.score([make_trajectory(text) for text in texts])
        finally:
            await scorer.close()

    asyncio.run(run())
    assert [note.partition(": ")[2].partition(";")[0] for note in notes] == [
        "1 (1 crash)",
        "10 (5 crash, 5 bad_value)",
        "12 (7 crash, 5 bad_value)",
    ]
    assert all("The first: row p, answer 0, term 't': crash: ValueError: invalid literal" in note for note in notes)

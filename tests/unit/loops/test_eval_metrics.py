"""The metrics of an evaluation: every term, the weighted sum, and what counts as passed."""

from __future__ import annotations

import pytest

from meshrl.config.run import RunConfig
from meshrl.core.errors import Failure, RewardError
from meshrl.core.types import Prompt, Trajectory
from meshrl.loops.evaluate import check_scores, eval_metrics, evaluation_text, standard_error
from meshrl.monitor.metrics import divide, merge

TERMS = {
    "answer": {"kind": "math_answer"},
    "form": {"kind": "format", "weight": 0.5},
    "seen": {"kind": "a:b", "weight": 0},
}
FAILED = Failure(kind="crash", message="no")


def config(**loop) -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {}, "reward": {"terms": TERMS}, "loop": {"num_steps": 1, **loop}}
    return RunConfig.model_validate(sections)


def attempt(prompt: str, index: int, answer: float | Failure, form: float = 0.0, seen: float = 0.0) -> Trajectory:
    reward = None if isinstance(answer, Failure) else answer + 0.5 * form
    rewards = {"answer": answer, "form": form, "seen": seen}
    row = Prompt(id=prompt, ordinal=0)
    return Trajectory(prompt=row, group_id=prompt, index=index, purpose="eval", rewards=rewards, reward=reward)


ATTEMPTS = [
    *(attempt("a", 0, 0.0, form=1.0), attempt("a", 1, 1.0, form=1.0, seen=0.25)),
    *(attempt("b", 0, 0.5, form=1.0), attempt("b", 1, 0.0)),
]


def values(attempts: list[Trajectory], **loop) -> dict[str, float]:
    return divide(merge(eval_metrics(attempts, config(**loop))))


def test_every_term_and_the_weighted_sum_are_evaluated_under_the_names_of_training():
    found = values(ATTEMPTS)
    assert found["eval/reward/mean"] == pytest.approx((0.5 + 1.5 + 1.0 + 0.0) / 4)
    assert found["eval/reward/term/answer"] == 1.5 / 4
    assert found["eval/reward/term/form"] == 3 / 4
    assert found["eval/reward/term/seen"] == 0.25 / 4  # its weight is 0


@pytest.mark.parametrize(
    ("loop", "mean", "passed"),
    [
        ({}, 0.375, 0.5),
        ({"eval_pass_score": 0.5}, 0.375, 1.0),
        ({"eval_pass_score": 1.01}, 0.375, 0.0),
        ({"eval_term": "form"}, 0.75, 1.0),
        ({"eval_term": "seen", "eval_pass_score": 0.25}, 0.0625, 0.5),
        ({"eval_term": "weighted_sum"}, 0.75, 1.0),
        ({"eval_term": "weighted_sum", "eval_pass_score": 1.5}, 0.75, 0.5),
    ],
)
def test_the_chosen_term_and_score_decide_what_has_passed(loop, mean, passed):
    found = values(ATTEMPTS, **loop)
    assert (found["eval/mean_at_k"], found["eval/pass_at_k"]) == (mean, passed)


def test_the_standard_error_is_over_prompts_not_over_attempts():
    assert values(ATTEMPTS)["eval/standard_error"] == pytest.approx(standard_error([0.5, 0.25]))


def test_an_attempt_that_failed_scores_0_and_is_counted():
    refused = Trajectory(prompt=Prompt(id="c", ordinal=0), group_id="c", index=0, status="failed")
    found = values([attempt("a", 0, 1.0, form=1.0), attempt("b", 0, FAILED, form=1.0), refused])
    assert found["eval/num_failed"] == 2 and found["eval/num_prompts"] == 3
    assert found["eval/mean_at_k"] == pytest.approx(1 / 3)
    assert found["eval/reward/term/form"] == pytest.approx(2 / 3)
    assert found["eval/reward/mean"] == pytest.approx(1.5 / 3)
    assert values([refused], eval_term="weighted_sum")["eval/mean_at_k"] == 0


def test_a_failed_grading_has_the_lowest_score_so_that_it_does_not_improve_a_penalty():
    found = values([attempt("a", 0, -3.0), attempt("b", 0, FAILED), attempt("c", 0, -1.0)], eval_term="answer")
    assert (found["eval/mean_at_k"], found["eval/num_failed"]) == (pytest.approx(-7 / 3), 1)


def test_an_attempt_to_which_the_term_does_not_apply_has_no_score():
    attempts = [attempt("a", 0, 1.0), attempt("b", 0, 0.0), attempt("b", 1, 0.0)]
    attempts[1].rewards["answer"] = attempts[2].rewards["answer"] = attempts[2].reward = None
    found = values(attempts, eval_term="answer")
    assert (found["eval/mean_at_k"], found["eval/num_prompts"]) == (1.0, 1)
    assert (found["eval/num_abstained"], found["eval/num_failed"], found["eval/reward/mean"]) == (2, 0, 0.5)
    with pytest.raises(RewardError, match="returned None for all of 2 attempts"):
        check_scores(config(eval_term="answer"), attempts[1:])


def test_an_evaluation_whose_term_failed_is_no_score():
    """Also one of weight 0, whose failures lose no answer in training."""
    attempts = [attempt(name, 0, 1.0) for name in "abcd"]
    attempts[0].rewards["seen"] = FAILED
    with pytest.raises(RewardError, match=r"no score: loop.eval_term = seen failed on 1 of 4 attempts.*term 'seen'"):
        check_scores(config(eval_term="seen"), attempts)
    check_scores(config(eval_term="form"), attempts)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "greedy, scored by answer"),
        ({"loop": {"eval_samples": 2, "eval_term": "form"}}, "2 samples each, scored by form"),
        ({"loop": {"eval_samples": 2, "eval_term": "weighted_sum"}}, "2 samples each, scored by weighted_sum"),
        ({"reward": {"terms": {"answer": {"kind": "math_answer"}}}}, "greedy"),
    ],
)
def test_the_text_about_an_evaluation_names_the_score_if_there_are_several(sections, expected):
    given = {"model": {"path": "m"}, "data": {}, "reward": {"terms": TERMS}} | sections
    given["loop"] = {"num_steps": 1} | sections.get("loop", {})
    assert evaluation_text(RunConfig.model_validate(given)) == expected

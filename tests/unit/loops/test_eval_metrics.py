"""The metrics of an evaluation: every term, the weighted sum, what counts as passed, and the identity of the test."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.config.data import DataConfig
from meshrl.config.reward import RewardConfig
from meshrl.config.run import RunConfig
from meshrl.core.errors import Failure, RewardError
from meshrl.core.types import Prompt, Trajectory
from meshrl.loops.evaluate import (
    check_scores,
    constant_answer,
    eval_metrics,
    evaluation_identity,
    evaluation_text,
    standard_error,
)
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
        ({"eval_term": "answer"}, 0.375, 0.5),
        ({"eval_term": "answer", "eval_pass_score": 0.5}, 0.375, 1.0),
        ({"eval_term": "answer", "eval_pass_score": 1.01}, 0.375, 0.0),
        ({"eval_term": "form"}, 0.75, 1.0),
        ({"eval_term": "seen", "eval_pass_score": 0.25}, 0.0625, 0.5),
        ({}, 0.75, 0.5),  # 1.5 passes: the form alone does not, nor half an answer with it
        ({"eval_term": "weighted_sum"}, 0.75, 0.5),
        ({"eval_term": "weighted_sum", "eval_pass_score": 1.0}, 0.75, 1.0),
    ],
)
def test_the_chosen_term_and_score_decide_what_has_passed(loop, mean, passed):
    found = values(ATTEMPTS, **loop)
    assert (found["eval/mean_at_k"], found["eval/pass_at_k"]) == (mean, passed)


def test_the_standard_error_is_over_prompts_not_over_attempts():
    assert values(ATTEMPTS, eval_term="answer")["eval/standard_error"] == pytest.approx(standard_error([0.5, 0.25]))


def test_an_attempt_that_failed_scores_0_and_is_counted():
    refused = Trajectory(prompt=Prompt(id="c", ordinal=0), group_id="c", index=0, status="failed")
    attempts = [attempt("a", 0, 1.0, form=1.0), attempt("b", 0, FAILED, form=1.0), refused]
    found = values(attempts, eval_term="answer")
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
    attempts[2].has_abstained = True
    found = values(attempts, eval_term="answer")
    assert (found["eval/mean_at_k"], found["eval/num_prompts"]) == (1.0, 1)
    assert (found["eval/num_abstained"], found["eval/num_failed"], found["eval/reward/mean"]) == (2, 0, 0.5)
    with pytest.raises(RewardError, match="returned None for all of 2 attempts"):
        check_scores(config(eval_term="answer"), attempts[1:])


def test_an_answer_passes_by_the_terms_that_apply_to_it():
    """Of rewards for several tasks each row has one term."""
    attempts = [attempt(name, 0, 1.0, form=1.0) for name in "abc"]
    for each, term, reward in zip(attempts, ("form", "answer", "answer"), (1.0, 0.5, 0.25), strict=True):
        each.rewards[term], each.reward = None, reward
    attempts.append(Trajectory(prompt=Prompt(id="d", ordinal=0), group_id="d", index=0, status="failed"))
    assert values(attempts)["eval/pass_at_k"] == 2 / 4
    assert values(attempts, eval_pass_score=1.0)["eval/pass_at_k"] == 1 / 4
    terms = {"long": {"kind": "overlong", "args": {"max_tokens": 9, "buffer_tokens": 8}}}
    only_penalties = config().model_copy(update={"reward": RewardConfig.model_validate({"terms": terms})})
    assert divide(merge(eval_metrics(attempts[3:], only_penalties)))["eval/pass_at_k"] == 0  # its score is the full one


def labelled(texts: str, labels: str) -> list[Trajectory]:
    """An attempt at each row, with a letter of texts as its text and one of labels as the answer of its row."""
    made = [
        attempt(f"q{i}", 0, float(text == label)) for i, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]
    for each, text, label in zip(made, texts, labels, strict=True):
        each.prompt = Prompt(id=each.group_id, ordinal=0, answer=label, meta={"level": int(label == "a")})
        each.turns = [SimpleNamespace(messages=[{"role": "assistant", "content": f" {text}\n"}], output_ids=[1])]  # type: ignore[list-item]
    return made


def test_a_model_with_one_answer_for_all_prompts_is_noted():
    found = values(constant := labelled("a" * 19 + "b", "ab" * 10))
    assert (found["eval/most_frequent_fraction"], found["eval/distinct_answers"]) == (0.95, 2)
    assert "19 of 20 held-out answers are the same, 'a', while the rows expect 2 different" in str(
        constant_answer(constant)
    )
    for texts, labels in (("a" * 17 + "bbb", "ab" * 10), ("a" * 20, "a" * 20), ("a" * 19, "ab" * 9 + "a")):
        assert constant_answer(labelled(texts, labels)) is None


def test_scores_by_a_column_have_their_names_and_the_rare_values_are_one():
    cfg = config().model_copy(update={"data": DataConfig(eval_path="x", eval_by="answer")})
    found = divide(merge(eval_metrics(labelled("aab", "abb"), cfg)))
    by = {name: value for name, value in found.items() if "/by/" in name}
    assert by == {"eval/by/a/mean_at_k": 1.0, "eval/by/b/mean_at_k": 0.5}
    alike = divide(merge(eval_metrics(labelled("%%%", "%#?"), cfg)))
    assert {name: value for name, value in alike.items() if "/by/" in name} == {
        "eval/by/_/mean_at_k": 0.0,
        "eval/by/_.2/mean_at_k": 1.0,
        "eval/by/_.3/mean_at_k": 0.0,
    }
    level = cfg.model_copy(update={"data": DataConfig(eval_path="x", eval_by="level")})
    assert divide(merge(eval_metrics(labelled("aab", "abb"), level)))["eval/by/1/mean_at_k"] == 1.0
    different = [1, "1", None, "null", "others", "a b", "a/b", "a_b.2", "x" * 50, "x" * 60]
    rows = labelled("a" * len(different), "a" * len(different))
    for row, value in zip(rows, different):
        row.prompt.meta["level"] = value
    assert len([name for name in divide(merge(eval_metrics(rows, level))) if "/by/" in name]) == len(different)
    many = "".join(chr(200 + i) for i in range(25))
    found = divide(merge(eval_metrics(labelled(many[:20] + "xxxxx", many), cfg)))
    assert len([name for name in found if "/by/" in name]) == 21 and found["eval/by/others/mean_at_k"] == 0.0


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
        ({}, "greedy, scored by weighted_sum"),
        ({"loop": {"eval_samples": 2, "eval_term": "form"}}, "2 samples each, scored by form"),
        ({"loop": {"eval_samples": 2, "eval_term": "weighted_sum"}}, "2 samples each, scored by weighted_sum"),
        ({"reward": {"terms": {"answer": {"kind": "math_answer"}}}}, "greedy"),
    ],
)
def test_the_text_about_an_evaluation_names_the_score_if_there_are_several(sections, expected):
    given = {"model": {"path": "m"}, "data": {}, "reward": {"terms": TERMS}} | sections
    given["loop"] = {"num_steps": 1} | sections.get("loop", {})
    assert evaluation_text(RunConfig.model_validate(given)) == expected


def identity(
    sections: Mapping[str, Any] = {}, rows: str = "abc", answers: str = "xyz", **changes: Any
) -> dict[str, str]:
    """Of an evaluation of prompts with these texts and answers. changes: of the task or of the graders' code."""
    parts: dict[str, Any] = {"model": {"path": "m"}, "data": {}, "reward": {"terms": TERMS}}
    parts = {**parts, "loop": {"num_steps": 1}, **sections}
    prompts = [
        Prompt(id=f"{changes.get('file', 'f')}-{i}", ordinal=-i, messages=[{"role": "user", "content": q}], answer=a)
        for i, (q, a) in enumerate(zip(rows, answers))
    ]
    task: Any = SimpleNamespace(
        eval_prompts=prompts,
        tokenizer=SimpleNamespace(chat_template=changes.get("template", "t")),
        agent=SimpleNamespace(tools=[]),
        stop_token_ids=changes.get("stops", (1, 2)),
    )
    scorer: Any = SimpleNamespace(code=dict.fromkeys(TERMS, "") | changes.get("code", {}))
    return evaluation_identity(RunConfig.model_validate(parts), task, scorer)


def loop(**values: Any) -> dict[str, Any]:
    return {"loop": {"num_steps": 1, **values}}


def terms(**changes: Any) -> dict[str, Any]:
    return {"reward": {"terms": {**TERMS, **changes}}}


BY_ANSWER = loop(eval_term="answer")


@pytest.mark.parametrize(
    ("part", "changes", "former"),
    [
        ("rows", {"rows": "abd"}, {}),
        ("rows", {"answers": "xyy"}, {}),
        ("rows", {"answers": "xzy"}, {}),  # the same answers of other questions
        ("rows", {"rows": "ab", "answers": "xy"}, {}),  # data.eval_limit
        ("rows", {"rows": "abcc", "answers": "xyzz"}, {}),
        ("graders", {"code": {"answer": "changed"}}, {}),
        ("graders", {"sections": terms(form={"kind": "format", "weight": 0.25})}, {}),
        ("graders", {"sections": terms(answer={"kind": "a:other"})}, {}),
        ("graders", {"sections": terms(answer={"kind": "math_answer", "args": {"rule": "gsm8k"}})}, {}),
        ("graders", {"sections": loop(eval_pass_score=0.5)}, {}),
        ("graders", {"sections": BY_ANSWER, "code": {"answer": "changed"}}, {"sections": BY_ANSWER}),
        ("term", {"sections": BY_ANSWER}, {}),
        ("sampling", {"sections": loop(eval_samples=4)}, {}),
        ("sampling", {"sections": {"rollout": {"eval_sampling": {"temperature": 0.5}}}}, {}),
        ("sampling", {"sections": {"rollout": {"sampling": {"max_new_tokens": 7}}}}, {}),
        ("sampling", {"sections": {"rollout": {"max_context_tokens": 77}}}, {}),
        ("sampling", {"sections": {"agent": {"kind": "tools"}}}, {}),
        ("sampling", {"stops": (1,)}, {}),
        ("template", {"template": "changed"}, {}),
        ("template", {"sections": {"data": {"chat_template_kwargs": {"enable_thinking": False}}}}, {}),
    ],
)
def test_an_evaluation_of_another_test_has_another_identity(part, changes, former):
    before, after = identity(**former), identity(**changes)
    other = {name for name in before if before[name] != after[name]}
    assert part in other and other <= {part, "graders"}  # another term has other graders


@pytest.mark.parametrize(
    ("changes", "former"),
    [
        ({"file": "g"}, {}),
        ({"rows": "cab", "answers": "zxy"}, {}),
        ({"sections": {"reward": {"terms": dict(reversed(TERMS.items())), "num_workers": 2}}}, {}),
        ({"sections": terms(seen={"kind": "c:d", "weight": 0})}, {}),
        ({"code": {"seen": "changed"}}, {}),
        ({"sections": {"rollout": {"sampling": {"temperature": 0.5}}, "train": {"optimizer": {"lr": 1e-3}}}}, {}),
        ({"sections": BY_ANSWER | terms(form={"kind": "format", "weight": 2})}, {"sections": BY_ANSWER}),
        ({"sections": BY_ANSWER, "code": {"form": "changed"}}, {"sections": BY_ANSWER}),
    ],
)
def test_what_does_not_change_a_score_does_not_change_the_identity(changes, former):
    """The name of the file, the order of its rows and of the terms, terms that the score does not contain, the
    temperature of training where evaluations are greedy."""
    assert identity(**changes) == identity(**former)

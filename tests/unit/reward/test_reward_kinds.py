"""A reward entry of the config that can't work is refused with the reason, before anything is graded."""

import asyncio
from typing import Any

import pytest

from meshrl.core.errors import ConfigError
from meshrl.reward.kinds import make_grader
from meshrl.reward.math_answer import math_answer


def test_names_and_dotted_paths_resolve_to_functions():
    for kind in ("math_answer", "meshrl.reward.math_answer:math_answer"):
        assert make_grader("t", kind, {}).function is math_answer


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        (
            "math_anser",
            {},
            "allowed: math_answer, format, overlong, judge, or a dotted path package.module:name; did you mean",
        ),
        ("no_such_module:score", {}, "importing 'no_such_module' raised ModuleNotFoundError"),
        ("sandbox_graders:behav", {}, "has no 'behav'; did you mean 'behave'"),
        ("sandbox_graders:no_function", {}, "7 is not a callable object"),
        ("sandbox_graders:no_arguments", {}, "this function has []. Write `def no_arguments(completion, answer, ...)`"),
        ("sandbox_graders:swapped", {}, "completion and the answer, in this order"),
        ("sandbox_graders:no_answer", {}, "has ['completion']. Write `def no_answer(completion, answer, ...)`, also"),
        ("sandbox_graders:prompt_second", {}, "this function has ['completion', 'prompt']"),
        ("math_answer", {"rul": "exact"}, "no argument 'rul'; allowed: rule; did you mean 'rule'"),
        ("math_answer", {"rule": "exakt"}, "rule is 'exakt'; allowed: auto, gsm8k, exact, math_verify"),
        ("format", {}, "missing a required argument: 'regex'"),
        ("format", {"regex": "(["}, "is not valid"),
        ("format", {"regex": "x", "where": "start"}, "where is 'start'; allowed: full, anywhere"),
    ],
)
def test_an_entry_that_can_not_work_is_refused(kind, args, message):
    with pytest.raises(ConfigError) as refused:
        make_grader("judge", kind, args)
    assert message in str(refused.value)


def test_a_function_gets_only_the_keywords_in_its_signature():
    assert make_grader("t", "sandbox_graders:behave", {}).takes == ()
    assert make_grader("t", "sandbox_graders:offered", {}).takes == ("prompt", "num_tokens")
    assert len(make_grader("t", "sandbox_graders:everything", {}).takes) == 4
    assert make_grader("t", "sandbox_graders:offered", {"num_tokens": 7}).takes == ("prompt",)


def test_async_functions_and_objects_are_known_as_such():
    assert make_grader("t", "sandbox_graders:slow", {}).is_async
    assert make_grader("t", "sandbox_graders:judge", {}).is_async
    assert not make_grader("t", "sandbox_graders:behave", {}).is_async


CALL = "the call is function(completion, answer, **keywords): "
BATCH = "as the lists of a batch, but a call here has one completion"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "foreign_graders:trl",
            [BATCH, "prompts, completions", CALL, "[{'role': 'assistant', 'content': completion}]"],
        ),
        ("foreign_graders:trl_with_column", [BATCH, "completions", CALL]),
        ("foreign_graders:openrlhf", [BATCH, "queries, prompts", CALL]),
        ("foreign_graders:verl_batch", [BATCH, "solution_strs, ground_truths", CALL]),
        ("sandbox_graders:swapped", ["in this order", CALL, "prompt, messages, stop_reason, num_tokens"]),
        ("sandbox_graders:no_arguments", ["in this order", CALL, "returns a number"]),
        ("sandbox_graders:no_function", ["7 is not a callable object", CALL]),
        ("format", ["missing a required argument: 'regex'", CALL]),
    ],
)
def test_an_error_about_a_signature_states_the_call(kind: str, words: list[str]):
    with pytest.raises(ConfigError) as refused:
        make_grader("judge", kind, {})
    for each in words:
        assert each in str(refused.value)


def payload(**meta: Any) -> dict[str, Any]:
    prompt = {"id": "p", "messages": [], "env": "mixture", "meta": meta}
    return dict(completion="5", answer="4", prompt=prompt, messages=[], stop_reason="stop", num_tokens=3)


def test_a_reward_function_of_verl_gets_its_arguments_by_name_and_may_return_a_dict_with_a_score():
    grade = make_grader("t", "foreign_graders:verl", {})
    assert grade(payload(data_source="math", extra_info={"index": 7})) == 1.0
    assert grade(payload(data_source="math", extra_info={"index": 8})) == 0.0
    assert make_grader("t", "foreign_graders:verl", {"data_source": "math"})(payload(extra_info={"index": 7})) == 1.0


def test_the_other_parameters_of_a_reward_function_of_verl_come_from_args_and_keywords():
    assert make_grader("t", "foreign_graders:verl_number", {})(payload()) == 3.0
    assert make_grader("t", "foreign_graders:verl_number", {"method": "flexible"})(payload()) == 0.0
    with pytest.raises(ConfigError, match="no argument 'metod'; allowed: method; did you mean 'method'"):
        make_grader("t", "foreign_graders:verl_number", {"metod": "flexible"})


def test_an_async_reward_function_of_verl_gets_the_source_of_a_mixture_where_rows_have_no_data_source():
    grade = make_grader("t", "foreign_graders:verl_async", {"bonus": 1})
    assert grade.is_async and asyncio.run(grade(payload())) == 6
    assert not make_grader("t", "foreign_graders:verl", {}).is_async


def test_a_dict_without_a_score_is_returned_as_it_is_so_that_the_grading_fails():
    assert make_grader("t", "foreign_graders:verl_without_score", {})(payload()) == {"accuracy": 1.0}

"""A reward entry of the config that can't work is refused with the reason, before anything is graded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from golden import cases, check_case

from meshrl.core.errors import ConfigError
from meshrl.reward.kinds import make_grader
from meshrl.reward.math_answer import math_answer


def test_names_and_dotted_paths_resolve_to_functions():
    for kind in ("math_answer", "meshrl.reward.math_answer:math_answer"):
        assert make_grader("t", kind, {}).function is math_answer


REFUSED = Path(__file__).parent / "golden" / "refused.txt"  # kind and arguments of a term


@pytest.mark.parametrize("given", [given for given, _ in cases(REFUSED)])
def test_an_entry_that_can_not_work_is_refused(given: str):
    """If its signature is wrong, the error states the call."""
    kind, _, args = given.partition(" ")
    with pytest.raises(ConfigError) as refused:
        make_grader("judge", kind, json.loads(args or "{}"))
    check_case(REFUSED, given, str(refused.value), tests=Path(__file__).parents[2])


def test_a_function_gets_only_the_keywords_in_its_signature():
    assert make_grader("t", "sandbox_graders:behave", {}).takes == ()
    assert make_grader("t", "sandbox_graders:offered", {}).takes == ("prompt", "num_tokens")
    assert len(make_grader("t", "sandbox_graders:everything", {}).takes) == 4
    assert make_grader("t", "sandbox_graders:offered", {"num_tokens": 7}).takes == ("prompt",)


def test_async_functions_and_objects_are_known_as_such():
    assert make_grader("t", "sandbox_graders:slow", {}).is_async
    assert make_grader("t", "sandbox_graders:judge", {}).is_async
    assert not make_grader("t", "sandbox_graders:behave", {}).is_async


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


def test_an_async_reward_function_of_verl_gets_the_source_of_a_mixture_where_rows_have_no_data_source():
    grade = make_grader("t", "foreign_graders:verl_async", {"bonus": 1})
    assert grade.is_async and asyncio.run(grade(payload())) == 6
    assert not make_grader("t", "foreign_graders:verl", {}).is_async


def test_a_dict_without_a_score_is_returned_as_it_is_so_that_the_grading_fails():
    assert make_grader("t", "foreign_graders:verl_without_score", {})(payload()) == {"accuracy": 1.0}

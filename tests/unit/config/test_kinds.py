"""An entry of a table of choices has all facts of its kind, and names functions that exist: no check passes with half
of a new kind."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from meshrl.config.docs import every_key
from meshrl.config.kinds import ADVANTAGES, REWARDS, AdvantageKind, RewardKind, compares_groups, needs_answer
from meshrl.core.lookup import import_object

TABLES: dict[str, tuple[dict[str, Any], type[Any]]] = {
    "reward.terms.NAME.kind": (REWARDS, RewardKind),
    "algo.advantage": (ADVANTAGES, AdvantageKind),
}
PATHS = {"function": ["", None], "check": ["", None], "self_test": [None] * 4}


@pytest.mark.parametrize("key", TABLES)
def test_a_kind_without_one_of_its_facts_can_not_be_made(key: str):
    table, entry = TABLES[key]
    complete = dataclasses.asdict(next(iter(table.values())))
    for fact in complete:
        with pytest.raises(TypeError, match=fact):
            entry(**{name: value for name, value in complete.items() if name != fact})


@pytest.mark.parametrize("key", TABLES)
def test_the_docs_describe_every_kind(key: str):
    text = every_key()[key].text
    for name, kind in TABLES[key][0].items():
        assert kind.text and f"{name} = {kind.text}" in text


@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_names_functions_that_can_be_called_as_they_are(kind: str):
    for fact, arguments in PATHS.items():
        inspect.signature(import_object(getattr(REWARDS[kind], fact))).bind_partial(*arguments)
    assert needs_answer(kind) == needs_answer(REWARDS[kind].function) == REWARDS[kind].needs_answer


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_an_advantage_names_a_function_of_the_rewards_of_a_group(kind: str):
    inspect.signature(import_object(ADVANTAGES[kind].function)).bind([1.0, 0.0], 1e-6)
    assert compares_groups(kind) and not compares_groups("mine:advantage")

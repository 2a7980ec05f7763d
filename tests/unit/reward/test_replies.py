"""Replies of a reward worker: only those that the worker's own code can send are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshrl.core.errors import Failure
from meshrl.reward.replies import MAX_MESSAGE_CHARS, Ready, parse_ready, parse_reply


def _parsed(**fields: Any) -> Any:
    data = json.dumps({"request": "b", "item": 1, **fields}).encode()
    return parse_reply(data, "b", {1, 2}, 1e12)


def test_values_and_failures_are_read():
    assert _parsed(value=3).result == 3.0 and not _parsed(value=3).retire
    assert _parsed(item=2, value=-1e12, retire=True).item == 2 and _parsed(value=1.0, retire=True).retire
    assert _parsed(failure=["memory", "a\nb"]).result == Failure(kind="memory", message="a b")
    assert len(_parsed(failure=["crash", "x" * 10_000]).result.message) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    "fields",
    [
        {"request": "a", "value": 1.0},
        {"request": None, "value": 1.0},
        {"item": 0, "value": 1.0},
        {"item": -1, "value": 1.0},
        {"item": 1.0, "value": 1.0},
        {"item": True, "value": 1.0},
        {"item": "1", "value": 1.0},
        {"item": None, "value": 1.0},
        {},
        {"value": True},
        {"value": "1.0"},
        {"value": [1.0]},
        {"value": float("nan")},
        {"value": float("inf")},
        {"value": 1.1e12},
        {"value": -(10**400)},
        {"failure": ["engine", "x"]},
        {"failure": ["crash"]},
        {"failure": ["crash", 7]},
        {"failure": ["crash", "x", "y"]},
        {"failure": "crash"},
        {"failure": [["crash"], "x"]},
    ],
    ids=str,
)
def test_any_other_reply_is_refused(fields):
    with pytest.raises(ValueError, match=r"reply|JSON"):
        _parsed(**fields)


def test_a_value_of_null_abstains():
    assert _parsed(value=None).result is None


def _ready(terms: list[str], **fields: Any) -> Ready:
    return parse_ready(json.dumps({"request": "b", **fields}).encode(), "b", terms)


def test_a_first_reply_names_terms_of_the_config():
    assert _ready(["a", "b"], **{"async": ["a"]}, cpu_limited=["b"], of_tokens=[]) == Ready(
        async_terms=frozenset("a"), cpu_limited_terms=frozenset("b")
    )
    assert _ready(["a"], config_error="no").error == "no"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"config_error": ""},
        {"async": ["c"], "cpu_limited": [], "of_tokens": []},
        {"async": [[]], "cpu_limited": [], "of_tokens": []},
        {"async": "a", "cpu_limited": [], "of_tokens": []},
        {"async": [], "cpu_limited": [], "of_tokens": 1},
        {"async": [], "cpu_limited": []},
        {"request": "a", "async": [], "cpu_limited": [], "of_tokens": []},
    ],
    ids=str,
)
def test_any_other_first_reply_is_refused(fields):
    with pytest.raises(ValueError, match="reply"):
        _ready(["a", "b"], **fields)

"""A grader that does not distinguish right from wrong is found at the start of a run. Nothing else would show it:
equal rewards look like a task that is too hard."""

import asyncio
import json

import pytest

from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.errors import ConfigError, Failure
from meshrl.core.types import Prompt
from meshrl.reward.math_answer import RULES
from meshrl.reward.score import Scorer
from meshrl.reward.self_test import (
    MATH_EXAMPLES,
    TEXTS,
    check_results,
    try_built_in,
    try_on_answers,
    try_references,
)

HERE = "self_test_graders"


def try_terms(terms, prompts=None, **cfg):
    """The notes of the self-tests of built-in terms, or of all others on these prompts."""
    cfg, notes = RewardConfig(terms=terms, **cfg), []

    async def run():
        scorer = Scorer(cfg)
        try:
            if prompts is None:
                await try_built_in(scorer, cfg.terms, notes.append)
            else:
                await try_on_answers(scorer, cfg, prompts, notes.append)
        finally:
            await scorer.close()

    asyncio.run(run())
    return notes


def rows(*answers):
    return [Prompt(id=f"row-{i}", ordinal=i, messages=[], answer=answer) for i, answer in enumerate(answers)]


def user(name, **fields):
    return RewardTerm(kind=f"{HERE}:{name}", **fields)


# ---- built-in kinds


def test_every_rule_has_a_self_test():
    assert {*MATH_EXAMPLES, "auto"} == set(RULES)


def test_built_in_kinds_pass_with_all_their_rules_without_a_note():
    terms = {rule: RewardTerm(kind="math_answer", args={"rule": rule}) for rule in RULES}
    terms["default"] = RewardTerm(kind="math_answer")
    terms["form"] = RewardTerm(kind="format", args={"regex": r"(?s).*#### [0-9]+"})
    terms["length"] = RewardTerm(kind="overlong", args={"max_tokens": 64, "buffer_tokens": 16})
    assert try_terms(terms) == []


def test_a_penalty_for_long_answers_that_is_the_same_for_all_lengths_ends_the_run():
    args = {"max_tokens": 64, "buffer_tokens": 16, "num_tokens": 1}
    with pytest.raises(ConfigError, match="1 token 0, and one of max_tokens 0, which must be lower"):
        try_terms({"length": RewardTerm(kind="overlong", args=args)})


@pytest.mark.parametrize("value", [True, False])
def test_a_math_verify_that_calls_all_answers_equal_or_unequal_ends_the_run(tmp_path, monkeypatch, value):
    """A release that does not fit the installed sympy: nothing raises, and every reward is the same."""
    (tmp_path / "math_verify.py").write_text(
        "LatexExtractionConfig = ExprExtractionConfig = dict\n"
        "def parse(text, extraction_config, parsing_timeout): return [text]\n"
        f"def verify(*args, **kwargs): return {value}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        try_terms({"maths": RewardTerm(kind="math_answer", args={"rule": "math_verify"})})
    text = str(refused.value)
    assert "reward.terms.maths of kind 'math_answer' with args {'rule': 'math_verify'} failed its self-test" in text
    assert f"{float(value):g} and the wrong one" in text and "math-verify" in text


def test_a_math_verify_that_raises_ends_the_run_with_what_it_raised(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(
        "LatexExtractionConfig = ExprExtractionConfig = dict\n"
        "def parse(text, extraction_config): pass\ndef verify(*args): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"could not grade .*crash: TypeError: .*parsing_timeout"):
        try_terms({"maths": RewardTerm(kind="math_answer")})


@pytest.mark.parametrize("args", [{"regex": "[0-9]*", "where": "anywhere"}, {"regex": "(?s).*"}])
def test_a_format_that_fits_every_text_gets_a_note(args):
    (note,) = try_terms({"form": RewardTerm(kind="format", args=args)})
    assert note.startswith(f"note: reward.terms.form with regex {args['regex']!r} matches {len(TEXTS)} texts")


def test_a_format_that_fits_none_of_the_texts_gets_no_note():
    assert try_terms({"form": RewardTerm(kind="format", args={"regex": "(?s)<plan>.*</plan>.*"})}) == []


def test_rows_that_a_term_does_not_grade_are_not_tried_with_it():
    """The tests of a program are no answer of mathematics, and a function that fails on them is not called."""
    prompts = rows("assert f(1) == 1", "4", "5")
    prompts[0].env = "code"
    only = dict(envs=["default"])
    terms = {"code": RewardTerm(kind="python_tests", args={"sandbox": "none"}, envs=["code"])}
    terms |= {"maths": RewardTerm(kind="math_answer", **only), "right": user("right", **only)}
    terms["misspelt"] = user("misspelt", envs=["else"])
    notes: list[str] = []

    async def run():
        scorer = Scorer(RewardConfig(terms=terms))
        try:
            await try_references(scorer, terms, prompts, notes.append)
        finally:
            await scorer.close()

    asyncio.run(run())
    assert notes == [] and try_terms({name: terms[name] for name in ("right", "misspelt")}, prompts) == []


# ---- a user's functions

BUILT_IN = RewardTerm(kind="math_answer")


def test_functions_that_score_the_answers_higher_than_an_empty_completion_get_no_note():
    names = ("right", "sees_everything", "judge")
    terms = {name: user(name) for name in names} | {"brief": user("repetition", weight=-0.5)}
    assert try_terms(terms, rows("4", "5")) == []


def test_functions_that_score_the_answers_no_higher_than_an_empty_completion_get_a_note_each():
    notes = try_terms({name: user(name) for name in ("constant", "swapped", "right")}, rows("4", "5"))
    assert [note.split(" of kind ")[0] for note in notes] == [
        "note: reward.terms.constant",
        "note: reward.terms.swapped",
    ]
    assert "no higher than an empty completion (0.5 and 0.5). This is expected if" in notes[0]
    assert "(tried on row-0" in notes[0]


@pytest.mark.parametrize(("name", "shown"), [("boxed", "NoneType"), ("from_json", "JSONDecodeError")])
def test_functions_that_raise_without_a_required_form_do_not_end_the_run(name, shown):
    """They may be right for the completions of the model."""
    (note,) = try_terms({"t": user(name)}, rows("four", "five"))
    assert "failed on the data's own answers" in note and shown in note and "self_test_graders" in note


def test_a_missing_column_is_shown_in_the_note():
    (note,) = try_terms({"t": user("by_level")}, rows("4", "5"))
    assert "KeyError: 'levl'" in note and "self_test_graders.py" in note


@pytest.mark.parametrize(
    ("name", "answers", "shown"),
    [("misspelt", ("4", "5"), "NameError: name 'normalise'"), ("wants_text", (4, 5), "'int' object has no attribute")],
)
def test_a_function_that_fails_for_every_completion_ends_the_run_with_the_exception(name, answers, shown):
    with pytest.raises(ConfigError) as refused:
        try_terms({"t": user(name)}, rows(*answers))
    text = str(refused.value)
    assert text.startswith(f"reward.terms.t of kind '{HERE}:{name}' failed on the data's own answers")
    assert shown in text and "self_test_graders.py:" in text and "data.answer" in text


def test_answers_that_are_not_text_are_not_tried():
    """Such as test cases of a program, which are not a completion."""
    assert try_terms({"t": user("constant")}, rows(None, ["4"], {"in": "4"}, " ")) == []
    assert "row-1)" in try_terms({"t": user("constant")}, rows(None, 4.5))[0]


def test_functions_that_grade_alike_without_any_answer_get_a_note_each():
    """data.answer=null: every completion scores alike, and the run trains on nothing to its end."""
    terms = {name: user(name) for name in ("right", "wants_text", "repetition")} | {"maths": BUILT_IN}
    right, wants_text = try_terms(terms, rows(None, None))
    start = "note: reward.terms.{} gets None as the answer of each row tried, because data.answer is null"
    assert right.startswith(start.format("right")) and "alike (0)" in right
    assert wants_text.startswith(start.format("wants_text")) and "self_test_graders.py:" in wants_text
    assert try_terms(terms, rows("4", None)) == try_terms(terms, rows("4"))


def test_slow_functions_are_tried_on_one_row():
    (note,) = try_terms({"t": user("slow")}, rows("4", "5", "6"))
    assert note.endswith("(tried on row-0)")


CRASH = Failure(kind="crash", message="NameError: name 'x' is not defined at f.py:3")
OTHER = Failure(kind="crash", message="NameError: name 'y' is not defined at f.py:4")
VALUE = Failure(kind="crash", message="ValueError: could not convert string to float: '' at f.py:3")
TIMEOUT = Failure(kind="timeout", message="no answer within 10 s")
NO_HIGHER, FAILED = "no higher than an empty completion", "failed on the data's own answers"
NONE = "returned None for the data's own answers and for empty completions"


@pytest.mark.parametrize(
    ("pairs", "weight", "found"),
    [
        ([(1.0, 0.0)], 1.0, None),
        ([(0.0, 0.0), (1.0, 0.0)], 1.0, None),
        ([(0.0, 0.0), (0.2, 0.5)], 1.0, NO_HIGHER),
        ([(0.0, 0.0)], -1.0, None),
        ([(0.0, 0.0)], 0.0, None),
        ([(CRASH, 0.0), (1.0, 0.0)], 1.0, None),
        ([(CRASH, 0.0), (0.0, 0.0)], 1.0, NO_HIGHER),
        ([(0.5, CRASH)], 1.0, None),
        ([(CRASH, 0.0)], 1.0, FAILED),
        ([(CRASH, OTHER), (CRASH, OTHER)], 1.0, FAILED),
        ([(VALUE, VALUE)], 1.0, FAILED),
        ([(TIMEOUT, TIMEOUT)], 1.0, FAILED),
        ([(None, None), (None, None)], 1.0, NONE),
        ([(None, None)], 0.0, NONE),
        ([(None, None), (1.0, None)], 1.0, None),
        ([(None, None), (0.0, 0.0)], 1.0, NO_HIGHER),
        ([(CRASH, CRASH), (CRASH, CRASH)], 1.0, ConfigError),
        ([(CRASH, CRASH)], -1.0, ConfigError),
    ],
    ids=lambda value: json.dumps(value, default=lambda x: getattr(x, "kind", str(x))),
)
def test_results_give_a_note_an_error_or_nothing(pairs, weight, found):
    term = RewardTerm(kind="m:f", weight=weight)
    if found is ConfigError:
        with pytest.raises(ConfigError, match="Fix the function, or"):
            check_results("t", term, pairs)
    else:
        text = check_results("t", term, pairs)
        assert text is None if found is None else found in text


# ---- the data's own answers


def try_answers(*answers, **args):
    notes = []

    async def run():
        cfg = RewardConfig(terms={"maths": RewardTerm(kind="math_answer", args=args)})
        scorer = Scorer(cfg)
        try:
            await try_references(scorer, cfg.terms, rows(*answers), notes.append)
        finally:
            await scorer.close()

    asyncio.run(run())
    return notes


def test_answers_that_their_own_completion_meets_get_no_note():
    texts = ("5.", "Paris, France", "2:30 PM", 72.0, {"value": "5"}, ["4", "four"], True, "x\n#### 1/2", "1:2:3", "C")
    assert try_answers(*texts) == []
    assert try_answers("72", 72.0, "72.0", "1,234", "$5", "2+2\n#### 4", rule="gsm8k") == []
    assert try_answers("Paris", 1.5, rule="exact") == [] == try_answers("1/2", "5 cm", rule="math_verify")


def test_rows_whose_answer_no_completion_meets_are_named_and_more_than_half_of_them_end_the_run():
    (note,) = try_answers(*range(20), *({"a": i, "b": 2} for i in range(12)))
    assert "grades 12 of the data's own 32 different answers" in note
    assert note.count("\n  row row-") == 10 and "row row-20, answer \"{'a': 0, 'b': 2}\"" in note
    assert "is no answer; allowed: a text" in note
    with pytest.raises(ConfigError, match=r"with rule gsm8k grades 2 of the data's own 3 different answers"):
        try_answers("4", "seventy", "1/2", rule="gsm8k")

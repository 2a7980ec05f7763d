"""Checks reward functions together with the config, and tries them before a run depends on them: built-in functions on
known completions, a user's on the answers of the data. The workers grade them like the completions of the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.config.case import Case, Problem
from meshrl.config.kinds import REWARDS, needs_answer
from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.errors import ConfigError, Failure, Graded
from meshrl.core.files import parse_json, read_text
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, import_object
from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.reward.answer_forms import references
from meshrl.reward.kinds import make_grader
from meshrl.reward.python_tests import TIMEOUT_S, tests_of
from meshrl.reward.score import Scorer

Note = Callable[[str], None]
Pair = tuple[Graded, Graded]
"""The result of a text, mostly the row's answer, as the completion, and that of the empty completion."""

NUM_ROWS = 4  # rows of the data on which a user's functions are tried
NUM_REFERENCES = 256  # rows of the data whose answers are tried with math_answer
_BATCH, _REFERENCES_S = 64, 2.0  # no further batch of answers is tried after this time
_TRIAL_S = 0.2  # no further row is tried after this time: a judge model may take seconds for each

TEXTS = (
    "",
    "4",
    "The answer is 4.",
    "2 + 2 = 4\n#### 4",
    "<think>\nI add 2 and 2.\n</think>\n<answer>4</answer>",
    "Therefore $\\boxed{4}$",
    '{"answer": 4}',
    "word " * 100,
)
"""Completions of different forms: a regular expression that fits all of them requires no form."""

# Exceptions that a completion of the wrong form hardly ever causes. ValueError, IndexError, KeyError and everything
# about NoneType are not among them: a function raises them when it searches for a marker and finds none.
_INDEPENDENT_OF_THE_TEXT = (
    *("NameError", "ImportError", "ModuleNotFoundError", "AttributeError", "TypeError", "NotImplementedError"),
)


MATH_EXAMPLES = {
    "gsm8k": ("1250", "2 * 625 = 1250\n#### 1,250", "2 * 625 = 1250\n#### 1,251"),
    "exact": ("4", "4", "5"),
    "math_verify": ("0.5", "$\\boxed{\\frac{1}{2}}$", "$\\boxed{\\frac{1}{3}}$"),
}
"""rule -> (answer, a right completion, a wrong one); the rule auto must grade all of them right."""
PROGRAMS = (
    ({"inputs": ["3"], "outputs": ["9"]}, "```python\nprint(int(input()) ** 2)\n```", "```python\nprint(8)\n```"),
    ("assert f(3) == 9", "```python\ndef f(x):\n    return x * x\n```", "```python\nimport os\nos._exit(0)\n```"),
)
"""(tests, a right completion, a wrong one)."""


_BOX = "\\boxed{{{}}}"
REFERENCE_FORMS = {"gsm8k": ["#### {}"], "exact": ["{}"], "math_verify": [_BOX], "auto": [_BOX, "{}"]}
"""rule -> the completions, made of the reference, that must be right."""


async def try_references(scorer: Scorer, terms: dict[str, RewardTerm], prompts: Sequence[Prompt], note: Note) -> None:
    """Grade the data's own answers, in the forms that the rule reads, with each math_answer term. A note names the rows
    whose answer is graded wrong, which no completion can meet."""
    for name, term in terms.items():
        unique: dict[str, Prompt] = {}
        for prompt in prompts if needs_answer(term.kind) else ():
            if term.grades(prompt.env):
                unique.setdefault(repr(prompt.answer), prompt)
        if "python_tests" in term.kind:
            for row in unique.values():
                tests_of(row.answer, f"reward.terms.{name}: the answer of row {row.id},")
            continue
        rule, deadline = term.args.get("rule", "auto"), time.monotonic() + _REFERENCES_S
        failed: list[str] = []
        rows, num_tried = list(unique.values()), 0
        while num_tried < len(rows) and time.monotonic() < deadline:
            batch = rows[num_tried : num_tried + _BATCH]
            cases = [(row, form.format(_own_answer(row.answer))) for row in batch for form in REFERENCE_FORMS[rule]]
            results = await scorer.grade([(name, _attempt(row, text)) for row, text in cases])
            wrong = {row.id: (row, text, result) for (row, text), result in zip(cases, results) if result != 1.0}
            for row, text, result in wrong.values():
                why = result.message[:120] if isinstance(result, Failure) else f"{text[:80]!r} is graded wrong"
                failed.append(f"\n  row {row.id}, answer {str(row.answer)[:80]!r}: {why}")
            num_tried += len(batch)
        if failed:
            text = (
                f"reward.terms.{name} of kind {term.kind!r} with rule {rule} grades {len(failed)} of the data's own "
                f"{num_tried} different answers, given as the completion, not as right, so hardly any completion can "
                f"be. Correct these answers, data.answer or the rule:{''.join(failed[:10])}"
            )
            if 2 * len(failed) > num_tried:
                raise ConfigError(text)
            note(f"note: {text}")


def _own_answer(answer: Any) -> str:
    """The text of a reference as a model would state it; empty for one that can't be read, which fails when graded."""
    try:
        return references(answer)[0].rpartition("####")[2].strip()
    except ValueError:
        return ""


async def try_built_in(scorer: Scorer, terms: dict[str, RewardTerm], note: Note) -> None:
    """Grade known completions with each built-in term, by its self-test."""
    for name, term in terms.items():
        if term.kind in REWARDS:
            await import_object(REWARDS[term.kind].self_test)(scorer, name, term, note)


async def try_on_answers(scorer: Scorer, cfg: RewardConfig, prompts: Sequence[Prompt], note: Note) -> None:
    """Grade the answers of these prompts, and empty completions, with every term that is a user's function.

    If none of the prompts has an answer, a note names the functions that then score different completions alike.
    """
    users = [name for name, term in cfg.terms.items() if term.kind not in REWARDS]
    without_answers = bool(prompts) and all(prompt.answer is None for prompt in prompts)
    rows = [(prompt, str(prompt.answer)) for prompt in prompts if isinstance(prompt.answer, str | int | float)]
    if without_answers:
        rows = [(prompts[0], "\n".join(TEXTS))]
    pairs: dict[str, list[Pair]] = {name: [] for name in users}
    started_at, tried = time.monotonic(), list[str]()
    for prompt, text in rows if users else ():
        if not text.strip():
            continue
        asked = [name for name in users if cfg.terms[name].grades(prompt.env)]
        graded = await scorer.grade([(name, _attempt(prompt, each)) for name in asked for each in (text, "")])
        for name, pair in zip(asked, zip(graded[::2], graded[1::2])):
            pairs[name].append(pair)
        tried.append(prompt.id)
        if time.monotonic() - started_at > _TRIAL_S:
            break
    for name in filter(pairs.get, users):
        term = cfg.terms[name]
        warning = _graded_alike(name, *pairs[name][0]) if without_answers else check_results(name, term, pairs[name])
        if warning is not None:
            note(f"note: {warning} (tried on {', '.join(tried)})")


def _graded_alike(name: str, some: Graded, empty: Graded) -> str | None:
    """A note about a function whose result for a text of many forms equals the one for no text, without an answer."""
    if isinstance(some, Failure) and isinstance(empty, Failure):
        result = f"failed on a text and on the empty completion alike, with {some.kind}: {some.message}"
    elif some == empty and not isinstance(some, Failure):
        result = f"scored a text and the empty completion alike ({'None' if some is None else f'{some:g}'})"
    else:
        return None
    return (
        f"reward.terms.{name} gets None as the answer of each row tried, because data.answer is null or data.map "
        f"returns no answer; it {result}. If the function reads the answer, name its column as data.answer"
    )


def check_results(name: str, term: RewardTerm, pairs: Sequence[Pair]) -> str | None:
    """A note for the user about a function with these results; None when they are as expected."""
    which = f"reward.terms.{name} of kind {term.kind!r}"
    failures = [score for score, _ in pairs if isinstance(score, Failure)]
    if len(failures) == len(pairs):
        kind, message = failures[0].kind, failures[0].message
        first = f"{kind}: {message}"
        is_same = len({repr(result) for pair in pairs for result in pair}) == 1
        error = message.split(":")[0]  # the completion can't be its cause, if it is one of these
        if is_same and kind == "crash" and error in _INDEPENDENT_OF_THE_TEXT and "NoneType" not in message:
            raise ConfigError(
                f"{which} failed on the data's own answers and on empty completions alike, with {first}. Fix the "
                "function, or data.answer if it names a column of another type than the function expects"
            )
        return (
            f"{which} failed on the data's own answers, with {first}; this is right only for a function that "
            "can't grade an answer alone. Such failures are masked, not scored 0"
        )
    if all(result is None for pair in pairs for result in pair):
        return (
            f"{which} returned None for the data's own answers and for empty completions; None means that the "
            "term does not apply to the row. A function without a return returns None, too"
        )
    scored = [(score, empty) for score, empty in pairs if isinstance(score, float) and isinstance(empty, float)]
    if term.weight > 0 and scored and all(score <= empty for score, empty in scored):
        score, empty = scored[0]
        return (
            f"{which} scores the data's own answers no higher than an empty completion ({score:g} and {empty:g}). This "
            "is expected if it grades no answer, or requires a form of it, such as tags or \\boxed{}: then there is "
            "nothing to do. Otherwise call it with a right completion, and correct it"
        )
    return None


async def try_math_answer(scorer: Scorer, name: str, term: RewardTerm, note: Note) -> None:
    rule = term.args.get("rule", "auto")
    await _try_examples(scorer, name, term, [*MATH_EXAMPLES.values()] if rule == "auto" else [MATH_EXAMPLES[rule]])


async def try_python_tests(scorer: Scorer, name: str, term: RewardTerm, note: Note) -> None:
    """A program that is killed after args.timeout_s is wrong; one that reward.timeout_s ends is a failed grading."""
    if term.args.get("timeout_s", TIMEOUT_S) > scorer.timeout_s / 2:
        text = "must be at most half of reward.timeout_s, which is"
        raise ConfigError(f"reward.terms.{name}.args.timeout_s {text} {scorer.timeout_s:g}")
    await _try_examples(scorer, name, term, PROGRAMS)


async def _try_examples(scorer: Scorer, name: str, term: RewardTerm, examples: Sequence[tuple[Any, str, str]]) -> None:
    for answer, *texts in examples:
        right, wrong = await _scores(scorer, name, term, [(text, answer) for text in texts])
        if not right > wrong:
            raise ConfigError(
                f"reward.terms.{name} of kind {term.kind!r} with args {term.args} failed its self-test: for the answer "
                f"{answer!r} it scored the right completion {texts[0]!r} {right:g} and the wrong one "
                f"{texts[1]!r} {wrong:g}; the right one must score higher. Install meshrl and its requirements again "
                "(math_answer needs math-verify, latex2sympy2_extended and sympy)"
            )


async def try_format(scorer: Scorer, name: str, term: RewardTerm, note: Note) -> None:
    scores = await _scores(scorer, name, term, [(text, None) for text in TEXTS])
    if all(scores):
        note(
            f"note: reward.terms.{name} with regex {term.args['regex']!r} matches {len(TEXTS)} texts of different "
            "forms, including the empty one; a term that matches every completion does not reward a form"
        )


async def try_overlong(scorer: Scorer, name: str, term: RewardTerm, note: Note) -> None:
    short, long = await _scores(scorer, name, term, [(text, None) for text in ("", " " * term.args["max_tokens"])])
    if not long < short:
        raise ConfigError(
            f"reward.terms.{name} of kind {term.kind!r} with args {term.args} failed its self-test: it scored a "
            f"completion of 1 token {short:g}, and one of max_tokens {long:g}, which must be lower. Raise max_tokens, "
            "and remove num_tokens from args: it is counted"
        )


async def try_judge(scorer: Scorer, name: str, term: RewardTerm, note: Note) -> None:
    """Grade the rows of args.calibration, and compare the order of their scores with that of their labels: equal scores
    count half. Without such a file grade one answer."""
    path, least = term.args.get("calibration"), term.args.get("min_agreement")
    if path is None:
        await _scores(scorer, name, term, [("4", "4")])
        return
    rows = _labelled_rows(path)
    results = await scorer.grade([(name, trajectory) for trajectory, _ in rows])
    graded = [(label, score, t.prompt.id) for (t, label), score in zip(rows, results) if isinstance(score, float)]
    failed = next((f" (the first failure, {r.kind}: {r.message})" for r in results if isinstance(r, Failure)), "")
    pairs = [(good, bad, a, b) for high, good, a in graded for low, bad, b in graded if high > low]
    agreement = sum((good > bad) + (good == bad) / 2 for good, bad, *_ in pairs) / max(1, len(pairs))
    wrong = (f"; it scored {a} {good:g}, and {b} {bad:g}" for good, bad, a, b in pairs if good <= bad)
    text = (
        f"reward.terms.{name}: the judge graded {len(graded)} of {len(rows)} rows of {path}{failed}, and ordered "
        f"{agreement:.0%} of {len(pairs)} pairs of rows with different labels as the labels do (by chance: 50%)"
        f"{next(wrong, '')}"
    )
    if not graded:
        raise ConfigError(f"reward.terms.{name}: the judge graded none of the {len(rows)} rows of {path}{failed}")
    if not pairs or agreement < (least or 0.0):
        raise ConfigError(f"{text}; args.min_agreement is {least}. Change the judge, or the rows if no labels differ")
    note(text)


def _labelled_rows(path: str) -> list[tuple[Trajectory, float]]:
    rows, place = [], path
    try:
        for number, line in enumerate(read_text(Path(path)).rstrip().split("\n"), 1):
            place, row = f"{path}:{number}", parse_json(line, constants=False)
            messages = [{"role": "user", "content": row["prompt"]}]
            prompt = Prompt(id=place, ordinal=0, messages=messages, answer=row.get("answer"))
            rows.append((_attempt(prompt, row["completion"]), float(row["score" if "score" in row else "label"])))
    except (LookupError, TypeError, ValueError) as error:
        form = "each line needs prompt, completion and a number as score or label; it may have answer"
        raise ConfigError(f"{place}: {type(error).__name__}: {error}; {form}") from error
    return rows


async def _scores(scorer: Scorer, name: str, term: RewardTerm, cases: Sequence[tuple[str, Any]]) -> list[float]:
    """Scores of (completion, answer)."""
    attempts = [_attempt(Prompt(id="self-test", ordinal=0, messages=[], answer=answer), text) for text, answer in cases]
    results = await scorer.grade([(name, attempt) for attempt in attempts])
    for (text, _), result in zip(cases, results):
        if isinstance(result, Failure):
            raise ConfigError(
                f"reward.terms.{name} of kind {term.kind!r} with args {term.args} failed its self-test: it could not "
                f"grade {text!r}: {result.kind}: {result.message}. Change args, or raise reward.timeout_s after a "
                "timeout and reward.max_memory_bytes after a lack of memory"
            )
    return [result for result in results if isinstance(result, float)]


def _attempt(prompt: Prompt, text: str) -> Trajectory:
    """A trajectory of one turn with this text, as if each character and the end were a token."""
    size = len(text) + 1
    turn = Turn(
        context_ids=np.zeros(0, np.int32),
        output_ids=np.zeros(size, np.int32),
        logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        stop_reason="stop",
        messages=[{"role": "assistant", "content": text}],
    )
    return Trajectory(prompt=prompt, group_id=prompt.id, index=0, turns=[turn])


def check_graders(in_memory: Mapping[str, Callable[..., Any]], case: Case) -> Iterator[Problem]:
    """Problems of reward functions that can't be imported, or that a run can't call. in_memory: by term the functions
    of a Python caller. Kinds that name no function are reported by the config's own check.

    Modules that only this check imports are removed from sys.modules, so that the check of the next config in this
    process reads their files again.
    """
    before = set(sys.modules)
    for name, term in case.rl.reward.terms.items():
        is_path = DOTTED_PATH.fullmatch(term.kind) and can_be_imported(term.kind)
        if not (name in in_memory or term.kind in REWARDS or is_path):
            continue
        try:
            make_grader(name, term.kind, term.args, given=in_memory.get(name))
        except ConfigError as error:
            yield Problem((f"reward.terms.{name}.kind",), f"{error}.")
        module = term.kind.partition(":")[0]
        if module not in before:
            sys.modules.pop(module, None)

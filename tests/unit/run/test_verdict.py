"""The verdict on a run: the change of its held-out score, and the interval in which it is no change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshrl.core.best_models import Best
from meshrl.loops.evaluate import standard_error
from meshrl.monitor.sinks import JsonlSink, MetricsLine
from meshrl.run.verdict import Verdict, evaluations, read_verdict, verdict_of

UNITS = {"eval/mean_at_k": "score", "eval/standard_error": "score"}


def line(step: int, right: int, of: int, evaluation: Mapping[str, str] = {}) -> MetricsLine:
    """An evaluation with right and wrong answers. evaluation: its identity."""
    error = standard_error([1.0] * right + [0.0] * (of - right))
    metrics = {"eval/mean_at_k": right / of, "eval/standard_error": error}
    return MetricsLine(step=step, time=0.0, metrics=metrics, evaluation=dict(evaluation))


def verdict(*lines: MetricsLine, best: Best | None = None) -> Verdict:
    found = verdict_of(lines, best)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("before", "after", "of", "outcome"),
    [
        (9, 0, 40, "worse"),
        (0, 9, 40, "better"),
        (9, 12, 40, "unchanged"),
        (0, 0, 40, "unchanged"),
        (0, 1, 8, "unchanged"),
        (8, 0, 8, "worse"),
        (0, 1, 1, "unchanged"),
        (400, 460, 1000, "better"),
        (400, 430, 1000, "unchanged"),
    ],
)
def test_a_difference_within_the_interval_is_no_change(before: int, after: int, of: int, outcome: str):
    found = verdict(line(0, before, of), line(5, 1, of), line(10, after, of))
    assert found.outcome == outcome and found.margin > 0


def test_the_interval_is_that_of_agresti_and_caffo():
    """Its standard errors are those of (x + 1) / (n + 2) right answers, for a difference of n / (n + 2) of ours."""
    shares = [(9 + 1) / 42, (0 + 1) / 42]
    expected = 42 / 40 * 1.96 * math.sqrt(sum(share * (1 - share) / 42 for share in shares))
    found = verdict(line(0, 9, 40), line(10, 0, 40), best=Best(0, 0.225, "tiny"))
    assert found.margin == pytest.approx(expected)
    assert found.text == "held-out 0.225 -> 0.000 (worse: -0.225 +- 0.144); best: 0.225 at step 0"
    assert found.facts["outcome"] == "worse" and found.facts["text"] == found.text
    assert found.lines == [found.text, "best model: tiny"]


def test_scores_of_another_range_have_an_interval_of_their_own():
    assert standard_error([-4.0, 10.0, 3.0]) > standard_error([0.0, 1.0, 1.0]) > standard_error([0.5] * 30) > 0


def test_one_evaluation_and_a_run_without_standard_errors_have_no_outcome():
    one = verdict(line(3, 9, 40))
    assert (one.outcome, one.text) == ("unknown", "held-out 0.225 +- 0.135 at step 3, the only evaluation")
    old = [MetricsLine(step=step, time=0.0, metrics={"eval/mean_at_k": 0.5}) for step in (0, 4)]
    assert verdict(*old).text == "held-out 0.500 -> 0.500 (interval unknown)"
    assert verdict_of(evaluations([MetricsLine(step=1, time=0.0, metrics={"reward/mean": 1.0})]), None) is None


def test_the_files_of_a_run_give_its_verdict_and_damaged_ones_give_none(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for each in (line(0, 40, 40), line(5, 0, 40), line(10, 9, 40)):
        sink.write(each.step, each.metrics, UNITS)
    sink.close()
    found = read_verdict(tmp_path)
    assert found is not None and (found.first, found.last) == ((0, 1.0), (10, 0.225))
    assert read_verdict(tmp_path / "nothing") is None


def test_only_evaluations_with_the_identity_of_the_last_one_are_compared():
    """A run that continues with other held-out rows evaluates its step again. Without this, the verdict on a model that
    has not changed could be `better: +1.000`. A run that returns to the former rows continues their curve."""
    hard, easy = ({"term": "weighted_sum", "rows": rows} for rows in ("hard", "easy"))
    lines = [line(0, 0, 40, hard), line(5, 1, 40, hard), line(5, 40, 40, easy), line(10, 40, 40, easy)]
    best = Best(0, 0.5, "tiny", hard)
    found = verdict_of(evaluations(lines), best)
    assert found is not None and (found.outcome, found.first, found.last) == ("unchanged", (5, 1.0), (10, 1.0))
    assert "best" not in found.text
    found = verdict_of(evaluations(lines[:3]), None)
    assert found is not None and found.outcome == "unknown"
    found = verdict_of(evaluations([*lines, line(10, 20, 40, hard)]), best)
    assert found is not None and (found.outcome, found.first, found.last) == ("better", (0, 0.0), (10, 0.5))
    assert found.best == best


@pytest.mark.parametrize(("term", "name"), [("weighted_sum", "held-out reward"), ("answer", "held-out answer")])
def test_the_verdict_names_what_it_scores(term: str, name: str):
    lines = [line(0, 9, 40, {"term": term}), line(9, 0, 40, {"term": term})]
    assert verdict(*lines).text == f"{name} 0.225 -> 0.000 (worse: -0.225 +- 0.144)"


def test_intervals_of_scores_within_0_and_1_end_at_their_limits():
    assert verdict(line(0, 0, 40), line(9, 40, 40)).text == "held-out 0.000 -> 1.000 (better: +1.000, +0.932 to +1.000)"
    assert verdict(line(0, 0, 9), line(9, 1, 9)).text.endswith("(unchanged: +0.111 +- 0.347)")
    assert verdict(line(4, 40, 40)).text == "held-out 1.000, 0.952 to 1.000 at step 4, the only evaluation"
    for extreme in ({"eval/score_max": 1.5}, {"eval/score_min": -1.0}):  # of an answer, as that of a reward model
        one = line(4, 40, 40)
        one.metrics.update(extreme)
        assert verdict(one).text == "held-out 1.000 +- 0.048 at step 4, the only evaluation"

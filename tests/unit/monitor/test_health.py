"""Each rule of health.json on a stored stream of a sick run and on healthy ones, its limits, and damaged streams."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.health import MEASURES, RULES, Health, HealthSink
from meshrl.monitor.sinks import JsonlSink, MetricsLine, read_metrics

STREAMS: dict[str, dict[str, list[float | None]]] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "health_streams.json").read_text()
)
CUT = "rollout/truncated_fraction"


def lines_of(stream: dict[str, list[float | None]]) -> list[MetricsLine]:
    """The i-th value of each metric is of step i; null = none."""
    count = max(map(len, stream.values()))
    steps = [{n: v[i] for n, v in stream.items() if i < len(v) and v[i] is not None} for i in range(count)]
    return [MetricsLine(step=i, time=float(i), metrics=step) for i, step in enumerate(steps)]  # type: ignore[arg-type]


def found(stream: dict[str, Any]) -> dict[str, int]:
    return {finding.rule.name: finding.since for finding in Health(lines_of(stream)).findings}


def of(values: list[float], **others: float) -> dict[str, list[float]]:
    return {"reward/mean": values, "reward/min": [0.0] * len(values), "reward/max": [1.0] * len(values)} | {
        name.replace("__", "/"): [value] * len(values) for name, value in others.items()
    }


@pytest.mark.parametrize("rule", [rule.name for rule in RULES if rule.means])
def test_each_rule_finds_its_stored_sick_run(rule: str):
    assert rule in found(STREAMS[rule])


@pytest.mark.parametrize("name", [name for name in STREAMS if name.startswith("healthy")])
def test_no_rule_finds_anything_in_a_stored_healthy_run(name: str):
    assert found(STREAMS[name]) == {}


def test_a_rule_without_one_of_its_metrics_is_silent():
    """All but those that have another line of conditions, or that miss no metric."""
    for rule in RULES:
        for conditions in rule.when if len(rule.when) == 1 else ():
            for lacking in {c.metric for c in conditions}:
                stream = {n: v for n, v in STREAMS.get(rule.name, {}).items() if not n.startswith(lacking.rstrip("*"))}
                assert rule.name not in (found(stream) if stream else {}), (rule.name, lacking)


@pytest.mark.parametrize(
    ("metric", "below", "above", "rule"),
    [
        (CUT, 0.2, 0.201, "truncation"),
        ("loss/kl", 1.0, 1.01, "KL runaway"),
        ("reward/kl", 1.0, 1.01, "KL runaway"),
        ("loss/approx_kl", 0.1, 0.11, "KL runaway"),
        ("correction/effective_sample_size", 0.5, 0.49, "sampler-trainer gap"),
        ("correction/chi_square", 1.0, 1.01, "sampler-trainer gap"),
        ("correction/weight_mean", 0.9, 0.89, "sampler-trainer gap"),
        ("correction/weight_mean", 1.1, 1.11, "sampler-trainer gap"),
        ("correction/log_ratio_mean", -0.1, -0.11, "sampler-trainer gap"),
        ("rollout/most_frequent_fraction", 0.9, 0.91, "one answer for all prompts"),
        ("reward/failed", 0.01, 0.011, "grader failures"),
        ("rollout/unscored_fraction", 0.01, 0.011, "grader failures"),
        ("loss/clip_fraction_low", 0.2, 0.21, "large updates"),
        ("train/restarts", 0.0, 1.0, "failures"),
    ],
)
def test_a_rule_holds_on_one_side_of_its_limit(metric: str, below: float, above: float, rule: str):
    assert found({metric: [below] * 20}) == {}
    assert found({metric: [above] * 20}).keys() == {rule}


def test_a_rule_begins_after_three_steps_and_ends_after_five():
    """The newest values are means of five, so 0.3 holds from the fifth step on."""
    health = Health()
    changes = {}
    for step, value in enumerate([0.3] * 8 + [0.0] * 12, start=1):
        health.record(step, {"loss/approx_kl": value}, {})
        for finding in health.check(step):
            changes[step] = finding.text
    assert list(changes) == [7, 16]  # the mean is below 0.1 from step 12 on
    assert changes[7].startswith(
        "health: KL runaway since step 5: loss/approx_kl: the newest values above 0.1 (here 0.3)"
    )
    assert "Try: Lower" in changes[7] and changes[16] == "health: step 16: KL runaway has ended; it began at step 5"
    assert health.open == [] and health.findings[0].until == 16


def test_one_noisy_step_is_no_finding_where_a_trend_is_needed():
    assert found({"loss/approx_kl": [0.0] * 10 + [0.4] + [0.0] * 10}) == {}
    assert found({"loss/entropy": [1.0] * 10 + [0.0] + [1.0] * 10} | of([0.5] * 21)) == {}


def test_entropy_may_fall_when_the_task_is_solved():
    fall = {"loss/entropy": [0.8**i for i in range(30)]}
    assert found(fall | of([0.5] * 30)).keys() == {"entropy collapse"}
    assert found(fall | of([0.95] * 30)) == {}
    assert found(fall) == {}  # SFT has no rewards


def test_a_reward_that_is_always_the_same_is_not_solved():
    stream = of([1.0] * 20, reward__groups_without_signal=1.0) | {"reward/min": [1.0] * 20}
    assert found(stream).keys() == {"groups without signal"}
    assert found(stream | {"reward/min": [0.0] * 20}) == {}


def test_answers_may_become_long_if_they_end():
    longer = {"rollout/length_mean_tokens": [10.0 + i for i in range(40)]}
    cut = [0.15 * i / 40 + 0.01 * (i % 2) for i in range(40)]
    assert found(longer | {CUT: cut}).keys() == {"length runaway"}
    assert found(longer | {CUT: [0.0] * 40}) == {} and found({CUT: cut}) == {}


def test_slow_steps_are_found_unless_they_have_more_tokens():
    speed, tokens = [100.0] * 20 + [20.0] * 20, [1000.0] * 40
    assert found({"perf/throughput": speed, "train/num_tokens": tokens, "train/grad_norm": [1.0] * 40}).keys() == {
        "throughput drop"
    }
    fewer = {"perf/throughput": speed, "train/num_tokens": [1000.0] * 20 + [100.0] * 20, "train/grad_norm": [1.0] * 40}
    assert found(fewer) == {}  # a step has fewer tokens and takes less time


def test_steps_without_an_optimizer_step_or_with_a_gradient_that_is_nan_are_dead():
    tokens = {"train/num_tokens": [100.0] * 12}
    assert found(tokens).keys() == {"dead gradients"}
    assert found(tokens | {"train/grad_norm": [1.0] * 4 + [math.nan] * 8}).keys() == {"dead gradients"}
    assert found(tokens | {"train/grad_norm": [1.0] * 12}) == {}


def held_out(scores: list[float], rewards: list[float]) -> dict[str, list[float | None]]:
    """An evaluation at every tenth step."""
    evals: list[float | None] = [None] * (10 * len(scores) + 1)
    evals[::10] = [*scores, None]
    errors = [None if score is None else 0.05 for score in evals]
    return {"eval/mean_at_k": evals, "eval/standard_error": errors, "reward/mean": [None, *rewards]}


def test_a_held_out_score_that_falls_from_its_best_value_while_the_reward_rises_is_found():
    rising = [0.01 * i + 0.01 * (i % 2) for i in range(39)]
    assert found(held_out([0.2, 0.7, 0.5, 0.3], rising)) == {"held-out score falls": 30}
    assert found(held_out([0.2, 0.7, 0.6, 0.55], rising)) == {}  # within the noise
    assert found(held_out([0.2, 0.7, 0.5, 0.3], rising[:10] + [0.05 + 0.001 * (i % 2) for i in range(29)])) == {}


def test_scores_of_other_held_out_rows_are_not_compared():
    health, identity = Health(), {"rows": "a"}
    for step in range(1, 31):
        health.record(step, {"reward/mean": 0.01 * step + 0.01 * (step % 2)}, {})
        if step % 10 == 0:
            identity = {"rows": "a" if step < 30 else "b"}
            values = {"eval/mean_at_k": 0.9 if step < 30 else 0.1, "eval/standard_error": 0.05}
            health.record(step, values, identity)
        health.check(step)
    assert health.findings == []


def test_a_term_that_pays_for_another_one_is_named():
    rises, falls = [0.05 * i for i in range(30)], [0.9 - 0.02 * i for i in range(30)]
    both = {"reward/part/a": rises, "reward/part/b": falls, "reward/mean": [a + b for a, b in zip(rises, falls)]}
    (finding,) = Health(lines_of(both)).findings  # type: ignore[arg-type]
    assert (finding.rule.name, finding.metric) == ("one term eaten by another", "reward/part/b")
    slow = [0.9 - 0.002 * i for i in range(30)]
    assert found(both | {"reward/part/b": slow, "reward/mean": [a + b for a, b in zip(rises, slow)]}) == {}


def test_a_term_that_falls_by_its_noise_is_not_eaten():
    noisy = [0.5 + 0.2 * ((i * 7) % 5 - 2) / 2 for i in range(27)] + [0.3] * 3
    total = [b + 0.01 * i for i, b in enumerate(noisy)]
    assert found({"reward/part/b": noisy, "reward/mean": [*total[:-5], *(t + 0.3 for t in total[-5:])]}) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e308])
@pytest.mark.parametrize("at", [range(30), range(15, 30), range(7, 8)])
def test_no_value_of_any_metric_raises(value: float, at: range):
    names = {c.metric.replace("*", "a") for rule in RULES for all_of in rule.when for c in all_of}
    names |= {"eval/standard_error", "reward/part/b", "reward/min", "reward/max"}
    for name in sorted(names):
        stream = {other: [0.5 + 0.01 * (i % 3) for i in range(30)] for other in names}
        stream[name] = [value if i in at else old for i, old in enumerate(stream[name])]
        found(stream)
    found({name: [value] * 30 for name in names})


def test_a_stream_with_missing_repeated_and_unknown_steps_is_read(tmp_path: Path):
    """A run that was resumed from step 6 on another machine, with metrics of a later version."""
    records: list[dict[str, Any]] = [{"schema": 1, "units": {CUT: "fraction"}}]
    for step in [*range(1, 9), *range(6, 9), 40, 41, 42, 43, 44]:
        records.append({"schema": 1, "step": step, "time": 1.0, "metrics": {CUT: 0.3, "new/metric": 1.0}})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with path.open("a") as file:
        file.write('{"schema":1,"step":45,"time":1.0,"metrics":{"loss/entropy":"NaN"}}\n')
        file.write('{"schema":1,"step":46,"ti')
    (finding,) = Health(read_metrics(path)[0]).findings
    assert (finding.rule.name, finding.since, finding.until) == ("truncation", 5, None)


def test_a_long_stream_is_checked_at_some_of_its_steps_and_at_its_last_one():
    health = Health([MetricsLine(step=i, time=0.0, metrics={CUT: 0.0 if i < 4990 else 0.9}) for i in range(5000)])
    assert [finding.rule.name for finding in health.open] == ["truncation"] and health.open[0].since > 4900


def test_a_run_notes_each_finding_once_also_when_it_is_resumed(tmp_path: Path):
    notes, shown = list[str](), list[list[str]]()
    sink = HealthSink(notes.append, dict, lambda rules: shown.append([*rules]))
    metrics = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, 11):
        for each in (metrics, sink):
            each.write(step, {CUT: 0.9}, {})
    metrics.close()
    assert len(notes) == 1 and shown == [["truncation"]]
    assert notes[0].startswith(f"health: truncation since step 1: {CUT}: the last value above 0.5 (here 0.9). Answers")
    resumed = HealthSink(notes.append, dict, lambda rules: shown.append([*rules]))
    resumed.restart(read_metrics(tmp_path / "metrics.jsonl")[0])
    assert shown[1:] == [["truncation"]]
    for step in range(11, 25):
        resumed.write(step, {CUT: 0.0}, {})
    assert len(notes) == 2 and "truncation has ended; it began at step 1" in notes[1] and shown[-1] == []


def test_each_rule_reads_metrics_that_the_glossary_explains_and_each_measure_is_used():
    conditions = [c for rule in RULES for all_of in rule.when for c in all_of]
    assert [c.metric for c in conditions if meaning_of(c.metric.replace("*", "a")) is None] == []
    assert {c.measure for c in conditions} == MEASURES.keys()
    assert len({rule.name for rule in RULES}) == len(RULES)

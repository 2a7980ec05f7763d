"""Predicted step times: cases computed by hand, and what holds for all lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshrl.config.loop import LoopConfig
from meshrl.tools.schedule.advise import STALENESS, best_of_each_kind, recommended
from meshrl.tools.schedule.step_time import Answer, Costs, Setup, predict, steps_of

PER_STEP, SIZE = 4, 2
SIDES = {"decode_step_s": 0.01, "decode_row_s": 0.0005, "train_step_s": 0.1, "train_token_s": 0.001}
OTHERS = {"prefill_step_s": 0.005, "prefill_token_s": 1e-5, "request_s": 1e-3, "reward_group_s": 0.003}
REAL = Costs(**SIDES, **OTHERS, sync_s=0.05, probe_s=0.01, step_s=0.02)


def answer(*outputs: int, prompt: int = 10) -> Answer:
    return Answer(tuple((prompt, output) for output in outputs), prompt * len(outputs) + sum(outputs))


def setup(kind="colocated", lengths=None, costs=None, max_running=64, rollout_ranks=1, **loop) -> Setup:
    """Answers of 100 tokens at 0.01 s for each token; training a step takes 0.88 s."""
    lengths, costs = lengths or [[answer(100)] * SIZE], costs or Costs(decode_step_s=0.01, train_token_s=0.001)
    sizes = {"num_steps": 12, "prompts_per_step": PER_STEP, "samples_per_prompt": len(lengths[0])}
    ranks = {"train_ranks": 1, "rollout_ranks": rollout_ranks}
    return Setup(
        loop=LoopConfig(kind=kind, **sizes | loop), max_running=max_running, costs=costs, lengths=lengths, **ranks
    )


def long_tailed(seed: int) -> list[list[Answer]]:
    tokens = np.random.default_rng(seed).lognormal(3, 1.2, (60, SIZE)).round().clip(1).astype(int)
    return [[answer(n) for n in group] for group in tokens.tolist()]


def seconds(made: Setup) -> list[float]:
    return [step[0] for step in steps_of(made)]


def test_a_colocated_step_is_the_sum_of_its_phases():
    """Its prefills share one step, and the last group is graded after the others."""
    rows, tokens = PER_STEP * SIZE, PER_STEP * SIZE * 110
    rollout = rows * 0.001 + 0.005 + 1e-5 * 10 * rows + 100 * (0.01 + 0.0005 * rows)
    expected = rollout + PER_STEP * 0.003 + 0.1 + 0.001 * tokens + 0.05 + 0.02
    assert seconds(setup(costs=REAL)) == pytest.approx([expected] * 12)


SAMPLING = {  # lengths, max_running, decode_row_s -> seconds of sampling, by hand
    "two rows for 10 steps, then one for 20": ([[answer(10), answer(30)]], 64, 0.005, 10 * 0.02 + 20 * 0.015),
    "the third row joins when the first ends": ([[answer(10), answer(30), answer(40)]], 2, 0.0, 0.5),
    "turns follow each other": ([[answer(20, 30), answer(1)]], 64, 0.0, 0.5),
    "a step takes longer for more rows": ([[answer(50)] * 8], 64, 0.0025, 50 * 0.03),
}


@pytest.mark.parametrize("case", SAMPLING)
@pytest.mark.parametrize("kind", ["colocated", "fully_async"])
def test_the_time_of_sampling(case, kind):
    lengths, max_running, row_s, expected = SAMPLING[case]
    costs = Costs(decode_step_s=0.01, decode_row_s=row_s, train_token_s=0.0)
    made = setup(kind, lengths, costs, max_running, prompts_per_step=1, num_steps=3, max_staleness=0)
    assert seconds(made) == pytest.approx([expected] * 3)


@pytest.mark.parametrize("train_token_s", [0.0005, 0.001136, 0.002])
def test_where_sides_overlap_a_step_is_its_longer_phase(train_token_s):
    costs = Costs(decode_step_s=0.01, train_token_s=train_token_s, sync_s=0.1)
    assert seconds(setup("one_step_off", costs=costs)) == pytest.approx([max(1.0, 880 * train_token_s) + 0.1] * 11)
    longer = max(1.0, 880 * train_token_s) + 0.1
    step_s = predict(setup("fully_async", costs=costs)).step_s  # groups need not start together
    assert 0.1 + 880 * train_token_s <= step_s + 1e-9 and step_s <= longer * 1.03


@pytest.mark.parametrize("kind", ["one_step_off", "fully_async"])
def test_without_staleness_a_step_is_that_of_colocated(kind):
    expected = seconds(setup(costs=REAL, lengths=long_tailed(0)))
    same = setup(kind, costs=REAL, lengths=long_tailed(0), max_staleness=0)
    assert seconds(same) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_the_limit_of_staleness_holds_and_more_of_it_is_not_slower(staleness):
    made = setup("fully_async", long_tailed(staleness), REAL, num_steps=25)
    limited = predict(made.with_loop(max_staleness=staleness))
    assert limited.staleness <= limited.max_staleness <= staleness
    assert predict(made.with_loop(max_staleness=staleness + 1)).step_s < limited.step_s * 1.05


def test_dropping_late_groups_saves_time_and_repeating_tokens_costs_time():
    made = setup("fully_async", long_tailed(1), REAL, max_staleness=1, num_steps=25)
    assert predict(made.with_loop(oversampling=0.5)).step_s < predict(made).step_s
    assert predict(made.with_loop(in_flight="restart")).step_s > predict(made).step_s


def test_a_sync_computes_the_contexts_of_running_rows_again():
    """A long answer of 1000 context tokens runs over a sync of each step; nothing else has a context."""
    lengths = [[answer(500, prompt=0)], *[[answer(5, prompt=0)]] * 3]
    made = setup("fully_async", lengths, max_staleness=4, num_steps=30)
    with_context = [[group[0]._replace(trained=group[0].trained + 1000)] for group in lengths]
    slow, fast = (
        predict(replace(made, lengths=with_context, costs=Costs(decode_step_s=0.01, train_token_s=1e-9, **more)))
        for more in ({"prefill_token_s": 1e-3}, {})
    )
    assert slow.step_s > fast.step_s + 0.5


@pytest.mark.parametrize("kind", STALENESS)
@pytest.mark.parametrize("max_running", [4, 64])
def test_more_ranks_are_never_slower(kind, max_running):
    made = setup(kind, long_tailed(3), REAL, max_running, num_steps=20)
    counts = [(n, 0 if kind == "colocated" else n) for n in (1, 2, 4)]
    times = [sum(seconds(replace(made, train_ranks=train, rollout_ranks=rollout))) for train, rollout in counts]
    assert times[0] > times[1] > times[2]


def test_idle_time_is_what_the_other_side_needs_more():
    prediction = predict(setup("one_step_off", costs=Costs(decode_step_s=0.01, train_token_s=0.25 / 880)))
    assert (prediction.rollout_idle, prediction.train_idle) == pytest.approx((0, 0.75), abs=1e-9)
    assert prediction.idle == pytest.approx(0.375)
    assert predict(setup(rollout_ranks=0)).idle == pytest.approx(0, abs=1e-9)  # its only rank always works


def test_the_recommendation_has_the_least_staleness_that_is_fast():
    gained = best_of_each_kind(setup(lengths=long_tailed(4), costs=REAL, num_steps=24), 4)
    assert [p.setup.loop.kind for p in gained] == [*STALENESS]
    assert all(p.setup.train_ranks + p.setup.rollout_ranks == 4 for p in gained)
    assert recommended(gained).setup.loop.kind == "fully_async"
    # Training takes no time, and a sampler needs twice the time for twice the rows: asynchrony gains nothing.
    costs = Costs(decode_step_s=1e-6, decode_row_s=0.001, train_token_s=1e-6)
    same = best_of_each_kind(setup(costs=costs, num_steps=24), 4)
    assert recommended(same).setup.loop.kind == "colocated"
    assert [p.setup.loop.kind for p in best_of_each_kind(setup(), 1)] == ["colocated"]

"""The simulated schedules: cases with a known result, and the rules that hold in all of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from meshrl.config.loop import LoopConfig
from meshrl.tools.schedule.advise import best_of_each_kind, recommended
from meshrl.tools.schedule.picture import picture
from meshrl.tools.schedule.setup import AnswerLengths, Costs, Setup, TurnLengths
from meshrl.tools.schedule.simulate import SCHEDULES, Simulation, predict, simulate

PER_STEP, SIZE = 4, 2


def answer(output: int, prompt: int = 10) -> AnswerLengths:
    return AnswerLengths((TurnLengths(prompt, prompt, output),), prompt + output)


def setup(kind="colocated", lengths=None, costs=None, max_running=64, rollout_ranks=1, **loop) -> Setup:
    """Answers of 100 tokens at 0.01 s for each token; training a step takes 0.88 s."""
    lengths = lengths or [[answer(100)] * SIZE]
    sizes = {"num_steps": 12, "prompts_per_step": PER_STEP, "samples_per_prompt": len(lengths[0])}
    return Setup(
        loop=LoopConfig(kind=kind, **sizes | loop),
        train_ranks=1,
        rollout_ranks=rollout_ranks,
        max_running=max_running,
        costs=costs or Costs(decode_step_s=0.01, train_token_s=0.001),
        lengths=lengths,
    )


def long_tailed(seed: int) -> list[list[AnswerLengths]]:
    rng = random.Random(seed)
    return [[answer(max(1, round(rng.lognormvariate(3, 1.2)))) for _ in range(SIZE)] for _ in range(60)]


REAL = Costs(
    decode_step_s=0.01,
    decode_row_s=0.0005,
    prefill_step_s=0.005,
    prefill_token_s=1e-5,
    request_s=1e-4,
    reward_group_s=0.003,
    train_step_s=0.1,
    train_token_s=0.001,
    sync_s=0.05,
    probe_s=0.01,
    step_s=0.02,
)


def steps_of(timeline: Simulation) -> list[float]:
    return [end - start for start, end in zip([0.0, *timeline.ends], timeline.ends)]


def test_a_colocated_step_is_the_sum_of_its_phases():
    costs = replace(REAL, request_s=0.001)
    timeline = simulate(setup(costs=costs))
    rows, tokens = PER_STEP * SIZE, PER_STEP * SIZE * 110
    rollout = rows * 0.001 + 0.005 + 1e-5 * 10 * rows + 100 * (0.01 + 0.0005 * rows)
    expected = rollout + PER_STEP * 0.003 + 0.1 + 0.001 * tokens + 0.05 + 0.02
    assert steps_of(timeline) == pytest.approx([expected] * 12)
    assert predict(setup(costs=costs)).step_s == pytest.approx(expected)


@pytest.mark.parametrize("train_token_s", [0.0005, 0.001136, 0.002])
def test_a_step_of_one_step_off_is_its_longer_phase(train_token_s):
    costs = Costs(decode_step_s=0.01, train_token_s=train_token_s, sync_s=0.1)
    steps = steps_of(simulate(setup("one_step_off", costs=costs)))
    assert steps[1:-1] == pytest.approx([max(1.0, 880 * train_token_s) + 0.1] * 10)


def test_where_training_takes_longer_full_asynchrony_gains_nothing():
    costs = Costs(decode_step_s=0.01, train_token_s=0.002)
    one_step_off, fully_async = (predict(setup(kind, costs=costs)) for kind in ("one_step_off", "fully_async"))
    assert one_step_off.step_s == pytest.approx(1.76)
    assert fully_async.step_s == pytest.approx(1.76, rel=0.02)


@pytest.mark.parametrize("kind", ["one_step_off", "fully_async"])
def test_without_staleness_a_step_is_that_of_colocated(kind):
    expected = simulate(setup(costs=REAL, lengths=long_tailed(0))).ends
    assert simulate(setup(kind, costs=REAL, lengths=long_tailed(0), max_staleness=0)).ends == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_staleness_never_exceeds_its_limit_and_no_group_is_lost(seed, staleness):
    """Every group is trained once, PER_STEP in each step, also when those that start later finish first."""
    made = setup("fully_async", lengths=long_tailed(seed), costs=REAL, max_staleness=staleness, num_steps=25)
    timeline = simulate(made)
    assert max(map(max, timeline.staleness)) <= staleness
    assert Counter(group.step for group in timeline.groups) == dict.fromkeys(range(25), PER_STEP)
    assert all(len(step) == PER_STEP * SIZE for step in timeline.staleness)


def test_oversampling_drops_late_groups_and_still_trains_full_steps():
    made = setup("fully_async", lengths=long_tailed(1), costs=REAL, max_staleness=1, num_steps=25, oversampling=0.5)
    timeline = simulate(made)
    steps = Counter(group.step for group in timeline.groups)
    dropped = sum(group.dropped for group in timeline.groups)
    assert dropped > 0 and all(steps[step] == PER_STEP for step in range(25))
    assert steps.total() == 25 * PER_STEP + steps[None] and steps[None] >= dropped
    assert timeline.ends[-1] < simulate(made.with_loop(oversampling=0.0)).ends[-1]


def test_a_full_sampler_starts_no_group():
    made = setup("fully_async", max_running=5, num_steps=6)
    alive = [(g.started_at, g.scored_at) for g in simulate(made).groups]
    most = max(sum(began <= at < end for began, end in alive) for at, _ in alive)
    assert most == 2  # groups of 2 answers in 5 rows


def test_rows_over_the_limit_of_a_sampler_wait():
    assert simulate(setup(max_running=4, num_steps=1)).ends == pytest.approx([2.0 + 0.88])


def test_a_sampler_slows_down_with_its_rows():
    """Two answers, of 10 and 30 tokens: 10 steps with two rows, then 20 steps with one."""
    costs = Costs(decode_step_s=0.01, decode_row_s=0.005, train_token_s=0.0)
    made = setup(lengths=[[answer(10), answer(30)]], costs=costs, prompts_per_step=1, num_steps=1)
    assert simulate(made).ends == pytest.approx([10 * 0.02 + 20 * 0.015])


def test_a_sync_computes_the_contexts_of_running_rows_again():
    """The long answer runs during the first sync; its context of 1000 tokens is then computed a second time."""
    lengths = [[answer(10, 1000)], [answer(500, 1000)], *[[answer(10, 1000)]] * 8]
    slow, fast = (
        simulate(setup("fully_async", lengths=lengths, costs=costs, prompts_per_step=1, num_steps=4))
        for costs in (Costs(decode_step_s=0.01, train_token_s=1e-9, prefill_token_s=t) for t in (1e-3, 0.0))
    )
    again = slow.groups[1].scored_at - fast.groups[1].scored_at
    assert again > 2 * 1.0  # its own prefill, and at least one more


def test_in_flight_restart_repeats_the_tokens():
    made = setup("fully_async", lengths=long_tailed(2), costs=REAL, num_steps=20)
    restarted = simulate(made.with_loop(in_flight="restart"))
    assert restarted.ends[-1] > simulate(made).ends[-1]
    assert sum(map(sum, restarted.staleness)) < sum(map(sum, simulate(made).staleness))


def test_turns_of_an_answer_follow_each_other():
    turns = (TurnLengths(10, 10, 20), TurnLengths(5, 35, 30))
    made = setup(lengths=[[AnswerLengths(turns, 65)] * SIZE], num_steps=1)
    assert simulate(made).ends == pytest.approx([0.5 + 0.001 * 65 * PER_STEP * SIZE])


@pytest.mark.parametrize("kind", SCHEDULES)
def test_more_ranks_are_never_slower(kind):
    made = setup(kind, lengths=long_tailed(3), costs=REAL, num_steps=20)
    if kind == "colocated":
        made = replace(made, rollout_ranks=0)
    times = [
        simulate(replace(made, train_ranks=n, rollout_ranks=n if made.rollout_ranks else 0)).ends[-1] for n in (1, 2, 4)
    ]
    assert times[0] >= times[1] >= times[2]


def test_idle_time_is_what_the_other_side_needs_more():
    prediction = predict(setup("one_step_off", costs=Costs(decode_step_s=0.01, train_token_s=0.25 / 880)))
    assert prediction.rollout_idle == pytest.approx(0, abs=0.01) and prediction.train_idle == pytest.approx(0.75)
    assert prediction.idle == pytest.approx(0.375, abs=0.01)
    colocated = predict(setup(rollout_ranks=0, costs=Costs(decode_step_s=0.01, train_token_s=0.001)))
    assert colocated.idle == pytest.approx(0, abs=1e-9)  # the only rank samples or trains all the time


def test_the_recommendation_has_the_least_staleness_that_is_fast():
    gained = best_of_each_kind(setup(lengths=long_tailed(4), costs=REAL, num_steps=24), 4)
    assert [p.setup.loop.kind for p in gained] == ["colocated", "one_step_off", "fully_async"]
    assert all(p.setup.train_ranks + p.setup.rollout_ranks == 4 for p in gained)
    assert recommended(gained).setup.loop.kind == "fully_async"
    # Training takes no time, and a sampler needs twice the time for twice the rows: asynchrony gains nothing.
    costs = Costs(decode_step_s=1e-6, decode_row_s=0.001, train_token_s=1e-6)
    same = best_of_each_kind(setup(costs=costs, num_steps=24), 4)
    assert recommended(same).setup.loop.kind == "colocated"
    assert [p.setup.loop.kind for p in best_of_each_kind(setup(), 1)] == ["colocated"]


def test_the_picture_shows_both_sides_of_each_schedule():
    found = best_of_each_kind(setup(lengths=long_tailed(4), costs=REAL, num_steps=24), 4)
    drawn = picture(found)
    for prediction in found:
        assert f"{prediction.setup.loop.kind}: " in drawn
    assert drawn.count(">sampling<") == drawn.count(">training<") == 3
    assert "nan" not in drawn and "inf" not in drawn and drawn.count('class="sync"') > 10

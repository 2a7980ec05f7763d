"""`meshrl diagnose` on real runs: planted delays are each named as the first cause, and no rank without one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import planted_delays
import pytest
from planted_delays import DELAYS
from tiny_run import write_run

import meshrl
from meshrl.tools.diagnose.diagnosis import Diagnosis, diagnose
from meshrl.tools.diagnose.read import Trace, read_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 4  # of each delay
ORDER = ["none", *(delay for delay in DELAYS if delay != "none"), "none"]
EXPECTED = {
    "slow rank": ("slow_rank", 1, "computation"),
    "stalled rank": ("slow_rank", 1, "time in which it runs no operation"),
    "slow link": ("communication", None, ""),
    "slow link of a rank": ("communication", 1, "its collectives, which take longer"),
    "host stall": ("host", None, "in gaps above 1 ms"),
    "large copy": ("sync", None, "longest copies: fill"),
    "slow grader": ("reward", None, ""),
}


@pytest.fixture(scope="module", params=[2, 4])
def trace(request, tmp_path_factory) -> Trace:
    """One run with all delays in sequence, each for some steps, all of them with the profiler."""
    folder = tmp_path_factory.mktemp("delays")
    config, file = write_run(folder), folder / "delay"
    planted_delays.write(file, "none", 0)
    count = len(ORDER) * STEPS

    def on_step(step: int, metrics: dict[str, float]) -> None:
        planted_delays.write(file, ORDER[min(max(0, step - 2), count - 1) // STEPS], step)

    overrides = [
        f"cluster.num_train_ranks={request.param}",
        f"loop.num_steps={count + 2}",
        f"monitor.trace_steps={count}",
        "loop.prompts_per_step=2",
        "loop.samples_per_prompt=2",
        "rollout.sampling.max_new_tokens=3",
        "loop.save_every_steps=0",
        f"algo.loss={{kind: 'planted_delays:loss', file: '{file}'}}",
        f"reward.terms={{ascii: {{kind: 'planted_delays:reward', args: {{file: '{file}'}}}}}}",
    ]
    run = meshrl.train(config, overrides, on_step=on_step, quiet=True)
    return read_trace(Path(run.folder))


def part(trace: Trace, place: int) -> Diagnosis:
    """The diagnosis of the steps of one delay."""
    steps = trace.steps[place * STEPS : (place + 1) * STEPS]
    assert len(steps) == STEPS
    return diagnose(dataclasses.replace(trace, steps=steps))


@pytest.mark.parametrize("delay", EXPECTED)
def test_a_planted_delay_is_the_first_cause(trace, delay):
    found = part(trace, ORDER.index(delay))
    cause, rank, detail = EXPECTED[delay]
    assert (found.costs[0].cause, found.costs[0].rank) == (cause, rank), found.costs
    assert detail in found.costs[0].detail
    assert found.costs[0].seconds > planted_delays.DELAY_S / 2
    assert [one.rank for one in found.stragglers if one.is_named] == ([] if rank is None else [rank])


@pytest.mark.parametrize("place", [0, len(ORDER) - 1])
def test_without_a_delay_no_rank_is_named(trace, place):
    found = part(trace, place)
    assert not any(one.is_named for one in found.stragglers), found.stragglers
    assert all(cost.rank is None for cost in found.costs)


def test_the_numbers_of_a_real_run_add_up(trace):
    found = diagnose(trace)
    assert sum(cost.seconds for cost in found.costs) == pytest.approx(found.step_s)
    for t in found.phases:
        assert t.compute + t.exposed + t.copy + t.host + t.idle == pytest.approx(t.wall)
    assert {"all_gather", "reduce_scatter"} <= {c.name for c in found.collectives}
    assert found.ratio is not None and found.slow_down is not None
    assert {peak.phase for peak in found.memory} >= {"train", "optim", "sync"}
    assert all(peak.peak > peak.parts["params"] > 0 for peak in found.memory if peak.phase == "train")

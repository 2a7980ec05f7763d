"""Overlapping schedules under faults: every prompt is trained once or counted, and nothing that is scored is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import killed
from run_contents import assert_equal_tensors, prompt_counts, sampled_turns, state, weights
from tiny_run import steps_of, train, write_run

from meshrl.agent.loop import SingleTurn
from meshrl.core.errors import DeadlineError, SyncError
from meshrl.core.types import Trajectory
from meshrl.monitor.rollout_log import read_rollouts

pytestmark = pytest.mark.timeout(900)  # ranks start slowly on a machine that does much else
NUM_STEPS, PER_STEP, STALENESS = 6, 2, 2
KINDS = {
    "one_step_off": ("loop.kind=one_step_off",),
    "fully_async": ("loop.kind=fully_async", f"loop.max_staleness={STALENESS}"),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("schedules"))
    sections = json.loads(path.read_text())
    sections["loop"] |= {"num_steps": NUM_STEPS, "prompts_per_step": PER_STEP, "samples_per_prompt": 2}
    sections["loop"]["save_every_steps"] = 1
    sections["cluster"] = {"num_train_ranks": 1, "num_rollout_ranks": 1}
    path.write_text(json.dumps(sections))
    return path


def assert_each_prompt_is_trained_once(folder: Path, num_steps: int = NUM_STEPS) -> None:
    counts = prompt_counts(folder)
    assert [sum(step.values()) for step in counts] == [2 * PER_STEP] * num_steps
    assert sum(counts, Counter()) == dict.fromkeys(range(num_steps * PER_STEP), 2)


def assert_no_sample_is_too_old(folder: Path) -> None:
    for step in range(NUM_STEPS):
        for record in read_rollouts(folder / "rollouts" / f"step_{step + 1:06d}.jsonl"):
            assert 0 <= step - min(int(t.versions.min()) for t in record.trajectory.turns) <= STALENESS


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a sampler dies while another one generates": (
        {"rank": 2, "method": "generate", "call": 5, "how": "kill"},
        ("cluster.num_rollout_ranks=2",),
    ),
    "a train rank dies": ({"rank": 0, "method": "forward_backward", "call": 4, "how": "kill"}, ()),
    "a sampler dies in a sync": ({"rank": 1, "method": "receive", "call": 12, "how": "kill"}, ()),
    "a train rank dies in a sync": ({"rank": 0, "method": "sync", "call": 4, "how": "kill"}, ()),
}


FAST = {("a train rank dies", "fully_async")}  # a lost sampler: tests/faults/test_named_faults.py
CASES = [
    pytest.param(fault, kind, marks=() if (fault, kind) in FAST else pytest.mark.slow)
    for fault in FAULTS
    for kind in KINDS
]


@pytest.mark.parametrize(("fault", "kind"), CASES)
def test_the_run_continues_and_trains_each_prompt_once(fault, kind, config, planted):
    planted(FAULTS[fault][0])
    folder = train(config, f"{kind} {fault}".replace(" ", "_"), *KINDS[kind], *FAULTS[fault][1])
    assert_each_prompt_is_trained_once(folder)
    assert_no_sample_is_too_old(folder)
    steps = steps_of(folder)
    if "train rank" in fault:
        assert steps[-1]["train/restarts"] == 1
    else:
        assert sum(step["rollout/ranks_replaced"] for step in steps) == 1


SYNC_FAILURES = {
    "colocated": ("loop.kind=colocated", "cluster.num_train_ranks=2", "cluster.num_rollout_ranks=0"),
    "split in turn": ("loop.kind=colocated",),
    **KINDS,
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SYNC_FAILURES)
def test_a_sync_that_fails_on_one_rank_is_repeated(layout, config, planted, capfd):
    """Without a lost rank, for example after a damaged transfer: the trainer still has the weights, so all are sent
    again, also where the ranks that train sample too."""
    planted({"rank": 1, "method": "receive", "call": 12, "how": "sync error"})
    folder = train(config, f"repeated {layout}".replace(" ", "_"), *SYNC_FAILURES[layout])
    assert_each_prompt_is_trained_once(folder)
    assert "planted by a test; sending the weights again" in "".join(capfd.readouterr())
    steps = steps_of(folder)
    assert all(
        step["sync/proven_wire"] == step["sync/proven_read_back"] == 1 for step in steps if "sync/version" in step
    )
    assert steps[-1]["train/restarts"] == 0


@pytest.mark.slow
def test_a_sync_that_fails_twice_ends_the_run(config, planted):
    planted(*({"rank": 1, "method": "receive", "call": call, "how": "sync error"} for call in (12, 13)))
    with pytest.raises(SyncError, match="planted by a test"):
        train(config, "twice", *SYNC_FAILURES["colocated"])


async def stalls(self: Any, prompt: Any, index: int, generate: Any, ctx: Any) -> Trajectory:
    """An agent that never returns from the third prompt."""
    if prompt.ordinal == 2:
        await asyncio.sleep(3600)
    return await SingleTurn.run(self, prompt, index, generate, ctx)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stalled_agent_ends_the_run_at_the_deadline(kind, config, monkeypatch):
    monkeypatch.setattr("meshrl.loops.collect._SLACK_S", 0.5)
    stalling = type("Stalling", (SingleTurn,), {"run": stalls})
    monkeypatch.setattr("meshrl.agent.resolve.AGENTS", {"single_turn": stalling})
    with pytest.raises(DeadlineError, match=r"(?s)phase .rollout.: none of 2 waiting tasks.*in stalls"):
        train(config, f"stalled_{kind}", *KINDS[kind], "cluster.deadlines.rollout=4")


@pytest.mark.slow
def test_a_slow_grader_does_not_let_the_samplers_run_ahead(config):
    """The limit counts groups that wait for a grade, too."""
    slow = "reward.terms.ascii.kind=tiny_run:slow_share"
    folder = train(config, "slow", *KINDS["fully_async"], slow, "reward.num_workers=1")
    assert_each_prompt_is_trained_once(folder)
    assert_no_sample_is_too_old(folder)
    waiting = [step["rollout/groups_scored"] + step["rollout/groups_running"] for step in steps_of(folder)]
    assert max(waiting) <= (STALENESS + 1) * PER_STEP


# ---- kills of the complete run


@pytest.mark.slow
def test_a_run_that_is_killed_trains_each_prompt_once(config):
    """No prompt is lost, and none is trained twice."""
    killed(config, "killed", 2, 7, 0.4, *KINDS["fully_async"], "loop.num_steps=8")
    assert_each_prompt_is_trained_once(config.parent / "runs" / "killed", 8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_kills_lose_no_prompt(kind, config):
    killed(config, f"kills_{kind}", 20, 13, 1.0, *KINDS[kind], "loop.num_steps=30")
    assert_each_prompt_is_trained_once(config.parent / "runs" / f"kills_{kind}", 30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_staleness_0_a_run_that_is_killed_is_equal_to_the_bit(kind, config):
    options = (f"loop.kind={kind}", "loop.max_staleness=0", "loop.num_steps=12")
    undisturbed = train(config, f"undisturbed_{kind}", *options)
    killed(config, f"resumed_{kind}", 6, 17, 0.6, *options)
    resumed = config.parent / "runs" / f"resumed_{kind}"
    assert_equal_tensors(weights(resumed, 12), weights(undisturbed, 12))
    assert_equal_tensors(state(resumed, 12), state(undisturbed, 12))
    assert sampled_turns(resumed) == sampled_turns(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_hundred_steps_with_a_fault_every_twenty_steps(config, planted):
    """Soak: the ledger is complete, no process grows, and the reward is that of a run without faults."""
    steps = 300
    options = ("loop.kind=fully_async", "loop.max_staleness=2", f"loop.num_steps={steps}", "loop.save_every_steps=5")
    more = ("cluster.num_rollout_ranks=2", "cluster.max_restarts=40", "run.keep_checkpoints=1")
    calm = train(config, "calm", *options, *more)
    faults: list[dict[str, Any]] = []
    for i in range(4):  # a new process counts its calls from the beginning
        faults += [
            {"rank": 1, "method": "generate", "call": 60, "how": "kill"},
            {"rank": 0, "method": "forward_backward", "call": 45, "how": "kill"},
            {"rank": 2, "method": "receive", "call": 60 + 80 * i, "how": "sync error"},
            {"rank": 2, "method": "generate", "call": 70, "how": "exit"},
        ]
    planted(*faults)
    folder = train(config, "soak", *options, *more)
    assert_each_prompt_is_trained_once(folder, steps)
    lines = [step for step in steps_of(folder, ("s",)) if "reward/mean" in step]
    rewards, expected = ([s["reward/mean"] for s in steps_of(f) if "reward/mean" in s] for f in (folder, calm))
    assert abs(np.mean(rewards[-100:]) - np.mean(expected[-100:])) < 0.1
    for name in {n for step in lines for n in step if n.startswith("memory/rss_bytes/")}:
        size = np.array([step.get(name, np.nan) for step in lines[100:]])
        known = np.flatnonzero(np.isfinite(size))
        slope = np.polyfit(known, size[known], 1)[0]
        assert slope < 50_000, f"{name} grows by {slope:.0f} bytes a step"

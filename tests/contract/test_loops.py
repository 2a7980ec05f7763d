"""The contract of all schedules: max_staleness 0 is colocated to the bit, and each prompt is trained once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_contents import assert_equal_tensors, prompt_counts, sampled_turns, weights
from tiny_run import steps_of, train, write_run

from meshrl.monitor.rollout_log import read_rollouts

pytestmark = pytest.mark.timeout(240)
KINDS = ("one_step_off", "fully_async")
NUM_STEPS, PER_STEP = 4, 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("loops"))
    values = json.loads(path.read_text())
    values["data"]["eval_path"] = "held_out.jsonl"
    values["loop"] |= {"num_steps": NUM_STEPS, "samples_per_prompt": 2, "eval_every_steps": 2}
    (path.parent / "held_out.jsonl").write_text('{"question": "1+2", "answer": "3"}\n')
    path.write_text(json.dumps(values))
    return path


RANKS = {
    "inline": ("cluster.executor=inline",),
    "processes": ("cluster.executor=processes", "cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1"),
}


@pytest.fixture(scope="module")
def colocated(config: Path) -> dict[str, Path]:
    return {name: train(config, f"colocated_{name}", *ranks) for name, ranks in RANKS.items()}


def staleness(folder: Path, step: int) -> list[int]:
    """By how many versions the oldest token of each answer of a step is older than the trainer's weights."""
    records = read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")
    return [step - min(int(turn.versions.min()) for turn in r.trajectory.turns) for r in records]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_with_staleness_0_every_schedule_is_colocated_to_the_bit(config, colocated, kind, ranks):
    folder = train(config, f"{kind}_0_{ranks}", *RANKS[ranks], f"loop.kind={kind}", "loop.max_staleness=0")
    expected = colocated[ranks]
    assert_equal_tensors(weights(folder, NUM_STEPS), weights(expected, NUM_STEPS))
    assert sampled_turns(folder) == sampled_turns(expected)
    for ours, theirs in zip(steps_of(folder), steps_of(expected), strict=True):
        same = {n for n in theirs if n.startswith(("loss/", "reward/", "eval/", "train/", "proof/logprob"))}
        assert repr({n: ours[n] for n in same}) == repr({n: theirs[n] for n in same})


@pytest.mark.parametrize(("kind", "most"), [("one_step_off", 1), ("fully_async", 1), ("fully_async", 3)])
def test_each_prompt_is_trained_once_and_no_sample_is_too_old(config, colocated, kind, most):
    options = (f"loop.kind={kind}", f"loop.max_staleness={most}", "algo.correction=off")
    folder = train(config, f"{kind}_{most}", *RANKS["processes"], *options)
    counts = prompt_counts(folder)
    assert [sum(step.values()) for step in counts] == [2 * PER_STEP] * NUM_STEPS
    assert sum(counts, start=type(counts[0])()) == dict.fromkeys(range(NUM_STEPS * PER_STEP), 2)
    ages = [staleness(folder, step) for step in range(NUM_STEPS)]
    assert max(map(max, ages)) <= most and min(map(min, ages)) >= 0
    if kind == "one_step_off":
        assert ages == [[0] * 8, *([[1] * 8] * (NUM_STEPS - 1))]
    else:
        assert max(map(max, ages)) > 0
    first, expected = (
        next(s["loss/policy"] for s in steps_of(f) if "loss/policy" in s) for f in (folder, colocated["processes"])
    )
    assert first == expected

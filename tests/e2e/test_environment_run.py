"""An environment whose episode is one answer trains as single_turn with the same reward does, under each schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_contents import assert_equal_tensors, weights
from tiny_run import ascii_share, steps_of, train, write_run


class Share:
    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        return None, {}

    def step(self, action: str) -> tuple[None, float, bool, bool, dict[str, Any]]:
        return None, ascii_share(action, ""), True, False, {}


STOP = "rollout.sampling.stop=" + str([*"abcdefghijklmnopqrstuvwxyz0123456789"])  # answers of a random model end
PLAIN = ("reward.terms.ascii.kind=tiny_run:share_of_ended",)
PLAYED = ("reward.terms={}", "agent.kind=environment", "agent.args={environment: test_environment_run:Share}")
APART = ("cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1", "loop.max_staleness=1")
LAYOUTS = {
    "colocated": ("cluster.executor=inline",),
    "one_step_off": ("loop.kind=one_step_off", *APART),
    "fully_async": ("loop.kind=fully_async", *APART),
}


@pytest.mark.parametrize("schedule", LAYOUTS)
def test_the_weights_are_those_of_single_turn_with_the_same_reward(schedule: str, tmp_path: Path):
    config, same = write_run(tmp_path), (STOP, "loop.save_every_steps=2", *LAYOUTS[schedule])
    played = train(config, "played", *PLAYED, *same)
    steps = steps_of(played)
    assert len(steps) == 2 and all(step["rollout/truncated_fraction"] < 0.5 for step in steps)
    assert all(step["reward/turns"] > 0 and step["rollout/crashed_fraction"] == 0 for step in steps)
    if schedule != "fully_async":  # its order depends on time
        plain = train(config, "plain", *PLAIN, *same)
        assert [s["reward/mean"] for s in steps] == [s["reward/mean"] for s in steps_of(plain)]
    if schedule == "colocated":  # in others the sampler's logprobs enter, whose rounding depends on its batches
        assert_equal_tensors(weights(played, 2), weights(plain, 2))

"""`meshrl train` with a user-defined loss and advantage, and with steps of truncated answers only."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny_run import steps_of, train, write_run

from meshrl.cluster.rows import PlannedRows
from meshrl.cluster.train_group import TrainGroup
from meshrl.core.errors import ConfigError

pytestmark = pytest.mark.timeout(300)
MODULE = """
import numpy as np
from meshrl.algo.losses import ppo_clip

def clipped(inputs, width: float):
    return ppo_clip(inputs, clip_low=width, clip_high=width, dual_clip=None)

def standardized(groups):
    ordered = [np.sort(group.rewards) for group in groups]
    return [(g.rewards - r.mean()) / (r.std(ddof=1) + 1e-6) for g, r in zip(groups, ordered)]
"""
UPDATES = ("train.updates_per_step=2", "algo.kl.coef=0.05")


def test_ranks_import_user_defined_functions_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a rank's process, copies of ppo_clip and grpo in a user's module give the bits of the built-in ones."""
    config = write_run(tmp_path)
    (tmp_path / "algorithm_of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    own = (
        "algo.advantage=algorithm_of_a_user:standardized",
        "algo.loss={kind: 'algorithm_of_a_user:clipped', width: 0.2}",
    )
    built_in = steps_of(train(config, "built-in", *UPDATES, "cluster.executor=inline"))
    for step in built_in:
        step.pop("reward/groups_of_one", None)  # not a fault with any advantage
    assert steps_of(train(config, "own", *UPDATES, *own)) == built_in


NOISE = """
import random
import numpy as np
import torch
from meshrl.algo.losses import ppo_clip

def noisy(inputs):
    loss, seen = ppo_clip(inputs, clip_low=0.2, clip_high=0.2, dual_clip=None)
    noise = torch.rand_like(loss) + np.random.rand() + random.random()
    seed = torch.full_like(loss, torch.initial_seed() % 997)
    return loss + noise.detach() * inputs.logprobs, {"noise": noise, "seed": seed}
"""


@pytest.mark.slow
def test_random_numbers_of_a_loss_follow_from_the_seed_with_every_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = write_run(tmp_path)
    (tmp_path / "noise_of_a_user.py").write_text(NOISE)
    monkeypatch.chdir(tmp_path)
    noisy = "algo.loss={kind: 'noise_of_a_user:noisy'}"
    inline = steps_of(train(config, "inline", noisy, "cluster.executor=inline"))
    assert steps_of(train(config, "processes", noisy)) == inline
    other = steps_of(train(config, "other", noisy, "cluster.executor=inline", "run.seed=1"))
    assert {step["loss/seed"] for step in other}.isdisjoint(step["loss/seed"] for step in inline)


def test_a_loss_that_fails_ends_the_run_before_it_begins(tmp_path: Path):
    config = write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"algo.loss.kind is 'own_algorithms:mean'.*one number for each"):
        train(config, "mean", "cluster.executor=inline", "algo.loss=own_algorithms:mean")
    assert not (tmp_path / "runs" / "mean").exists()


def test_steps_with_only_truncated_answers_do_not_change_the_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """With algo.truncated mask such a step has no gradient, and the optimizer's momentum must not move the weights.
    In this run answers have one token: in some steps all are truncated, in others at least one ends by itself."""
    cut = ("cluster.executor=inline", "algo.truncated=mask", "rollout.sampling.max_new_tokens=1")
    steps = steps_of(train(write_run(tmp_path), "cut", *cut))
    printed = capfd.readouterr()
    assert "step 2: 16 of 16 rows were cut off and algo.truncated is mask" in printed.out + printed.err
    trained = [step["rollout/truncated_fraction"] < 1 for step in steps]
    assert set(trained) == {True, False}
    for name in ("loss/policy", "train/grad_norm"):
        assert [name in step for step in steps] == trained
    assert [step.get("sync/changed_tensors", 0.0) for step in steps] == trained  # without an update there is no sync
    assert not any(math.isnan(value) for step in steps for value in step.values())


def test_an_update_has_the_batch_plan_of_the_logprobs_that_its_ratio_compares_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In bf16 the logprobs of a row depend on the rows packed with it. Rows without a gradient are packed apart, for
    the old logprobs, too: so without a change of the weights all ratios are exactly 1."""
    planned: dict[str, list[PlannedRows]] = {"forward": [], "forward_backward": []}
    for name, rows_of in planned.items():
        original = getattr(TrainGroup, name)

        def recorded(self, rows, *args, _rows_of=rows_of, _original=original):
            _rows_of.append(rows)
            return _original(self, rows, *args)

        monkeypatch.setattr(TrainGroup, name, recorded)
    rows = ("reward.terms.ascii.kind=tiny_run:differs_for_some", "loop.num_steps=1")
    still = ("model.dtype=bfloat16", "train.optimizer.lr=1e-30", "train.updates_per_step=2", "algo.loss=gspo")
    (step,) = steps_of(train(write_run(tmp_path), "still", "cluster.executor=inline", *rows, *still))
    assert step["loss/ratio_max"] == 1 and step["loss/approx_kl"] == 0
    assert 0 < step["train/no_gradient_fraction"] < 1
    assert [*map(id, planned["forward"])] == [*map(id, planned["forward_backward"])]

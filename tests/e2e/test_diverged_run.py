"""A run with weights that are not finite ends with the reason, and leaves no state and no model with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from poisoned_states import poison
from safetensors.torch import load_file, save_file
from tiny_run import write_run

from meshrl.cli import main
from meshrl.train.checkpoint_files import states

pytestmark = pytest.mark.timeout(300)
LOSS = """
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from meshrl.algo.losses import ppo_clip

calls = 0

def damaged_memory(inputs):
    '''In the second step, the update leaves NaN in the shard of rank 1.'''
    global calls
    calls += 1
    if dist.is_initialized() and dist.get_rank() == 1 and calls == 1:
        register_optimizer_step_post_hook(poison)
    return ppo_clip(inputs, clip_low=0.2, clip_high=0.2, dual_clip=None)

steps = 0

def poison(optimizer, args, kwargs):
    global steps
    steps += 1
    if steps == 2:
        optimizer.param_groups[0]["params"][1].detach().to_local().view(-1)[0] = float("nan")
"""


def _command(config: Path, name: str, *overrides: str) -> list[str]:
    return ["train", str(config), f"run.name={name}", *overrides]


def test_a_learning_rate_that_makes_weights_infinite_ends_the_run_with_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = write_run(tmp_path)
    overrides = ("cluster.executor=inline", "train.optimizer.lr=1e38", "loop.save_every_steps=1")
    assert main(_command(config, "run", *overrides)) == 1
    printed = capsys.readouterr().err
    assert "step 1: model." in printed and "not finite in model.dtype float32" in printed
    assert "learning rate 1e+38" in printed and "train.optimizer.lr" in printed and "run.resume=auto" in printed
    assert [path.name for path in (tmp_path / "runs" / "run").rglob("*") if path.name in ("state", "model")] == []


@pytest.mark.slow
def test_a_weight_that_is_not_finite_in_one_rank_ends_the_run_and_a_poisoned_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = write_run(tmp_path)
    (tmp_path / "loss_of_a_user.py").write_text(LOSS)
    monkeypatch.chdir(tmp_path)
    overrides = ("cluster.num_train_ranks=2", "loop.num_steps=3", "loop.save_every_steps=1")
    loss = "algo.loss={kind: 'loss_of_a_user:damaged_memory'}"
    assert main(_command(config, "run", *overrides, loss)) == 1
    assert "step 2: model." in capsys.readouterr().err
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    ((step, state),) = states(checkpoints)
    assert step == 1 and list(checkpoints.glob("*/model")) == [state.with_name("model")]

    bad = tmp_path / "bad" / "step_000001" / "state"
    name = poison(state, bad, "policy_rank_00001.safetensors", "model.")
    reason = f"{bad} contains values that are not finite in {name}: "
    capsys.readouterr()
    assert main(["convert", str(bad.parent), str(tmp_path / "out")]) == 1
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(_command(config, "next", "cluster.executor=inline", f"run.resume={bad}", loss)) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_model_that_is_not_finite_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
):
    """By trainer and reference, and by the embedded sampler of an evaluation."""
    config = write_run(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][-1] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    values = json.loads(config.read_text())
    values["data"]["eval_path"] = values["data"]["path"]
    config.write_text(json.dumps(values))
    assert main([command, str(config), "cluster.executor=inline"]) == 2
    printed = capsys.readouterr().err
    assert f"{file}: tensor model.norm.weight contains NaN" in printed

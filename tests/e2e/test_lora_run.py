"""`meshrl train` with LoRA: only adapters are sent, sampler and trainer agree, the KL starts at 0."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tiny_run import steps_of, train, write_run

from meshrl.cli import main
from meshrl.config.rollout import RolloutConfig
from meshrl.core.errors import CheckpointError

pytestmark = pytest.mark.timeout(400)
LORA = ("model.lora.enabled=true", "model.lora.rank=4", "model.lora.alpha=8", "algo.kl.coef=0.1", "loop.num_steps=3")
SPLIT = ("cluster.num_train_ranks=2", "cluster.num_rollout_ranks=1")
LAYOUTS = {
    "one process": ("cluster.executor=inline",),
    "two ranks": ("cluster.num_train_ranks=2",),
    "split": SPLIT,
    "split, delta": (*SPLIT, "rollout.sync_mode=delta"),
    "split, broadcast": (*SPLIT, "rollout.sync_transport=broadcast"),
}


SLOW = ("two ranks", "split", "split, delta", "split, broadcast")


@pytest.mark.parametrize("layout", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in LAYOUTS])
def test_only_adapters_are_sent_and_the_sampler_equals_the_trainer(layout, tmp_path: Path):
    steps = steps_of(train(write_run(tmp_path), "lora", *LORA, *LAYOUTS[layout]), ())
    check_that_only_adapters_are_sent(steps, is_shared=layout == "one process")


def check_that_only_adapters_are_sent(steps: list[dict[str, float]], is_shared: bool = False) -> None:
    """is_shared: the base is one copy, so that the first sync sends only the adapters, too."""
    assert len(steps) == 3
    first = steps[0]["first_sync/num_bytes"]
    assert steps[0].get("first_sync/shared_tensors", 0) == pytest.approx(26 / 54 * is_shared)
    for number, step in enumerate(steps):
        assert step["proof/logprob_abs_diff_mean"] < 1e-5, number
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
        assert step["sync/num_bytes"] == first if is_shared else 0 < step["sync/num_bytes"] < 0.5 * first  # a third
        # Only the A and B; in the first step no A has a gradient, because B is 0.
        assert step["sync/changed_tensors"] == pytest.approx((28 if number else 14) / 54)
    kl = [step["loss/kl"] for step in steps]
    assert kl[0] == 0 and 0 < kl[1] < kl[2]


SHARED = "sync/shared_tensors", "first_sync/shared_tensors"
RESTARTED = "train/restarts", "rollout/ranks_replaced", "rollout/requests_retried"
VARIANTS = {"fp32": (), "bf16": ("model.dtype=bfloat16",), "released memory": ("rollout.release_memory=true",)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_copy_of_the_base_changes_no_number(variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Against the same run with two copies, a resume of it with one copy included: metrics, checkpoints and exported
    weights are equal to the bit."""
    from safetensors.torch import load_file

    config, more = write_run(tmp_path), (*LORA, "cluster.executor=inline", "loop.save_every_steps=1")
    shared = train(config, "shared", *more, *VARIANTS[variant])
    with monkeypatch.context() as patch:
        patch.setattr(RolloutConfig, "second_copy", lambda *_: "this is a test")
        apart = train(config, "apart", *more, *VARIANTS[variant])
        half = train(config, "half", *more, *VARIANTS[variant], "loop.num_steps=2")
    train(config, "half", *more, *VARIANTS[variant], "run.resume=auto")
    steps = [{k: v for k, v in step.items() if k not in SHARED} for step in steps_of(shared)]
    assert [len(step) for step in steps] < [len(step) for step in steps_of(shared)]
    assert steps == steps_of(apart)
    assert steps[2] == {k: v for k, v in steps_of(half)[2].items() if k not in SHARED}
    files = {path.relative_to(shared) for path in shared.glob("checkpoints/step_000003/**/*.safetensors")}
    assert {path.parent.name for path in files} == {"model", "adapter", "state"}
    for path in files:
        want = load_file(apart / path)
        for folder in (shared, half):
            got = load_file(folder / path)
            assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want), path
    assert "Trainer and sampler share" in (shared / "run_notes.txt").read_text()
    assert (
        "have their own copy of the weights that LoRA does not train: this is a test"
        in (apart / "run_notes.txt").read_text()
    )


@pytest.mark.slow
def test_a_restarted_rank_shares_the_base_again(tmp_path: Path):
    """Its first sync is a full one. The rest of the run is the same to the bit."""
    config, killed = write_run(tmp_path), list[int]()
    more = (*LORA, "loop.save_every_steps=1")

    def kill(step: int, _: object) -> None:
        if not killed:
            ranks = json.loads((tmp_path / "runs" / "killed" / "status.json").read_text())["ranks"]
            killed.extend(rank["pid"] for rank in ranks)
            os.kill(killed[0], signal.SIGKILL)

    expected, found = train(config, "full", *more), train(config, "killed", *more, on_step=kill)
    restarts = [step["train/restarts"] for step in steps_of(found)]
    assert len(killed) == 1 and restarts[-1] == 1
    assert all(step[SHARED[0]] == pytest.approx(26 / 54) for step in steps_of(found))
    last = [{k: v for k, v in steps_of(folder)[-1].items() if k not in RESTARTED} for folder in (expected, found)]
    assert last[0] == last[1]


def test_supervised_training_changes_only_the_adapters(tmp_path: Path):
    """The exported model has the base's embedding to the bit; its folder also contains the adapter."""
    from safetensors.torch import load_file

    config = json.loads(write_run(tmp_path).read_text())
    chats = [[{"role": "user", "content": f"{i}+1"}, {"role": "assistant", "content": str(i + 1)}] for i in range(10)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    config = {key: config[key] for key in ("model", "train", "run")}
    config["sft"] = {"path": "chats.jsonl", "rows_per_step": 4, "num_steps": 6, "max_row_tokens": 99}
    (tmp_path / "sft.yaml").write_text(json.dumps(config))
    adapters = ("model.lora.enabled=true", "model.lora.targets=[q_proj, v_proj]", "run.name=sft")
    assert main(["sft", str(tmp_path / "sft.yaml"), *adapters]) == 0
    folder = tmp_path / "runs" / "sft"
    losses = json.loads((folder / "result.json").read_text())["loss_curve"]
    assert losses[-1] < losses[0]
    model = folder / "checkpoints" / "step_000006" / "model"
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "model", model))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert after.keys() == before.keys() and len(moved) == 4
    assert all("q_proj.weight" in name or "v_proj.weight" in name for name in moved)
    assert len(load_file(model / "adapter" / "adapter_model.safetensors")) == 2 * 4


@pytest.mark.slow
def test_a_resume_is_bit_identical_and_convert_makes_the_same_folder_as_the_export(tmp_path: Path):
    """On two ranks, from a checkpoint that has only the adapters."""
    from transformers import AutoModelForCausalLM

    config, ranks = write_run(tmp_path), ("cluster.num_train_ranks=2", "loop.save_every_steps=1")
    full = train(config, "full", *LORA, *ranks)
    half = train(config, "half", *LORA, *ranks, "loop.num_steps=2")
    train(config, "half", *LORA, *ranks, "run.resume=auto")
    left, right = (folder / "checkpoints" / "step_000003" for folder in (full, half))
    assert steps_of(full)[2] == steps_of(half)[2]
    for override, words in {
        "model.lora.alpha=9": "holds adapters, and model.lora.alpha is not what they were trained with",
        f"model.path={left / 'model'}": "and the model in model.path",
        "model.dtype=bfloat16": "or model.dtype, is not what they were trained with",
        "model.lora.enabled=false": "model.lora.enabled has changed",
    }.items():
        lora = LORA if "enabled" not in override else LORA[3:]
        with pytest.raises(CheckpointError, match=words):
            train(config, "half", *lora, *ranks, "run.resume=auto", "loop.num_steps=4", override)
    assert main(["convert", str(right), str(tmp_path / "converted")]) == 0
    models = [
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (left / "model", right / "model", tmp_path / "converted")
    ]
    for (name, p), *others in zip(*(model.named_parameters() for model in models), strict=True):
        for _, other in others:
            assert torch.equal(p, other), name

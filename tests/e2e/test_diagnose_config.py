"""`meshrl diagnose CONFIG`: profiles the first steps of a config, of reinforcement learning and of SFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import write_run

from meshrl.cli import main

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("config"))


def only_run(config: Path, before: set[Path]) -> Path:
    (folder,) = set((config.parent / "runs").glob("*")) - before
    return folder


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_steps_of_a_config_are_profiled(config, capfd, kind):
    before, path = set((config.parent / "runs").glob("*")), config
    if kind == "sft":
        messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        rows = config.parent / "chat.jsonl"
        rows.write_text(json.dumps({"messages": messages}) + "\n")
        path = config.parent / "sft.yaml"
        given = json.loads(config.read_text())
        sft = {"path": "chat.jsonl", "num_steps": 50, "rows_per_step": 2, "max_row_tokens": 64}
        path.write_text(json.dumps({name: given[name] for name in ("model", "train", "run")} | {"sft": sft}))
    command = ["diagnose", "--trace", "fsdp", str(path), "cluster.executor=inline", "--steps", "2"]
    assert main([*command, *(["run.name=mine"] if kind == "train" else [])]) == 0
    out, err = capfd.readouterr()
    folder = only_run(config, before)
    assert folder.name == "mine" if kind == "train" else folder.name.startswith("sft-diagnose-")
    # A profiler of an earlier test in this process has set the level of its messages.
    first = f"{path}: runs 4 steps; torch.profiler records the last 2 of them"
    lines = [line for line in err.splitlines() if not line.startswith("USDT:")]
    assert lines == [first, *(f"step {step} of 4" for step in range(1, 5))]
    assert f"{folder}/traces: steps 3 to 4" in out and "profiler: a step takes" in out
    assert "1. " in out[out.index("The three largest costs") :]
    record = json.loads((folder / "diagnose.json").read_text())
    assert record["steps"] == [3, 4] and record["slow_down"] > 0
    phases = {row["phase"] for row in record["phases"]}
    assert phases >= ({"rollout", "reward", "train", "sync"} if kind == "train" else {"train"})
    assert record["ratio"] is None  # one rank has no communication
    files = {"diagnose.html", "diagnose.json", "diagnose.perfetto.json.gz", "traces"}
    assert {file.name for file in folder.iterdir()} == files
    changes = " ".join(cost["change"] for cost in record["costs"])
    assert ("loop." in changes or "rollout." in changes) == (kind == "train")
    if kind == "train":
        assert main([*command, "run.name=mine"]) == 2
        assert f"{folder} exists" in capfd.readouterr().err

"""A run whose engine does not take the images of its rows ends before a process starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_run import write_run
from tiny_vision import drawing, encoded, make_vision_folder

from meshrl.config.load import load_sft_config
from meshrl.core.errors import ConfigError
from meshrl.run.inputs import Objects, load_run
from meshrl.run.task import load_sft_source, load_task

SERVERS = {
    "vllm": (f"rollout.vllm.python={sys.executable}",),
    "sglang": ("rollout.sglang.url=http://127.0.0.1:1",),
    "endpoint": ("rollout.endpoint.url=http://127.0.0.1:1", "rollout.endpoint.weights=files"),
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = write_run(tmp_path)
    (tmp_path / "a.png").write_bytes(encoded(drawing(28, 28)))
    for rows in tmp_path.glob("*.jsonl"):
        made = [json.loads(line) | {"images": ["a.png"]} for line in rows.read_text().splitlines()]
        rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.mark.parametrize(
    ("engine", "family", "takes"),
    [
        ("embedded", "llava", True),
        ("vllm", "qwen2_vl", True),
        ("vllm", "llava", False),
        ("sglang", "qwen2_vl", False),
        ("endpoint", "qwen2_vl", False),
    ],
)
def test_rows_with_images_need_an_engine_that_takes_them(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, family: str, takes: bool
):
    monkeypatch.chdir(tmp_path)
    model = make_vision_folder(tmp_path / f"{family} model", family)
    (model / "model.safetensors").touch()
    loaded = load_run(config, [f"model.path={model}", f"rollout.engine={engine}", *SERVERS.get(engine, ())])
    if takes:
        load_task(loaded.config, Objects(), True)
        return
    with pytest.raises(ConfigError, match=rf"rollout\.engine {engine} does not take with a model of type {family}"):
        load_task(loaded.config, Objects(), True)


@pytest.mark.parametrize("axis", ["tp", "ulysses"])
def test_rows_with_images_need_ranks_that_share_no_tokens(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str
):
    monkeypatch.chdir(tmp_path)
    model = make_vision_folder(tmp_path / "model", "llava")
    (model / "model.safetensors").touch()
    mesh = [f"train.mesh.{axis}=2", "cluster.num_train_ranks=2", "cluster.executor=processes"]
    loaded = load_run(config, [f"model.path={model}", *mesh])
    with pytest.raises(ConfigError, match="is larger than 1, and a row has an image"):
        load_task(loaded.config, Objects(), True)


def test_sft_rows_with_images_need_ranks_that_share_no_tokens(config: Path, tmp_path: Path):
    model = make_vision_folder(tmp_path / "model", "llava")
    (model / "model.safetensors").touch()
    rows = {"path": str(tmp_path / "rows.jsonl"), "prompt": "question", "num_steps": 1, "rows_per_step": 2}
    content = {"model": {"path": str(model)}, "sft": rows, "cluster": {"num_train_ranks": 2}}
    load_sft_source(load_sft_config(content).config, Objects())
    shared = load_sft_config({**content, "train": {"mesh": {"tp": 2}}})
    with pytest.raises(ConfigError, match="is larger than 1, and a row has an image"):
        load_sft_source(shared.config, Objects())

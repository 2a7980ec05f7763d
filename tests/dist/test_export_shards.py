"""A model of which each rank writes one file, read by Transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import engine_over
from tiny_models import tiny_lm

from meshrl.model.save import assign_files, save_pretrained


def _written(rank: int, world: int, family: str, path: Path) -> None:
    engine = engine_over(tiny_lm(family), world)
    save_pretrained(engine.model.lm, torch.float32, path, min_file_bytes=1)


FAMILIES = ["qwen2", "gemma2", "mixtral", "glm4_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_a_model_that_each_rank_wrote_one_file_of(pool, tmp_path, family):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    pool.run(_written, 2, family, tmp_path)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == names
    held = {}
    for name in names:
        with safe_open(tmp_path / name, "pt") as file:
            assert held.keys().isdisjoint(file.keys()) and len(file.keys()) > 0
            held |= dict.fromkeys(file.keys(), name)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == held
    tiny_lm(family).save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        assert held.keys() == set(file.keys())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, got), (_, want) in zip(loaded.named_parameters(), tiny_lm(family).named_parameters(), strict=True):
        assert torch.equal(got, want), name


def test_files_hold_complete_layers_and_about_the_same_bytes():
    layers = [(f"model.layers.{i}.{part}", 100) for i in range(8) for part in ("attention", "mlp", "norm")]
    sizes = [("model.embed.weight", 500), *layers, ("model.norm.weight", 1), ("head", 500)]
    for ranks in (1, 2, 3, 4, 50):
        file_of = assign_files(sizes, ranks, 1)
        numbers = list(file_of.values())
        assert numbers == sorted(numbers) and set(numbers) == set(range(max(numbers) + 1)) and max(numbers) < ranks
        assert all(len({file_of[n] for n, _ in layers if f".{i}." in n}) == 1 for i in range(8))
        if ranks <= 4:
            held = [sum(size for name, size in sizes if file_of[name] == number) for number in range(ranks)]
            assert max(held) <= 3401 / ranks + 500
    assert set(assign_files(sizes, 4, 4000).values()) == {0}

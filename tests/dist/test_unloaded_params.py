"""A model folder whose files don't fill the model of its config.json, for a trainer and for an embedded engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_lm, tiny_qwen2

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import UnloadedParamsError
from meshrl.core.types import POLICY
from meshrl.parallel.mesh import build_mesh
from meshrl.rollout.embedded import engine as embedded
from meshrl.train import engine as trainer

Tensors = dict[str, torch.Tensor]


def _rewrite(file: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def _configure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _renamed_prefix(folder: Path) -> None:
    tiny_qwen2(tie=True).save_pretrained(folder)
    _rewrite(folder / "model.safetensors", lambda old: {f"language_model.{name}": t for name, t in old.items()})


def _joined_qkv(folder: Path) -> None:
    tiny_qwen2(tie=True).save_pretrained(folder)

    def joined(old: Tensors) -> Tensors:
        new = {name: t for name, t in old.items() if not any(f"{letter}_proj" in name for letter in "qkv")}
        for name in old:
            if "q_proj" in name:
                new[name.replace("q_", "qkv_")] = torch.cat([old[name.replace("q_", f"{each}_")] for each in "qkv"])
        return new

    _rewrite(folder / "model.safetensors", joined)


def _no_head(folder: Path) -> None:
    tiny_qwen2(tie=True).save_pretrained(folder)
    _configure(folder, tie_word_embeddings=False)


def _other_vocabulary(folder: Path) -> None:
    tiny_qwen2(tie=False).save_pretrained(folder)
    _configure(folder, vocab_size=70)


def _extra_expert(folder: Path) -> None:
    """With the router's rows for three experts, so that the expert is all that is wrong."""
    tiny_lm("mixtral", num_local_experts=4, num_hidden_layers=1).save_pretrained(folder)
    _configure(folder, num_local_experts=3)
    _rewrite(
        folder / "model.safetensors",
        lambda old: {name: t[:3] if name.endswith("moe.gate.weight") else t for name, t in old.items()},
    )


def _truncated_shard(folder: Path) -> None:
    """And a shard that is gone, a renamed norm in a complete one, and a dtype: a message has all of them."""
    tiny_qwen2(tie=True).save_pretrained(folder, max_shard_size="10KB")
    file_of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    cut, lost, intact = sorted(set(file_of.values()))[:3]
    data = (folder / cut).read_bytes()
    (folder / cut).write_bytes(data[:-10])
    (folder / lost).unlink()
    name = next(name for name, file in file_of.items() if file == intact)
    _rewrite(folder / intact, lambda old: {**old, name: old[name].int(), "model.nrom.weight": torch.ones(32)})


Q, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.0.block_sparse_moe.experts"
CASES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "renamed prefix": (
        _renamed_prefix,
        [
            "52 faults",
            "no file holds; they would be left random:\n    model.embed_tokens.weight [64, 32] (nearest there: "
            "language_model.model.embed_tokens.weight",
            f"    {Q}.weight [32, 32] (nearest there: language_model.{Q}.weight",
            "    and 18 more\n- tensors that the model has no parameter for; they would be ignored:\n    language_mo",
            "- names that differ by a prefix",
        ],
    ),
    "joined qkv": (
        _joined_qkv,
        [
            "16 faults",
            f"    {Q}.weight [32, 32] (nearest there: model.layers.0.self_attn.qkv_proj.weight",
            "(qkv_proj)",
        ],
    ),
    "missing head": (_no_head, ["1 fault:", "    lm_head.weight [64, 32]\n", "tie_word_embeddings=true"]),
    "vocabulary size": (
        _other_vocabulary,
        [
            "2 faults",
            "    lm_head.weight is F32 [64, 32] in model.safetensors, but float32 [70, 32] in the model\n",
            "    model.embed_tokens.weight is F32 [64, 32] in model.safetensors, but float32 [70, 32] in the model\n",
            "such as vocab_size",
        ],
    ),
    "extra expert": (
        _extra_expert,
        [
            "3 faults",
            f"would be ignored:\n    {EXPERT}.3.w1.weight [48, 32] in model.safetensors (nearest there: {EXPERT}.",
            "correct their number in config.json",
        ],
    ),
    "truncated shard": (
        _truncated_shard,
        [
            "4 faults",
            "/model-00001-of-00011.safetensors: no complete safetensors file (",
            "/model-00002-of-00011.safetensors: no such file",
            "would be ignored:\n    model.nrom.weight [32] in model-00003-of-00011.safetensors (nearest there: model.",
            " is I32 [32, 32] in model-00003-of-00011.safetensors, but float32 [32, 32] in the model\n",
            "copy or download these files again",
        ],
    ),
}


def _no_optimizer(*args: Any) -> None:
    raise AssertionError("an optimizer was made")


def _train_side(rank: int, world: int, folder: Path) -> str:
    mesh, build = build_mesh((1, world, 1, 1), "cpu"), trainer.build_optimizer
    trainer.build_optimizer = _no_optimizer  # type: ignore[assignment]
    try:
        trainer.TrainEngine.build(ModelConfig(path=str(folder)), TrainConfig(), mesh, POLICY)
    except UnloadedParamsError as error:
        return str(error)
    finally:
        trainer.build_optimizer = build
    return "built"


@pytest.mark.parametrize("case", CASES)
def test_all_faults_of_a_folder_are_in_one_error_of_both_sides(pool, tmp_path, monkeypatch, case):
    """Before an optimizer or a sampler exists. One fault at a time would cost a start of the run each."""
    write, texts = CASES[case]
    write(tmp_path)
    monkeypatch.setattr(embedded, "EmbeddedEngine", lambda *args, **kwargs: pytest.fail("a sampler was made"))
    with pytest.raises(UnloadedParamsError) as caught:
        cfg = ModelConfig(path=str(tmp_path), dtype="float32")
        embedded.build_embedded_engine(cfg, RolloutConfig(), torch.device("cpu"), "tiny", ())
    message = str(caught.value)
    assert [text for text in texts if text not in message] == [], message
    assert str(tmp_path) in message and len(message) < 8000
    assert pool.run(_train_side, 1, tmp_path) == [message]

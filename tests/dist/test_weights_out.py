"""Weights out of the train engine: names, values, and folders that Transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import STRATEGIES, engine_over
from tiny_models import tiny_lm, tiny_qwen2

from meshrl.model.recipe import cast_parameters
from meshrl.parallel.fsdp import local_shard
from meshrl.train.weights import RankWeights

UNEVEN: dict[str, Any] = dict(  # 4 divides no dim; with a dim of 5 the last of four ranks is empty
    vocab_size=61, hidden_size=30, intermediate_size=5, num_attention_heads=3, num_key_value_heads=1
)


def _held(
    rank: int, world: int, model: dict[str, Any], train: dict[str, Any], dtype: torch.dtype
) -> tuple[RankWeights, int]:
    """This rank's boxes, and the size of its smallest shard."""
    engine = engine_over(tiny_qwen2(**model), world, train, dtype)
    engine.require_independent_rows()  # a forward without a backward must not leave gathered parameters behind
    return engine.weights(), min(local_shard(p).numel() for p in engine.model.parameters())


def _check(answers: list[tuple[RankWeights, int]], model: dict[str, Any], dtype: torch.dtype) -> None:
    """Each box is a block of a fresh model's tensor, and the boxes of all ranks cover the tensor."""
    fresh = dict(cast_parameters(tiny_qwen2(**model), dtype).named_parameters())
    covered = {name: torch.zeros(want.shape, dtype=torch.bool) for name, want in fresh.items()}
    for held, _ in answers:
        sent = str(dtype).removeprefix("torch.")
        assert list(held.tensors.items()) == [(name, (tuple(want.shape), sent)) for name, want in fresh.items()]
        for name, boxes in held.sources.items():
            for offsets, shape, elements in boxes:
                block = tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))
                values = elements[0 : elements.numel()].to(dtype).view(shape)
                assert torch.equal(values, fresh[name][block]), name
                covered[name][block] = True
    assert all(each.all() for each in covered.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_names_and_values_equal_a_fresh_model_to_the_bit(pool, world, dtype):
    """With dims that the ranks do not divide, and ranks without a part of a tensor."""
    model = {"tie": False, **UNEVEN}
    answers = pool.run(_held, world, model, {}, dtype)
    _check(answers, model, dtype)
    assert (min(smallest for *_, smallest in answers) == 0) == (world == 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sharding_strategy_holds_all_of_the_weights(pool, strategy):
    """In shards and in replicas of shards."""
    train = {"sharding_strategy": strategy, **STRATEGIES[strategy]}
    _check(pool.run(_held, 4, UNEVEN, train, torch.bfloat16), UNEVEN, torch.bfloat16)


TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "{{ x }}"}


def _exported(rank: int, world: int, family: str, path: Path, tokenizer: Path, dtype: torch.dtype) -> None:
    engine_over(tiny_lm(family), world, {}, dtype).export(path, tokenizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_from_pretrained_of_an_exported_folder_gives_the_same_logits(pool, tmp_path, family, dtype):
    """Loaded with Transformers' own attention, cache and dtype; tied tensors stay tied."""
    from transformers import AutoModelForCausalLM

    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name, text in TOKENIZER.items():
        (tokenizer / name).write_text(text)
    (tokenizer / "model.safetensors").write_text("not a tokenizer's")
    pool.run(_exported, 2, family, tmp_path / "out", tokenizer, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.config._attn_implementation in ("sdpa", "eager") and loaded.config.use_cache
    mine = cast_parameters(tiny_lm(family), dtype)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == (family == "gemma2")
    for (name, got), (_, want) in zip(loaded.named_parameters(), mine.named_parameters(), strict=True):
        assert got.dtype == dtype and torch.equal(got, want), name
    loaded.set_attn_implementation("eager")
    mine.set_attn_implementation("eager")
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, mine(tokens, use_cache=False).logits)
    written = {p.name: p for p in (tmp_path / "out").iterdir()}
    assert {name: written[name].read_text() for name in TOKENIZER} == TOKENIZER
    assert {"config.json", "generation_config.json", "model.safetensors"} < written.keys()


def _export_with_buffer(rank: int, world: int, folder: str) -> None:
    lm = tiny_qwen2()
    lm.model.register_buffer("correction_bias", torch.arange(3.0))
    engine_over(lm, world).export(folder)


def test_persistent_buffers_are_exported_with_the_parameters(pool, tmp_path):
    """A router's correction bias is not a parameter, but the exported model would be wrong without it."""
    from safetensors import safe_open

    pool.run(_export_with_buffer, 2, str(tmp_path))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.correction_bias").tolist() == [0.0, 1.0, 2.0]

"""From the names in a folder's files to the model's names, and errors for names that do not fit."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_lm, tiny_qwen2

from meshrl.core.errors import ConfigError, UnloadedParamsError
from meshrl.model.facts import meta_copy, model_facts
from meshrl.model.recipe import Recipe, cast_parameters, load_causal_lm, materialize, skeleton
from meshrl.model.stream import LoadedWeights, StoredWeights

CPU = torch.device("cpu")
_UP = "model__layers__0__mlp__up_proj__weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tied Qwen2 in one file, which holds its head under the embedding's name."""
    tiny_qwen2(tie=True).save_pretrained(tmp_path)
    return tmp_path


def _rewrite(folder: Path, **changes: torch.Tensor | str | None) -> None:
    """Change tensors of the folder's one file: None removes a tensor, a string renames it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None or isinstance(value, str):
            tensor = tensors.pop(name)
            if value:
                tensors[value] = tensor
        else:
            tensors[name] = value
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def _opened(folder: Path) -> tuple[Any, StoredWeights | LoadedWeights]:
    facts = model_facts(folder)
    return skeleton(facts, Recipe()).lm, facts.weights


def _same_as_saved(folder: Path) -> bool:
    got, want = load_causal_lm(folder).state_dict(), tiny_qwen2(tie=True).state_dict()
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_a_tied_tensor_may_have_any_of_its_names_in_the_files(folder):
    """Under the embedding's, the head's, or both."""
    assert _same_as_saved(folder)
    _rewrite(folder, model__embed_tokens__weight="lm_head.weight")
    assert _same_as_saved(folder)
    _rewrite(folder, model__embed_tokens__weight=load_file(folder / "model.safetensors")["lm_head.weight"])
    assert _same_as_saved(folder)
    assert isinstance(_opened(folder)[1], StoredWeights)


def test_two_different_tensors_under_tied_names_stay_two(folder, caplog):
    """As in Transformers; each rank loads the full model, with a warning."""
    head = torch.randn(64, 32)
    _rewrite(folder, lm_head__weight=head)
    lm, weights = _opened(folder)
    assert isinstance(weights, LoadedWeights)
    materialize(lm, CPU)
    weights.fill(lm)
    assert torch.equal(lm.lm_head.weight, head)
    assert lm.lm_head.weight is not lm.model.embed_tokens.weight
    assert "every rank loads the full model" in caplog.text and "lm_head.weight and model.embed_tokens" in caplog.text


def test_names_of_the_bare_model_and_of_old_files_are_understood(folder):
    """Files of a model without a head have no `model.`; old files hold rotary frequencies, which are now computed."""
    names = list(load_file(folder / "model.safetensors"))
    _rewrite(folder, **{name.replace(".", "__"): name.removeprefix("model.") for name in names})
    _rewrite(folder, layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    assert "layers.0.self_attn.rotary_emb.inv_freq" in load_file(folder / "model.safetensors")
    assert _same_as_saved(folder)


def test_a_missing_tensor_is_named_with_the_nearest_that_is_there(folder):
    _rewrite(folder, model__layers__1__self_attn__q_proj__weight="model.layers.1.attn.q_proj.weight")
    _rewrite(folder, model__norm__weight=None)
    with pytest.raises(UnloadedParamsError) as error:
        load_causal_lm(folder)
    text = str(error.value)
    assert "model.layers.1.self_attn.q_proj.weight [32, 32] (nearest there: model.layers.1.attn.q_proj.weight)" in text
    assert str(folder) in text and "model.norm.weight [32]" in text and "don't fill Qwen2ForCausalLM" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"v_head__weight": torch.zeros(1, 32)}, r"no parameter for.*\n    v_head\.weight \[1, 32\] in model\.safe"),
        ({_UP: torch.zeros(40, 32)}, r"up_proj\.weight is F32 \[40, 32\] in .* float32 \[48, 32\] in"),
        ({_UP: torch.ones(48, 32, dtype=torch.int8)}, r"dtype.*\n    model\.layers\.0\.mlp\.up_proj\.weight is I8 "),
        ({"norm__weight": torch.ones(32)}, r"norm\.weight and model\.norm\.weight are both the weight"),
        (  # a head that differs from the embedding, so that only Transformers can load the files
            {"lm_head__weight": torch.randn(64, 32), "model__norm__weight": None},
            r"they would be left random:\n    model\.norm\.weight \[32\]",
        ),
    ],
    ids=["a head of another task", "another shape", "quantised without scales", "one hub name", "missing"],
)
def test_tensors_that_do_not_fit_are_named(folder, changes, expected):
    """None may be dropped, rounded or left random silently."""
    _rewrite(folder, **changes)
    with pytest.raises(UnloadedParamsError, match=expected):
        load_causal_lm(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """One of them would be ignored, and it may have other values."""
    tiny_qwen2(tie=True).save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name, first = "model.norm.weight", index["model.norm.weight"]
    other = next(file for file in index.values() if file != first)
    tensors = load_file(tmp_path / other) | {name: torch.zeros(32)}
    save_file(tensors, tmp_path / other, metadata={"format": "pt"})
    with pytest.raises(UnloadedParamsError, match=r"model\.norm\.weight is in model-\S+ and in model-\S+; remove one"):
        load_causal_lm(tmp_path)


def _saved_experts(folder: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_local_experts=3)
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    MixtralForCausalLM(config).save_pretrained(folder)


def test_experts_that_are_separate_in_the_files_are_joined_as_transformers_joins_them(tmp_path):
    from transformers import AutoModelForCausalLM

    _saved_experts(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    lm, weights = _opened(tmp_path)
    assert isinstance(weights, StoredWeights)
    assert {name.split(".")[-2] for name in weights.stored if "experts.1." in name} == {"w1", "w2", "w3"}
    materialize(lm, CPU)
    weights.fill(lm, 100)
    assert all(torch.equal(tensor, want[name]) for name, tensor in lm.state_dict().items())


def test_an_expert_without_one_of_its_matrices_is_refused(tmp_path):
    _saved_experts(tmp_path)
    _rewrite(tmp_path, model__layers__0__block_sparse_moe__experts__1__w3__weight=None)
    with pytest.raises(UnloadedParamsError, match=r"\n    model\.layers\.0\.block_sparse_moe\.experts\.1\.w3\.weight"):
        load_causal_lm(tmp_path)


def test_a_file_cut_after_its_header_was_read_is_named(folder):
    lm, weights = _opened(folder)
    materialize(lm, CPU)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    with pytest.raises(ConfigError, match=r"model\.safetensors ends within"):
        weights.fill(lm)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_memory_for_a_model_keeps_its_ties_and_buffers(family):
    """`to_empty` alone makes two tensors of a tied one, and leaves rotary frequencies undefined."""
    lm = tiny_lm(family, tie_word_embeddings=True)
    buffers = {name: buffer.clone() for name, buffer in lm.named_buffers()}
    bare = meta_copy(lm)
    assert {p.device.type for p in bare.parameters()} == {"meta"} and {p.device.type for p in lm.parameters()} == {
        "cpu"
    }
    materialize(bare, CPU)
    assert bare.lm_head.weight is bare.model.embed_tokens.weight
    assert {p.device.type for p in bare.parameters()} == {"cpu"}
    assert [name for name, b in bare.named_buffers() if not torch.equal(b, buffers[name])] == []


def _with_value(value: float, at: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = torch.zeros(48, 32, dtype=dtype)
    weight.view(-1)[at] = value
    return weight


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named_with_tensor_and_file(folder, value):
    """In the last of several pieces, and by the full load, which a head that differs from the embedding needs."""
    _rewrite(folder, model__layers__0__mlp__up_proj__weight=_with_value(value, -1, torch.bfloat16))
    lm, weights = _opened(folder)
    assert isinstance(weights, StoredWeights)
    materialize(lm, CPU)
    message = r"model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight contains NaN, an infinity"
    with pytest.raises(ConfigError, match=message):
        weights.fill(lm, 100)
    with pytest.raises(ConfigError, match=message):
        load_causal_lm(folder)
    _rewrite(folder, lm_head__weight=torch.randn(64, 32))
    with pytest.raises(ConfigError, match=message):
        model_facts(folder)


def test_a_value_outside_the_range_of_the_parameters_dtype_is_named(folder):
    _rewrite(folder, model__layers__0__mlp__up_proj__weight=_with_value(1e5, 0))
    for dtype, is_refused in ((torch.bfloat16, False), (torch.float16, True)):
        lm, weights = _opened(folder)
        assert isinstance(weights, StoredWeights)
        materialize(cast_parameters(lm, dtype), CPU)
        with pytest.raises(ConfigError, match=r"up_proj\.weight contains .*float16") if is_refused else nullcontext():
            weights.fill(lm)


def test_finite_values_with_which_the_forward_overflows_are_refused_with_that_reason(folder):
    _rewrite(folder, model__layers__0__mlp__down_proj__weight=torch.full((32, 48), 1e38))
    with pytest.raises(ConfigError, match="computes logprobs that are not finite, although its values are"):
        load_causal_lm(folder)

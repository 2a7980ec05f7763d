"""`meshrl model-check`: which layers it takes of a model, and what it reports of one that Transformers computes
differently. tests/contract/test_model_families.py tests the checks, tests/e2e/test_docs.py the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_families import config_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.model.limits import HEAD_SCALES
from meshrl.tools.model_check import checks
from meshrl.tools.model_check.command import check_model
from meshrl.tools.model_check.small_model import MAX_RANDOM_VOCABULARY, write_first_layers, write_random_model


class BrightLlamaConfig(LlamaConfig):
    model_type = "bright_llama"
    brightness: float = 3.0


class BrightLlamaForCausalLM(LlamaForCausalLM):
    """Its head has a scale of its own."""

    config_class = BrightLlamaConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.config.brightness
        return out


@pytest.fixture(scope="module")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    AutoConfig.register("bright_llama", BrightLlamaConfig)
    AutoModelForCausalLM.register(BrightLlamaConfig, BrightLlamaForCausalLM)
    folder = tmp_path_factory.mktemp("bright")
    write_random_model(BrightLlamaConfig(**config_of("llama").to_diff_dict() | {"model_type": "bright_llama"}), folder)
    return folder


def _on_one_rank(function: Callable[..., float], world: int, *args: object) -> list[float]:
    return [0.0]


def test_layers_of_each_kind_are_taken_with_the_models_own_values(tmp_path: Path):
    """Gemma 3 has full attention in each sixth layer; the last of the first six is the first of that kind."""
    config = config_of("gemma3_text", num_hidden_layers=8, layer_types=None, sliding_window_pattern=6)
    write_random_model(config, tmp_path / "full")
    assert "6 of its 8 layers are checked, with its own values" in write_first_layers(
        str(tmp_path / "full"), tmp_path / "first"
    )
    full, first = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "first"))
    assert {name for name in full.keys() - first.keys() if ".layers." not in name} == set()
    assert {name.split(".")[2] for name in full.keys() - first.keys()} == {"6", "7"}
    assert all(torch.equal(values, full[name]) for name, values in first.items())


def test_a_config_alone_gives_random_values_and_a_small_vocabulary(tmp_path: Path):
    """DeepSeek's first three layers are dense, so the fourth is the first mixture of experts."""
    config_of(
        "deepseek_v3", num_hidden_layers=9, first_k_dense_replace=3, vocab_size=5000, eos_token_id=4999
    ).save_pretrained(tmp_path / "config")
    text = write_first_layers(str(tmp_path / "config"), tmp_path / "first")
    assert "4 of its 9 layers are checked, with random values" in text
    config = AutoConfig.from_pretrained(tmp_path / "first")
    assert (config.vocab_size, config.eos_token_id) == (MAX_RANDOM_VOCABULARY, None)
    assert any("mlp.experts" in name for name in load_file(tmp_path / "first" / "model.safetensors"))


def test_a_folder_without_a_config_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also a relative one, which Transformers would take for a model of the hub, and one that does not exist."""
    (tmp_path / "only_tokenizer").mkdir()
    (tmp_path / "only_tokenizer" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for model in ("only_tokenizer", str(tmp_path / "only_tokenizer"), str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"holds no config\.json"):
            check_model(model, print)


def test_a_class_of_another_package_is_refused_until_the_scale_of_its_head_is_stated(
    bright: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error names the model that was given, not the folder of its first layers, and where to look."""
    with pytest.raises(ConfigError, match=rf"of '{bright}' gives a single row .* differ .*; docs/add_a_model\.md"):
        check_model(str(bright), lambda line: None)
    monkeypatch.setitem(HEAD_SCALES, "brightness", float)
    assert all(finding.proven for _, finding in checks.findings(bright, _on_one_rank))


def test_a_check_that_fails_and_one_that_raises_are_reported_and_the_others_are_made(
    bright: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(checked: checks.CheckedModel) -> float:
        raise KeyError("a name")

    monkeypatch.setitem(HEAD_SCALES, "brightness", float)
    made = {"first": lambda checked: 0.5, "second": fails, "third": lambda checked: 0.0}
    monkeypatch.setattr(checks, "CHECKS", made)
    lines: list[str] = []
    assert not check_model(str(bright), lines.append)
    first, second, third = lines[1:4]
    assert first.startswith("NOT PROVEN  first: largest difference 5.0e-01 (allowed: ")
    assert second == "NOT PROVEN  second: KeyError: 'a name'"
    assert third.startswith("proven      third: largest difference 0.0e+00")


def test_a_class_whose_embedded_sampling_differs_is_found(bright: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as one whose `generate` scales logits otherwise than its forward: greedy tokens are the same."""
    monkeypatch.setitem(HEAD_SCALES, "brightness", float)
    checked = checks.CheckedModel(bright, _on_one_rank)
    checked.theirs.config.brightness = 2.9
    assert checks.embedded_sampling(checked) > 1e-3
    checked.theirs.lm_head.weight.data.mul_(-1)
    with pytest.raises(MeshrlError, match=r"greedy token 0 .* is another one"):
        checks.embedded_sampling(checked)


def test_the_tolerance_is_larger_where_rounding_alone_changes_more(tmp_path: Path):
    """Logits twenty times as large are rounded twenty times as coarsely."""
    write_random_model(config_of("llama"), tmp_path)
    usual, large = (checks.CheckedModel(tmp_path, _on_one_rank) for _ in range(2))
    assert usual.tolerance == checks.TOLERANCE
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] *= 20
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert checks.TOLERANCE < large.tolerance <= checks.MAX_TOLERANCE

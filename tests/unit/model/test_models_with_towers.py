"""A model with a tower that meshrl does not train is refused, and `meshrl convert` writes the text model of any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import COMMON, FAMILIES
from tiny_tokenizers import tiny_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from meshrl.core.errors import CheckpointError, ConfigError
from meshrl.model.facts import model_facts
from meshrl.model.recipe import load_causal_lm
from meshrl.tools.convert import convert
from meshrl.tools.model_check.command import check_model

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
VISION |= {"depth": 1, "num_heads": 2, "num_attention_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {  # model type -> the family of its text model, fields of its config
    "qwen3_5": ("qwen3_5_text", {"vision_config": VISION}),
    "gemma3": ("gemma3_text", {"vision_config": VISION | {"model_type": "siglip_vision_model"}}),
    "llava": ("llama", {"vision_config": VISION | {"model_type": "clip_vision_model"}}),
    "vipllava": ("llama", {"vision_config": VISION | {"model_type": "clip_vision_model"}}),
}


def _write(kind: str, folder: Path) -> Any:
    family, fields = TOWERS[kind]
    tokenizer = tiny_tokenizer()
    text = {**COMMON, **FAMILIES[family].config, "vocab_size": len(tokenizer), "model_type": family}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](text_config=text, **fields)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_a_tower_of_another_family_is_refused_with_the_command_that_writes_its_text_model(tmp_path: Path):
    _write("vipllava", tmp_path)
    for refusing in (model_facts, lambda path: check_model(str(path), print)):
        with pytest.raises(
            ConfigError, match=f"vision tower .*ForConditionalGeneration(?s:.)*meshrl convert {tmp_path} "
        ):
            refusing(tmp_path)


@pytest.mark.parametrize("kind", TOWERS)
def test_convert_writes_the_text_model_of_one_with_a_tower(kind: str, tmp_path: Path):
    full, folder, out = _write(kind, tmp_path / "full"), tmp_path / "full", tmp_path / "text"
    convert(folder, out)
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        wanted = full(input_ids=tokens).logits
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(out)(tokens).logits, wanted)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    load_causal_lm(out)  # and our forward equals Transformers' own


@pytest.mark.parametrize("name", ["out.gguf", "out.safetensors", "OUT.GGUF"])
def test_a_model_is_not_written_to_a_folder_that_is_named_as_a_file(name: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match="the name of a file, but a folder is written"):
        convert(tmp_path, tmp_path / name)
    assert not list(tmp_path.iterdir())

"""The parts of a model, and the positions of the tokens of several rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import tiny_lm

from meshrl.core.errors import ConfigError
from meshrl.core.types import unsampled_row
from meshrl.model.inputs import TEXT_INPUTS, Piece
from meshrl.model.parts import HEAD, TEXT, ModelPart, blocks_of, eager_attention, part_of, parts_of


@pytest.mark.parametrize(
    ("family", "text", "blocks"),
    [("qwen2", "model", "layers"), ("gpt2", "transformer", "h"), ("opt", "model.decoder", "layers")],
)
def test_parts_are_named_by_their_modules(family, text, blocks):
    lm = tiny_lm(family)
    parts = parts_of(lm)
    assert parts == {TEXT: ModelPart(text, f"{text}.{blocks}", "meshrl"), HEAD: ModelPart("lm_head")}
    assert len(blocks_of(lm, parts[TEXT])) == 2 and len(blocks_of(lm, parts[HEAD])) == 0
    names = [name for name, _ in lm.named_modules() if part_of(name, parts) == HEAD]
    assert names == ["lm_head"]


def test_a_list_of_more_modules_than_the_model_has_layers_is_not_taken_for_its_blocks():
    """Such as the experts of a layer."""
    lm = tiny_lm("qwen2")
    lm.model.layers[0].experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(9))
    assert parts_of(lm)[TEXT].blocks == "model.layers"
    del lm.model.layers[1]
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no ModuleList of 2 blocks"):
        parts_of(lm)


def test_attention_is_that_of_the_setting_again_after_an_error():
    lm = tiny_lm("qwen2")
    with pytest.raises(RuntimeError), eager_attention(lm, parts_of(lm)):
        assert lm.config._attn_implementation == "eager"
        raise RuntimeError
    assert lm.config._attn_implementation == "meshrl"


def test_positions_of_rows_follow_from_starts_and_lengths():
    row = unsampled_row("row", np.zeros(8, np.int32), np.zeros(8, bool))
    pieces = [Piece(row, start, stop) for start, stop in ((0, 2), (7, 8), (3, 6))]
    assert TEXT_INPUTS.positions(pieces).tolist() == [0, 1, 7, 3, 4, 5]
    assert TEXT_INPUTS.positions([]).tolist() == []

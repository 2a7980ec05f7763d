"""What a model needs of a row besides its ids: positions, keys of images, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vision_families import FAMILIES, IMAGE, config_of, image, row, tiny_vision_lm

from meshrl.config.model import IMAGE_MODELS
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.types import Request, Sample
from meshrl.model import images
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.inputs import TEXT_INPUTS, ModelInputs, Piece
from meshrl.rollout.embedded.scheduler import _without_cut_image

SIZE = FAMILIES["qwen2_vl"].sizes[0]  # 2 x 3 features


def inputs_of(family: str = "qwen2_vl") -> ModelInputs:
    return ModelInputs(config_of(family))


def picture(family: str = "qwen2_vl") -> Sample:
    """Two tokens of text, an image, and more text."""
    return row(family, "row", [2, (FAMILIES[family].sizes[0], 1), 3], 2)


def test_the_families_that_a_config_may_name_are_those_of_the_table():
    assert set(IMAGE_MODELS) == images.FAMILIES.keys()


def test_text_counts_on_from_the_largest_position_of_an_image():
    """The example of Qwen2-VL's paper, of 2 x 3 features, which begin at the fourth token: positions of time, height
    and width; the text after it has the largest one plus one, so a later token's position is 3 less than its index."""
    sample, inputs = picture(), inputs_of()
    assert sample.media_spans[0][1:] == (3, 6)
    complete = inputs.positions([Piece(sample, 0, len(sample))])
    assert complete[:, :10].T.tolist() == [
        *([i] * 3 for i in range(3)),
        *([3, 3 + y, 3 + x] for y in range(2) for x in range(3)),
        [6] * 3,
    ]
    assert inputs.offset(sample) == -3
    parts = inputs.positions([Piece(sample, 0, 9), Piece(sample, 9, len(sample)), Piece(sample, 0, 4)])
    assert np.array_equal(parts, np.concatenate([complete, complete[:, :4]], axis=1))
    assert inputs_of("llava").positions([Piece(picture("llava"), 2, 5)]).tolist() == [2, 3, 4]


def test_images_of_one_size_have_other_keys():
    sample, inputs = picture(), inputs_of()
    other = row("qwen2_vl", "row", [2, (SIZE, 7), 3], 2)
    assert np.array_equal(sample.tokens, other.tokens)
    keys, others = (inputs.keys(s, s.tokens) for s in (sample, other))
    is_image = sample.tokens == IMAGE
    assert not np.isin(keys[is_image], others).any() and len({*keys[is_image]}) == is_image.sum()
    assert np.array_equal(keys[~is_image], sample.tokens[~is_image])
    assert np.array_equal(inputs.tokens(keys), sample.tokens)


def test_found_pages_end_before_an_image_that_they_have_in_part():
    request = Request(id="a", context_ids=np.zeros(12, np.int32), media_spans=[("a", 3, 4), ("b", 8, 4)])
    ends = {end: sum(n for _, n in _without_cut_image([(0, min(end, 5)), (1, end - 5)][: 1 + (end > 5)], request))
            for end in (2, 3, 5, 6, 7, 8, 9, 11, 12)}  # fmt: skip
    assert ends == {2: 2, 3: 3, 5: 3, 6: 3, 7: 7, 8: 8, 9: 8, 11: 8, 12: 12}


def test_another_number_of_placeholders_than_of_features_is_refused():
    sample, inputs = picture(), inputs_of()
    (name, _, _), short = sample.media_spans[0], replace(next(iter(sample.media.values())), num_tokens=5)
    assert inputs.fault(sample, sample.tokens) == ""
    assert "5 features, but 6 placeholder" in inputs.fault(replace(sample, media={name: short}), sample.tokens)
    assert "6 placeholder tokens for images of 0" in inputs.fault(replace(sample, media_spans=[]), sample.tokens)
    assert "which is not in media" in inputs.fault(replace(sample, media={}), sample.tokens)
    assert TEXT_INPUTS.fault(sample, sample.tokens) == "the model has no vision tower"
    with pytest.raises(DataError, match="has 5 placeholder tokens, but the model makes 6 features"):
        inputs.kwargs([Piece(replace(sample, media={name: short}), 0, len(sample))])


@pytest.mark.parametrize("family", [f for f in FAMILIES if (FAMILIES[f].model_type or f) in images.FAMILIES])
def test_features_are_counted_from_the_arrays_of_an_image(family: str):
    """The test table has the numbers of tokens that the families' processors write."""
    inputs = inputs_of(family)
    assert inputs.family is not None
    for size in FAMILIES[family].sizes:
        media, _ = image(family, size, 0)
        assert inputs.family.features(inputs.config, media.outputs) == media.num_tokens


def test_an_image_of_several_parts_that_see_themselves_alone_is_refused():
    sample = picture("gemma3")
    (name, start, length) = sample.media_spans[0]
    apart = replace(sample, media_spans=[(name, start, length + 1)])
    with pytest.raises(DataError, match=r"several parts .*do_pan_and_scan to false"):
        inputs_of("gemma3").mutual([Piece(apart, 0, len(apart))])


def test_ranks_that_share_tokens_refuse_images():
    model = CausalModel(tiny_vision_lm("llava"))
    model.peers = SimpleNamespace(own_tokens=lambda x: x)  # type: ignore[assignment]
    tokens = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=re.escape("train.mesh.ulysses or train.mesh.tp is larger than 1")):
        model.hidden(tokens, tokens, PackedAttention([0, 3], tokens.device), pixel_values=torch.zeros(1))

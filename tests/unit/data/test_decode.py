"""The fast text of sampled ids equals the tokenizer's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from tiny_tokenizers import numbered_tokenizer, tiny_tokenizer

from meshrl.data import decode


def _same_texts(tokenizer: Any, size: int) -> None:
    rng = np.random.default_rng(0)
    for length in (0, 1, 2, 3, 50, 400):
        for _ in range(40):
            ids = rng.integers(0, size, length).astype(np.int32)
            for special in (False, True):
                options = dict(skip_special_tokens=not special, clean_up_tokenization_spaces=False)
                assert decode.text_of(tokenizer, ids, special) == tokenizer.decode(ids.tolist(), **options)


def test_a_byte_level_tokenizer_has_a_table():
    """Random bytes are mostly not valid UTF-8, so both sides replace them."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "two words", "é"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<hidden>"]})
    assert None not in (decode._cached_table(tokenizer, False), decode._cached_table(tokenizer, True))
    _same_texts(tokenizer, len(tokenizer))


def test_a_token_that_is_added_later_is_in_the_text():
    tokenizer = tiny_tokenizer()
    _same_texts(tokenizer, len(tokenizer))
    tokenizer.add_tokens(["<answer>"])
    assert decode.text_of(tokenizer, np.array([len(tokenizer) - 1], np.int32)) == "<answer>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<hidden>"]})
    last = np.array([len(tokenizer) - 1], np.int32)
    assert (decode.text_of(tokenizer, last), decode.text_of(tokenizer, last, special=True)) == ("", "<hidden>")


def test_ids_above_the_vocabulary_have_no_text():
    """Vocabularies of models are padded; a random model samples such ids."""
    tokenizer = tiny_tokenizer()
    _same_texts(tokenizer, len(tokenizer) + 20)


def test_other_tokenizers_decode_themselves():
    tokenizer = numbered_tokenizer(30)
    assert decode._cached_table(tokenizer, False) is None
    _same_texts(tokenizer, 30)

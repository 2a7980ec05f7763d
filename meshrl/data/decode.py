"""The text of sampled ids, without special tokens. For byte-level tokenizers it is a table lookup, 15 times faster than
the tokenizer's `decode`: the controller decodes every answer of a step."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_CHECKED_IDS = 1024  # ids in one comparison with the tokenizer
_tables: WeakKeyDictionary[Any, tuple[int, np.ndarray | None]] = WeakKeyDictionary()  # with the tokenizer's size


def text_of(tokenizer: Any, ids: np.ndarray) -> str:
    """What `decode` returns without special tokens. ids: int32[R]."""
    table = _table_of(tokenizer)
    if table is None or not len(ids) or ids.min() < 0 or ids.max() >= len(table):
        return _decoded(tokenizer, ids)
    return _joined(table, ids)


def _decoded(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _joined(table: np.ndarray, ids: np.ndarray) -> str:
    return b"".join(table[ids].tolist()).decode("utf-8", "replace")


def _table_of(tokenizer: Any) -> np.ndarray | None:
    """The bytes of each id; None for a tokenizer that is not byte level."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if type(decoder).__name__ != "ByteLevel":
        return None
    size, table = _tables.get(tokenizer, (-1, None))
    if size != len(tokenizer):
        table = _checked_table(tokenizer)
        _tables[tokenizer] = len(tokenizer), table
    return table


def _checked_table(tokenizer: Any) -> np.ndarray | None:
    """The table, if it gives the tokenizer's texts for all ids in order and in a random order."""
    to_byte = _bytes_of_letters()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    table = np.empty(len(tokenizer), object)
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if token is None or i in special:
            table[i] = b""
        elif all(letter in to_byte for letter in token):
            table[i] = bytes(to_byte[letter] for letter in token)
        else:  # an added token, with text that is not byte level
            table[i] = token.encode()
    shuffled = np.random.default_rng(0).permutation(len(table))
    for order in (np.arange(len(table)), shuffled):
        for ids in np.array_split(order, -(-len(order) // _CHECKED_IDS)):
            if _joined(table, ids) != _decoded(tokenizer, ids):
                return None
    return table


def _bytes_of_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: itself if it is printable, else one of the
    letters from 256 on. Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}

"""The text of sampled ids. For byte-level tokenizers it is a table lookup, 20 times faster than the tokenizer's
`decode`: the controller decodes every answer of a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_CHECKED_IDS = 1024  # ids in one comparison with the tokenizer
_WORD = 8  # bytes; most tokens are one word, so the arrays of a lookup have about one element for each id
_PAD = b"\xff"  # fills words; no valid UTF-8 has this byte


@dataclass(frozen=True, slots=True)
class _TokenTable:
    """The padded bytes of all ids end to end, uint64; where those of each id start, and how many words there are,
    int64[V]."""

    words: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    def text(self, ids: np.ndarray) -> str:
        sizes = self.sizes.take(ids)
        ends = sizes.cumsum()
        places = np.arange(ends[-1])  # of each word of the text in `words`
        places += (self.starts.take(ids) - ends + sizes).repeat(sizes)
        return self.words.take(places).tobytes().translate(None, _PAD).decode("utf-8", "replace")


# By tokenizer, with and without special tokens: the tokenizer's size and its table.
_tables: WeakKeyDictionary[Any, dict[bool, tuple[int, _TokenTable | None]]] = WeakKeyDictionary()


def text_of(tokenizer: Any, ids: np.ndarray, special: bool = False) -> str:
    """What `decode` returns. ids: int32[R]. special: with special tokens."""
    table = _cached_table(tokenizer, special)
    if table is None or not len(ids) or ids.view(np.uint32).max() >= len(table.sizes):  # -1 is seen as 2^32 - 1
        return _decoded(tokenizer, ids, special)
    return table.text(ids)


def answer_text(tokenizer: Any, ids: np.ndarray, stop_ids: Collection[int]) -> str:
    """The text of a sampled turn, with its special tokens except those at its end that only end it. ids: int32[R]."""
    ends, size = ending_ids(tokenizer, stop_ids), len(ids)
    while size and int(ids[size - 1]) in ends and not text_of(tokenizer, ids[size - 1 : size]):  # it is special
        size -= 1
    return text_of(tokenizer, ids[:size], special=True)


def ending_ids(tokenizer: Any, stop_ids: Collection[int]) -> set[int | None]:
    """These stop ids, EOS and padding."""
    return {*stop_ids, *(getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "pad"))}


def _decoded(tokenizer: Any, ids: np.ndarray, special: bool) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def _cached_table(tokenizer: Any, special: bool) -> _TokenTable | None:
    """The table of a tokenizer; None for a tokenizer that is not byte level."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if type(decoder).__name__ != "ByteLevel":
        return None
    tables = _tables.setdefault(tokenizer, {})
    size, table = tables.get(special, (-1, None))
    if size != len(tokenizer):
        table = _checked_table(tokenizer, special)
        tables[special] = len(tokenizer), table
    return table


def _checked_table(tokenizer: Any, special: bool) -> _TokenTable | None:
    """The table, if it gives the tokenizer's texts for all ids in order and in a random order."""
    to_byte = bytes_of_letters()
    left_out = set() if special else {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    parts = []
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if token is None or i in left_out:
            parts.append(b"")
        elif all(letter in to_byte for letter in token):
            parts.append(bytes(to_byte[letter] for letter in token))
        else:  # an added token, with text that is not byte level
            parts.append(token.encode())
    parts = [part.replace(_PAD, "\ufffd".encode()) for part in parts]  # the text has this letter for such a byte
    sizes = np.array([-(-len(part) // _WORD) for part in parts])
    padded = b"".join(part.ljust(size * _WORD, _PAD) for part, size in zip(parts, sizes.tolist()))
    table = _TokenTable(np.frombuffer(padded, np.uint64), sizes.cumsum() - sizes, sizes)
    shuffled = np.random.default_rng(0).permutation(len(sizes))
    for order in (np.arange(len(sizes)), shuffled):
        for ids in np.array_split(order, -(-len(order) // _CHECKED_IDS)):
            if table.text(ids) != _decoded(tokenizer, ids, special):
                return None
    return table


def bytes_of_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: itself if it is printable, else one of the
    letters from 256 on. Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}

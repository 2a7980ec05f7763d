"""Texts that end a turn (`sampling.stop`), found in ids as they are sampled, in every engine by this code.

A turn ends with the token that completes a stop string. That token is not cut, also where the string ends in the
middle of it; it is part of the output and is trained, as a stop token is. What is compared are UTF-8 bytes, so a
character that lies in several tokens is no special case, and special tokens count as the text they are written as.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.errors import CapabilityError
from meshrl.core.types import Request
from meshrl.data.chat import load_tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's name for a token of a single byte
_CUT = "\ufffd"  # what a tokenizer decodes bytes of an incomplete character to


class StopStrings:
    """Makes the search of each request. load: the tokenizer of the model, when it is first needed; None = there is
    none, and a request with stop strings is refused."""

    def __init__(self, load: Callable[[], Any] | None = None):
        self._load = load
        self._tokenizer: Any = None
        self._bytes: dict[int, bytes] = {}

    def search(self, request: Request) -> StopSearch | None:
        """None for a request without stop strings. The output of an aborted turn's earlier parts is searched with its
        continuation. Raises: CapabilityError."""
        if not request.sampling.stop:
            return None
        if self._tokenizer is None:
            if self._load is None:
                raise CapabilityError(
                    f"request {request.id} has stop strings, and this engine was made without the tokenizer that finds "
                    "them in ids; give it stop_strings, or the request stop_token_ids"
                )
            self._tokenizer = self._load()
        search = StopSearch([text.encode() for text in request.sampling.stop], self._bytes_of)
        if request.prefix_output is not None:
            search.skip(request.prefix_output)
        return search

    def _bytes_of(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = bytes_of(self._tokenizer, token)
        return found


class StopSearch:
    """The search in one request's output. It holds as many bytes as the longest stop string has, less one. found: one
    is complete, and what comes after it is no part of the output."""

    def __init__(self, stops: Sequence[bytes], bytes_of: Callable[[int], bytes]):
        self._stops, self._bytes_of = stops, bytes_of
        self._num_kept = max(map(len, stops)) - 1
        self._tail = b""
        self.found = False

    def skip(self, prefix: np.ndarray) -> None:
        """Tokens that came before, and ended nothing."""
        for token in reversed(prefix.tolist()):
            if len(self._tail) >= self._num_kept:
                break
            self._tail = self._bytes_of(token) + self._tail
        self._keep()

    def ends_with(self, token: int) -> bool:
        """Take the next token; whether it completes a stop string."""
        known = len(self._tail)
        self._tail += self._bytes_of(token)
        self.found = any(self._tail.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self._stops)
        self._keep()
        return self.found

    def num_kept(self, tokens: Sequence[int]) -> int:
        """Take tokens from a server, which gets no stop strings: how many of them belong to the output."""
        if self.found:
            return 0
        return next((count for count, token in enumerate(tokens, 1) if self.ends_with(token)), len(tokens))

    def _keep(self) -> None:
        self._tail = self._tail[max(0, len(self._tail) - self._num_kept) :]


def stop_strings_of(model: ModelConfig, rollout: RolloutConfig) -> StopStrings:
    """For an engine of this model. The tokenizer is loaded now where the config has stop strings, so that no request
    waits for it."""
    tokenizer = load_tokenizer(model.path) if rollout.sampling.stop else None
    return StopStrings(lambda: tokenizer or load_tokenizer(model.path))


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The UTF-8 bytes that a token adds to a text; none for an id that the tokenizer does not have.

    From the text that it has after another token: at the start of a text SentencePiece drops its space. A token that
    is no whole number of characters decodes to a placeholder, and its bytes are in its name.
    """
    alone, twice = (tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    if _CUT not in twice:
        return twice[len(alone) :].encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if single := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(single[1], 16)])
    if all(char in _BYTE_OF for char in piece):
        return bytes(_BYTE_OF[char] for char in piece)
    return piece.replace("▁", " ").encode()


def _byte_level() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: the printable ones stand for themselves. Source: GPT-2's encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level()

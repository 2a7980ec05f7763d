"""Stop strings (`sampling.stop`). Every engine finds them in the sampled ids with this code.

A turn ends with the token that completes a stop string. That token is not cut, even if the string ends in the middle
of it; it is part of the output and is trained, as a stop token is. UTF-8 bytes are compared, so a character that is
split over several tokens is no special case. A special token counts as its text.
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
from meshrl.data.chat import read_tokenizer
from meshrl.data.decode import bytes_of_letters

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's name for a token of a single byte
_BYTE_OF = bytes_of_letters()  # of byte-level tokenizers
_REPLACEMENT = "\ufffd"  # tokenizers decode the bytes of an incomplete character to it


class StopStrings:
    """Makes the search of each request. load: loads the model's tokenizer when it is first needed; None = there is no
    tokenizer, and a request with stop strings is refused."""

    def __init__(self, load: Callable[[], Any] | None = None):
        self._load = load
        self._tokenizer: Any = None
        self._bytes: dict[int, bytes] = {}

    def search(self, request: Request) -> StopSearch | None:
        """None for a request without stop strings. In a continuation, a stop string may begin in the output of the
        earlier parts."""
        if not request.sampling.stop:
            return None
        if self._tokenizer is None:
            if self._load is None:
                raise CapabilityError(
                    f"request {request.id} has stop strings, and this engine has no tokenizer to find them in ids; "
                    "pass stop_strings to the engine, or stop_token_ids in the request"
                )
            self._tokenizer = self._load()
        search = StopSearch([text.encode() for text in request.sampling.stop], self._token_bytes)
        search.skip(request.prefix_output)
        return search

    def _token_bytes(self, token: int) -> bytes:
        token_bytes = self._bytes.get(token)
        if token_bytes is None:
            token_bytes = self._bytes[token] = bytes_of(self._tokenizer, token)
        return token_bytes


class StopSearch:
    """The search in one request's output. It retains one byte less than the longest stop string has. found: whether a
    stop string is complete; later tokens do not belong to the output."""

    def __init__(self, stops: Sequence[bytes], bytes_of: Callable[[int], bytes]):
        self._stops, self._token_bytes = stops, bytes_of
        self._num_retained = max(map(len, stops)) - 1
        self._tail = b""
        self.found = False

    def skip(self, prefix: np.ndarray) -> None:
        """Take earlier tokens, which completed no stop string."""
        for token in reversed(prefix.tolist()):
            if len(self._tail) >= self._num_retained:
                break
            self._tail = self._token_bytes(token) + self._tail
        self._trim()

    def ends_with(self, token: int) -> bool:
        """Take the next token; returns whether it completes a stop string."""
        num_before = len(self._tail)
        self._tail += self._token_bytes(token)
        self.found = any(self._tail.find(stop, max(0, num_before - len(stop) + 1)) >= 0 for stop in self._stops)
        self._trim()
        return self.found

    def count_output(self, tokens: Sequence[int]) -> int:
        """Take tokens of a server, which does not know the stop strings; returns how many belong to the output."""
        if self.found:
            return 0
        return next((count for count, token in enumerate(tokens, 1) if self.ends_with(token)), len(tokens))

    def _trim(self) -> None:
        self._tail = self._tail[max(0, len(self._tail) - self._num_retained) :]


def stop_strings_of(model: ModelConfig, rollout: RolloutConfig) -> StopStrings:
    """Stop strings for this model. If the config has stop strings, the tokenizer is loaded now, so that no request
    waits for it."""
    tokenizer = read_tokenizer(model.path) if rollout.sampling.stop else None
    return StopStrings(lambda: tokenizer or read_tokenizer(model.path))


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The UTF-8 bytes that a token adds to a text; none for an id that the tokenizer does not have.

    The token is decoded after another one, because SentencePiece drops the space at the start of a text. A token with
    an incomplete character decodes to a replacement character; then its bytes are taken from its name.
    """
    alone, twice = (tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    if _REPLACEMENT not in twice:
        return twice[len(alone) :].encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if single := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(single[1], 16)])
    if all(char in _BYTE_OF for char in piece):
        return bytes(_BYTE_OF[char] for char in piece)
    return piece.replace("▁", " ").encode()

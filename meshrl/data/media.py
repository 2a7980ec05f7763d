"""Images as parts of messages, their places in token ids, and their arrays. A message's content is a text, or a list of
parts {type: text, text: ...} and {type: image, image: media id}."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshrl.core.errors import DataError
from meshrl.core.types import Media


def parts_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of these messages in order; a content that is a text is one part."""
    contents = (message.get("content") or [] for message in messages)
    return [part for c in contents for part in ([{"type": "text", "text": c}] if isinstance(c, str) else c)]


def content_text(messages: Sequence[dict[str, Any]]) -> str:
    """The text of these messages without their images, with a space between parts."""
    return " ".join(part.get("text", "") for part in parts_of(messages))


def find_spans(ids: np.ndarray, media: Mapping[str, Media], placeholder: int) -> list[tuple[str, int, int]]:
    """(media id, start, length) of each medium: from its first placeholder to its last. Each has as many of them as its
    num_tokens, in the order of `media`. Raises: DataError when the ids have other numbers."""
    at, total = np.flatnonzero(ids == placeholder), sum(each.num_tokens for each in media.values())
    if len(at) != total:
        raise DataError(f"it has {len(at)} placeholders of images, but its {len(media)} images have {total} features")
    spans, first = [], 0
    for name, each in media.items():
        start, last = int(at[first]), int(at[first + each.num_tokens - 1])
        spans.append((name, start, last + 1 - start))
        first += each.num_tokens
    return spans


class MediaArrays(Mapping[str, np.ndarray]):
    """The arrays of an image, which are processed again when the cache has dropped them. Pickled as a dict."""

    def __init__(self, load: Callable[[], Mapping[str, np.ndarray]]):
        self._load = load

    def __getitem__(self, name: str) -> np.ndarray:
        return self._load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def items(self) -> ItemsView[str, np.ndarray]:  # all of them by one call
        return self._load().items()

    def __reduce__(self) -> tuple[type, tuple[dict[str, np.ndarray]]]:
        return dict, (dict(self.items()),)

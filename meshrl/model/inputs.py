"""What a model needs of tokens besides their ids: the position of each in its row, and what a processor made of the
media of the row. For packed rows (train/packing.py) and for a step of the embedded sampler (embedded/runner.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from meshrl.core.types import Media


class HasMedia(Protocol):
    """A row with media: a Sample or a Request. media_spans: (media id, start, length) in its tokens."""

    media: dict[str, Media]
    media_spans: list[tuple[str, int, int]]


def positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64[T]: of the tokens of several rows end to end; of each row as many as its length, from its start on."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts + lengths - ends, lengths)


def model_kwargs(rows: Iterable[tuple[HasMedia, int, int]]) -> dict[str, np.ndarray]:
    """Processor outputs of all media that begin in [start, stop) of these rows, in the order of their tokens."""
    outputs: dict[str, list[np.ndarray]] = {}
    for row, start, stop in rows:
        for media_id, first, _ in sorted(row.media_spans, key=lambda span: span[1]):
            if start <= first < stop:
                for name, array in row.media[media_id].outputs.items():
                    outputs.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in outputs.items()}

"""What a model needs of tokens besides their ids: their positions, what a processor made of the images of their rows,
and which of them see each other. For packed rows (train/packing.py) and for a step of the embedded sampler
(embedded/runner.py), so that trainer and sampler can't differ.

Letters: T tokens of several pieces of rows, end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshrl.core.errors import DataError
from meshrl.core.types import Media
from meshrl.model.images import FAMILIES, MEDIA_IDS, ImageFamily

Span = tuple[str, int, int]  # media id, start, length


class HasMedia(Protocol):
    """A row with media: a Sample or a Request. media_spans: (media id, start, length) in its tokens."""

    media: dict[str, Media]
    media_spans: list[Span]


class Piece(NamedTuple):
    """Tokens [start, stop) of a row."""

    row: HasMedia
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Mutual:
    """Tokens that see each other, besides those before them: (start, end) in T. For the rule see ImageFamily."""

    spans: list[tuple[int, int]]
    rule: str


class ModelInputs:
    """Of the model with this Transformers config; None = of text. placeholder: the id of the tokens that stand for an
    image's features; None without a tower. masked: ids that are never sampled."""

    def __init__(self, config: Any = None):
        self.config = config
        has_tower = getattr(config, "vision_config", None) is not None
        self.family: ImageFamily | None = FAMILIES.get(config.model_type) if has_tower else None
        self.placeholder: int | None = None if self.family is None else config.image_token_id
        ids = (getattr(config, name, None) for name in (MEDIA_IDS if self.family else ()))
        self.masked = sorted({i for i in ids if i is not None and i < config.get_text_config().vocab_size})

    def positions(self, pieces: Sequence[Piece]) -> np.ndarray:
        """int64[T], or [3, T] where the position of an image's token is its place in the image."""
        starts, lengths = (np.array([getattr(p, end) for p in pieces], np.int64) for end in ("start", "stop"))
        lengths -= starts
        ends = np.cumsum(lengths)
        flat = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts + lengths - ends, lengths)
        if self.family is None or not self.family.has_grid or not any(p.row.media_spans for p in pieces):
            return flat
        merge, grid = self.config.vision_config.spatial_merge_size, np.repeat(flat[None], 3, axis=0)
        for piece, end in zip(pieces, ends.tolist(), strict=True):
            if piece.row.media_spans:
                of_row = _grid_positions(piece.row, piece.stop, merge)
                grid[:, end - (piece.stop - piece.start) : end] = of_row[:, piece.start :]
        return grid

    def offset(self, row: HasMedia) -> int:
        """The position of a token after all images of the row, minus its index."""
        if self.family is None or not self.family.has_grid or not row.media_spans:
            return 0
        end = max(start + length for _, start, length in row.media_spans)
        return int(_grid_positions(row, end + 1, self.config.vision_config.spatial_merge_size)[0, -1]) - end

    def kwargs(self, pieces: Iterable[Piece]) -> dict[str, np.ndarray]:
        """Processor outputs of all media that begin in the pieces, in the order of their tokens."""
        outputs: dict[str, list[np.ndarray]] = {}
        for row, start, stop in pieces:
            for media_id, first, _ in in_order(row):
                if start <= first < stop:
                    self.require_features(row.media[media_id])
                    for name, array in row.media[media_id].outputs.items():
                        outputs.setdefault(name, []).append(array)
        axis = 0 if self.family is None else self.family.axis
        return {name: _joined(arrays, axis) for name, arrays in outputs.items()}

    def mutual(self, pieces: Iterable[Piece]) -> Mutual | None:
        """None if each token sees those before it, and no others."""
        if self.family is None or not self.family.mutual:
            return None
        if self.family.mutual == "window" and self.config.get_text_config().use_bidirectional_attention != "vision":
            return None
        spans, at = list[tuple[int, int]](), 0
        for row, start, stop in pieces:
            of_piece = [(first - start, length) for _, first, length in in_order(row) if start <= first < stop]
            if other := [name for name, _, length in row.media_spans if length != row.media[name].num_tokens]:
                raise DataError(
                    f"image {other[0]!r} is in several parts with text between them, each of which sees itself alone; "
                    "meshrl computes images of one part. Set do_pan_and_scan to false in preprocessor_config.json"
                )
            spans += [(at + first, at + first + length) for first, length in of_piece]
            at += stop - start
        return Mutual(spans, self.family.mutual) if spans else None

    def fault(self, row: HasMedia, tokens: np.ndarray) -> str:
        """What is wrong with the row's placeholders; "" if each image has as many as features, and no other token has
        their id."""
        if self.placeholder is None:
            return "the model has no vision tower" if row.media_spans else ""
        is_placeholder = tokens == self.placeholder
        for media_id, start, length in row.media_spans:
            if media_id not in row.media:
                return f"media_spans names {media_id!r}, which is not in media ({', '.join(row.media) or 'empty'})"
            found, needed = int(is_placeholder[start : start + length].sum()), row.media[media_id].num_tokens
            if found != needed:
                return f"image {media_id!r} has {needed} features, but {found} placeholder tokens in its span"
        total, of_images = int(is_placeholder.sum()), sum(row.media[name].num_tokens for name, _, _ in row.media_spans)
        return "" if total == of_images else f"{total} placeholder tokens for images of {of_images} features"

    def require_features(self, media: Media) -> None:
        """Raises: DataError for an image with other numbers of placeholders and of features, with which a model stops,
        or computes with the features of another image."""
        if self.family is not None and (num := self.family.features(self.config, media.outputs)) != media.num_tokens:
            raise DataError(
                f"image {media.source!r} has {media.num_tokens} placeholder tokens, but the model makes {num} features "
                "of it: the processor's files do not fit config.json. Copy both from the original model"
            )

    def keys(self, row: HasMedia, tokens: np.ndarray) -> np.ndarray:
        """int64[T]: tokens of a row by which keys and values are found. That of an image's feature is negative, and
        differs from those of all other features: images of one size have equal placeholders."""
        keys = tokens.astype(np.int64)
        for media_id, start, length in row.media_spans:
            own = keys[start : start + length]
            digest = blake2b(row.media[media_id].digest.encode(), digest_size=8).digest()
            at = int.from_bytes(digest) >> 2
            own[own == self.placeholder] = -1 - at - np.arange(np.count_nonzero(own == self.placeholder))
        return keys

    def tokens(self, keys: np.ndarray) -> np.ndarray:
        """The reverse of `keys`."""
        return keys if self.placeholder is None else np.where(keys < 0, self.placeholder, keys)

    def smallest(self) -> tuple[np.ndarray, Media]:
        """A small image, and the ids of its tokens."""
        assert self.family is not None
        outputs = dict(self.family.smallest(self.config))
        num_tokens = self.family.features(self.config, outputs)
        media = Media(kind="image", digest="smallest", source="smallest", outputs=outputs, num_tokens=num_tokens)
        return np.full(num_tokens, self.placeholder, np.int32), media


TEXT_INPUTS = ModelInputs()


def in_order(row: HasMedia) -> list[Span]:
    return sorted(row.media_spans, key=lambda span: span[1])


def _grid_positions(row: HasMedia, length: int, merge: int) -> np.ndarray:
    """int64[3, length]: time, height and width of the first tokens of a row. Text counts on from the largest position
    of an image. Source: Wang et al., Qwen2-VL (2024), section 2.1."""
    out, at, position = np.empty((3, length), np.int64), 0, 0
    for media_id, start, num in in_order(row):
        frames, height, width = row.media[media_id].outputs["image_grid_thw"][0].tolist()
        grid = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        out[:, at:start] = np.arange(position, position + start - at)[: max(0, length - at)]
        position += start - at
        out[:, start : start + num] = (position + grid)[:, : max(0, length - start)]
        position += max(height, width) // merge
        at = start + num
        if at >= length:
            return out
    out[:, at:] = np.arange(position, position + length - at)
    return out


def _joined(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Of several images along this axis, padded with zeros on the others."""
    if len({a.shape[:axis] + a.shape[axis + 1 :] for a in arrays}) > 1:
        size = np.max([a.shape for a in arrays], axis=0)
        pads = [[(0, 0 if dim == axis else size[dim] - n) for dim, n in enumerate(a.shape)] for a in arrays]
        arrays = [np.pad(a, pad) for a, pad in zip(arrays, pads, strict=True)]
    return np.concatenate(arrays, axis=axis)

"""From rows and their batch plan to a Batch: rows end to end, a group's prompt once; and the check before training that
packed rows do not affect each other.

The controller makes the batch plan from the rows' lengths, groups and shared prompts (train/batch_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshrl.core.batch import Batch
from meshrl.core.columns import TokenColumn, columns_for, values_of
from meshrl.core.device import upload
from meshrl.core.errors import ConfigError
from meshrl.core.types import Sample, unsampled_row
from meshrl.model.inputs import TEXT_INPUTS, ModelInputs, Piece
from meshrl.model.verify import TOLERANCE_NATS
from meshrl.parallel.mesh import chunk_tokens


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [start, stop) of a sample: a full row, a prompt that several rows share (row -1), or the rest of a row."""

    sample: Sample
    start: int
    stop: int
    row: int
    parent: int = -1  # index of the piece it continues


def _pieces(samples: Sequence[Sample], rows: Sequence[int], share_prefix: bool) -> list[_Piece]:
    """Cut the rows of a group after their common prefix if this micro-batch has several of them."""
    groups: dict[str, list[int]] = {}
    for i, s in enumerate(samples):
        groups.setdefault(s.group_id, []).append(i)
    out: list[_Piece] = []
    for members in groups.values():
        first = samples[members[0]]
        n = min(samples[i].prefix_len for i in members)
        sharing = [i for i in members if n > 0 and share_prefix and _shares(samples[i], first, n)]
        if len(sharing) < 2:
            sharing = []
        else:
            out.append(_Piece(first, 0, n, -1))
        parent = len(out) - 1
        for i in members:
            s = samples[i]
            out.append(_Piece(s, n, len(s), rows[i], parent) if i in sharing else _Piece(s, 0, len(s), rows[i]))
    return out


def _shares(s: Sample, first: Sample, n: int) -> bool:
    """Whether both start with the same n untrained context tokens and media, and s has tokens after them."""
    return (
        len(s) > n
        and not s.mask[:n].any()
        and np.array_equal(s.tokens[:n], first.tokens[:n])
        and s.routed_experts is None
        and _media_before(s, n) == _media_before(first, n)
        and all(start + size <= n or start >= n for _, start, size in s.media_spans)
    )


def _media_before(s: Sample, n: int) -> list[tuple[int, str]]:
    return sorted((start, s.media[media_id].digest) for media_id, start, _ in s.media_spans if start < n)


def pack(
    samples: Sequence[Sample],
    rows: Sequence[int],
    device: torch.device | str = "cpu",
    share_prefix: bool = True,
    num_ulysses: int = 1,
    num_tp: int = 1,
    inputs: ModelInputs = TEXT_INPUTS,
    has_images: bool = False,
) -> Batch:
    """Lay samples end to end as one Batch; without samples, a dummy that every rank can run (zero mask).

    rows[s]: index of samples[s] in the step. share_prefix: the common prompt of a group is in the batch once, with the
    same gradient. num_ulysses, num_tp: the peers that share the tokens. inputs: of the model. has_images: a rank has an
    image in its batch, so each rank needs one, since all compute the tower together; one without gets a small image as
    a row of its own, that nothing reads. A column is None when no sample has it. It is an error if only some samples
    have one without a fill, since filled-in values would be trained on.
    """
    is_dummy = not samples
    if has_images and not any(s.media_spans for s in samples):
        samples, rows = [*samples, _image_row(inputs)], [*rows, -1]
    elif is_dummy:
        samples, rows = [bare_row("dummy", [0, 0], scored=False)], [-1]
    pieces = _pieces(samples, rows, share_prefix)
    lengths, places = [p.stop - p.start for p in pieces], [Piece(p.sample, p.start, p.stop) for p in pieces]
    cu = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(lengths, out=cu[1:])
    previous = np.arange(-1, cu[-1] - 1)
    for s, piece in enumerate(pieces):
        previous[cu[s]] = cu[piece.parent + 1] - 1 if piece.parent >= 0 else 0

    columns, token_extras = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for column in columns_for("batch"):
        values = _column(pieces, column, [values_of(p.sample, column.name) for p in pieces])
        if values is not None:
            (columns if column.name in Batch.__slots__ else token_extras)[column.name] = values
    for name in sorted({name for p in pieces for name in p.sample.token_extras} - token_extras.keys()):
        extra = TokenColumn(name=name, dtype=None, fill=0, made_by="sampler")
        values = _column(pieces, extra, [p.sample.token_extras.get(name) for p in pieces])
        if values is not None:
            token_extras[name] = values
    columns.setdefault("loss_weight", torch.zeros(int(cu[-1])))
    per_row = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
    temperature = np.array([p.sample.temperature for p in pieces], np.float32)[per_row]
    mask = columns["mask"].numpy()
    # Computed here, since on an accelerator the host would have to wait for their sizes.
    trained = (mask & (columns["loss_weight"].numpy() != 0)).nonzero()[0]
    scored = mask.nonzero()[0]
    chunks = previous[scored] // chunk_tokens(int(cu[-1]), num_ulysses, num_tp)
    tensors = {
        "position_ids": torch.from_numpy(inputs.positions(places)),
        "previous": torch.from_numpy(previous),
        "scored": torch.from_numpy(scored[np.argsort(chunks, kind="stable")]),
        "trained": torch.from_numpy(trained),
        "temperature": torch.from_numpy(temperature),
    }
    kwargs = inputs.kwargs(places)
    groups = tensors | columns, token_extras, {name: torch.from_numpy(array) for name, array in kwargs.items()}
    sent: Iterator[Any] = iter(upload([x for group in groups for x in group.values()], torch.device(device)))
    fields, token_extras, sent_kwargs = ({name: next(sent) for name in group} for group in groups)
    return Batch(
        cu_seqlens=torch.from_numpy(cu),
        rows=[p.row for p in pieces],
        parents=[p.parent for p in pieces],
        offsets=[p.start for p in pieces],
        scored_of_chunk=np.bincount(chunks, minlength=num_ulysses).tolist(),
        trained_lengths=np.unique(per_row[trained], return_counts=True)[1].tolist(),
        token_extras=token_extras,
        model_kwargs=sent_kwargs,
        mutual=inputs.mutual(places),
        is_dummy=is_dummy,
        **fields,
    )


def _column(pieces: Sequence[_Piece], column: TokenColumn, arrays: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    """Each piece's part of its sample's array; None if no sample has one."""
    like = next((array for array in arrays if array is not None), None)
    if like is None:
        return None
    missing = [p.sample for p, array in zip(pieces, arrays, strict=True) if array is None]
    lacking = [sample.trajectory_id for sample in missing if sample.mask.any()]
    if lacking and column.fill is None:
        raise ValueError(
            f"samples {lacking[:3]} have no {column.name}, but others of the same batch do; annotate all or none"
        )
    shapes = {array.shape[1:] for array in arrays if array is not None}
    if len(shapes) > 1:
        raise ValueError(f"{column.name} of one batch has the shapes {sorted(shapes)}; a model has one")
    filled = (
        np.full((len(p.sample), *like.shape[1:]), column.fill or 0, like.dtype) if array is None else array
        for p, array in zip(pieces, arrays)
    )
    rows = [array[p.start : p.stop] for p, array in zip(pieces, filled)]
    return torch.from_numpy(np.concatenate(rows, dtype=column.dtype, casting="unsafe"))


def bare_row(name: str, tokens: Sequence[int], scored: bool) -> Sample:
    """A row that no sampler made and that trains nothing. scored: its tokens are in the mask, except the first one."""
    row = unsampled_row(name, np.array(tokens, np.int32), (np.arange(len(tokens)) > 0) & scored)
    row.advantages = np.zeros(len(tokens), np.float32)
    return row


def _image_row(inputs: ModelInputs) -> Sample:
    """A row of a small image alone."""
    tokens, media = inputs.smallest()
    row = bare_row("image", [int(token) for token in tokens], scored=False)
    row.media, row.media_spans = {media.digest: media}, [(media.digest, 0, len(tokens))]
    return row


def require_independent_rows(
    model: str, vocab_size: int, score: Callable[[Sequence[Sample]], Mapping[int, np.ndarray]]
) -> None:
    """Score a row between two others twice, and a third time with these two swapped. The first two scores must be equal
    to the bit, the third within TOLERANCE_NATS.

    Swapping the neighbours keeps the shape of every matrix product, also those of experts, so the row is rounded as
    before. With other neighbours experts would multiply other numbers of rows, and in bf16 that rounding may route a
    token to another expert, which changes a logprob as much as a leak does. A leak that does not depend on the order,
    such as a mean over the pack, is found by `recipe.verify`, in fp32.

    model: its name in errors. score: logprobs of samples packed in this order, by index.
    """
    before, row, after = (
        bare_row("before", [(1 + i) % vocab_size for i in range(9)], scored=True),
        bare_row("row", [3, 1, 2, 4, 1], scored=True),
        bare_row("after", [(2 + i) % vocab_size for i in range(9)], scored=True),
    )
    first, again = (score([before, row, after])[1] for _ in range(2))
    swapped = score([after, row, before])[1]
    if not np.array_equal(first, again):
        raise ConfigError(
            f"{model} gives random scores: a row's logprobs differ by {np.abs(first - again).max():.2g} nats when one "
            "pack is scored twice, so ratios of new to old logprobs would be noise. It is in eval mode, without "
            "dropout, so one of its modules draws random numbers even there. Choose another model"
        )
    difference = np.abs(first - swapped).max()
    if not difference <= TOLERANCE_NATS:
        raise ConfigError(
            f"rows of one pack affect each other in {model}: a row's logprobs differ by {difference:.2g} nats "
            f"(allowed: {TOLERANCE_NATS:g}) when its neighbours are swapped. It can't be trained packed. Choose "
            "another model"
        )

"""From rows and their batch plan to a Batch: rows end to end, a group's prompt once.

The controller makes the batch plan from the rows' lengths, groups and shared prompts (train/batch_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from meshrl.core.batch import Batch
from meshrl.core.device import upload
from meshrl.core.types import Sample, unsampled_row
from meshrl.model.inputs import model_kwargs, positions
from meshrl.parallel.peers import chunk_tokens


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
) -> Batch:
    """Lay samples end to end as one Batch; without samples, a dummy that every rank can run (zero mask).

    rows[s]: index of samples[s] in the step. share_prefix: the common prompt of a group is in the batch once, with the
    same gradient. num_ulysses, num_tp: the peers that share the tokens. A field is None when no sample has it; it is an
    error if only some samples have it, since filled-in values would be trained on.
    """
    if not samples:
        dummy = bare_row("dummy", [0, 0], scored=False)
        return replace(pack([dummy], [-1], device, False, num_ulysses, num_tp), is_dummy=True)
    pieces = _pieces(samples, rows, share_prefix)
    lengths = [p.stop - p.start for p in pieces]
    cu = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(lengths, out=cu[1:])
    previous = np.arange(-1, cu[-1] - 1)
    for s, piece in enumerate(pieces):
        previous[cu[s]] = cu[piece.parent + 1] - 1 if piece.parent >= 0 else 0

    def cat(name: str, dtype: type) -> torch.Tensor:
        arrays = [getattr(p.sample, name)[p.start : p.stop] for p in pieces]
        return torch.from_numpy(np.concatenate(arrays, dtype=dtype, casting="unsafe"))

    def cat_if_annotated(name: str) -> torch.Tensor | None:
        lacking = [p.sample.trajectory_id for p in pieces if getattr(p.sample, name) is None]
        if lacking and len(lacking) < len(pieces):
            raise ValueError(
                f"samples {lacking[:3]} have no {name}, but others of the same batch do; annotate all or none"
            )
        return None if lacking else cat(name, np.float32)

    per_row = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
    temperature = np.array([p.sample.temperature for p in pieces], np.float32)[per_row]
    mask, weight = cat("mask", np.bool_), _filled(pieces, [p.sample.loss_weight for p in pieces], 0.0)
    loss_weight = torch.zeros(int(cu[-1])) if weight is None else weight  # fp32, in tests of equality fp64
    # Computed here, since on an accelerator the host would have to wait for their sizes.
    trained = (mask.numpy() & (loss_weight.numpy() != 0)).nonzero()[0]
    scored = mask.numpy().nonzero()[0]
    chunks = previous[scored] // chunk_tokens(int(cu[-1]), num_ulysses, num_tp)
    tensors = {
        "tokens": cat("tokens", np.int64),
        "position_ids": torch.from_numpy(positions(np.array([p.start for p in pieces]), np.array(lengths))),
        "previous": torch.from_numpy(previous),
        "mask": mask,
        "scored": torch.from_numpy(scored[np.argsort(chunks, kind="stable")]),
        "trained": torch.from_numpy(trained),
        "loss_weight": loss_weight,
        "temperature": torch.from_numpy(temperature),
        "rollout_logprobs": cat("rollout_logprobs", np.float32),
    }
    optional = {name: cat_if_annotated(name) for name in ("old_logprobs", "ref_logprobs", "advantages")}
    optional["routed_experts"] = _filled(pieces, [p.sample.routed_experts for p in pieces], -1)  # the router chooses
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    names = sorted({name for p in pieces for name in p.sample.token_extras})
    filled = ((name, _filled(pieces, [p.sample.token_extras.get(name) for p in pieces], 0)) for name in names)
    kwargs = model_kwargs((p.sample, p.start, p.stop) for p in pieces)
    groups = (
        tensors,
        {name: x for name, x in filled if x is not None},
        {name: torch.from_numpy(array) for name, array in kwargs.items()},
    )
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
        **fields,
    )


def _filled(pieces: Sequence[_Piece], arrays: Sequence[np.ndarray | None], fill: float) -> torch.Tensor | None:
    """Each piece's part of its sample's array; `fill` where a sample has none, None if no sample has one."""
    like = next((array for array in arrays if array is not None), None)
    if like is None:
        return None
    shapes = {array.shape[1:] for array in arrays if array is not None}
    if len(shapes) > 1:
        raise ValueError(f"routed_experts or extras of one batch have shapes {sorted(shapes)}; a model has one")
    rows = [
        np.full((p.stop - p.start, *like.shape[1:]), fill, like.dtype) if array is None else array[p.start : p.stop]
        for p, array in zip(pieces, arrays, strict=True)
    ]
    return torch.from_numpy(np.concatenate(rows))


def bare_row(name: str, tokens: Sequence[int], scored: bool) -> Sample:
    """A row that no sampler made and that trains nothing. scored: its tokens are in the mask, except the first one."""
    row = unsampled_row(name, np.array(tokens, np.int32), (np.arange(len(tokens)) > 0) & scored)
    row.advantages = np.zeros(len(tokens), np.float32)
    return row

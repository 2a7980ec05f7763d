"""From rows and their batch plan to a Batch: rows end to end, a group's prompt once.

The controller makes the batch plan from lengths alone (train/batch_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshrl.core.batch import Batch
from meshrl.core.types import EXTRA_FILLS, Sample

_DUMMY_TOKENS = 2


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
    plan_hash: str = "",
    share_prefix: bool = True,
) -> Batch:
    """Lay samples end to end as one Batch; without samples, a dummy that every rank can run (zero mask).

    rows[s]: index of samples[s] in the step. share_prefix: the common prompt of a group is in the batch once, with the
    same gradient. A field is None when no sample has it; it is an error if only some samples have it, since filled-in
    values would be trained on.
    """
    if not samples:
        return _dummy(device, plan_hash)
    pieces = _pieces(samples, rows, share_prefix)
    lengths = [p.stop - p.start for p in pieces]
    cu = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(lengths, out=cu[1:])
    previous = np.arange(-1, cu[-1] - 1)
    for s, piece in enumerate(pieces):
        previous[cu[s]] = cu[piece.parent + 1] - 1 if piece.parent >= 0 else 0

    def cat(name: str, dtype: torch.dtype) -> torch.Tensor:
        arrays = [getattr(p.sample, name)[p.start : p.stop] for p in pieces]
        return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)

    def cat_if_annotated(name: str) -> torch.Tensor | None:
        lacking = [p.sample.trajectory_id for p in pieces if getattr(p.sample, name) is None]
        if lacking and len(lacking) < len(pieces):
            raise ValueError(
                f"samples {lacking[:3]} have no {name}, but others of the same batch do; annotate all or none"
            )
        return None if lacking else cat(name, torch.float32)

    per_row = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
    temperature = np.array([p.sample.temperature for p in pieces], np.float32)[per_row]
    return Batch(
        tokens=cat("tokens", torch.int64),
        cu_seqlens=torch.from_numpy(cu),
        position_ids=torch.from_numpy(np.concatenate([np.arange(p.start, p.stop) for p in pieces])).to(device),
        previous=torch.from_numpy(previous).to(device),
        sample_index=torch.from_numpy(per_row).to(device),
        rows=[p.row for p in pieces],
        parents=[p.parent for p in pieces],
        offsets=[p.start for p in pieces],
        mask=cat("mask", torch.bool),
        loss_weight=_loss_weight(pieces, device),
        temperature=torch.from_numpy(temperature).to(device),
        rollout_logprobs=cat("rollout_logprobs", torch.float32),
        old_logprobs=cat_if_annotated("old_logprobs"),
        ref_logprobs=cat_if_annotated("ref_logprobs"),
        values=cat_if_annotated("values"),
        advantages=cat_if_annotated("advantages"),
        returns=cat_if_annotated("returns"),
        routed_experts=_routed_experts(pieces, device),
        token_extras=_token_extras(pieces, device),
        model_kwargs=_model_kwargs(pieces, device),
        plan_hash=plan_hash,
    )


def _loss_weight(pieces: Sequence[_Piece], device: torch.device | str) -> torch.Tensor:
    """fp64 weights stay fp64, which the equality tests need; runs have fp32."""
    rows = [
        np.zeros(p.stop - p.start, np.float32)
        if p.sample.loss_weight is None
        else p.sample.loss_weight[p.start : p.stop]
        for p in pieces
    ]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def _routed_experts(pieces: Sequence[_Piece], device: torch.device | str) -> torch.Tensor | None:
    """[T, L, K]; rows without recorded experts are filled with -1 (the router chooses there)."""
    shapes = {p.sample.routed_experts.shape[1:] for p in pieces if p.sample.routed_experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"routed_experts of one batch have shapes {sorted(shapes)}; a model has one")
    (shape,) = shapes
    rows = [
        np.full((p.stop - p.start, *shape), -1, np.int16)
        if p.sample.routed_experts is None
        else p.sample.routed_experts[p.start : p.stop]
        for p in pieces
    ]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def _token_extras(pieces: Sequence[_Piece], device: torch.device | str) -> dict[str, torch.Tensor]:
    names = sorted({name for p in pieces for name in p.sample.token_extras})
    out = {}
    for name in names:
        known = next(p.sample.token_extras[name] for p in pieces if name in p.sample.token_extras)
        fill = EXTRA_FILLS.get(name, 0)
        rows = [
            p.sample.token_extras[name][p.start : p.stop]
            if name in p.sample.token_extras
            else np.full((p.stop - p.start, *known.shape[1:]), fill, known.dtype)
            for p in pieces
        ]
        out[name] = torch.from_numpy(np.concatenate(rows)).to(device)
    return out


def _model_kwargs(pieces: Sequence[_Piece], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Processor outputs of all media, in the order of their spans in the pack."""
    parts: dict[str, list[np.ndarray]] = {}
    for p in pieces:
        for media_id, start, _ in sorted(p.sample.media_spans, key=lambda span: span[1]):
            if p.start <= start < p.stop:
                for name, array in p.sample.media[media_id].outputs.items():
                    parts.setdefault(name, []).append(array)
    return {name: torch.from_numpy(np.concatenate(arrays)).to(device) for name, arrays in parts.items()}


def _dummy(device: torch.device | str, plan_hash: str) -> Batch:
    n = _DUMMY_TOKENS
    zeros = torch.zeros(n, device=device)
    return Batch(
        tokens=torch.zeros(n, dtype=torch.int64, device=device),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        position_ids=torch.arange(n, device=device),
        previous=torch.zeros(n, dtype=torch.int64, device=device),
        sample_index=torch.zeros(n, dtype=torch.int32, device=device),
        rows=[-1],
        parents=[-1],
        offsets=[0],
        mask=torch.zeros(n, dtype=torch.bool, device=device),
        loss_weight=zeros,
        temperature=zeros + 1,
        rollout_logprobs=zeros + float("nan"),
        advantages=zeros.clone(),
        plan_hash=plan_hash,
        is_dummy=True,
    )

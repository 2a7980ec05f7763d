"""From rows of different lengths to the same number of micro-batches on every rank, and from rows to a Batch.

The controller makes the plan from lengths alone, so no collective is needed; ranks compare its hash (P25).
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshrl.core.batch import Batch
from meshrl.core.types import EXTRA_FILLS, Sample

QUADRATIC_TOKENS = 4096.0  # length at which a row's attention costs as much as the rest of the model
_DUMMY_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """micro_batches[rank][m] = indices of the rows in that micro-batch; [] is a dummy. Every rank has equally many.

    Example, 3 rows on 2 ranks: micro_batches = (((0,),), ((1, 2),)).
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    hash: str

    def rows(self, rank: int) -> list[int]:
        """All row indices of one rank, in order."""
        return [i for micro in self.micro_batches[rank] for i in micro]


def row_cost(length: int) -> float:
    """Relative compute of a row: a linear term and attention's quadratic one."""
    return length * (1.0 + length / QUADRATIC_TOKENS)


def make_plan(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> Plan:
    """Spread rows over ranks by cost, then over micro-batches of at most max_tokens (a longer row stands alone).

    A pure function of its arguments: same lengths, same plan, on any machine.
    """
    ranks = _spread(range(len(lengths)), lengths, num_ranks)
    count = max(1, *(_fewest_bins([lengths[i] for i in rows], max_tokens) for rows in ranks))
    micro = tuple(_fill(rows, lengths, count, max_tokens) for rows in ranks)
    while any(m is None for m in micro):
        count += 1
        micro = tuple(_fill(rows, lengths, count, max_tokens) for rows in ranks)
    digest = hashlib.sha256(json.dumps([list(lengths), num_ranks, max_tokens, micro]).encode()).hexdigest()[:16]
    return Plan(micro, digest)  # type: ignore[arg-type]


def _spread(rows: Sequence[int], lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Longest processing time first: the next largest row goes to the least loaded bin."""
    heap = [(0.0, b) for b in range(bins)]
    out: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(rows, key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        out[b].append(i)
        heapq.heappush(heap, (load + row_cost(lengths[i]), b))
    return out


def _fewest_bins(lengths: Sequence[int], max_tokens: int) -> int:
    giants = [n for n in lengths if n > max_tokens]
    return len(giants) + -(-sum(n for n in lengths if n <= max_tokens) // max_tokens)


def _fill(
    rows: Sequence[int], lengths: Sequence[int], count: int, max_tokens: int
) -> tuple[tuple[int, ...], ...] | None:
    """Rows into `count` micro-batches of even cost under the token budget; None when they don't fit."""
    load, tokens = [0.0] * count, [0] * count
    out: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(rows, key=lambda i: (-lengths[i], i)):
        n = lengths[i]
        fitting = [b for b in range(count) if tokens[b] + n <= max_tokens or tokens[b] == 0]
        if not fitting:
            return None
        b = min(fitting, key=lambda b: (load[b], b))
        out[b].append(i)
        load[b] += row_cost(n)
        tokens[b] += n
    return tuple(tuple(sorted(b)) for b in out)


def pack(
    samples: Sequence[Sample], rows: Sequence[int], device: torch.device | str = "cpu", plan_hash: str = ""
) -> Batch:
    """Lay samples end to end as one Batch; no samples give a dummy that every rank can run (zero mask).

    rows[s] is the step-wide index of samples[s]. A field is None when no sample has it; a sample that lacks a field
    others have is an error, since a silent fill would train on it.
    """
    if not samples:
        return _dummy(device, plan_hash)
    lengths = [len(s) for s in samples]
    cu = np.zeros(len(samples) + 1, np.int32)
    np.cumsum(lengths, out=cu[1:])

    def cat(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        arrays = [getattr(s, name) for s in samples]
        if all(a is None for a in arrays):
            return None
        if any(a is None for a in arrays):
            have = [s.trajectory_id for s, a in zip(samples, arrays, strict=True) if a is None]
            raise ValueError(
                f"samples {have[:3]} have no {name}, but others of the same batch do; annotate all or none"
            )
        return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)

    per_row = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
    temperature = np.array([s.temperature for s in samples], np.float32)[per_row]
    return Batch(
        tokens=cat("tokens", torch.int64),
        cu_seqlens=torch.from_numpy(cu),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device),
        sample_index=torch.from_numpy(per_row).to(device),
        rows=list(rows),
        mask=cat("mask", torch.bool),
        loss_weight=_loss_weight(samples, device),
        temperature=torch.from_numpy(temperature).to(device),
        rollout_logprobs=cat("rollout_logprobs", torch.float32),
        old_logprobs=cat("old_logprobs", torch.float32),
        ref_logprobs=cat("ref_logprobs", torch.float32),
        values=cat("values", torch.float32),
        advantages=cat("advantages", torch.float32),
        returns=cat("returns", torch.float32),
        correction=cat("correction", torch.float32),
        routed_experts=_routed_experts(samples, device),
        token_extras=_token_extras(samples, device),
        model_kwargs=_model_kwargs(samples, device),
        plan_hash=plan_hash,
    )


def _loss_weight(samples: Sequence[Sample], device: torch.device | str) -> torch.Tensor:
    """fp64 weights stay fp64: the equality harness needs them; production writes fp32."""
    rows = [np.zeros(len(s), np.float32) if s.loss_weight is None else s.loss_weight for s in samples]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def _routed_experts(samples: Sequence[Sample], device: torch.device | str) -> torch.Tensor | None:
    """[T, L, K]; rows whose sampler recorded none are filled with -1 (the router runs freely there)."""
    shapes = {s.routed_experts.shape[1:] for s in samples if s.routed_experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"routed_experts of one batch have shapes {sorted(shapes)}; a model has one")
    (shape,) = shapes
    rows = [np.full((len(s), *shape), -1, np.int16) if s.routed_experts is None else s.routed_experts for s in samples]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def _token_extras(samples: Sequence[Sample], device: torch.device | str) -> dict[str, torch.Tensor]:
    names = sorted({name for s in samples for name in s.token_extras})
    out = {}
    for name in names:
        known = next(s.token_extras[name] for s in samples if name in s.token_extras)
        fill = EXTRA_FILLS.get(name, 0)
        rows = [s.token_extras.get(name, np.full((len(s), *known.shape[1:]), fill, known.dtype)) for s in samples]
        out[name] = torch.from_numpy(np.concatenate(rows)).to(device)
    return out


def _model_kwargs(samples: Sequence[Sample], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Processor outputs of all media, in the order their spans stand in the pack."""
    parts: dict[str, list[np.ndarray]] = {}
    for s in samples:
        for media_id, _, _ in sorted(s.media_spans, key=lambda span: span[1]):
            for name, array in s.media[media_id].outputs.items():
                parts.setdefault(name, []).append(array)
    return {name: torch.from_numpy(np.concatenate(arrays)).to(device) for name, arrays in parts.items()}


def _dummy(device: torch.device | str, plan_hash: str) -> Batch:
    n = _DUMMY_TOKENS
    zeros = torch.zeros(n, device=device)
    return Batch(
        tokens=torch.zeros(n, dtype=torch.int64, device=device),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        position_ids=torch.arange(n, device=device),
        sample_index=torch.zeros(n, dtype=torch.int32, device=device),
        rows=[-1],
        mask=torch.zeros(n, dtype=torch.bool, device=device),
        loss_weight=zeros,
        temperature=zeros + 1,
        rollout_logprobs=zeros + float("nan"),
        advantages=zeros.clone(),
        plan_hash=plan_hash,
        is_dummy=True,
    )

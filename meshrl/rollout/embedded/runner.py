"""From scheduled sequences to logits: one call of the model a step, for new contexts and running rows together.

Letters: T tokens of the step, N rows that draw a token, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from meshrl.model.attention import AttentionContext, PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.logprob import token_logprobs
from meshrl.rollout.embedded.cached_attention import DecodeAttention, PrefillAttention, StepAttention
from meshrl.rollout.embedded.kv_cache import KVStore, plan_writes
from meshrl.rollout.embedded.scheduler import Admission, Fill, Move, Scheduler, Sequence


class Runner:
    """Owns the cache: `own` holds a row for each running sequence, `shared` one for each prompt of a group."""

    def __init__(self, model: CausalModel, device: torch.device):
        self.model, self.device = model, device
        self.own, self.shared = KVStore(), KVStore()

    @torch.inference_mode()
    def step(self, scheduler: Scheduler, admission: Admission) -> torch.Tensor:
        """Compute the new contexts and the last token of every other running row -> logits float[N, V], one row for
        each of `scheduler.running`, in its order."""
        joined = admission.sequences
        rows = scheduler.running[: len(scheduler.running) - len(joined)]
        fills = admission.fills
        tokens = [fill.ids for fill in fills] + [np.array([s.tokens[-1] for s in rows], np.int64)]
        places = [np.arange(len(fill.ids)) for fill in fills] + [np.array([s.num_cached for s in rows], np.int64)]
        hidden = self.model.hidden(
            torch.from_numpy(np.concatenate(tokens)).to(self.device),
            torch.from_numpy(np.concatenate(places)).to(self.device),
            self._context(fills, rows, scheduler),
        )
        ends = np.cumsum([len(fill.ids) for fill in fills])
        alone: dict[int, torch.Tensor] = {}  # own row -> final hidden state of its context
        for fill, end in zip(fills, ends, strict=True):
            if fill.prompt is None:
                alone[fill.row] = hidden[end - 1]
            else:
                fill.prompt.last_hidden = hidden[end - 1].clone()
        drawn = hidden[ends[-1] if fills else 0 :]
        if joined:
            lasts = [s.prompt.last_hidden if s.prompt else alone[len(rows) + i] for i, s in enumerate(joined)]
            drawn = torch.cat([drawn, torch.stack(lasts)])
        for sequence in rows:
            sequence.cached += 1
        return self.model.head().logits(drawn)

    def _context(self, fills: list[Fill], rows: list[Sequence], scheduler: Scheduler) -> AttentionContext:
        prefill = self._prefill(fills) if fills else None
        if not rows:
            assert prefill is not None, "a step has contexts to compute or rows to go on with"
            return prefill
        decode = DecodeAttention(
            self.own,
            np.array([s.cached + 1 for s in rows], np.int64),
            self.shared,
            np.array([s.prompt.row if s.prompt else -1 for s in rows], np.int64),
            np.array([p.length for p in scheduler.prompts if p.last_hidden is not None], np.int64),
            self.device,
        )
        return StepAttention(prefill, decode) if prefill else decode

    def _prefill(self, fills: list[Fill]) -> PrefillAttention:
        lengths = [len(fill.ids) for fill in fills]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        writes = []
        for store, shared in ((self.own, False), (self.shared, True)):
            part = [i for i, fill in enumerate(fills) if (fill.prompt is not None) == shared]
            if part:
                rows = np.concatenate([np.full(lengths[i], fills[i].row, np.int64) for i in part])
                places = np.concatenate([np.arange(lengths[i]) for i in part])
                source = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in part])
                writes.append((store, plan_writes(rows, places, self.device, source)))
        return PrefillAttention(bounds.tolist(), self.device, writes)

    @torch.inference_mode()
    def follow(self, own: Move | None, shared: Move | None) -> None:
        """Move rows as `Scheduler.settle` decided."""
        for store, move in ((self.own, own), (self.shared, shared)):
            if move is not None:
                store.move(move.order, move.lengths, self.device)

    @torch.inference_mode()
    def score(self, ids: np.ndarray) -> np.ndarray:
        """Logprobs of ids[1:] given what stands before each, at temperature 1, without any cache; float32[T]."""
        tokens = torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)
        places = torch.arange(len(ids), device=self.device)
        hidden = self.model.hidden(tokens, places, PackedAttention([0, len(ids)], self.device))
        ones = torch.ones(len(ids) - 1, device=self.device)
        logprobs, _ = token_logprobs(hidden[:-1], self.model.head(), tokens[1:], ones)
        return np.concatenate([np.zeros(1, np.float32), logprobs.float().cpu().numpy()])

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes + self.shared.num_bytes

    def flush(self) -> None:
        """Drop every key and value: they belong to weights (P17)."""
        self.own.clear()
        self.shared.clear()

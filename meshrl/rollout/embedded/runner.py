"""From scheduled sequences to logits: one call of the model a step, for new contexts and running rows together.

Letters: T tokens of the step, N rows that draw a token, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from meshrl.model.attention import AttentionContext, PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.lean import LeanDecoder
from meshrl.model.logprob import Head, token_logprobs
from meshrl.rollout.embedded.cached_attention import DecodeAttention, PrefillAttention, StepAttention
from meshrl.rollout.embedded.kv_cache import KVStore, plan_writes
from meshrl.rollout.embedded.scheduler import Admission, Fill, Move, Sequence


class Runner:
    """Owns the cache: `running` has a row for each running sequence, `prompts` one for each prompt of a group."""

    def __init__(self, model: CausalModel, device: torch.device, lean: LeanDecoder | None):
        self.model, self.device = model, device
        self._lean, self._hidden = lean, model.hidden if lean is None else lean.hidden
        self._head: Head | None = None  # made ready for these weights, as the lean forward is
        self.running, self.prompts = KVStore(), KVStore()

    @torch.inference_mode()
    def step(self, running: list[Sequence], admission: Admission) -> torch.Tensor:
        """Compute the new contexts, and the last token of every row that ran before -> logits float[N, V] for all
        running rows, in their order."""
        if self._head is None:
            self._head = self.model.head().ready()
            if self._lean is not None:
                self._lean.pack()
        rows = running[: len(running) - len(admission.joined)]
        hidden = self._compute(rows, admission.fills)
        for sequence in rows:
            sequence.cached += 1
        return self._head.logits(self._last_states(hidden, len(rows), admission))

    def _compute(self, rows: list[Sequence], fills: list[Fill]) -> torch.Tensor:
        """Final hidden states [T, D] of all contexts end to end, then of one token a row."""
        if not rows and not fills:  # all running rows have just joined a prompt that is there
            weight = self.model.head().weight
            return weight.new_empty(0, weight.shape[1])
        tokens = [fill.ids for fill in fills] + [np.array([s.tokens[-1] for s in rows], np.int64)]
        places = [np.arange(len(fill.ids)) for fill in fills] + [np.array([s.cached for s in rows], np.int64)]
        return self._hidden(
            torch.from_numpy(np.concatenate(tokens)).to(self.device),
            torch.from_numpy(np.concatenate(places)).to(self.device),
            self._context(rows, fills),
        )

    def _last_states(self, hidden: torch.Tensor, num_rows: int, admission: Admission) -> torch.Tensor:
        """The state that each running row draws from: its newest token's, or that of its context's end when it joins.
        Members of a group get their copy of the prompt here."""
        end, alone = 0, []
        for fill in admission.fills:
            end += len(fill.ids)
            if fill.prompt is None:
                alone.append(hidden[end - 1])
            else:
                fill.prompt.last_hidden = hidden[end - 1].clone()
        if not admission.joined:
            return hidden[end:]
        own = iter(alone)
        states = [next(own) if prompt is None else prompt.last_hidden for _, prompt in admission.joined]
        copies = [(num_rows + i, p.row, p.length) for i, (_, p) in enumerate(admission.joined) if p is not None]
        self.running.copy_rows(self.prompts, copies, self.device)
        return torch.cat([hidden[end:], torch.stack(states)])

    def _context(self, rows: list[Sequence], fills: list[Fill]) -> AttentionContext:
        if not rows:
            return self._prefill(fills)
        decode = DecodeAttention(self.running, np.array([s.cached + 1 for s in rows], np.int64), self.device)
        return StepAttention(self._prefill(fills), decode) if fills else decode

    def _prefill(self, fills: list[Fill]) -> PrefillAttention:
        lengths = [len(fill.ids) for fill in fills]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        writes = []
        for store, shared in ((self.running, False), (self.prompts, True)):
            part = [i for i, fill in enumerate(fills) if (fill.prompt is not None) == shared]
            if part:
                rows = np.concatenate([np.full(lengths[i], fills[i].row, np.int64) for i in part])
                places = np.concatenate([np.arange(lengths[i]) for i in part])
                source = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in part])
                writes.append((store, plan_writes(rows, places, self.device, source)))
        return PrefillAttention(bounds.tolist(), self.device, writes)

    @torch.inference_mode()
    def follow(self, running: Move | None, prompts: Move | None) -> None:
        """Move rows as `Scheduler.settle` decided."""
        for store, move in ((self.running, running), (self.prompts, prompts)):
            if move is not None:
                store.move(move.order, move.lengths, self.device)

    @torch.inference_mode()
    def score(self, ids: np.ndarray) -> np.ndarray:
        """Logprobs of ids[1:] given what stands before each, at temperature 1, without any cache; float32[T]."""
        tokens = torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)
        places = torch.arange(len(ids), device=self.device)
        hidden = self._hidden(tokens, places, PackedAttention([0, len(ids)], self.device))
        ones = torch.ones(len(ids) - 1, device=self.device)
        logprobs, _ = token_logprobs(hidden[:-1], self.model.head(), tokens[1:], ones)
        return np.concatenate([np.zeros(1, np.float32), logprobs.float().cpu().numpy()])

    @property
    def num_bytes(self) -> int:
        return self.running.num_bytes + self.prompts.num_bytes

    def flush(self) -> None:
        """Drop every key and value, and every copy made of the weights: they belong to one version (P11, P17)."""
        self._head = None
        if self._lean is not None:
            self._lean.unpack()
        self.running.clear()
        self.prompts.clear()

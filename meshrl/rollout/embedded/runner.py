"""From scheduled sequences to logits: one model call per step, for new contexts and running rows together.

Letters: T tokens of the step, N rows that sample a token, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.fast_decoder import FastDecoder
from meshrl.model.logprob import Head, token_logprobs
from meshrl.model.memory import token_bytes
from meshrl.model.routing import Routing
from meshrl.rollout.embedded.cache_bound import CacheBound
from meshrl.rollout.embedded.cached_attention import DecodeAttention, PrefillAttention, StepAttention
from meshrl.rollout.embedded.kv_cache import KVStore, RowCopy, plan_writes, tile_dtype
from meshrl.rollout.embedded.scheduler import Admission, Prefill, Sequence
from meshrl.rollout.embedded.step_arrays import StepArrays

_ROUTES = -1  # the layer of the KV cache whose keys are the experts that the routers selected


class Runner:
    """Owns the KV cache: `running` has a row for each running sequence, `prompts` one for each shared prompt.

    routing: whose selections are recorded for each token, next to its keys and values; None = none are."""

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        fast: FastDecoder | None,
        kv_cache_bytes: int | None = None,
        routing: Routing | None = None,
    ):
        self._routing = routing
        if routing is not None:
            routing.records = True
        self.model, self.device = model, device
        self._fast, self._hidden = fast, model.hidden if fast is None else fast.hidden
        self._head: Head | None = None  # prepared for these weights, like the fast decoder
        self.running, self.prompts = KVStore(), KVStore()
        stored = token_bytes(model, tile_dtype(device, model.head().weight.dtype))
        self.bound = CacheBound(kv_cache_bytes, stored, device, self.running, self.prompts)

    @torch.inference_mode()
    def step(self, running: list[Sequence], admission: Admission, arrays: StepArrays) -> torch.Tensor:
        """Compute the new contexts, and the last token of every row that ran before. Returns logits float[N, V] for all
        running rows, in their order. arrays: those of this step."""
        if self._head is None:
            self._head = self.model.head().ready()
            if self._fast is not None:
                self._fast.pack()
        rows = running[: len(running) - len(admission.joined)]
        hidden = self._compute(rows, admission.prefills, arrays)
        for sequence in rows:
            sequence.cached += 1
        return self._head.logits(self._last_states(hidden, len(rows), admission))

    def _compute(self, rows: list[Sequence], prefills: list[Prefill], arrays: StepArrays) -> torch.Tensor:
        """Final hidden states [T, D]: of all contexts, concatenated, then of one token per row."""
        if not rows and not prefills:  # all running rows have just joined, with a prompt that is computed already
            weight = self.model.head().weight
            return weight.new_empty(0, weight.shape[1])
        tokens = [prefill.ids for prefill in prefills] + [np.array([s.tokens[-1] for s in rows], np.int64)]
        positions = [np.arange(len(prefill.ids)) for prefill in prefills] + [
            np.array([s.cached for s in rows], np.int64)
        ]
        ids, places = arrays.add(np.concatenate(tokens)), arrays.add(np.concatenate(positions))
        context = self._context(rows, prefills, arrays)
        hidden = self._hidden(ids(), places(), context)
        if self._routing is not None:
            routes = self._routing.recorded().flatten(1)[:, None]  # [T, 1, L * K]
            context.write(_ROUTES, routes, routes[..., :1])
        return hidden

    def routes_of(self, row: int, length: int) -> np.ndarray | None:
        """int16[length, L, K]: the experts that were selected for the tokens in a running row's cache."""
        if self._routing is None or length == 0:
            return None
        routes = self.running.keys_of_row(_ROUTES, row, length).to("cpu", torch.int16).numpy()
        return routes.reshape(length, len(self._routing.routers), -1)

    def _last_states(self, hidden: torch.Tensor, num_rows: int, admission: Admission) -> torch.Tensor:
        """The state from which each running row samples: of its newest token, or of its last context token when it
        joins. Sequences that share a prompt get their copy of its keys and values here."""
        end, alone = 0, []
        for prefill in admission.prefills:
            end += len(prefill.ids)
            if prefill.prompt is None:
                alone.append(hidden[end - 1])
            else:
                prefill.prompt.last_hidden = hidden[end - 1].clone()
        if not admission.joined:
            return hidden[end:]
        unshared = iter(alone)
        states = [next(unshared) if prompt is None else prompt.last_hidden for _, prompt in admission.joined]
        copies = [(num_rows + i, p.row, p.length) for i, (_, p) in enumerate(admission.joined) if p is not None]
        self.running.copy_rows(self.prompts, copies, self.device)
        return torch.cat([hidden[end:], torch.stack(states)])

    def _context(
        self, rows: list[Sequence], prefills: list[Prefill], arrays: StepArrays
    ) -> PrefillAttention | DecodeAttention | StepAttention:
        if not rows:
            return self._prefill(prefills, arrays)
        decode = DecodeAttention(self.running, np.array([s.cached + 1 for s in rows], np.int64), arrays)
        return StepAttention(self._prefill(prefills, arrays), decode) if prefills else decode

    def _prefill(self, prefills: list[Prefill], arrays: StepArrays) -> PrefillAttention:
        lengths = [len(prefill.ids) for prefill in prefills]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        writes = []
        for store, shared in ((self.running, False), (self.prompts, True)):
            part = [i for i, prefill in enumerate(prefills) if (prefill.prompt is not None) == shared]
            if part:
                rows = np.concatenate([np.full(lengths[i], prefills[i].row, np.int64) for i in part])
                positions = np.concatenate([np.arange(lengths[i]) for i in part])
                source = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in part])
                writes.append((store, plan_writes(rows, positions, arrays, source)))
        state_rows = [(self.running if p.prompt is None else self.prompts, p.row) for p in prefills]
        return PrefillAttention(bounds.tolist(), self.device, writes, state_rows)

    @torch.inference_mode()
    def move_rows(self, running: list[RowCopy], prompts: list[RowCopy]) -> None:
        """Move rows as `Scheduler.compact` decided."""
        self.running.copy_rows(self.running, running, self.device)
        self.prompts.copy_rows(self.prompts, prompts, self.device)

    @torch.inference_mode()
    def score(self, ids: np.ndarray) -> np.ndarray:
        """Logprobs of ids[1:] given all earlier ids, at temperature 1, without a cache; float32[T], index 0 is 0."""
        tokens = torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)
        positions = torch.arange(len(ids), device=self.device)
        hidden = self._hidden(tokens, positions, PackedAttention([0, len(ids)], self.device))
        ones = torch.ones(len(ids) - 1, device=self.device)
        logprobs, _ = token_logprobs(hidden[:-1], self.model.head(), tokens[1:], ones)
        return np.concatenate([np.zeros(1, np.float32), logprobs.float().cpu().numpy()])

    @property
    def num_bytes(self) -> int:
        return self.running.num_bytes + self.prompts.num_bytes

    def flush(self) -> None:
        """Drop all keys, values and states, and all copies of the weights: they belong to one version."""
        self._head = None
        if self._fast is not None:
            self._fast.unpack()
        self.bound.clear()

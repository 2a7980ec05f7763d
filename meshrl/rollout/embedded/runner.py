"""From scheduled sequences to logits: one model call per step, for new contexts and running rows together.

Letters: T tokens of the step, N rows that sample a token, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from meshrl.core.device import has_triton, upload
from meshrl.model.causal import CausalModel
from meshrl.model.costs import token_bytes
from meshrl.model.fast_decoder import FastDecoder
from meshrl.model.inputs import model_kwargs, positions
from meshrl.model.logprob import Head
from meshrl.model.routing import Routing
from meshrl.rollout.embedded.cached_attention import (
    DecodeAttention,
    PrefillAttention,
    StepAttention,
    TiledAttention,
)
from meshrl.rollout.embedded.decode_graph import DecodeGraphs, StepArrays, padded
from meshrl.rollout.embedded.kv_cache import (
    CacheBound,
    KVStore,
    RowCopy,
    TileTable,
    plan_writes,
    rows_of_tiles,
    tile_format,
)
from meshrl.rollout.embedded.scheduler import Admission, Prefill, Sequence

_ROUTES = -1  # the layer of the KV cache whose keys are the experts that the routers selected


class Runner:
    """Owns the KV cache: `running` has a row for each running sequence, `prompts` one for each shared prompt.

    routing: whose selections are recorded for each token, next to its keys and values; None = none are."""

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        fast: FastDecoder | None,
        max_context_tokens: int,
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
        self.kernels_fit = routing is None and has_triton(device)  # all layers; prefill may show that one does not
        self._table, self._of_prompts = (
            TileTable(store, max_context_tokens, device) for store in (self.running, self.prompts)
        )
        self._graphs: DecodeGraphs | None = None
        if fast is not None and self.kernels_fit:
            self._graphs = DecodeGraphs(fast.hidden, partial(TiledAttention, self._table), device)
        self._addresses: list[int] = []  # of the weights that the graphs read
        self._ahead: torch.Tensor | None = None  # final states of the running rows, from `look_ahead`
        stored = token_bytes(model, tile_format(device, model.head().weight.dtype)[0])
        self.bound = CacheBound(kv_cache_bytes, stored, device, self.running, self.prompts)

    @torch.inference_mode()
    def step(self, running: list[Sequence], admission: Admission, arrays: StepArrays) -> torch.Tensor:
        """Compute the new contexts, and the last token of every row that ran before. Returns logits float[N, V] for all
        running rows, in their order. arrays: those of this step."""
        if self._head is None:
            self._head = self.model.head().ready()
            if self._fast is not None:
                self._fast.pack()
            if self._graphs is not None:
                addresses, self._addresses = self._addresses, [p.data_ptr() for p in self.model.parameters()]
                if addresses != self._addresses:
                    self._graphs.clear()
        rows, ahead = running[: len(running) - len(admission.joined)], self._ahead
        self._ahead = None
        if ahead is not None:
            hidden = ahead
            if admission.prefills:
                hidden = torch.cat([self._compute([], admission.prefills, arrays), ahead])
        else:
            hidden = self._compute(rows, admission.prefills, arrays)
            for sequence in rows:
                sequence.cached += 1
        return self._head.logits(self._last_states(hidden, len(rows), admission))

    def _compute(self, rows: list[Sequence], prefills: list[Prefill], arrays: StepArrays) -> torch.Tensor:
        """Final hidden states [T, D]: of all contexts, concatenated, then of one token per row."""
        if not rows and not prefills:  # all running rows have just joined, with a prompt that is computed already
            weight = self.model.head().weight
            return weight.new_empty(0, weight.shape[1])
        if self.kernels_fit and rows:
            self._locate(np.array([s.cached + 1 for s in rows], np.int64))
        tokens = [prefill.ids for prefill in prefills] + [np.array([s.tokens[-1] for s in rows], np.int64)]
        starts = np.array([0] * len(prefills) + [s.cached for s in rows], np.int64)
        lengths = np.array([len(prefill.ids) for prefill in prefills] + [1] * len(rows), np.int64)
        ids, places = arrays.add(np.concatenate(tokens)), arrays.add(positions(starts, lengths))
        kwargs = model_kwargs((prefill.request, 0, len(prefill.ids)) for prefill in prefills)
        sent = {name: arrays.add(array) for name, array in kwargs.items()}
        context = self._context(rows, prefills, arrays)
        hidden = self._hidden(ids(), places(), context, **{name: on_device() for name, on_device in sent.items()})
        if isinstance(context, PrefillAttention):
            self.kernels_fit &= context.kernels_fit
        if self._routing is not None:
            routes = self._routing.recorded().flatten(1)[:, None]  # [T, 1, L * K]
            context.write(_ROUTES, routes, routes[..., :1])
        return hidden

    def _locate(self, lengths: np.ndarray) -> None:
        """Make room for rows of these lengths, whose addresses the kernels get."""
        self.running.reserve(rows_of_tiles(lengths))
        self._table.update()

    @torch.inference_mode()
    def look_ahead(self, rows: list[Sequence], tokens: torch.Tensor) -> None:
        """Queue the forward of the next step for these rows, so that the device works while the host reads and records
        the tokens int64[N] of this one. A row that this token ends has none; for one that ends for another reason it
        is computed in vain."""
        goes_on = [len(s.tokens) + 1 < s.bounds.limit for s in rows]
        if self._graphs is None or not self.kernels_fit or not any(goes_on):
            return
        inputs = np.zeros((2, padded(len(rows))), np.int64)
        inputs[0, : len(rows)] = [s.cached * on for s, on in zip(rows, goes_on, strict=True)]
        inputs[1, : len(rows)] = inputs[0, : len(rows)] + goes_on
        self._locate(inputs[1, : len(rows)])
        (sent,) = upload([torch.from_numpy(inputs)], self.device)
        self._ahead = self._graphs.run(sent, tokens)
        for sequence, on in zip(rows, goes_on, strict=True):
            sequence.cached += on

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
        self._copy(self._table, self._of_prompts, copies)
        return torch.cat([hidden[end:], torch.stack(states)])

    def _context(
        self, rows: list[Sequence], prefills: list[Prefill], arrays: StepArrays
    ) -> PrefillAttention | DecodeAttention | StepAttention:
        if not rows:
            return self._prefill(prefills, arrays)
        lengths = np.array([s.cached + 1 for s in rows], np.int64)
        if self.kernels_fit:
            decode: DecodeAttention = TiledAttention(self._table, arrays.add(lengths))
        else:
            decode = DecodeAttention(self.running, lengths, arrays)
        return StepAttention(self._prefill(prefills, arrays), decode) if prefills else decode

    def _prefill(self, prefills: list[Prefill], arrays: StepArrays) -> PrefillAttention:
        lengths = np.array([len(prefill.ids) for prefill in prefills], np.int64)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        writes = []
        for store, shared in ((self.running, False), (self.prompts, True)):
            part = [i for i, prefill in enumerate(prefills) if (prefill.prompt is not None) == shared]
            if part:
                rows = np.repeat([prefills[i].row for i in part], lengths[part])
                in_rows, source = (positions(starts[part], lengths[part]) for starts in (0 * lengths, bounds))
                writes.append((store, plan_writes(rows, in_rows, arrays, source)))
        state_rows = [(self.running if p.prompt is None else self.prompts, p.row) for p in prefills]
        return PrefillAttention(bounds.tolist(), self.device, writes, state_rows)

    @torch.inference_mode()
    def move_rows(self, running: list[RowCopy], prompts: list[RowCopy], num_running: int) -> None:
        """Move rows as `Scheduler.compact` decided. num_running: rows that are left."""
        if self._ahead is not None:
            order = np.arange(num_running)
            for row, old, _ in running:
                order[row] = old
            (sent,) = upload([torch.from_numpy(order)], self.device)
            self._ahead = self._ahead.index_select(0, sent)
        self._copy(self._table, self._table, running)
        self._copy(self._of_prompts, self._of_prompts, prompts)

    def _copy(self, into: TileTable, source: TileTable, copies: list[RowCopy]) -> None:
        """Copy rows of keys, values and states; with kernels, by one launch for all layers. Then rows are not sorted,
        so no new row is an old one."""
        if not copies:
            return
        shapes = source.shapes
        if not self.kernels_fit or len(shapes) != 1:
            into.store.copy_rows(source.store, copies, self.device)
            return
        from meshrl.rollout.embedded.kernels import copy_rows  # Triton is not installed everywhere

        ((num_heads, size),) = shapes
        table = np.array(copies, np.int64).T.copy()
        lengths = np.zeros(table[0].max() + 1, np.int64)
        lengths[table[0]] = table[2]
        into.store.copy_states(source.store, copies)
        into.store.reserve(rows_of_tiles(lengths), source.store)
        source.update()
        into.update()
        (sent,) = upload([torch.from_numpy(table)], self.device)
        copy_rows(source.tables, into.tables, into.widths, sent, int(table[2].max()), num_heads, size)

    @property
    def num_bytes(self) -> int:
        return self.running.num_bytes + self.prompts.num_bytes

    def flush(self) -> None:
        """Drop all keys, values and states, and all copies of the weights: they belong to one version."""
        self._head = None
        self._ahead = None
        if self._fast is not None:
            self._fast.unpack()
        self.bound.clear()

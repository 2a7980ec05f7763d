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
from meshrl.model.inputs import Piece
from meshrl.model.logprob import Head
from meshrl.model.routing import Routing
from meshrl.plan.sizes import page_tokens
from meshrl.rollout.embedded.cached_attention import (
    DecodeAttention,
    KernelAttention,
    PageReads,
    Past,
    PrefillAttention,
    StepAttention,
)
from meshrl.rollout.embedded.decode_graph import DecodeGraphs, StepArrays, padded
from meshrl.rollout.embedded.kv_cache import AddressTable, CacheBound, KVPool, Places, cache_format
from meshrl.rollout.embedded.pages import PageTable, places_of, places_of_last
from meshrl.rollout.embedded.rows import Rows
from meshrl.rollout.embedded.scheduler import Admission

_FEW_EXTENTS = 4  # with more, pages are moved: products of a few pages each don't use all cores
_ROUTES = -1  # the layer of the KV cache whose keys are the experts that the routers selected


class Runner:
    """Owns the KV cache: `pool` has the pages of `table`, and a row of states for each running sequence; `snapshots`
    has states of contexts that sequences share.

    routing: whose selections are recorded for each token, next to its keys and values; None = none are. keeps_idle: as
    for PageTable."""

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        fast: FastDecoder | None,
        max_context_tokens: int,
        kv_cache_bytes: int | None = None,
        routing: Routing | None = None,
        keeps_idle: bool = False,
    ):
        self._routing = routing
        if routing is not None:
            routing.records = True
        self.model, self.device = model, device
        self._fast, self._hidden = fast, model.hidden if fast is None else fast.hidden
        self._head: Head | None = None  # prepared for these weights, like the fast decoder
        # Without the states at their end, the pages of a context are of no use.
        self.table = PageTable(page_tokens(device.type), max_context_tokens, keeps_idle and not model.has_states)
        self.pool, self.snapshots = (KVPool(self.table.page_tokens, lambda: self.table.num_pages) for _ in range(2))
        self.kernels_fit = routing is None and has_triton(device)  # all layers; prefill may show that one does not
        self._addresses = AddressTable(self.pool, self.table, device)
        self._reads: tuple[int, np.ndarray, PageReads] | None = None  # with the state of the table and the slots
        self._graphs: DecodeGraphs | None = None
        if fast is not None and self.kernels_fit:
            self._graphs = DecodeGraphs(fast.hidden, partial(KernelAttention, self._addresses), device)
        self._weights: list[int] = []  # addresses of those that the graphs read
        self._pointers: tuple[int, int] | None = None  # and of the tables
        self.ahead: torch.Tensor | None = None  # final states of the running rows, from `look_ahead`
        stored = token_bytes(model, cache_format(device, model.head().weight.dtype)[0])
        self.bound = CacheBound(kv_cache_bytes, stored, device, self.pool, self.snapshots)

    @torch.inference_mode()
    def step(self, rows: Rows, admission: Admission, arrays: StepArrays) -> torch.Tensor:
        """Compute the new contexts, and the last token of every row whose context is in the cache. Returns logits
        float[N, V] for all running rows, in their order. arrays: those of this step."""
        if self._head is None:
            self._head = self.model.head().ready()
            if self._fast is not None:
                self._fast.pack()
            if self._graphs is not None:
                addresses, self._weights = self._weights, [p.data_ptr() for p in self.model.parameters()]
                if addresses != self._weights:
                    self._graphs.clear()
        ahead, self.ahead = self.ahead, None
        first = 0 if ahead is None else len(rows) - len(admission.joined)
        decoding = slice(first, len(rows) - len(admission.sampled))
        hidden = self._compute(rows, decoding, admission, arrays)
        rows.cached[rows.slots[decoding]] += 1
        num_context = sum(len(prefill.ids) for prefill in admission.prefills)
        parts = [hidden[num_context:]] if ahead is None else [ahead, hidden[num_context:]]
        if admission.sampled:
            ends = np.cumsum([len(prefill.ids) for prefill in admission.prefills])[admission.sampled] - 1
            parts.append(torch.stack([hidden[end] for end in ends]))
        return self._head.logits(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _compute(self, rows: Rows, decoding: slice, admission: Admission, arrays: StepArrays) -> torch.Tensor:
        """Final hidden states [T, D]: of all contexts, concatenated, then of one token of the rows that decode."""
        slots, prefills = rows.slots[decoding], admission.prefills
        if not len(slots) and not prefills:
            weight = self.model.head().weight
            return weight.new_empty(0, weight.shape[1])
        self.pool.reserve()
        inputs, pieces = self.model.inputs, [Piece(p.request, p.start, p.start + len(p.ids)) for p in prefills]
        ids = arrays.add(np.concatenate([*(inputs.tokens(p.ids) for p in prefills), rows.last[slots]]))
        of_prefills, of_rows = inputs.positions(pieces), rows.cached[slots] + rows.offset[slots]
        of_rows = np.broadcast_to(of_rows, (*of_prefills.shape[:-1], len(slots)))
        positions = arrays.add(np.concatenate([of_prefills, of_rows], axis=-1))
        sent = {name: arrays.add(array) for name, array in inputs.kwargs(pieces).items()}
        context = self._context(rows, slots, admission, arrays)
        self.pool.copy_states(self.snapshots, [(self._row(rows, s), row) for s, row in admission.copies])
        forward = self._hidden if of_prefills.ndim == 1 and not sent else self.model.hidden
        hidden = forward(ids(), positions(), context, **{name: on_device() for name, on_device in sent.items()})
        if isinstance(context, PrefillAttention):
            self.kernels_fit &= context.kernels_fit
        if self._routing is not None:
            routes = self._routing.recorded().flatten(1)[:, None]  # [T, 1, L * K]
            context.write(_ROUTES, routes, routes[..., :1])
        return hidden

    @torch.inference_mode()
    def look_ahead(self, rows: Rows, goes_on: np.ndarray, tokens: torch.Tensor) -> None:
        """Queue the forward of the next step for the rows that go on, bool[N], so that the device works while the host
        reads and records the tokens int64[N] of this one; they have pages for it. For a row that ends it is computed in
        vain."""
        assert self._graphs is not None
        inputs = np.zeros((3, padded(len(rows))), np.int64)
        inputs[0, : len(rows)] = (rows.length + rows.offset)[rows.slots] * goes_on
        inputs[1, : len(rows)] = (rows.length[rows.slots] + 1) * goes_on
        inputs[2, : len(rows)] = rows.slots
        self.pool.reserve()
        (sent,) = self._addresses.update([torch.from_numpy(inputs)])
        if self._addresses.pointers != self._pointers:
            self._pointers = self._addresses.pointers
            self._graphs.clear()
        self.ahead = self._graphs.run(sent, tokens)
        rows.cached[rows.slots[goes_on]] += 1

    @property
    def looks_ahead(self) -> bool:
        return self._graphs is not None and self.kernels_fit

    def routes_of(self, slot: int, length: int) -> np.ndarray | None:
        """int16[length, L, K]: the experts that were selected for the tokens in a running row's cache."""
        if self._routing is None or length == 0:
            return None
        places = torch.from_numpy(np.stack(places_of(self.table, slot, np.arange(length)))).to(self.device)
        routes = self.pool.gather(_ROUTES, Places(lambda: places))[0].to("cpu", torch.int16).numpy()
        return routes.reshape(length, len(self._routing.routers), -1)

    def _context(
        self, rows: Rows, slots: np.ndarray, admission: Admission, arrays: StepArrays
    ) -> PrefillAttention | DecodeAttention | StepAttention:
        if not len(slots):
            return self._prefill(rows, admission, arrays)
        lengths = arrays.add(rows.cached[slots] + 1)
        if self.kernels_fit and self.pool.layers:  # the first step shows whether they fit, and allocates the pages
            self._addresses.update([])
            decode: DecodeAttention = KernelAttention(self._addresses, arrays.add(slots), lengths)
        else:
            reads = self._reads_of(slots)  # it may move pages
            places = Places(arrays.add(places_of_last(self.table, slots, rows.cached[slots])))
            decode = DecodeAttention(self.pool, reads, places, lengths)
        return StepAttention(self._prefill(rows, admission, arrays), decode) if admission.prefills else decode

    def _reads_of(self, slots: np.ndarray) -> PageReads:
        seen = self._reads
        if seen is None or seen[0] != self.table.num_changes or not np.array_equal(seen[1], slots):
            self.pool.forget_reads()
            reads = PageReads(self.table, slots, self.device)
            if len(reads.extents) > _FEW_EXTENTS and self.device.type == "cpu":
                self.pool.copy_pages(self.table.gather())
                reads = PageReads(self.table, slots, self.device)
            self._reads = seen = self.table.num_changes, slots, reads
        return seen[2]

    def _prefill(self, rows: Rows, admission: Admission, arrays: StepArrays) -> PrefillAttention:
        prefills, states, past = admission.prefills, [], None
        written = [places_of(self.table, p.slot, np.arange(p.start, p.start + len(p.ids))) for p in prefills]
        if any(p.start for p in prefills):
            pasts = [places_of(self.table, p.slot, np.arange(p.start)) for p in prefills]
            past = Past(Places(arrays.add(np.concatenate(pasts, axis=1))), [p.start for p in prefills])
        for p in prefills if self.model.has_states else ():
            snapshot = [] if p.snapshot is None else [(self.snapshots, p.snapshot)]
            states.append([(self.pool, self._row(rows, sequence)) for sequence in p.sequences] + snapshot)
        lengths, places = [len(p.ids) for p in prefills], Places(arrays.add(np.concatenate(written, axis=1)))
        mutual = self.model.inputs.mutual(Piece(p.request, p.start, p.start + len(p.ids)) for p in prefills)
        return PrefillAttention(lengths, self.device, self.pool, places, past, states, mutual)

    def _row(self, rows: Rows, sequence: object) -> int:
        return next(row for row, s in enumerate(rows.sequences) if s is sequence)

    @torch.inference_mode()
    def move_rows(self, order: np.ndarray) -> None:
        """Move states, and what is computed ahead, as `Scheduler.compact` decided."""
        if self.ahead is not None:
            (sent,) = upload([torch.from_numpy(order)], self.device)
            self.ahead = self.ahead.index_select(0, sent)
        if self.model.has_states:
            self.pool.copy_states(self.pool, [(row, old) for row, old in enumerate(order.tolist()) if row != old])

    @property
    def num_bytes(self) -> int:
        return self.pool.num_bytes + self.snapshots.num_bytes

    def flush(self) -> None:
        """Drop all keys, values and states, and all copies of the weights: they belong to one version."""
        self._head = self.ahead = self._reads = None
        if self._fast is not None:
            self._fast.unpack()
        self.bound.clear()

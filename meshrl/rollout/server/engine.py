"""The engine of every sampler that is a server: vLLM, SGLang, or any endpoint. A Dialect describes the server.

Ids go in and come out; nothing is tokenized. Logprobs are those of the distribution that was sampled from, temperature
applied (P2).

Weights that change under running requests (pause "keep", sync, resume): the server drops their keys and values with
its cache and computes them again with the new weights, so every logprob is exactly that of the version beside it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import aclosing, suppress

import numpy as np

from meshrl.core.errors import CapabilityError, EngineEnded, StaleWeightsError
from meshrl.core.types import Media, Request, Turn
from meshrl.rollout.admission import Bounds, bounds_of, check_admission
from meshrl.rollout.base import EngineStats, PauseMode, check_parts
from meshrl.rollout.foreign.weights import ServerWeights
from meshrl.rollout.server.answer import Answer, Labels
from meshrl.rollout.server.dialect import Dialect
from meshrl.rollout.server.gate import Gate
from meshrl.rollout.stop_strings import StopSearch, StopStrings
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Ack, Layout, SyncHeader

RELEASABLE = {"weights", "kv_cache"}  # parts whose memory a server can release; it keeps its graphs


class ServerEngine:
    """rollout.base.RolloutEngine over a server.

    Consumes requests as they come; each is a stream of the server. A pause, a sync and released memory shut a gate in
    this process, where requests wait; `resume`, `commit`, `cancel` and `restore` open it. When a server that is a child
    of this process ends, all calls raise EngineEnded.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        max_running: int,
        vocab_size: int,
        keep_weights: bool = False,
        adapter_scale: float | None = None,
        stop_strings: StopStrings | None = None,
    ):
        """keep_weights: also in this machine's memory, for syncs that carry changes only. adapter_scale: alpha / rank
        of the adapters that such syncs carry, which this process merges into the base; None = they carry none."""
        self.engine_id, self.capabilities = dialect.http.name, dialect.capabilities
        self.max_context_tokens = max_context_tokens
        self._dialect = dialect
        self._stop_token_ids, self._vocab_size, self._max_running = stop_token_ids, vocab_size, max_running
        self._stop_strings = stop_strings or StopStrings()
        self._gate = Gate(dialect.abort)
        self._weights = ServerWeights(dialect.call_workers, self.engine_id, keep_weights, adapter_scale)
        self._run = secrets.token_hex(4)  # in the labels, so that another client's weights have other ones
        self._labels: dict[str, int] = {}
        self._released: set[str] = set()
        self._awaits_sync = False  # the weights' memory was released: nothing may be computed before a full sync

    # ---- generation

    async def generate(self, request: Request) -> Turn:
        """Sample one turn. Waits while paused, while a sync is open, and while memory is released."""
        check_admission(request, self.engine_id, self._weights.expected, self._gate.closed, self._gate.ids)
        bounds = bounds_of(request, self._stop_token_ids, self.max_context_tokens, self._vocab_size)
        self._dialect.check(request, bounds)
        search = self._stop_strings.search(request)
        if await self._gate.admitted(request.id):
            with self._gate.sending(request.id):
                return await self._sample(request, bounds, search)
        answer = Answer(request, bounds, self._dialect.name, self._labels)
        answer.reason = "abort"
        return answer.turn(self.engine_id)

    async def _sample(self, request: Request, bounds: Bounds, search: StopSearch | None) -> Turn:
        versions: Labels | int = self._weights.version if self._dialect.loaded_label is None else self._labels
        answer = Answer(request, bounds, self._dialect.name, versions, search)
        async with aclosing(self._dialect.stream(request, bounds)) as parts:
            async for part in parts:
                self._gate.count_tokens(answer.add(part))
                if answer.is_over:
                    await self._dialect.abort([request.id])
        turn = answer.turn(self.engine_id)
        self._gate.count_turn(request, turn)
        return turn

    async def score(self, ids: np.ndarray, media: dict[str, Media] | None = None) -> np.ndarray:
        """Teacher-forced logprobs at temperature 1, float32[T], from no cache at all; index 0 is 0.

        Servers need room for one more token, so a row may have max_context_tokens - 1 ids at most.
        """
        if media:
            raise CapabilityError(f"score() was given media; {self._dialect.name} takes text only")
        if self.capabilities.score and (self._weights.version < 0 or self._released):
            need = f"restore {', '.join(sorted(self._released))}" if self._released else "sync weights"
            raise StaleWeightsError(f"{self.engine_id} has nothing usable to score with; {need} first")
        row = np.asarray(ids)
        bounds_of(Request(id="score", context_ids=row), (), self.max_context_tokens, self._vocab_size)
        return await self._dialect.score(row.tolist())

    async def abort(self, ids: Sequence[str] | None = None) -> int:
        """End these requests (None = all), sent or not; returns how many there were."""
        return await self._gate.abort(ids)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop: wait = running requests finish first, abort = all return now, keep = all stay in place.

        Raises: CapabilityError where requests can't be kept in place.
        """
        if mode == "keep" and not self.capabilities.in_flight:
            raise CapabilityError(f"{self.engine_id} can't hold requests in place (capabilities.in_flight)")
        await self._gate.pause(mode)
        if mode == "keep":
            await self._dialect.hold()

    async def resume(self) -> None:
        self._gate.pause_mode = None
        await self._go_on()

    async def _hold(self) -> None:
        """From here on nothing is sent or computed; running requests stay in place, or have finished."""
        self._gate.shut()
        if not self.capabilities.in_flight:
            await self._gate.drained()
        await self._dialect.hold()

    async def _go_on(self) -> None:
        """Let the server compute and requests in, unless something else still holds them."""
        if self._released or self._awaits_sync or self._weights.expected != self._weights.version:
            return
        if self._gate.pause_mode != "keep":
            await self._dialect.go_on()
        if self._gate.pause_mode is None:
            self._gate.open()

    # ---- weights

    def trust_loaded_weights(self, version: int = 0) -> None:
        """Sample with the weights that the server loaded at its start, as this version, until a sync begins."""
        self._weights.trust(version)
        self._labels = {self._dialect.loaded_label or "": version}

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with what the server would load of it, both ways. Raises: UnloadedParamsError."""
        await self._hold()
        try:
            await self._weights.reconcile(layout)
        finally:
            await self._go_on()

    async def begin(self, header: SyncHeader) -> None:
        """Hold all requests, and take this version's transfers."""
        await self._hold()
        await self._dialect.begin_update(self._label(header.version), "kv_cache" not in self._released)
        await self._weights.begin(header)

    async def receive(self, delivery: Delivery) -> None:
        await self._weights.receive(delivery)

    async def commit(self) -> Ack:
        """Read every parameter back, make the version visible, go on. By then every cache was dropped (P17)."""
        ack = await self._weights.commit()
        await self._dialect.end_update(self._label(ack.version))
        self._labels[self._label(ack.version)] = ack.version
        self._awaits_sync = False
        await self._go_on()
        return ack

    async def cancel(self) -> None:
        """The weights are mixed now: all requests return what they have (abort), and none is taken until the next full
        sync."""
        self._gate.shut()
        try:
            await self._weights.cancel()
        finally:  # also when that failed, requests must not wait for ever
            await self.abort()
            self._awaits_sync = False  # no request is left that could be computed
            await self._go_on()

    def _label(self, version: int) -> str:
        return f"{self._run}:{version}"

    # ---- memory and the rest

    async def release(self, parts: set[str]) -> int:
        """Free parts of {weights, kv_cache, graphs}; returns bytes freed, over all workers. graphs frees nothing.

        Running requests stay in place and lose their cache, or finish first; later ones wait.
        """
        self._check_parts(parts)
        new = parts & RELEASABLE - self._released
        if not new:
            return 0
        self._gate.shut()
        if self._dialect.drains_before_release:
            await self._gate.drained()
        await self._hold()
        if "weights" in new:
            self._weights.drop()
            self._awaits_sync = True
        self._released |= new
        return await self._dialect.release(new)

    async def restore(self, parts: set[str]) -> int:
        """Take parts back; returns bytes taken. Weights wait for the next full sync."""
        self._check_parts(parts)
        back = parts & self._released
        taken = await self._dialect.restore(back) if back else 0
        self._released -= back
        await self._go_on()
        return taken

    def _check_parts(self, parts: set[str]) -> None:
        check_parts(parts)
        if not self.capabilities.release:
            raise CapabilityError(f"{self.engine_id} can't release its memory: {self._dialect.no_release}")

    def stats(self) -> EngineStats:
        return self._gate.stats(self._weights.version, self._max_running)

    async def close(self) -> None:
        """End all requests (abort), and the server if it is this engine's own."""
        self._gate.closed = True
        try:
            with suppress(EngineEnded):
                await self.abort()
        finally:
            self._weights.close()
            await self._dialect.close()

"""The SGLang engine: a client of one SGLang server, which is a child of this process or was there before it.

Ids go in and come out; nothing is tokenized. Logprobs are those of the distribution that was sampled from, temperature
applied (P2), which is what SGLang returns unless SGLANG_RETURN_ORIGINAL_LOGPROB is set.

Weights that change under running requests (pause "keep", sync, resume): SGLang puts them back into its queue
("retract"), without their keys and values, and computes those again from their tokens with the new weights; so every
logprob is exactly that of the version beside it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from meshrl.core.errors import CapabilityError, RequestError, StaleWeightsError, SyncError
from meshrl.core.types import Media, Request, Turn
from meshrl.rollout.accept import Bounds, bounds_of
from meshrl.rollout.base import Capabilities, EngineStats, PauseMode, check_parts
from meshrl.rollout.foreign.adapted import remote_weights
from meshrl.rollout.foreign.desk import Desk, ended_unsent, watched
from meshrl.rollout.http import HttpClient
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.sglang.facts import ServerFacts
from meshrl.rollout.sglang.requests import MIXTURE, Answer, body_of, check_capabilities, scores_of, scoring_body
from meshrl.rollout.sglang.workers import Workers
from meshrl.rollout.stop_strings import StopSearch, StopStrings
from meshrl.sync.manifest import Ack, Layout, SyncHeader
from meshrl.sync.receive import Bucket

LENT = {"weights", "kv_cache"}  # SGLang's own names for them; it keeps its graphs
_CONTROL_S = 600.0  # for one command; the run's phases have deadlines of their own, which come first


class SglangEngine:
    """rollout.base.RolloutEngine over an SGLang server.

    Consumes requests as they come; each is a stream of the server. What holds them back (a pause, a sync, lent memory)
    closes a gate in this process; `resume`, `commit`, `cancel` and `restore` open it. The server's end raises
    EngineEnded in all of them.
    """

    def __init__(
        self,
        http: HttpClient,
        facts: ServerFacts,
        *,
        engine_id: str,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        max_running: int,
        vocab_size: int,
        keep_weights: bool = False,
        adapter_scale: float | None = None,
        server: ServerProcess | None = None,
        stop_strings: StopStrings | None = None,
    ):
        """keep_weights: also in this machine's memory, for syncs of changes alone. adapter_scale: alpha / rank of
        the adapters that come then, for this process to add to the base; None = none come. server: ended by `close`;
        None = it belongs to somebody else."""
        self.capabilities = Capabilities(
            release=facts.lends_memory,
            in_flight=True,
            resident_digest=True,
            score=True,
            tp=True,
            continues_exactly=facts.deterministic,
        )
        self.engine_id, self.max_context_tokens = engine_id, max_context_tokens
        self._http, self._facts, self._server = http, facts, server
        self._stop_token_ids, self._vocab_size, self._max_running = stop_token_ids, vocab_size, max_running
        self._stop_strings = stop_strings or StopStrings()
        self._desk = Desk(engine_id, self._abort_sent)
        self._run = secrets.token_hex(4)  # in rids and version labels, so that another client's are told apart
        self._rids: dict[str, str] = {}
        self._num_rids = 0
        self._labels: dict[str, int] = {}  # what the server calls each version
        self._workers = Workers(self._post, facts.tp_size)
        self._weights = remote_weights(self._workers.call, engine_id, keep_weights, adapter_scale)
        self._released: set[str] = set()
        self._awaits_sync = False  # the memory of the weights has been lent: nothing is computed before a full sync
        self._session = False
        self._attached = server is not None  # whether no client was there before this one

    # ---- generation

    async def generate(self, request: Request) -> Turn:
        """Sample one turn. Waits while paused, while a sync is open, and while the cache's memory is lent."""
        self._desk.accept(request, self._weights.expected)
        bounds = bounds_of(request, self._stop_token_ids, self.max_context_tokens, self._vocab_size)
        check_capabilities(request, bounds)
        search = self._stop_strings.search(request)
        if not await self._desk.let_in(request.id):
            return ended_unsent(request, self.engine_id)
        rid = self._rids[request.id] = self._new_rid()
        try:
            with self._desk.sending(request.id):
                return await self._sample(request, bounds, rid, search)
        finally:
            del self._rids[request.id]

    async def _sample(self, request: Request, bounds: Bounds, rid: str, search: StopSearch | None) -> Turn:
        answer = Answer(request, bounds, self._labels, search)
        async with watched(self._server):
            async for event in self._http.stream("/generate", body_of(request, bounds, rid)):
                self._desk.count_tokens(answer.take(event))
                if answer.is_over:
                    await self._post("/abort_request", {"rid": rid})
        turn = answer.turn(self.engine_id)
        self._desk.count_turn(request, turn)
        return turn

    def _new_rid(self) -> str:
        self._num_rids += 1
        return f"{self._run}-{self._num_rids:012d}"

    async def score(self, ids: np.ndarray, media: dict[str, Media] | None = None) -> np.ndarray:
        """Teacher-forced logprobs at temperature 1, float32[T], from no cache at all; index 0 is 0.

        SGLang keeps a place for the next token, so a row may have max_context_tokens - 1 ids at most.
        """
        if media:
            raise CapabilityError("score() was given media; the SGLang engine takes text only")
        if self._weights.version < 0 or self._released:
            need = f"restore {', '.join(sorted(self._released))}" if self._released else "sync weights"
            raise StaleWeightsError(f"{self.engine_id} has nothing usable to score with; {need} first")
        row = np.asarray(ids)
        bounds_of(Request(id="score", context_ids=row), (), self.max_context_tokens, self._vocab_size)
        return scores_of(await self._post("/generate", scoring_body(row.tolist(), self._new_rid())), row.tolist())

    async def abort(self, ids: Sequence[str] | None = None) -> int:
        """End these requests (None = all), sent or not; returns how many there were."""
        return await self._desk.end(ids)

    async def _abort_sent(self, ids: list[str]) -> None:
        if len(ids) == self._desk.num_sent:
            await self._post("/abort_request", {"abort_all": True})
        else:
            await asyncio.gather(*(self._post("/abort_request", {"rid": self._rids[name]}) for name in ids))

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop: wait = who runs finishes first, abort = all return now, keep = all stay in place."""
        await self._desk.pause(mode)
        if mode == "keep":
            await self._hold()

    async def resume(self) -> None:
        self._desk.resume()
        await self._go_on()

    async def _hold(self) -> None:
        """Nothing is computed from here on; who runs waits in the server's queue with its tokens."""
        self._desk.shut()
        await self._post("/pause_generation", {"mode": "retract"})

    async def _go_on(self) -> None:
        """Let the server compute and requests in, unless something else still holds them."""
        if self._released or self._awaits_sync or self._weights.expected != self._weights.version:
            return
        if not self._desk.keeps_in_place:
            await self._post("/continue_generation", {})
        if not self._desk.paused:
            self._desk.open()

    # ---- weights

    def trust_loaded_weights(self, version: int = 0) -> None:
        """Sample with the weights that were loaded from the folder, as this version, until a sync begins."""
        self._weights.trust(version)
        self._labels = {self._facts.weight_version: version}

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with what SGLang's loader does with it, both ways. Raises: UnloadedParamsError."""
        await self._hold()
        async with self._update():
            await self._weights.reconcile(layout)
        await self._go_on()

    async def begin(self, header: SyncHeader) -> None:
        """Hold all requests, and take this version's buckets. The cache is dropped with the last of them (P17)."""
        await self._hold()
        await self._open_session()
        await self._weights.begin(header)

    async def receive(self, bucket: Bucket) -> None:
        await self._weights.receive(bucket)

    async def commit(self) -> Ack:
        """Read every parameter back, drop every cache, make the version visible, go on."""
        version = self._weights.expected
        label = f"{self._run}:{version}"
        self._workers.finishing = {"weight_version": label, "flush_cache": "kv_cache" not in self._released}
        ack = await self._weights.commit()
        await self._close_session()
        held = (await self._get("/model_info"))["weight_version"]
        if held != label:
            raise SyncError(f"{self.engine_id}: version {version} was labelled {label!r}, and SGLang has {held!r}")
        self._labels[label] = version
        self._awaits_sync = False
        await self._go_on()
        return ack

    async def cancel(self) -> None:
        """The weights are a mixture now: all requests return what they have (abort), and none is taken until the
        next full sync."""
        self._desk.shut()
        self._weights.drop()
        try:
            await self._close_session()
            await self._post("/update_weight_version", {"new_version": MIXTURE, "abort_all_requests": False})
            await self._post("/continue_generation", {})  # a request that came during the pause can't be aborted in it
        finally:  # whoever waits must not wait for ever
            await self.abort()
            self._awaits_sync = False  # nobody is left to compute
            await self._go_on()

    @asynccontextmanager
    async def _update(self) -> AsyncIterator[None]:
        await self._open_session()
        try:
            yield
        finally:
            await self._close_session()

    async def _open_session(self) -> None:
        """Releases from 0.5.21 on take weights between a begin and an end."""
        if self._facts.has_sessions:
            await self._close_session()
            if not self._attached:
                self._attached = True
                with suppress(RequestError):  # none is open, unless a client that died has left one
                    await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {})
            self._session = True

    async def _close_session(self) -> None:
        if self._session:
            self._session = False
            await self._post("/end_weight_update", {})

    # ---- memory and the rest

    async def release(self, parts: set[str]) -> int:
        """Free parts of {weights, kv_cache, graphs}; requests in place wait, and their caches are computed again.

        Returns bytes freed, as SGLang measured them when it took them. graphs frees nothing.
        """
        self._check_parts(parts)
        new = parts & LENT - self._released
        if not new:
            return 0
        await self._hold()
        if "weights" in new:
            self._weights.drop()
            self._awaits_sync = True
        await self._post("/release_memory_occupation", {"tags": sorted(new)})
        self._released |= new
        return self._facts.num_bytes(new)

    async def restore(self, parts: set[str]) -> int:
        """Take parts back; returns bytes taken. Weights wait for the next full sync."""
        self._check_parts(parts)
        back = parts & self._released
        if back:
            await self._post("/resume_memory_occupation", {"tags": sorted(back)})
            self._released -= back
        await self._go_on()
        return self._facts.num_bytes(back)

    def _check_parts(self, parts: set[str]) -> None:
        check_parts(parts)
        if not self.capabilities.release:
            raise CapabilityError(
                f"{self.engine_id} can't lend its memory: the server runs without --enable-memory-saver"
            )

    def stats(self) -> EngineStats:
        return self._desk.stats(self._weights.version, self._max_running)

    async def close(self) -> None:
        """End all requests (abort), and the server if it is this engine's own."""
        self._desk.closed = True
        if self._server is None or not self._server.has_ended():
            await self.abort()
        await self._http.close()
        self._weights.close()
        self._workers.close()
        if self._server is not None:
            self._server.close()

    async def _get(self, path: str) -> Any:
        async with watched(self._server):
            return await self._http.get(path, timeout_s=_CONTROL_S)

    async def _post(self, path: str, body: Any) -> Any:
        async with watched(self._server):
            return await self._http.post(path, body, timeout_s=_CONTROL_S)

"""The vLLM engine: a client of one vLLM server that is a child of this process, with the weights of a trainer.

Ids go in and come out; nothing is tokenized. Logprobs are those of the distribution that was sampled from, temperature
applied (`--logprobs-mode processed_logprobs`, P2).

Weights that change under running requests (pause "keep", sync, resume): vLLM drops their keys and values with its
prefix cache and computes them again, so every logprob is exactly that of the version beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.errors import CapabilityError, EngineFailure, StaleWeightsError, SyncError
from meshrl.core.types import Media, Request, Turn
from meshrl.rollout.accept import Bounds, bounds_of
from meshrl.rollout.base import Capabilities, EngineStats, PauseMode, check_parts
from meshrl.rollout.foreign.adapted import remote_weights
from meshrl.rollout.foreign.desk import Desk, ended_unsent, watched
from meshrl.rollout.http import HttpClient
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.stop_strings import StopSearch, StopStrings
from meshrl.rollout.vllm.requests import Answer, body_of, check_capabilities
from meshrl.sync.manifest import Ack, Layout, SyncHeader
from meshrl.sync.receive import Bucket

LENT = {"weights", "kv_cache"}  # graphs are a GPU's affair and stay
_CONTROL_S = 600.0  # for one command; the run's phases have deadlines of their own, which come first
_ID_PREFIX = "generate-tokens-"  # vLLM puts it before the ids of its token endpoint


class VllmEngine:
    """rollout.base.RolloutEngine over a vLLM server.

    Consumes requests as they come; each is a stream of the server. What holds them back (a pause, a sync, lent memory)
    closes a gate in this process; `resume`, `commit`, `cancel` and `restore` open it. The server's end raises
    EngineFailure in all of them.
    """

    def __init__(
        self,
        server: ServerProcess,
        socket: Path,
        *,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        max_running: int,
        vocab_size: int,
        capabilities: Capabilities,
        keep_weights: bool = False,
        adapter_scale: float | None = None,
        owns_server: bool = True,
        stop_strings: StopStrings | None = None,
    ):
        """socket: that the server listens on. keep_weights: also in this machine's memory, for syncs of changes alone.
        adapter_scale: alpha / rank of the adapters that come then, for this process to add to the base; None = none
        come. owns_server: `close` ends it."""
        self.capabilities = capabilities
        self.engine_id, self.max_context_tokens = server.name, max_context_tokens
        self._server, self._owns_server = server, owns_server
        self._stop_token_ids, self._vocab_size, self._max_running = stop_token_ids, vocab_size, max_running
        self._stop_strings = stop_strings or StopStrings()
        self._http = HttpClient(server.name, socket=socket)
        self._weights = remote_weights(self._call_workers, server.name, keep_weights, adapter_scale)
        self._trusted = -1
        self._released: set[str] = set()
        self._awaits_sync = False  # the memory of the weights has been lent: nothing is computed before a full sync
        self._desk = Desk(server.name, self._abort_sent)

    # ---- generation

    async def generate(self, request: Request) -> Turn:
        """Sample one turn. Waits while paused, while a sync is open, and while the cache's memory is lent."""
        self._desk.accept(request, self._weights.expected)
        check_capabilities(request)
        bounds = bounds_of(request, self._stop_token_ids, self.max_context_tokens, self._vocab_size)
        search = self._stop_strings.search(request)
        if not await self._desk.let_in(request.id):
            return ended_unsent(request, self.engine_id)
        with self._desk.sending(request.id):
            return await self._sample(request, bounds, search)

    async def _sample(self, request: Request, bounds: Bounds, search: StopSearch | None) -> Turn:
        answer = Answer(request, bounds, self._trusted, search)
        async with watched(self._server):
            async for event in self._http.stream("/inference/v1/generate", body_of(request, bounds)):
                self._desk.count_tokens(answer.take(event))
                if answer.is_over:
                    await self._abort_sent([request.id])
        turn = answer.turn(self.engine_id)
        self._desk.count_turn(request, turn)
        return turn

    async def score(self, ids: np.ndarray, media: dict[str, Media] | None = None) -> np.ndarray:
        """Teacher-forced logprobs at temperature 1, float32[T], from no cache at all; index 0 is 0.

        vLLM samples a token with it, so a row may have max_context_tokens - 1 ids at most.
        """
        if media:
            raise CapabilityError("score() was given media; the vLLM engine takes text only")
        if self._weights.version < 0 or self._released:
            need = f"restore {', '.join(sorted(self._released))}" if self._released else "sync weights"
            raise StaleWeightsError(f"{self.engine_id} has nothing usable to score with; {need} first")
        row = np.asarray(ids)
        bounds_of(Request(id="score", context_ids=row), (), self.max_context_tokens, self._vocab_size)
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._post("/inference/v1/generate", {"token_ids": row.tolist(), "sampling_params": sampling})
        scores = np.zeros(len(row), np.float32)
        for place, entry in enumerate(answer["prompt_logprobs"]):
            if entry is not None:
                scores[place] = min(entry[str(row[place])]["logprob"], 0.0)
        return scores

    async def abort(self, ids: Sequence[str] | None = None) -> int:
        """End these requests (None = all), sent or not; returns how many there were."""
        return await self._desk.end(ids)

    async def _abort_sent(self, ids: list[str]) -> None:
        await self._post("/abort_requests", {"request_ids": [_ID_PREFIX + name for name in ids]})

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop: wait = who runs finishes first, abort = all return now, keep = all stay in place."""
        await self._desk.pause(mode)
        if mode == "keep":
            await self._hold()

    async def resume(self) -> None:
        self._desk.resume()
        await self._go_on()

    async def _hold(self) -> None:
        """Nothing is computed from here on; who runs stays in place, with its cache."""
        await self._post("/pause", params={"mode": "keep", "clear_cache": False})

    async def _go_on(self) -> None:
        """Let the server step and requests in, unless something else still holds them."""
        if self._released or self._awaits_sync or self._weights.expected != self._weights.version:
            return
        if not self._desk.keeps_in_place:
            await self._post("/resume")
        if not self._desk.paused:
            self._desk.open()

    # ---- weights

    def trust_loaded_weights(self, version: int = 0) -> None:
        """Sample with the weights that were loaded from the folder, as this version, until a sync begins."""
        self._weights.trust(version)
        self._trusted = version

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with what vLLM's loader does with it, both ways. Raises: UnloadedParamsError."""
        await self._weights.reconcile(layout)

    async def begin(self, header: SyncHeader) -> None:
        """Hold all requests, drop every cache (P17), and take this version's buckets."""
        self._desk.shut()
        await self._hold()
        await self._weights.begin(header)
        await self._drop_caches()

    async def receive(self, bucket: Bucket) -> None:
        await self._weights.receive(bucket)

    async def commit(self) -> Ack:
        """Read every parameter back, make the version visible, go on."""
        ack = await self._weights.commit()
        await self._post("/update_weight_version", {"new_version": str(ack.version)})
        self._awaits_sync = False
        await self._go_on()
        return ack

    async def cancel(self) -> None:
        """The weights are a mixture now: all requests return what they have (abort), and none is taken until the
        next full sync."""
        try:
            await self._weights.cancel()
        finally:  # whoever waits must not wait for ever
            await self.abort()
            self._awaits_sync = False  # nobody is left to compute
            await self._go_on()

    # ---- memory and the rest

    async def release(self, parts: set[str]) -> int:
        """Free parts of {weights, kv_cache, graphs}. Who was sent finishes first, who comes later waits.

        Returns bytes freed, over all workers. graphs frees nothing.
        """
        self._check_parts(parts)
        new = parts & LENT - self._released
        if not new:
            return 0
        self._desk.shut()
        await self._desk.drained()  # vLLM has died over requests that it held in place while its memory went
        await self._hold()
        if "weights" in new:
            self._weights.drop()
            self._trusted, self._awaits_sync = -1, True
        await self._drop_caches()
        self._released |= new
        return await self._memory("meshrl_release", new)

    async def restore(self, parts: set[str]) -> int:
        """Take parts back; returns bytes taken. Weights wait for the next full sync."""
        self._check_parts(parts)
        back = parts & self._released
        taken = await self._memory("meshrl_restore", back) if back else 0
        self._released -= back
        await self._go_on()
        return taken

    async def _memory(self, method: str, parts: set[str]) -> int:
        answers = await self._call_workers(method, {"parts": sorted(parts)})
        for answer in answers:
            if "error" in answer:
                raise EngineFailure(f"{self.engine_id}: {answer['error']}")
        return sum(answer["num_bytes"] for answer in answers)

    async def _drop_caches(self) -> None:
        """Forget what all tokens left in the cache; who runs is computed again. Nothing may be computing."""
        reset = await self._post("/reset_prefix_cache", params={"reset_running_requests": True})
        if not reset["success"]:
            raise SyncError(f"{self.engine_id}: vLLM could not drop its prefix cache, which belongs to the old weights")

    def _check_parts(self, parts: set[str]) -> None:
        check_parts(parts)
        if not self.capabilities.release:
            raise CapabilityError(
                f"{self.engine_id} can't lend its memory: the server runs without --enable-sleep-mode; "
                "use rollout.release_memory"
            )

    def stats(self) -> EngineStats:
        return self._desk.stats(self._weights.version, self._max_running)

    async def close(self) -> None:
        """End all requests (abort) and the server."""
        self._desk.closed = True
        if not self._server.has_ended():
            await self.abort()
        await self._http.close()
        self._weights.close()
        if self._owns_server:
            self._server.close()

    async def _call_workers(self, method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        answer = await self._post("/collective_rpc", {"method": method, "kwargs": arguments})
        return list(answer["results"])

    async def _post(self, path: str, body: Any = None, params: dict[str, Any] | None = None) -> Any:
        async with watched(self._server):
            return await self._http.post(path, body, params, timeout_s=_CONTROL_S)

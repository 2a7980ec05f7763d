"""The embedded engine: continuous batching over the model's own Transformers module, in this process and thread.

Callers use `await generate(request)`, or `submit` and `step` without an event loop.

Weights may change while requests run: the KV cache is dropped with the old weights and computed again from the tokens
with the new ones. So every logprob belongs exactly to the recorded weight version, which a cache of mixed versions
could not guarantee.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import empty_cache, fetched, return_freed_memory
from meshrl.core.errors import MeshrlError, SyncError
from meshrl.core.types import Request, StopReason, Turn
from meshrl.model.causal import CausalModel
from meshrl.model.facts import ModelFacts
from meshrl.model.fast_decoder import FastDecoder, fast_decoder
from meshrl.model.limits import limits_of
from meshrl.model.lora import init_adapters, randomize_adapters
from meshrl.model.recipe import DTYPES, Recipe, build_model
from meshrl.model.verify import require_replay
from meshrl.rollout.admission import bounds_of, check_admission, check_supported, topk_of
from meshrl.rollout.base import Capabilities, EngineStats, check_parts
from meshrl.rollout.embedded.decode_graph import StepArrays
from meshrl.rollout.embedded.runner import Runner
from meshrl.rollout.embedded.sampler import RowSampling, draw
from meshrl.rollout.embedded.scheduler import Scheduler, Sequence
from meshrl.rollout.embedded.weights import EngineWeights
from meshrl.rollout.stop_strings import StopStrings, stop_strings_of
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Ack, Layout, SyncHeader

PREFILL_TOKENS = 4096  # tokens of new contexts in one step


def build_embedded_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    engine_id: str,
    stop_token_ids: tuple[int, ...],
    facts: ModelFacts | None = None,
    synced: bool = False,
) -> EmbeddedEngine:
    """Load the model in its compute dtype into the device's memory, without gradients; no weight version yet. facts: of
    the model's folder, if they are known. synced: a sync brings the weights, so none are read."""
    max_context_tokens, _ = limits_of(model_cfg.path, rollout_cfg.max_context_tokens)
    dtype, lora = DTYPES[model_cfg.dtype], model_cfg.lora
    recipe = Recipe(
        dtype=dtype,
        lora=lora if lora.enabled and rollout_cfg.takes_adapters(lora) else None,
        adapter_dtype=dtype,
        device=device,
        synced=synced,
        attention=model_cfg.attn_implementation,
        router_dtype=DTYPES.get(model_cfg.router_dtype),
    )
    model = build_model(model_cfg.path, recipe, facts)
    model.requires_grad_(False)
    randomize_adapters(model.lm)  # so that the fast decoder is compared with adapters that do something
    if rollout_cfg.router_replay:
        require_replay(model, model_cfg.path)
    fast = fast_decoder(model)
    init_adapters(model.lm)
    engine = EmbeddedEngine(
        model,
        fast=fast,
        stop_token_ids=stop_token_ids,
        max_running=rollout_cfg.max_running_requests,
        max_context_tokens=max_context_tokens,
        kv_cache_bytes=rollout_cfg.embedded.kv_cache_bytes,
        engine_id=engine_id,
        device=device,
        stop_strings=stop_strings_of(model_cfg, rollout_cfg),
        records_routes=rollout_cfg.router_replay,
    )
    if synced:
        engine._state.end("invalid")
    return engine


class EmbeddedEngine:
    """rollout.base.RolloutEngine over a CausalModel.

    Consumes requests; the requests of one event-loop tick are admitted together. One task steps while there is work and
    neither a sync nor released memory prevents it. It yields to the event loop after each step; `generate`, `commit`
    and `restore` start it again.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        stop_token_ids: tuple[int, ...],
        max_running: int,
        max_context_tokens: int,
        engine_id: str,
        device: torch.device,
        fast: FastDecoder | None = None,
        prefill_tokens_per_step: int = PREFILL_TOKENS,
        stop_strings: StopStrings | None = None,
        kv_cache_bytes: int | None = None,
        records_routes: bool = False,
    ):
        if fast is not None:
            fast.fuse()
        self.capabilities = Capabilities(release=True, in_flight=True)
        self.engine_id, self.max_context_tokens = engine_id, max_context_tokens
        self._stop_token_ids, self._vocab_size, self._device = stop_token_ids, model.vocab_size, device
        self._stop_strings = stop_strings or StopStrings()
        self._weights = EngineWeights(model.lm, engine_id, fast)
        self._state = self._weights.state
        self._runner = Runner(
            model, device, fast, max_context_tokens, kv_cache_bytes, model.routing if records_routes else None
        )
        self._scheduler = Scheduler(max_running, prefill_tokens_per_step, self._runner.bound)
        self._cached_version = -1  # of the keys and values of running rows
        self._sampling: RowSampling | None = None  # None when the rows have changed
        self._totals = EngineStats()
        self._ids: set[str] = set()
        self._futures: dict[str, asyncio.Future[Turn]] = {}
        self._step_task: asyncio.Task[None] | None = None
        self._released: set[str] = set()
        self._closed = False

    # ---- generation, without an event loop

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        check_admission(request, self.engine_id, self._state.expected, self._closed, self._ids)
        bounds = bounds_of(request, self._stop_token_ids, self.max_context_tokens, self._vocab_size)
        check_supported(
            request,
            "the embedded engine",
            lambda name: name == "entropy" or topk_of(name) > 0,
            "entropy and topk:N, N from 1",
        )
        sequence = Sequence(request, bounds, self._stop_strings.search(request))
        self._runner.bound.require(request, sequence.max_cached)
        self._scheduler.submit(sequence)
        self._ids.add(request.id)

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Turn]]:
        """Admit requests that fit, sample one token for every running request, and return the finished ones."""
        if not self._may_step:
            return []
        if self._cached_version != self._state.version and (self._scheduler.running or self._scheduler.prompts):
            raise SyncError(
                f"{self.engine_id}: keys and values of weight version {self._cached_version} would be used with "
                f"version {self._state.version}; a sync must drop them. The cause is an error in meshrl"
            )
        self._cached_version = self._state.version
        admission = self._scheduler.admit()
        rows = self._scheduler.running
        if self._sampling is None or admission.joined:
            self._sampling = RowSampling([s.request for s in rows], self._device)
        arrays = StepArrays(self._device)
        positions = np.array([s.first_position + len(s.tokens) for s in rows], np.int64)
        u = arrays.add(self._sampling.uniforms(positions))
        logits = self._runner.step(rows, admission, arrays)
        drawn = draw(logits, self._sampling, u, lambda row: rows[row].ids())
        read = fetched(torch.stack([drawn.tokens.double(), drawn.logprobs.double()]))
        self._runner.look_ahead(rows, drawn.tokens)
        tokens, logprobs = read().tolist()
        done = self._record(rows, tokens, logprobs, drawn.extras)
        for sequence, _ in admission.joined:
            sequence.times.prefill_s += sequence.lap()
        finished = [(rows[row].request.id, self._turn(rows[row], reason)) for row, reason in done.items()]
        if done or admission.joined:
            self._compact(done.keys())
        self._totals.prefill_tokens += sum(len(prefill.ids) for prefill in admission.prefills)
        self._totals.decode_tokens += len(rows)
        return finished

    def drop_caches(self) -> None:
        """Free keys and values, and the copies of weights that multiply faster; they are made again when needed.
        Running requests wait at the head of the queue with their tokens. A CPU's heap would grow with each version if
        it were not returned to the system."""
        self._scheduler.preempt_all()
        self._runner.flush()
        return_freed_memory(self._device)

    def output_so_far(self, request_id: str) -> list[int]:
        """The tokens that a running request has sampled, for callers of `step`."""
        return {s.request.id: s.tokens for s in self._scheduler.running}[request_id]

    def _record(
        self,
        rows: list[Sequence],
        tokens: list[float],
        logprobs: list[float],
        extras: dict[int, dict[str, np.ndarray]],
    ) -> dict[int, StopReason]:
        """Append one token to each row; returns the rows that end with it, and their stop reasons."""
        version = self._state.version
        done: dict[int, StopReason] = {}
        for row, (sequence, token, logprob) in enumerate(zip(rows, map(int, tokens), logprobs, strict=True)):
            if logprob != logprob:
                raise MeshrlError(
                    f"request {sequence.request.id}: the logits of token {len(sequence.tokens)} are not numbers (NaN) "
                    f"at weight version {version}; the weights are damaged, or the dtype has too little range"
                )
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            search = sequence.stop_search
            if token in sequence.bounds.stop_ids or (search is not None and search.ends_with(token)):
                done[row] = "stop"
            elif len(sequence.tokens) >= sequence.bounds.limit:
                done[row] = sequence.bounds.limit_reason
        for row, values in extras.items():
            rows[row].extras.append(values)
        return done

    def _turn(self, s: Sequence, reason: StopReason) -> Turn:
        self._ids.discard(s.request.id)
        if s.cached:
            s.times.decode_s += s.lap()
        else:
            s.times.queue_s += s.lap()
        return Turn(
            context_ids=s.request.context_ids,
            output_ids=np.array(s.tokens, np.int32),
            logprobs=np.array(s.logprobs, np.float32),
            versions=np.array(s.versions, np.int32),
            stop_reason=reason,
            routed_experts=self._routes_of(s),
            extras={name: np.stack([e[name] for e in s.extras]) for name in (s.extras[0] if s.extras else ())},
            sampling=s.request.sampling,
            seed=s.request.seed,
            engine_id=self.engine_id,
            times=s.times,
        )

    def _routes_of(self, s: Sequence) -> np.ndarray | None:
        """int16[C+R, L, K], -1 for the last token, which no forward has computed; without those of prefix_output, which
        the turn does not have. None for a request without a cache."""
        routes = self._runner.routes_of(self._scheduler.running.index(s), s.cached) if s.cached else None
        if routes is None:
            return None
        padded = np.full((len(s.ids()), *routes.shape[1:]), -1, np.int16)
        padded[: s.cached] = routes
        first = len(s.request.context_ids)
        return np.delete(padded, slice(first, first + s.first_position), axis=0)

    def _compact(self, gone: Collection[int]) -> None:
        running, prompts = self._scheduler.compact(gone, sort=not self._runner.kernels_fit)
        self._runner.move_rows(running, prompts, len(self._scheduler.running))
        self._sampling = None

    def _withdraw(self, ids: Collection[str] | None) -> list[tuple[str, Turn]]:
        """End these requests (None = all) with their tokens so far."""
        left, rows = self._scheduler.withdraw(ids)
        withdrawn = left + [self._scheduler.running[row] for row in rows]
        turns = [(s.request.id, self._turn(s, "abort")) for s in withdrawn]
        if withdrawn:
            self._compact(set(rows))
        return turns

    # ---- generation, with an event loop

    async def generate(self, request: Request) -> Turn:
        self.submit(request)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._futures[request.id] = future
        future.add_done_callback(lambda f: self._return_turns(self._withdraw({request.id})) if f.cancelled() else None)
        self._start_steps()
        return await future

    async def abort(self, ids: Seq[str] | None = None) -> int:
        aborted = self._withdraw(None if ids is None else set(ids))
        self._return_turns(aborted)
        return len(aborted)

    @property
    def _may_step(self) -> bool:
        return self.has_work and self._state.version >= 0 and not self._released

    def _start_steps(self) -> None:
        if self._may_step and (self._step_task is None or self._step_task.done()):
            self._step_task = asyncio.create_task(self._run())
            self._step_task.add_done_callback(self._on_step_error)

    async def _run(self) -> None:
        while True:
            version = None
            while version != self._state.version:  # a sync that ended in these ticks is acknowledged before the step
                version = self._state.version
                # In the first tick of the event loop, callers get their results and new requests arrive, which join the
                # next step; in the second, this process sends the answers to calls that have ended.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            if not self._may_step:
                return
            self._return_turns(self.step())

    def _on_step_error(self, task: asyncio.Task[None]) -> None:
        """After a step raised, every request ends with its error, so that no caller waits for ever. Nothing that the
        step has computed is read again: its rows may not have all tokens that were to be written."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            futures, self._futures = self._futures, {}
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
            self.drop_caches()
            self._withdraw(None)

    def _return_turns(self, turns: Iterable[tuple[str, Turn]]) -> None:
        for request_id, turn in turns:
            future = self._futures.pop(request_id, None)
            if future is not None and not future.done():
                future.set_result(turn)

    # ---- weights

    def trust_loaded_weights(self, version: int = 0) -> None:
        self._state.trust(version)

    async def reconcile(self, layout: Layout) -> None:
        self._weights.reconcile(layout)

    def targets(self) -> dict[str, torch.Tensor]:
        """The tensors that the open sync has to fill, by wire name; a trainer in this process may write them directly
        (`sync_rank`). Empty unless a sync is open."""
        return self._weights.targets()

    async def begin(self, header: SyncHeader) -> None:
        """Pause all requests, drop every cache, and expect the transfers of this version."""
        self.drop_caches()
        self._weights.begin(header)

    async def receive(self, *deliveries: Delivery) -> None:
        for delivery in deliveries:
            self._weights.receive(delivery)

    async def commit(self) -> Ack:
        """Read every parameter back, make the version visible, and resume."""
        ack = self._weights.commit(self._weights.read_back)
        self._start_steps()
        return ack

    async def cancel(self) -> None:
        """All requests are aborted, and new ones are refused until the next full sync."""
        self._weights.cancel()
        await self.abort()

    # ---- memory and the rest

    async def release(self, parts: set[str]) -> int:
        """Running requests wait, and their KV cache is computed again."""
        check_parts(parts)
        freed = self._runner.num_bytes if "kv_cache" in parts else 0
        self.drop_caches()
        if "weights" in parts - self._released:
            freed += self._weights.release()
        self._released |= parts
        empty_cache(self._device)
        return freed

    async def restore(self, parts: set[str]) -> int:
        """The cache grows with use."""
        check_parts(parts)
        taken = self._weights.restore() if "weights" in parts & self._released else 0
        self._released -= parts
        self._start_steps()
        return taken

    def stats(self) -> EngineStats:
        running, prompts = self._scheduler.running, self._scheduler.prompts
        return dataclasses.replace(
            self._totals,
            running=len(running),
            waiting=len(self._scheduler.waiting),
            cached_tokens=sum(s.cached for s in running) + sum(p.length for p in prompts),
            version=self._state.version,
            kv_cache_bytes=self._runner.bound.measured,
        )

    async def close(self) -> None:
        """Abort all requests, free the cache, and refuse new requests."""
        self._closed = True
        await self.abort()
        self._runner.flush()

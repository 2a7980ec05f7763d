"""The embedded engine: continuous batching over the model's own Transformers module, in this process and thread.

Callers use `await generate(request)`, or `submit` and `step` without an event loop.

Weights may change while requests run: the KV cache is dropped with the old weights and computed again from the tokens
with the new ones. So every logprob belongs exactly to the recorded weight version, which a cache of mixed versions
could not guarantee.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import empty_cache, fetched, return_freed_memory
from meshrl.core.errors import MeshrlError, RequestError, SyncError
from meshrl.core.types import Request, StopReason, Turn
from meshrl.model.causal import CausalModel
from meshrl.model.facts import ModelFacts
from meshrl.model.fast_decoder import FastDecoder, fast_decoder
from meshrl.model.limits import limits_of
from meshrl.model.lora import init_adapters, randomize_adapters
from meshrl.model.recipe import DTYPES, Recipe, build_model, frozen_parameters
from meshrl.model.verify import require_replay
from meshrl.plan.memory import PREFILL_TOKENS
from meshrl.rollout.admission import bounds_of, check_admission, check_supported, topk_of
from meshrl.rollout.base import Capabilities, EngineStats, check_parts
from meshrl.rollout.embedded.decode_graph import StepArrays
from meshrl.rollout.embedded.rows import Rows, Sequence
from meshrl.rollout.embedded.runner import Runner
from meshrl.rollout.embedded.sampler import RowSampling, draw
from meshrl.rollout.embedded.scheduler import Scheduler
from meshrl.rollout.embedded.weights import EngineWeights
from meshrl.rollout.stop_strings import StopStrings, stop_strings_of
from meshrl.sync.delivery import Delivery
from meshrl.sync.digest import tensor_digests
from meshrl.sync.layout import Ack, Layout, SyncHeader


def build_embedded_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    engine_id: str,
    stop_token_ids: tuple[int, ...],
    facts: ModelFacts | None = None,
    synced: bool = False,
    base: torch.nn.Module | None = None,
) -> EmbeddedEngine:
    """Load the model in its compute dtype into the device's memory, without gradients; no weight version yet. facts: of
    the model's folder, if they are known. synced: a sync brings the weights, so none are read. base: the trainer's
    model with adapters, whose frozen parameters are used without a copy (synced)."""
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
        base=base,
    )
    shared = {} if base is None else frozen_parameters(base)
    values = tensor_digests(shared)
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
        prefix_cache=bool(rollout_cfg.embedded.prefix_cache),
        shared=shared.values(),
    )
    if changed := [name for name, digest in tensor_digests(shared).items() if digest != values[name]]:
        raise MeshrlError(
            f"{engine_id} has changed {len(changed)} of the {len(shared)} tensors that it shares with the trainer, the "
            f"first is {changed[0]}; the cause is an error in meshrl"
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
        prefix_cache: bool = False,
        shared: Collection[torch.nn.Parameter] = (),
    ):
        """prefix_cache: retain the keys and values of ended requests, for those that continue them. shared: see
        EngineWeights."""
        if fast is not None:
            fast.fuse()
        self.capabilities = Capabilities(release=True, in_flight=True)
        self.engine_id, self.max_context_tokens = engine_id, max_context_tokens
        self._stop_token_ids, self._vocab_size, self._device = stop_token_ids, model.vocab_size, device
        self._inputs = model.inputs
        self._stop_strings = stop_strings or StopStrings()
        self._weights = EngineWeights(model.lm, engine_id, fast, shared)
        self._state = self._weights.state
        routing = model.routing if records_routes else None
        self._runner = Runner(model, device, fast, max_context_tokens, kv_cache_bytes, routing, prefix_cache)
        self._scheduler = Scheduler(
            max_running, prefill_tokens_per_step, self._runner.bound, self._runner.table, model.has_states
        )
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
            takes_media=self._inputs.family is not None,
        )
        if fault := self._inputs.fault(request, np.asarray(request.context_ids)):
            raise RequestError(f"request {request.id}: {fault}")
        sequence = Sequence(request, bounds, self._stop_strings.search(request), self._inputs)
        self._runner.bound.require(request, sequence.max_cached)
        self._scheduler.submit(sequence)
        self._ids.add(request.id)

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Turn]]:
        """Admit requests that fit, sample one token for every running request, and return the finished ones."""
        if not self._may_step:
            return []
        runner, scheduler, rows = self._runner, self._scheduler, self._scheduler.rows
        if scheduler.version != self._state.version and runner.table.num_pages:
            raise SyncError(
                f"{self.engine_id}: keys and values of weight version {scheduler.version} would be used with "
                f"version {self._state.version}; a sync must drop them. The cause is an error in meshrl"
            )
        admission = scheduler.admit(self._state.version, is_ahead=runner.ahead is not None)
        if not len(rows):
            return []
        arrays = StepArrays(self._device)
        sampling = RowSampling(rows, arrays)
        drawn = draw(runner.step(rows, admission, arrays), sampling, rows.ids)
        read = fetched(torch.stack([drawn.tokens.double(), drawn.logprobs.double()]))
        if runner.looks_ahead:
            goes_on = rows.sampled[rows.slots] + 1 < rows.limit[rows.slots]
            if goes_on.any() and scheduler.reserve_next(goes_on):
                runner.look_ahead(rows, goes_on, drawn.tokens)
        tokens, logprobs = read().cpu().numpy()
        done = self._record(rows, tokens.astype(np.int64), logprobs, drawn.extras)
        for sequence in admission.joined:
            sequence.times.prefill_s += sequence.lap()
        self._totals.prefill_tokens += sum(len(p.ids) for p in admission.prefills) + len(admission.decoders)
        self._totals.decode_tokens += len(rows)
        return self._finish(done) if done or admission.joined else []

    def drop_caches(self) -> None:
        """Free keys and values, and the copies of weights that multiply faster; they are made again when needed.
        Running requests wait at the head of the queue with their tokens. A CPU's heap would grow with each version if
        it were not returned to the system."""
        self._scheduler.preempt_all()
        self._runner.flush()
        return_freed_memory(self._device)

    def output_so_far(self, request_id: str) -> list[int]:
        """The tokens that a request has sampled; none before it runs and after its end."""
        rows = self._scheduler.rows
        slot = next((s.slot for s in rows.sequences if s.request.id == request_id), None)
        if slot is None:
            return []
        output: list[int] = rows.tokens[slot, : rows.sampled[slot]].tolist()
        return output

    def _record(
        self, rows: Rows, tokens: np.ndarray, logprobs: np.ndarray, extras: dict[int, dict[str, np.ndarray]]
    ) -> dict[int, StopReason]:
        """Append one token to each row; returns the rows that end with it, and their stop reasons."""
        for row in np.flatnonzero(np.isnan(logprobs)).tolist():
            raise MeshrlError(
                f"request {rows.sequences[row].request.id}: the logits of token {rows.sampled[rows.slots[row]]} are "
                f"not numbers (NaN) at weight version {self._state.version}; the weights are damaged, or the dtype has "
                "too little range"
            )
        for row, values in extras.items():
            rows.sequences[row].extras.append(values)
        done: dict[int, StopReason] = {}
        for row in rows.append(tokens, logprobs).tolist():
            sequence, token = rows.sequences[row], int(tokens[row])
            search = sequence.stop_search
            if token in sequence.bounds.stop_ids or (search is not None and search.ends_with(token)):
                done[row] = "stop"
            elif rows.sampled[sequence.slot] >= sequence.bounds.limit:
                done[row] = sequence.bounds.limit_reason
        return done

    def _finish(self, done: Mapping[int, StopReason]) -> list[tuple[str, Turn]]:
        """Remove rows, for these reasons; returns their turns."""
        rows = self._scheduler.rows
        ended = [(rows.sequences[row], reason) for row, reason in done.items()]
        routes = [self._runner.routes_of(s.slot, int(rows.cached[s.slot])) for s, _ in ended]
        self._runner.move_rows(self._scheduler.compact(done.keys()))
        return [(s.request.id, self._turn(s, why, True, of)) for (s, why), of in zip(ended, routes, strict=True)]

    def _turn(self, s: Sequence, reason: StopReason, has_run: bool, routes: np.ndarray | None) -> Turn:
        """has_run: it was one of the rows. routes: of the tokens in the cache."""
        self._ids.discard(s.request.id)
        if has_run:
            s.times.decode_s += s.lap()
        else:
            s.times.queue_s += s.lap()
        return Turn(
            context_ids=s.request.context_ids,
            output_ids=s.tokens,
            logprobs=s.logprobs,
            versions=np.concatenate([np.full(n, version, np.int32) for version, n in s.versions or [(0, 0)]]),
            stop_reason=reason,
            routed_experts=None if routes is None else _routes_of(s, routes),
            extras={name: np.stack([e[name] for e in s.extras]) for name in (s.extras[0] if s.extras else ())},
            sampling=s.request.sampling,
            seed=s.request.seed,
            engine_id=self.engine_id,
            times=s.times,
        )

    def _withdraw(self, ids: Collection[str] | None) -> list[tuple[str, Turn]]:
        """End these requests (None = all) with their tokens so far."""
        left, rows = self._scheduler.withdraw(ids)
        turns = [(s.request.id, self._turn(s, "abort", False, None)) for s in left]
        return turns + (self._finish(dict.fromkeys(rows, "abort")) if left or rows else [])

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

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """By wire name, the tensors that are those of a trainer in this process: no sync writes them."""
        return self._weights.shared

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
        rows = self._scheduler.rows
        return dataclasses.replace(
            self._totals,
            running=len(rows),
            waiting=len(self._scheduler.waiting),
            cached_tokens=int(rows.cached[rows.slots].sum()),
            version=self._state.version,
            kv_cache_bytes=self._runner.bound.measured,
        )

    async def close(self) -> None:
        """Abort all requests, free the cache, and refuse new requests."""
        self._closed = True
        await self.abort()
        self._runner.flush()


def _routes_of(s: Sequence, routes: np.ndarray) -> np.ndarray:
    """int16[C+R, L, K], -1 for the last token, which no forward has computed; without those of prefix_output, which the
    turn does not have."""
    padded = np.full((len(s.ids()), *routes.shape[1:]), -1, np.int16)
    num = min(len(routes), len(padded) - 1)
    padded[:num] = routes[:num]
    first = len(s.request.context_ids)
    return np.delete(padded, slice(first, first + s.first_position), axis=0)

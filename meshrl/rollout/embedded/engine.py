"""The embedded engine: continuous batching over the model's own Transformers module, in this process and thread.

Two ways in: `await generate(request)`, or `submit` and `step` for callers without an event loop.

Weights that change under running requests (pause "keep", sync, resume): their keys and values are dropped with the
old weights, and computed again from their tokens with the new ones. So every logprob is exactly that of the version
written beside it, which a cache of mixed versions could not give.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import empty_cache
from meshrl.core.errors import CapabilityError, MeshrlError, StaleWeightsError
from meshrl.core.types import Media, Request, StopReason, Turn
from meshrl.model.causal import CausalModel
from meshrl.model.lean import LeanDecoder, lean_decoder
from meshrl.model.limits import limits_of
from meshrl.model.load import DTYPES, cast_parameters, load_causal_lm
from meshrl.model.lora import add_adapters, init_adapters, scatter_adapters
from meshrl.rollout.admission import bounds_of, check_admission, check_supported, topk_of
from meshrl.rollout.base import Capabilities, EngineStats, PauseMode, check_parts
from meshrl.rollout.embedded.runner import Runner
from meshrl.rollout.embedded.sampler import RowSampling, draw
from meshrl.rollout.embedded.scheduler import Admission, Scheduler, Sequence
from meshrl.rollout.embedded.weights import EngineWeights
from meshrl.rollout.stop_strings import StopStrings, stop_strings_of
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Ack, Layout, SyncHeader

PREFILL_TOKENS = 4096  # of new contexts in one step


def build_embedded_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    engine_id: str,
    stop_token_ids: tuple[int, ...],
) -> EmbeddedEngine:
    """Load the model in its compute dtype, without gradients; no weight version yet.

    Raises: ConfigError when rollout.max_context_tokens is more than the model has positions.
    """
    max_context_tokens, _ = limits_of(model_cfg.path, rollout_cfg.max_context_tokens)
    lm = load_causal_lm(model_cfg.path)
    if model_cfg.lora.enabled:
        add_adapters(lm, model_cfg.lora, torch.float32, model_cfg.path)
        scatter_adapters(lm)  # so that the lean forward is compared with adapters that do something
    model = CausalModel(lm.eval().requires_grad_(False))
    lean = lean_decoder(model)
    init_adapters(lm)
    cast_parameters(model.lm, DTYPES[model_cfg.dtype]).to(device)
    return EmbeddedEngine(
        model,
        lean=lean,
        stop_token_ids=stop_token_ids,
        max_running=rollout_cfg.max_running_requests,
        max_context_tokens=max_context_tokens,
        engine_id=engine_id,
        device=device,
        stop_strings=stop_strings_of(model_cfg, rollout_cfg),
    )


class EmbeddedEngine:
    """rollout.base.RolloutEngine over a CausalModel.

    Consumes requests as they come; those of one event-loop tick are admitted together. One task steps while there is
    work and nothing holds it (a pause, a sync, released memory) and gives the loop a turn after each step; `generate`,
    `resume`, `commit` and `restore` start it again.
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
        lean: LeanDecoder | None = None,
        prefill_tokens_per_step: int = PREFILL_TOKENS,
        stop_strings: StopStrings | None = None,
    ):
        if lean is not None:
            lean.fuse()
        self.capabilities = Capabilities(release=True, in_flight=True, score=True)
        self.engine_id, self.max_context_tokens = engine_id, max_context_tokens
        self._stop_token_ids, self._vocab_size, self._device = stop_token_ids, model.vocab_size, device
        self._stop_strings = stop_strings or StopStrings()
        self._weights = EngineWeights(model.lm, engine_id, lean)
        self._scheduler = Scheduler(max_running, prefill_tokens_per_step)
        self._runner = Runner(model, device, lean)
        self._sampling: RowSampling | None = None  # of the rows as they stand
        self._totals = EngineStats()
        self._ids: set[str] = set()
        self._futures: dict[str, asyncio.Future[Turn]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._pause: PauseMode | None = None
        self._released: set[str] = set()
        self._closed = False

    # ---- generation, without an event loop

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError, CapabilityError, StaleWeightsError."""
        check_admission(request, self.engine_id, self._weights.expected, self._closed, self._ids)
        bounds = bounds_of(request, self._stop_token_ids, self.max_context_tokens, self._vocab_size)
        check_supported(
            request,
            "the embedded engine",
            lambda name: name == "entropy" or topk_of(name) > 0,
            "entropy and topk:N, N from 1",
        )
        self._scheduler.submit(
            Sequence(
                request=request,
                stop_ids=bounds.stop_ids,
                limit=bounds.limit,
                limit_reason=bounds.limit_reason,
                stop_search=self._stop_strings.search(request),
            )
        )
        self._ids.add(request.id)

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Turn]]:
        """Admit requests that fit, draw one token for every running request, and return those that are done."""
        if not self._may_step:
            return []
        began = time.perf_counter()
        admission = self._scheduler.admit() if self._pause is None else Admission()
        rows = self._scheduler.running
        logits = self._runner.step(rows, admission)
        if self._sampling is None or admission.joined:
            self._sampling = RowSampling([s.request for s in rows], self._device)
        positions = np.array([s.first_position + len(s.tokens) for s in rows], np.int64)
        drawn = draw(logits, self._sampling, positions, lambda row: rows[row].ids())
        tokens, logprobs = torch.stack([drawn.tokens.double(), drawn.logprobs.double()]).tolist()
        done = self._record(rows, tokens, logprobs, drawn.extras)
        for sequence, _ in admission.joined:
            sequence.times.prefill_s += sequence.lap()
        finished = [(rows[row].request.id, self._turn(rows[row], reason)) for row, reason in done.items()]
        if done or admission.joined:
            self._settle(done.keys())
        self._count(admission, len(rows), time.perf_counter() - began)
        return finished

    def _record(
        self,
        rows: list[Sequence],
        tokens: list[float],
        logprobs: list[float],
        extras: dict[int, dict[str, np.ndarray]],
    ) -> dict[int, StopReason]:
        """Append one token to each row; returns the rows that end with it, and why."""
        version = self._weights.version
        done: dict[int, StopReason] = {}
        for row, (sequence, token, logprob) in enumerate(zip(rows, map(int, tokens), logprobs, strict=True)):
            if logprob != logprob:
                raise MeshrlError(
                    f"request {sequence.request.id}: the logits of token {len(sequence.tokens)} are not numbers (NaN) "
                    f"at weight version {version}; the weights or the model's precision are broken"
                )
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            search = sequence.stop_search
            if token in sequence.stop_ids or (search is not None and search.ends_with(token)):
                done[row] = "stop"
            elif len(sequence.tokens) >= sequence.limit:
                done[row] = sequence.limit_reason
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
            extras={name: np.stack([e[name] for e in s.extras]) for name in (s.extras[0] if s.extras else ())},
            sampling=s.request.sampling,
            seed=s.request.seed,
            engine_id=self.engine_id,
            times=s.times,
        )

    def _settle(self, gone: Collection[int]) -> None:
        self._runner.follow(*self._scheduler.settle(gone))
        self._sampling = None

    def _count(self, admission: Admission, num_rows: int, seconds: float) -> None:
        """A step computes contexts and new tokens together; its time is split by the tokens computed."""
        prefilled = sum(len(fill.ids) for fill in admission.fills)
        share = prefilled / max(1, prefilled + num_rows - len(admission.joined))
        self._totals.prefill_tokens += prefilled
        self._totals.decode_tokens += num_rows
        self._totals.prefill_s += seconds * share
        self._totals.decode_s += seconds * (1 - share)

    def _withdraw(self, ids: Collection[str] | None) -> list[tuple[str, Turn]]:
        """End these requests (None = all) with what they have."""
        left, rows = self._scheduler.withdraw(ids)
        ended = left + [self._scheduler.running[row] for row in rows]
        if ended:
            self._settle(set(rows))
        return [(s.request.id, self._turn(s, "abort")) for s in ended]

    def _flush(self) -> None:
        """Drop all keys and values; running requests wait at the head of the queue with their tokens."""
        self._scheduler.requeue_all()
        self._runner.flush()

    # ---- generation, with one

    async def generate(self, request: Request) -> Turn:
        """Sample one turn. Waits while paused or while a sync is open."""
        self.submit(request)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._futures[request.id] = future
        future.add_done_callback(lambda f: self._deliver(self._withdraw({request.id})) if f.cancelled() else None)
        self._wake()
        return await future

    async def abort(self, ids: Seq[str] | None = None) -> int:
        """End these requests (None = all), running or waiting; returns how many there were."""
        ended = self._withdraw(None if ids is None else set(ids))
        self._deliver(ended)
        return len(ended)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop: wait = running requests finish first, abort = all return now, keep = all stay in place."""
        self._pause = mode
        if mode == "abort":
            await self.abort()
        while mode == "wait" and self._pause == "wait" and self._scheduler.running:
            self._wake()
            await asyncio.sleep(0)

    async def resume(self) -> None:
        self._pause = None
        self._wake()

    @property
    def _may_step(self) -> bool:
        held = self._released or self._weights.version < 0 or self._pause in ("abort", "keep")
        return not held and bool(self._scheduler.running or (self._pause is None and self._scheduler.waiting))

    def _wake(self) -> None:
        if self._may_step and (self._pump is None or self._pump.done()):
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(self._failed)

    async def _run(self) -> None:
        await asyncio.sleep(0)  # requests of this tick of the loop join the first step
        while self._may_step:
            self._deliver(self.step())
            await asyncio.sleep(0)

    def _failed(self, pump: asyncio.Task[None]) -> None:
        """A step that raised ends every request with its error: no caller waits for an answer that can't come."""
        error = None if pump.cancelled() else pump.exception()
        if error is not None:
            futures, self._futures = self._futures, {}
            self._withdraw(None)
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)

    def _deliver(self, turns: Iterable[tuple[str, Turn]]) -> None:
        for request_id, turn in turns:
            future = self._futures.pop(request_id, None)
            if future is not None and not future.done():
                future.set_result(turn)

    async def score(self, ids: np.ndarray, media: dict[str, Media] | None = None) -> np.ndarray:
        """Teacher-forced logprobs at temperature 1, float32[T], from no cache at all; index 0 is 0."""
        if media:
            raise CapabilityError("score() was given media; the embedded engine takes text only")
        if self._weights.version < 0 or self._released:
            raise StaleWeightsError(f"{self.engine_id} has no usable weights to score with; sync weights first")
        return self._runner.score(ids)

    # ---- weights

    def trust_loaded_weights(self, version: int = 0) -> None:
        """Sample with the weights that were loaded from the folder, as this version, until a sync begins."""
        self._weights.trust(version)

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the model's own parameters, both ways. Raises UnloadedParamsError."""
        self._weights.reconcile(layout)

    def targets(self) -> dict[str, torch.Tensor]:
        """The tensors that the next sync has to fill, by the names that are sent: a trainer in this process may write
        them itself between begin and commit (`ShardSender.in_place`)."""
        return self._weights.targets()

    async def begin(self, header: SyncHeader) -> None:
        """Hold all requests, drop every cache (P17), and take this version's buckets."""
        self._flush()
        self._weights.begin(header)

    async def receive(self, delivery: Delivery) -> None:
        self._weights.receive(delivery)

    async def commit(self) -> Ack:
        """Read every parameter back, make the version visible, go on."""
        ack = self._weights.commit()
        self._wake()
        return ack

    async def cancel(self) -> None:
        """The weights are a mixture now: all requests return what they have (abort), and none is taken until the
        next full sync."""
        self._weights.cancel()
        await self.abort()

    # ---- memory and the rest

    async def release(self, parts: set[str]) -> int:
        """Free parts of {weights, kv_cache, graphs}; requests in place wait, and their caches are computed again.

        Returns bytes freed. graphs frees nothing: this engine has none.
        """
        check_parts(parts)
        freed = 0
        if parts & {"weights", "kv_cache"}:
            freed += self._runner.num_bytes if "kv_cache" in parts else 0
            self._flush()
        if "weights" in parts - self._released:
            freed += self._weights.release()
        self._released |= parts & {"weights", "kv_cache"}
        empty_cache(self._device)
        return freed

    async def restore(self, parts: set[str]) -> int:
        """Take parts back; returns bytes taken. The cache grows with use; weights wait for the next full sync."""
        check_parts(parts)
        taken = self._weights.restore() if "weights" in parts & self._released else 0
        self._released -= parts
        self._wake()
        return taken

    def stats(self) -> EngineStats:
        running, prompts = self._scheduler.running, self._scheduler.prompts
        return EngineStats(
            running=len(running),
            waiting=len(self._scheduler.waiting),
            cached_tokens=sum(s.cached for s in running) + sum(p.length for p in prompts),
            free_slots=self._scheduler.max_running - len(running),
            prefill_tokens=self._totals.prefill_tokens,
            decode_tokens=self._totals.decode_tokens,
            prefill_s=self._totals.prefill_s,
            decode_s=self._totals.decode_s,
            version=self._weights.version,
        )

    async def close(self) -> None:
        """End all requests (abort), free the cache, take no more."""
        self._closed = True
        await self.abort()
        self._runner.flush()

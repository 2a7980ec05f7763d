"""The endpoint engine: any server with an OpenAI-like /v1/completions that takes ids and returns ids and logprobs.

Nothing is known of such a server but what it answers, so little is proven: that it went on from the ids it was sent,
that each token has a logprob, and, in training, that the trainer's own scores of what was sampled agree. New weights
reach it as folders, if it can load one. It can't be held in the middle of a request: a sync waits for those under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.errors import CapabilityError, EngineFailure
from meshrl.core.types import Media, Request, StopReason, Times, Turn
from meshrl.model.limits import limits_of
from meshrl.process.leases import LeasedFolder
from meshrl.rollout.accept import Bounds, bounds_of
from meshrl.rollout.base import Capabilities, EngineStats, PauseMode
from meshrl.rollout.folder_weights import FolderWeights
from meshrl.rollout.foreign.adapted import remote_weights
from meshrl.rollout.foreign.desk import Desk, check_echo, ended_unsent, full_ids
from meshrl.rollout.http import HttpClient, fetch, key_in
from meshrl.rollout.stop_strings import StopSearch, StopStrings, stop_strings_of
from meshrl.sync.manifest import Ack, Layout, SyncHeader
from meshrl.sync.receive import Bucket

_RELOAD_S = 1800.0  # for a server to read a large model from a slow disk
_RELOAD_PATH = "/update_weights_from_disk"


def build_endpoint_engine(
    model_cfg: ModelConfig,
    rollout_cfg: RolloutConfig,
    device: torch.device,
    engine_id: str,
    stop_token_ids: tuple[int, ...],
) -> EndpointEngine:
    """Look at the server that runs; no weight version yet. Blocks. Raises: EngineFailure, ConfigError."""
    cfg = rollout_cfg.endpoint
    assert cfg.url is not None, "the config check demands an address"
    headers = key_in(cfg.api_key_env)
    max_context_tokens, vocab_size = limits_of(model_cfg.path, rollout_cfg.max_context_tokens)
    model = cfg.model or only_model(fetch("/v1/models", cfg.url, headers), cfg.url)
    return EndpointEngine(
        HttpClient(engine_id, cfg.url, headers=headers),
        model=model,
        model_folder=Path(model_cfg.path),
        takes_folders=cfg.weights == "files",
        reload_url=cfg.reload_url or _RELOAD_PATH,
        versions=None if cfg.folder is None else Path(cfg.folder),
        engine_id=engine_id,
        stop_token_ids=stop_token_ids,
        max_context_tokens=max_context_tokens,
        max_running=rollout_cfg.max_running_requests,
        vocab_size=vocab_size,
        keep_weights=rollout_cfg.sync_mode == "delta",
        adapter_scale=model_cfg.lora.scale if model_cfg.lora.enabled else None,
        stop_strings=stop_strings_of(model_cfg, rollout_cfg),
    )


def only_model(answer: dict[str, Any], url: str) -> str:
    """From /v1/models. Raises: EngineFailure when there are several."""
    names = [str(entry["id"]) for entry in answer["data"]]
    if len(names) != 1:
        raise EngineFailure(f"{url} serves {', '.join(names) or 'no model'}; name one in rollout.endpoint.model")
    return names[0]


class EndpointEngine:
    """rollout.base.RolloutEngine over /v1/completions.

    Consumes requests as they come, at most max_running at a time; each is a stream. A pause and a sync close a gate in
    this process, and wait until nothing is under way; `resume`, `commit` and `cancel` open it.
    """

    def __init__(
        self,
        http: HttpClient,
        *,
        model: str,
        model_folder: Path,
        takes_folders: bool,
        reload_url: str,
        versions: Path | None,
        engine_id: str,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        max_running: int,
        vocab_size: int,
        keep_weights: bool = False,
        adapter_scale: float | None = None,
        stop_strings: StopStrings | None = None,
    ):
        """versions: the folder that versions are written below; None = one of its own, removed by `close`.
        keep_weights: also in this machine's memory, for syncs of changes alone. adapter_scale: alpha / rank of the
        adapters that come then, for this process to add to the base; None = none come."""
        self.capabilities = Capabilities()  # a seed is passed on, and nobody promises to heed it
        self.engine_id, self.max_context_tokens = engine_id, max_context_tokens
        self._http, self._model, self._reload_url = http, model, reload_url
        self._stop_token_ids, self._vocab_size = stop_token_ids, vocab_size
        self._stop_strings = stop_strings or StopStrings()
        self._places, self._max_running = asyncio.Semaphore(max_running), max_running
        self._takes_folders = takes_folders
        self._own_folder = LeasedFolder() if versions is None else None
        home = versions or (self._own_folder.path if self._own_folder else Path())
        writer = FolderWeights(model_folder, home, self._reload, engine_id)
        self._weights = remote_weights(writer.call, engine_id, keep_weights, adapter_scale)
        self._desk = Desk(engine_id, self._call_off)
        self._called_off: dict[str, asyncio.Event] = {}

    # ---- generation

    async def generate(self, request: Request) -> Turn:
        """Sample one turn. Waits while paused or while a sync is open."""
        self._desk.accept(request, self._weights.expected)
        bounds = bounds_of(request, self._stop_token_ids, self.max_context_tokens, self._vocab_size)
        _check_capabilities(request, bounds)
        search = self._stop_strings.search(request)
        if not await self._desk.let_in(request.id):
            return ended_unsent(request, self.engine_id)
        called_off = self._called_off[request.id] = asyncio.Event()
        try:
            with self._desk.sending(request.id):
                async with self._places:
                    return await self._sample(request, bounds, search, called_off)
        finally:
            del self._called_off[request.id]

    async def _sample(
        self, request: Request, bounds: Bounds, search: StopSearch | None, called_off: asyncio.Event
    ) -> Turn:
        answer = _Answer(request, bounds, self._weights.version, search)
        events = self._http.stream("/v1/completions", _body_of(request, bounds, self._model))
        ending = asyncio.ensure_future(called_off.wait())
        try:
            while not called_off.is_set() and not answer.found_stop:  # the server gets no stop strings
                event = asyncio.ensure_future(anext(events, None))
                await asyncio.wait([event, ending], return_when=asyncio.FIRST_COMPLETED)
                if not event.done():  # closing the connection is the one way to end it
                    event.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await event
                    break
                if event.result() is None:
                    break
                self._desk.count_tokens(answer.take(event.result()))
        finally:
            ending.cancel()
            await events.aclose()
        turn = answer.turn(self.engine_id, called_off.is_set())
        self._desk.count_turn(request, turn)
        return turn

    async def score(self, ids: np.ndarray, media: dict[str, Media] | None = None) -> np.ndarray:
        raise CapabilityError(f"{self.engine_id} can't score: a completions server samples only (capabilities.score)")

    async def abort(self, ids: Sequence[str] | None = None) -> int:
        """End these requests (None = all), sent or not; returns how many there were."""
        return await self._desk.end(ids)

    async def _call_off(self, ids: list[str]) -> None:
        for name in ids:
            self._called_off[name].set()

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop: wait = who runs finishes first, abort = all return now. Raises: CapabilityError for keep."""
        if mode == "keep":
            raise CapabilityError(f"{self.engine_id} can't hold requests in place (capabilities.in_flight)")
        await self._desk.pause(mode)

    async def resume(self) -> None:
        self._desk.paused = False
        self._go_on()

    def _go_on(self) -> None:
        if not self._desk.paused and self._weights.expected == self._weights.version:
            self._desk.open()

    # ---- weights

    def trust_loaded_weights(self, version: int = 0) -> None:
        """Sample with the weights that the server has, as this version, until a sync begins."""
        self._weights.trust(version)

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the files of the model's folder, both ways. Raises: UnloadedParamsError."""
        if not self._takes_folders:
            raise CapabilityError(
                f"{self.engine_id} takes no weights: rollout.endpoint.weights is none, which is for evaluation only"
            )
        await self._weights.reconcile(layout)

    async def begin(self, header: SyncHeader) -> None:
        """Let who runs finish, hold all others, and take this version's buckets."""
        self._desk.shut()
        await self._desk.drained()
        await self._weights.begin(header)

    async def receive(self, bucket: Bucket) -> None:
        await self._weights.receive(bucket)

    async def commit(self) -> Ack:
        """Have the server load the folder, make the version visible, go on."""
        ack = await self._weights.commit()
        self._go_on()
        return ack

    async def cancel(self) -> None:
        """Nobody knows what the server holds now: all requests return what they have (abort), and none is taken until
        the next full sync."""
        try:
            await self._weights.cancel()
        finally:  # whoever waits must not wait for ever
            await self.abort()
            self._go_on()

    async def _reload(self, folder: Path) -> None:
        answer = await self._http.post(self._reload_url, {"model_path": str(folder)}, timeout_s=_RELOAD_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineFailure(
                f'{self.engine_id}: {self._reload_url} answered {answer!r:.200} to {folder}, not {{"success": true}}'
            )

    # ---- the rest

    async def release(self, parts: set[str]) -> int:
        raise CapabilityError(f"release({sorted(parts)}): {self.engine_id} lends no memory (capabilities.release)")

    async def restore(self, parts: set[str]) -> int:
        raise CapabilityError(f"restore({sorted(parts)}): {self.engine_id} has lent nothing (capabilities.release)")

    def stats(self) -> EngineStats:
        return self._desk.stats(self._weights.version, self._max_running)

    async def close(self) -> None:
        """End all requests (abort). The server stays."""
        self._desk.closed = True
        await self.abort()
        await self._http.close()
        self._weights.close()
        if self._own_folder is not None:
            self._own_folder.close()


def _check_capabilities(request: Request, bounds: Bounds) -> None:
    """Raises: CapabilityError for what this engine does not declare."""
    asked = {"media": request.media or request.media_spans, "adapter": request.adapter, "want": request.want}
    for name, value in asked.items():
        if value:
            raise CapabilityError(f"request {request.id} has {name}; an endpoint gives ids and logprobs of text only")
    if request.sampling.ignore_eos and bounds.stop_ids:
        raise CapabilityError(
            f"request {request.id} has ignore_eos and stop_token_ids {sorted(bounds.stop_ids)}, which servers read "
            "differently. Give one of them"
        )


def _body_of(request: Request, bounds: Bounds, model: str) -> dict[str, Any]:
    """The JSON of a request. Ids go in as they are, so nothing is tokenized or rendered by the server (P21)."""
    p = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": full_ids(request),
        "max_tokens": bounds.limit,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k or -1,
        "min_p": p.min_p,
        "repetition_penalty": p.repetition_penalty,
        "ignore_eos": not bounds.stop_ids,
        "seed": request.seed,
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        "stream": True,
    }
    return body | ({"stop_token_ids": sorted(bounds.stop_ids)} if bounds.stop_ids else {})


class _Answer:
    """The events of one request, as they come in. version: of all its tokens, for no sync runs beside a request."""

    def __init__(self, request: Request, bounds: Bounds, version: int, search: StopSearch | None = None):
        self.request, self._bounds, self._version, self._search = request, bounds, version, search
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._reason: StopReason | None = None
        self._echoed = False
        self._times = Times()
        self._sent = time.perf_counter()

    def take(self, event: dict[str, Any]) -> int:
        """Add an event; returns how many tokens it added to the output. Raises: RequestError, EngineFailure."""
        if not event["choices"]:
            return 0
        (choice,) = event["choices"]
        if not self._echoed:
            echoed = choice.get("prompt_token_ids", event.get("prompt_token_ids"))
            check_echo(self.request, full_ids(self.request), echoed, "the endpoint")
            self._echoed = True
        new = choice.get("token_ids") or []
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(logprobs) != len(new) or None in logprobs or (choice.get("text") and not new):
            raise EngineFailure(
                f"request {self.request.id}: the endpoint gave {len(new)} token ids and {len(logprobs)} logprobs; it "
                "must return both for each token (return_token_ids, logprobs)"
            )
        if new and not self.tokens:
            self._times.prefill_s = time.perf_counter() - self._sent
        kept = len(new) if self._search is None else self._search.num_kept(new)
        self.tokens += new[:kept]
        self._logprobs += logprobs[:kept]
        if self.found_stop:
            self._reason = "stop"
        elif choice.get("finish_reason") is not None:
            self._reason = self._reason_of(choice["finish_reason"])
        return kept

    @property
    def found_stop(self) -> bool:
        """Whether a stop string is complete; the connection is closed then, which ends the request."""
        return self._search is not None and self._search.found

    def _reason_of(self, said: str) -> StopReason:
        if said == "length":
            return self._bounds.limit_reason if len(self.tokens) == self._bounds.limit else "context"
        if said not in ("stop", "abort"):
            raise EngineFailure(f"request {self.request.id}: the endpoint ended it with {said!r}")
        return "stop" if said == "stop" else "abort"

    def turn(self, engine_id: str, called_off: bool) -> Turn:
        """The turn, once the stream has ended, or was closed."""
        if self._reason is None and not called_off:
            raise EngineFailure(f"request {self.request.id}: the endpoint's answer ended without a reason")
        self._times.decode_s = time.perf_counter() - self._sent - self._times.prefill_s
        return Turn(
            context_ids=self.request.context_ids,
            output_ids=np.array(self.tokens, np.int32),
            logprobs=np.minimum(np.array(self._logprobs, np.float32), 0),
            versions=np.full(len(self.tokens), self._version, np.int32),
            stop_reason=self._reason or "abort",
            sampling=self.request.sampling,
            seed=self.request.seed,
            engine_id=engine_id,
            times=self._times,
        )

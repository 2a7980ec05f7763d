"""A stand-in for SGLang's server: the documented HTTP interface of releases 0.5.21 to 0.5.23, with a tiny real model.

    python tests/sglang_server.py --model-path FOLDER --port 0 [the other arguments that meshrl passes to a server]

It is stricter than the real server: an unknown field, argument or sampling parameter is an error, and so is a request
while the cache belongs to other weights, which gives wrong samples silently in the real one. POST /standin {"fault":
NAME, ...} injects a fault or selects another release. When the server is ready it prints "listening on PORT".

It is also an OpenAI-like completions server (POST /v1/completions), as SGLang is.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import io
import pickle
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from sglang_bodies import (
    Abort,
    Completion,
    Continue,
    Generate,
    Memory,
    Nothing,
    Pause,
    Selected,
    StandInFault,
    UpdateFromDisk,
    UpdateFromTensor,
    UpdateVersion,
)
from sglang_shards import ShardModel, full_state
from tiny_engines import ask, layout_of, sync, tiny_engine
from tiny_http import HttpServer, Refused

from meshrl.core.types import Request, Turn
from meshrl.model.hub_names import tied_names
from meshrl.model.recipe import load_causal_lm

GARBAGE = float("nan")


class SafeUnpickler(pickle.Unpickler):
    """Accepts plain tensors only: the part of SGLang's list that is needed for a tensor outside of shared memory."""

    ALLOWED = (("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) not in self.ALLOWED:
            raise Refused(500, f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


class Server:
    """The state of the server. `engine` computes with the tensors of `shards`, which are joined again after changes."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.pretends_to_be = "0.5.23"
        self.lm = load_causal_lm(args.model_path).to(getattr(torch, args.dtype)).eval().requires_grad_(False)
        self.names = {name: p.detach() for name, p in self.lm.named_parameters()}
        tied, kv_heads, tp = tied_names(self.lm), self.lm.config.num_key_value_heads, args.tp_size
        self.shards = [ShardModel(self.names, tied, kv_heads, rank, tp) for rank in range(tp)]
        self.engine = tiny_engine(
            self.lm, max_context_tokens=args.context_length, max_running=args.max_running_requests
        )
        self.eos = {i for i in [self.lm.config.eos_token_id] if isinstance(i, int)}
        self.number, self.label, self.labels = 0, "default", {0: "default"}  # labels by the engine's version number
        self.reconciled = self.paused = self.session = False
        self.dirty = self.unflushed = False  # shards have changed: the engine must be synced, the cache be flushed
        self.released: set[str] = set()
        self.pending: set[str] = set()
        self.fault: dict[str, Any] = {}

    @property
    def has_sessions(self) -> bool:
        return tuple(map(int, self.pretends_to_be.split("."))) >= (0, 5, 21)

    def broken(self, fault: str) -> bool:
        return self.fault.get("fault") == fault

    # ---- generation

    async def generate(self, body: Generate) -> Any:
        """A stream of events, or the last event."""
        if len(body.input_ids) >= self.args.context_length or body.rid in self.pending:
            raise Refused(400, {"error": {"message": f"{len(body.input_ids)} ids do not fit, or the rid is in use"}})
        if body.sampling_params.max_new_tokens == 0:
            return await self._score(body)
        events = self._events(body)
        if body.stream:
            return events
        return [event async for event in events][-1]

    async def _events(self, body: Generate) -> AsyncGenerator[dict[str, Any]]:
        p = body.sampling_params
        # SGLang never uses one position of the context, and reserves one for the next token.
        limit = min(p.max_new_tokens, self.args.context_length - len(body.input_ids) - 2)
        done, sent = await self._start(self._request(body.rid, body.input_ids, p, p.sampling_seed, limit)), 0
        while not done.done():
            await asyncio.sleep(0.001)
            tokens, logprobs = self._so_far(body.rid)
            if body.stream and len(tokens) - sent >= (p.stream_interval or 1 if sent else 1):
                yield self._event(body, tokens, logprobs, sent, None)
                sent = len(tokens)
        turn = await done
        reason: dict[str, Any] = {"type": "length", "length": limit}
        if turn.stop_reason == "stop":
            reason = {"type": "stop", "matched": int(turn.output_ids[-1])}
        elif turn.stop_reason == "abort":
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            sent = max(0, sent - (sent == len(turn.output_ids)))  # an aborted queued request repeats its last token
        event = self._event(body, turn.output_ids.tolist(), turn.logprobs.tolist(), sent, reason)
        event["meta_info"]["weight_versions"] = self._spans(turn)
        yield event

    def _event(
        self, body: Generate, tokens: list[int], logprobs: list[float], start: int, reason: Any
    ) -> dict[str, Any]:
        ids = tokens[start:]
        meta: dict[str, Any] = {
            "id": body.rid,
            "finish_reason": reason,
            "prompt_tokens": len(body.input_ids),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self.label,
        }
        if body.return_logprob and not self.broken("no_logprobs"):
            shift = int(self.broken("other_logprobs"))
            meta["output_token_logprobs"] = [[lp, i + shift, None] for lp, i in zip(logprobs[start:], ids, strict=True)]
        event = {"text": "", "output_ids": ids, "meta_info": meta}
        if body.return_prompt_token_ids:
            doubled = int(self.broken("wrong_echo"))  # like a tokenizer that adds a second BOS
            event["prompt_token_ids"] = body.input_ids[:doubled] + body.input_ids
        return event

    def _spans(self, turn: Turn) -> list[dict[str, Any]]:
        spans = [{"version": self.labels[self.number], "start": 0, "end": 0}] if not len(turn.versions) else []
        for position, number in enumerate(turn.versions.tolist()):
            if not spans or spans[-1]["version"] != self.labels[number]:
                spans.append({"version": self.labels[number], "start": position, "end": position})
            spans[-1]["end"] = position + 1
        return spans

    async def _score(self, body: Generate) -> dict[str, Any]:
        await self._compute_with_shards()
        scores = (await self.engine.score(np.array(body.input_ids, np.int32))).tolist()
        event = self._event(body, [], [], 0, {"type": "length", "length": 0})
        pairs = [[lp if i else None, token, None] for i, (lp, token) in enumerate(zip(scores, body.input_ids))]
        event["meta_info"]["input_token_logprobs"] = pairs[body.logprob_start_len :]
        return event

    def _request(self, rid: str, ids: list[int], p: Any, seed: int | None, max_new_tokens: int) -> Request:
        if seed is None or not self.args.enable_deterministic_inference:
            seed = random.getrandbits(62)  # seeds are used with deterministic inference only
        return ask(
            rid,
            ids[:1],
            prefix_output=np.array(ids[1:], np.int32),  # SGLang's draws depend on the position in the full sequence
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=0 if p.top_k in (-1, 1 << 30) else p.top_k,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            stop_token_ids=() if p.ignore_eos else tuple({*(p.stop_token_ids or ()), *self.eos}),
            seed=seed,
            max_new_tokens=max_new_tokens + len(ids) - 1,
        )

    async def _start(self, request: Request) -> asyncio.Future[Turn]:
        if not self.paused:
            await self._compute_with_shards()
        self.pending.add(request.id)
        done = asyncio.ensure_future(self.engine.generate(request))
        done.add_done_callback(lambda _: self.pending.discard(request.id))
        return done

    def _so_far(self, rid: str) -> tuple[list[int], list[float]]:
        rows = [s for s in self.engine._scheduler.running if s.request.id == rid]
        return (rows[0].tokens[:], rows[0].logprobs[:]) if rows else ([], [])

    async def completions(self, body: Completion) -> Any:
        limit = min(body.max_tokens, self.args.context_length - len(body.prompt))
        if limit <= 0 or not body.stream:
            raise Refused(400, {"message": f"{len(body.prompt)} ids do not fit, or no stream was asked for"})
        rid = f"cmpl-{random.getrandbits(60):x}"
        return self._choices(body, self._request(rid, body.prompt, body, body.seed, limit))

    async def _choices(self, body: Completion, request: Request) -> AsyncGenerator[dict[str, Any]]:
        done, sent, ended = await self._start(request), 0, False
        try:
            while not ended:
                await asyncio.sleep(0.001)
                ended = done.done()
                tokens, logprobs = self._so_far(request.id)
                reason = None
                if ended:
                    turn = await done
                    tokens, logprobs = turn.output_ids.tolist(), turn.logprobs.tolist()
                    reason = turn.stop_reason if turn.stop_reason in ("stop", "abort") else "length"
                if len(tokens) > sent or ended:
                    yield self._choice(body, tokens, logprobs, sent, reason)
                    sent = len(tokens)
        finally:
            if not done.done():  # the client has disconnected
                await self.engine.abort([request.id])

    def _choice(
        self, body: Completion, tokens: list[int], logprobs: list[float], sent: int, reason: str | None
    ) -> dict[str, Any]:
        ids = tokens[sent:]
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": reason, "logprobs": None}
        if body.logprobs is not None and not self.broken("no_logprobs"):
            choice["logprobs"] = {"token_logprobs": logprobs[sent:], "tokens": [""] * len(ids), "top_logprobs": []}
        if body.return_token_ids and not self.broken("no_ids"):
            choice["token_ids"] = ids
            if not sent:
                choice["prompt_token_ids"] = body.prompt[: int(self.broken("wrong_echo"))] + body.prompt
        return {"id": "cmpl", "object": "text_completion", "model": body.model, "choices": [choice]}

    async def abort(self, body: Abort) -> None:
        if body.abort_all or body.rid:  # the scheduler compares prefixes, and every id has the empty prefix
            await self.engine.abort([i for i in self.pending if body.abort_all or i.startswith(body.rid or "")])

    async def pause(self, body: Pause) -> dict[str, Any]:
        self.paused = True
        if body.mode == "abort":
            await self.engine.abort()
        await self.engine.release({"kv_cache"})  # running requests return to the queue with their tokens
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def resume(self, body: Continue) -> dict[str, Any]:
        await self._compute_with_shards()
        self.paused = False
        await self.engine.restore({"kv_cache"} - self.released)
        return {"message": "Generation continued successfully.", "status": "ok"}

    # ---- weights

    async def begin_update(self, body: Selected) -> dict[str, Any]:
        if not self.has_sessions:
            raise Refused(404, {"detail": "Not Found"})
        self._session(False, True, "a weight-update session is already open; call end_weight_update() first")
        return {"success": True, "message": "Success"}

    async def end_update(self, body: Nothing) -> dict[str, Any]:
        if not self.has_sessions:
            raise Refused(404, {"detail": "Not Found"})
        self._session(True, False, "no weight-update session is open; call begin_weight_update() first")
        return {"success": True, "message": "Success"}

    def _session(self, before: bool, after: bool, message: str) -> None:
        if self.session != before:
            raise Refused(400, {"success": False, "message": message})
        self.session = after

    async def update_from_tensor(self, body: UpdateFromTensor) -> dict[str, Any]:
        if self.has_sessions:
            self._session(True, True, "update_weights_from_tensor must run between begin_weight_update() and its end")
        known = body.load_format in self.args.custom_weight_loader
        if not known or len(body.serialized_named_tensors) != len(self.shards):
            raise Refused(500, {"message": f"Unknown load_format={body.load_format}, or not one payload a rank"})
        if self.pending and not self.paused:
            raise Refused(500, {"message": "weights are updated under running requests"})
        if "weights" in self.released:
            raise Refused(500, {"message": "weights are updated whose memory is released"})
        module, _, name = body.load_format.rpartition(".")
        loader = getattr(importlib.import_module(module), name)
        before = [p.clone() for shard in self.shards for p in shard.parameters()]
        for shard, payload in zip(self.shards, body.serialized_named_tensors, strict=True):
            shard.skip = {*self.fault["names"]} if self.broken("drop_weights") else set()
            loader(shard, SafeUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load())
        after = [p for shard in self.shards for p in shard.parameters()]
        if not all(map(torch.equal, before, after)):
            self.dirty, self.unflushed = True, "kv_cache" not in self.released
        return self._updated(body.flush_cache, body.weight_version)

    async def update_from_disk(self, body: UpdateFromDisk) -> dict[str, Any]:
        if not Path(body.model_path, "config.json").is_file():
            message = f"Failed to get weights iterator: no model in {body.model_path}."
            raise Refused(400, {"success": False, "message": message})
        while self.pending and not self.paused:
            await asyncio.sleep(0.001)
        state = load_causal_lm(body.model_path).to(getattr(torch, self.args.dtype)).named_parameters()
        tensors = [(name, p.detach()) for name, p in state]
        for shard in self.shards:
            shard.load_weights(tensors)
        self.dirty = self.unflushed = True
        done = self._updated(body.flush_cache, body.weight_version)
        return {} if self.broken("empty_reload_answer") else done

    def _updated(self, flush: bool, label: str | None) -> dict[str, Any]:
        if label is not None:
            self.label, self.dirty = label, True  # later tokens get the new label
        if flush and not self._flushed():
            message = "Weights were updated, but the cache was not flushed because requests are still running."
            raise Refused(400, {"success": False, "message": message})
        return {"success": True, "message": "Success"}

    async def update_version(self, body: UpdateVersion) -> dict[str, Any]:
        if body.abort_all_requests:
            await self.engine.abort()
        self.label, self.dirty = body.new_version, True
        self.unflushed = False  # the client labels mixed weights without a flush; it discards their tokens
        return {"success": True, "message": "", "new_version": body.new_version}

    async def flush(self, body: Nothing) -> str:
        if not self._flushed():
            raise Refused(400, "Flush cache failed.")
        return "Cache flushed."

    def _flushed(self) -> bool:
        if (self.pending and not self.paused) or self.broken("no_flush"):
            return False
        self.unflushed = False
        return True

    async def _compute_with_shards(self) -> None:
        """Sync the shards' values into the engine. (The real server reads them in each forward.)"""
        if self.unflushed:
            raise Refused(500, {"message": "the radix cache still holds keys and values of other weights"})
        if not self.dirty:
            return
        self.dirty, self.number = False, self.number + 1
        self.labels[self.number] = self.label
        for name, tensor in full_state(self.shards, self.names).items():
            self.lm.get_parameter(name).copy_(tensor)
        layout = layout_of(self.lm, 1 << 20)
        if not self.reconciled:
            await self.engine.reconcile(layout)
            self.reconciled = True
        await sync(self.lm, self.engine, self.number, 1 << 20)

    # ---- memory and facts

    async def release(self, body: Memory) -> None:
        if self.pending and not self.paused:
            raise Refused(500, {"message": "release_memory_occupation should be called only when server is idle."})
        tags = {*(body.tags or ("weights", "kv_cache"))} if self.args.enable_memory_saver else set()
        self.released |= tags
        for p in (p for shard in self.shards for p in shard.parameters() if "weights" in tags):
            p.data.fill_(GARBAGE)
            self.dirty = True  # later requests are computed with the garbage
        await self.engine.release(tags)

    async def restore(self, body: Memory) -> None:
        tags = {*(body.tags or ("weights", "kv_cache"))}
        if not tags <= self.released:
            raise Refused(500, {"message": f"KeyError: {sorted(tags - self.released)}"})
        self.released -= tags
        await self.engine.restore(tags - {"kv_cache"} if self.paused else tags)

    async def server_info(self, body: None) -> dict[str, Any]:
        memory = {"weight": 1.0, "kvcache": 0.5, "token_capacity": 4096}
        info = {**vars(self.args), "version": self.pretends_to_be, "internal_states": [{"memory_usage": memory}]}
        return info | ({"enable_memory_saver": False} if self.broken("no_memory_saver") else {})

    async def model_info(self, body: None) -> dict[str, Any]:
        return {"model_path": self.args.model_path, "is_generation": True, "weight_version": self.label}

    async def models(self, body: None) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.args.model_path, "max_model_len": self.args.context_length}]}

    async def health(self, body: None) -> str:
        return ""

    async def stand_in(self, body: StandInFault) -> None:
        self.fault = self.http.fault = body.model_dump()
        self.pretends_to_be = body.release

    async def handle(self, method: str, path: str, body: Any) -> Any:
        call, model, methods = self.routes.get(path, (None, None, ()))
        if call is None or method not in methods:
            raise Refused(404, {"detail": "Not Found"})
        try:
            checked = None if model is None else model.model_validate({} if body is None and "GET" in methods else body)
        except ValidationError as error:
            raise Refused(400, {"object": "error", "message": str(error), "code": 400}) from error
        return await call(checked)

    async def run(self) -> None:
        get, post, both = ("GET",), ("POST",), ("GET", "POST")
        self.routes = {
            "/health": (self.health, None, get),
            "/server_info": (self.server_info, None, get),
            "/model_info": (self.model_info, None, get),
            "/v1/models": (self.models, None, get),
            "/generate": (self.generate, Generate, post),
            "/v1/completions": (self.completions, Completion, post),
            "/abort_request": (self.abort, Abort, post),
            "/pause_generation": (self.pause, Pause, post),
            "/continue_generation": (self.resume, Continue, post),
            "/begin_weight_update": (self.begin_update, Selected, post),
            "/end_weight_update": (self.end_update, Nothing, post),
            "/update_weights_from_tensor": (self.update_from_tensor, UpdateFromTensor, post),
            "/update_weights_from_disk": (self.update_from_disk, UpdateFromDisk, post),
            "/update_weight_version": (self.update_version, UpdateVersion, post),
            "/flush_cache": (self.flush, Nothing, both),
            "/release_memory_occupation": (self.release, Memory, both),
            "/resume_memory_occupation": (self.restore, Memory, both),
            "/standin": (self.stand_in, StandInFault, post),
        }
        self.http = HttpServer(self.handle, self.args.api_key)
        await self.http.serve(self.args.port, lambda port: print(f"listening on {port}", flush=True))


def arguments() -> argparse.Namespace:
    """The arguments that meshrl passes to `python -m sglang.launch_server`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--max-running-requests", type=int, default=4)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--custom-weight-loader", nargs="*", default=[])
    parser.add_argument("--log-level", default="info")
    for flag in ("enable-deterministic-inference", "enable-memory-saver", "incremental-streaming-output"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--api-key")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(Server(arguments()).run())

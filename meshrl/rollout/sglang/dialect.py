"""An SGLang server of release 0.5.23 or later: its command line, its endpoint (`/generate`) and its commands.

The server gets token ids, so it neither tokenizes nor applies a template. Logprobs belong to the distribution
that was sampled from, with temperature applied, as SGLang returns them unless SGLANG_RETURN_ORIGINAL_LOGPROB is
set.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import torch

from meshrl.core.device import visible_devices
from meshrl.core.errors import CapabilityError, ConfigError, EngineFailure, RequestError, SyncError
from meshrl.core.types import Request
from meshrl.process.leases import LeasedFolder
from meshrl.rollout.admission import Bounds
from meshrl.rollout.base import Capabilities
from meshrl.rollout.server.answer import MIXED, AnswerPart, full_ids
from meshrl.rollout.server.dialect import Dialect, ServerSpec, command_line, sampling_body, stream_interval
from meshrl.rollout.server.http import HttpClient, authorization, fetch, is_up
from meshrl.rollout.server.process import ServerProcess

LOADER = "meshrl.rollout.sglang.loader.load"  # runs in the workers
OLDEST = (0, 5, 23)  # the oldest release that the tests have run
_RESERVED = 6  # positions at the end of SGLang's context that no prompt may reach; the model may have fewer
_MEMORY_KEYS = {"weights": "weight", "kv_cache": "kvcache"}  # keys of SGLang's memory_usage, in GiB on each rank
_GIB = 1 << 30
_BAD_REQUEST = 400
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


class SglangDialect(Dialect):
    """An SGLang server that this process has started, or that was already running."""

    name = "SGLang"
    no_release = "the server runs without --enable-memory-saver"

    def __init__(
        self,
        http: HttpClient,
        info: dict[str, Any],
        loaded_label: str,
        server: ServerProcess | None = None,
    ):
        """info: the server's answer to /server_info. server: None = another process started it."""
        super().__init__(http, server)
        self.capabilities = Capabilities(release=bool(info.get("enable_memory_saver")), in_flight=True)
        self.loaded_label = loaded_label
        self._is_deterministic = bool(info.get("enable_deterministic_inference"))
        self._tp_size = int(info["tp_size"])
        self._gib = (info.get("internal_states") or [{}])[0].get("memory_usage") or {}
        self._rids: dict[str, str] = {}  # request id -> SGLang's rid, of sent requests
        self._answers = LeasedFolder()  # each worker writes its answer to a file in this folder
        self._num_calls = 0
        self._commit_fields: dict[str, Any] = {}  # sent with the next commit
        self._in_session = server is None  # a dead client may have left an update open

    # ---- requests

    def check(self, request: Request, bounds: Bounds) -> None:
        super().check(request, bounds)
        if request.sampling.min_p and self._is_deterministic:
            remedy = "set min_p to 0, or rollout.sglang.deterministic=false"
            raise CapabilityError(f"request {request.id} has min_p, which ends a deterministic SGLang server; {remedy}")

    async def stream(self, request: Request, bounds: Bounds) -> AsyncGenerator[AnswerPart]:
        # Of a fixed length: SGLang aborts by prefix, so an abort of "a-1" would also abort "a-10".
        rid, num_sampled = secrets.token_hex(8), 0
        self._rids[request.id] = rid
        try:
            async with aclosing(self.http.stream("/generate", _body(request, bounds, rid))) as events:
                async for event in events:
                    part = part_of(event, num_sampled, request.id)
                    num_sampled += len(part.tokens)
                    yield part
        finally:
            del self._rids[request.id]

    async def abort(self, ids: Sequence[str]) -> None:
        rids = [self._rids[name] for name in ids if name in self._rids]
        if len(rids) == len(self._rids):
            await self.http.post("/abort_request", {"abort_all": True})
        else:
            await asyncio.gather(*(self.http.post("/abort_request", {"rid": rid}) for rid in rids))

    # ---- commands

    async def pause(self) -> None:
        """Running requests wait in the server's queue with their tokens. With the mode in_place, they would continue
        with keys and values of the old weights."""
        await self.http.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self.http.post("/continue_generation", {})

    async def call_workers(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """A cancelled sync is no call to the workers: the loader has nothing to undo."""
        if step == "cancel":
            # The weights are labelled as mixed before anything is sampled with them: SGLang can't abort a request
            # during the pause in which it came.
            await self._close_session()
            await self.http.post("/update_weight_version", {"new_version": MIXED, "abort_all_requests": False})
            await self.resume()
            return []
        if step in ("reconcile", "begin"):
            await self._close_session()
            await self.http.post("/begin_weight_update", {})
            self._in_session = True
        try:
            return await self._run_in_workers(step, arguments)
        finally:
            if step in ("reconcile", "commit"):
                await self._close_session()

    async def _run_in_workers(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Call `loader.load` in every worker."""
        self._num_calls += 1
        answer_files = [self._answers.path / f"{self._num_calls}.{rank}" for rank in range(self._tp_size)]
        body: dict[str, Any] = {
            "serialized_named_tensors": [_payload(step, arguments, file) for file in answer_files],
            "load_format": LOADER,
            "flush_cache": False,
        }
        if step == "commit":
            body |= self._commit_fields
        await self.http.post("/update_weights_from_tensor", body)
        missing = [rank for rank, file in enumerate(answer_files) if not file.is_file()]
        if missing:
            raise EngineFailure(
                f"SGLang's workers {missing} of {self._tp_size} did not answer {step}: they must run on this "
                "machine, with access to its temporary folder and its shared memory"
            )
        answers = [json.loads(file.read_text()) for file in answer_files]
        for file in answer_files:
            file.unlink()
        return answers

    async def begin_update(self, label: str, has_cache: bool) -> None:
        """The last request of the sync, which completes the weights, also sets the label and drops the cache; if either
        is refused, the sync fails."""
        self._commit_fields = {"weight_version": label, "flush_cache": has_cache}

    async def end_update(self, label: str) -> None:
        served = (await self.http.get("/model_info"))["weight_version"]
        if served != label:
            raise SyncError(f"{self.http.name}: the weights were labelled {label!r}, and SGLang has {served!r}")

    async def _close_session(self) -> None:
        if self._in_session:
            self._in_session = False
            with suppress(RequestError):  # refused if no update is open
                await self.http.post("/end_weight_update", {})

    async def release(self, parts: set[str]) -> int:
        """Returns the bytes that SGLang measured when it allocated them."""
        await self.http.post("/release_memory_occupation", {"tags": sorted(parts)})
        return self._num_bytes(parts)

    async def restore(self, parts: set[str]) -> int:
        await self.http.post("/resume_memory_occupation", {"tags": sorted(parts)})
        return self._num_bytes(parts)

    def _num_bytes(self, parts: set[str]) -> int:
        return int(sum(self._gib.get(_MEMORY_KEYS[part], 0) for part in parts) * self._tp_size * _GIB)

    async def close(self) -> None:
        await super().close()
        self._answers.close()


def _payload(step: str, arguments: dict[str, Any], answer: Path) -> str:
    """SGLang unpickles only [(name, tensor)], from base64, so the message is a uint8 tensor."""
    text = json.dumps({"step": step, "arguments": arguments, "answer": str(answer)}).encode()
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("meshrl", message)])).decode()


def _body(request: Request, bounds: Bounds, rid: str) -> dict[str, Any]:
    sampling = sampling_body(request, bounds) | {
        "max_new_tokens": bounds.limit,
        "sampling_seed": request.seed,  # draws depend on seed and position, so a continuation uses the same seed
        "stream_interval": stream_interval(request),
    }
    return {
        "rid": rid,
        "input_ids": full_ids(request),
        "sampling_params": sampling,
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "stream": True,
    }


def part_of(event: dict[str, Any], num_sampled: int, request_id: str) -> AnswerPart:
    """An event has the tokens since the last event, or all tokens; the event of an abort in the queue may repeat the
    last token. So the total count determines which tokens are new. num_sampled: tokens of earlier events."""
    meta = event["meta_info"]
    new, ids = meta["completion_tokens"] - num_sampled, event.get("output_ids") or []
    if not 0 <= new <= len(ids):
        raise EngineFailure(
            f"request {request_id}: SGLang has sampled {meta['completion_tokens']} tokens, but after {num_sampled} "
            f"tokens it sent {len(ids)}; some are lost"
        )
    pairs = meta.get("output_token_logprobs") or []
    pairs = pairs[max(0, len(pairs) - new) :]
    reason = meta["finish_reason"] or {}
    is_failure = reason.get("type") == "abort" and (reason.get("status_code") or 0) >= _BAD_REQUEST
    return AnswerPart(
        tokens=ids[len(ids) - new :],
        logprobs=[pair[0] for pair in pairs],
        logprob_ids=[pair[1] for pair in pairs],
        context=event.get("prompt_token_ids"),
        label_spans=meta.get("weight_versions") or [],
        cached_tokens=meta.get("cached_tokens") or 0,
        reason=str(reason) if is_failure else reason.get("type"),
    )


def connect_sglang(spec: ServerSpec) -> SglangDialect:
    """Start the server and wait until it is ready, unless the config has the url of a running one. Blocks."""
    cfg = spec.rollout.sglang
    server, url, headers = None, cfg.url, authorization(cfg.api_key_env)
    if url is None:
        key = secrets.token_hex(16)  # other users of this machine can connect to its ports
        headers = {"Authorization": f"Bearer {key}"}
        server, url = start_server(spec, key)
    info = fetch("/server_info", url, headers)
    require_fit(info, spec.name, cfg.deterministic, spec.max_context_tokens, spec.model.dtype)
    label = str(fetch("/model_info", url, headers)["weight_version"])
    http = HttpClient(spec.name, url, headers=headers, server=server)
    return SglangDialect(http, info, label, server)


def require_fit(info: dict[str, Any], engine_id: str, deterministic: bool, max_context_tokens: int, dtype: str) -> None:
    """Raises: ConfigError for a server that this engine can't use, or that does not fit the config."""
    if tuple(int(number) for number in re.findall(r"\d+", str(info["version"]))[:3]) < OLDEST:
        raise ConfigError(
            f"{engine_id} runs SGLang {info['version']}; this engine needs {'.'.join(map(str, OLDEST))} or later, "
            "because it was not tested with earlier ones"
        )
    if LOADER not in (info.get("custom_weight_loader") or []):
        raise ConfigError(
            f"{engine_id} was started without --custom-weight-loader {LOADER}, which loads meshrl's weights; it has "
            f"{info.get('custom_weight_loader')}. Install meshrl in SGLang's environment and add the argument"
        )
    if bool(info.get("enable_deterministic_inference")) != deterministic:
        raise ConfigError(
            f"rollout.sglang.deterministic is {deterministic}, but {engine_id} was started "
            f"{'without' if deterministic else 'with'} --enable-deterministic-inference. Make them agree"
        )
    if (room := int(info["max_req_input_len"])) < max_context_tokens:  # prompts are shorter than room
        raise ConfigError(
            f"{engine_id} takes {room} tokens per request, but the run needs {max_context_tokens}; set "
            f"rollout.max_context_tokens to {room} or less, or give the server a larger KV cache and --context-length "
            f"{max_context_tokens + _RESERVED}"
        )
    if info.get("dtype") not in (None, "auto", dtype):
        raise ConfigError(f"{engine_id} computes in {info['dtype']}, but model.dtype is {dtype}. Make them agree")


def start_server(spec: ServerSpec, key: str) -> tuple[ServerProcess, str]:
    """A server that is ready, and its address. config/rollout.py refuses the flags that are set here in
    rollout.sglang.args."""
    cfg, tp_size = spec.rollout.sglang, spec.rollout.tp_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values: dict[str, object] = {
        "--model-path": spec.model.path,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": spec.model.dtype,
        "--tp-size": tp_size,
        "--context-length": spec.max_context_tokens + _RESERVED,
        "--max-running-requests": spec.rollout.max_running_requests,
        "--mem-fraction-static": cfg.mem_fraction_static,
        "--custom-weight-loader": LOADER,
        "--log-level": "warning",
    }
    flags = ["--skip-tokenizer-init", "--incremental-streaming-output"]
    if cfg.deterministic:
        flags.append("--enable-deterministic-inference")
    if spec.device.type != "cpu":
        flags.append("--enable-memory-saver")

    def command(private: Path) -> list[str]:
        secret = private / "key.yaml"  # all users of the machine can read a command line
        secret.touch(mode=0o600)
        secret.write_text(f'api-key: "{key}"\n', encoding="utf-8")
        return command_line(cfg.python, "sglang.launch_server", values | {"--config": secret}, flags, cfg.args)

    server = ServerProcess(spec.name, command, _ENVIRONMENT | visible_devices(spec.device, tp_size), spec.logs)
    url = f"http://127.0.0.1:{port}"
    server.wait_until(lambda: is_up("/health", url), cfg.start_deadline_s, "rollout.sglang.start_deadline_s")
    return server, url

"""A vLLM server: its command line, its token endpoint (`/inference/v1/generate`) and its commands.

The server gets token ids and processed images, so it neither tokenizes nor applies a template. vLLM's own EOS check is
switched off: a turn ends at the stop ids that meshrl sends, as with every engine. Logprobs belong to the distribution
that was sampled from (`--logprobs-mode processed_logprobs`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from meshrl.config.rollout import VLLM_IMAGE_MODELS
from meshrl.core.device import visible_devices
from meshrl.core.errors import CapabilityError, EngineFailure, RequestError
from meshrl.core.types import Request
from meshrl.model.causal import MASKED
from meshrl.model.inputs import TEXT_INPUTS, ModelInputs
from meshrl.model.limits import full_config, has_experts
from meshrl.plan.decisions import VLLM_CPU_CACHE_BYTES
from meshrl.rollout.admission import Bounds, check_supported, topk_of
from meshrl.rollout.base import Capabilities
from meshrl.rollout.server.answer import AnswerPart, full_ids
from meshrl.rollout.server.dialect import (
    Dialect,
    ServerSpec,
    command_line,
    continuation_seed,
    sampling_body,
    stream_interval,
)
from meshrl.rollout.server.http import HttpClient, is_up
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.vllm.features import EncodedImages

MAX_TOPK = 19  # vLLM returns at most 20 logprobs with each token, and one of them may be the sampled token
_GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"  # vLLM prepends it to the ids of requests to that endpoint
_LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to it, and would sample from another distribution than requested

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # endpoints for pause, abort, cache and weights; only this user can use the socket
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


class VllmDialect(Dialect):
    """A vLLM server that this process has started."""

    name = "vLLM"
    loaded_label = "default"
    drains_before_release = True  # vLLM crashed when its memory was released with requests in place
    no_release = "the server runs without --enable-sleep-mode; use rollout.release_memory"

    def __init__(
        self, http: HttpClient, server: ServerProcess | None, can_release: bool, inputs: ModelInputs = TEXT_INPUTS
    ):
        """inputs: of the server's model."""
        super().__init__(http, server)
        self.capabilities = Capabilities(release=can_release, in_flight=True)
        self._inputs, self._images = inputs, EncodedImages(inputs, self._encode)

    # ---- requests

    def check(self, request: Request, bounds: Bounds) -> None:
        check_supported(
            request,
            self.name,
            lambda name: 1 <= topk_of(name) <= MAX_TOPK,
            f"topk:N, N from 1 to {MAX_TOPK}",
            takes_media=self._inputs.family is not None and self._inputs.config.model_type in VLLM_IMAGE_MODELS,
        )
        if fault := self._inputs.fault(request, request.context_ids):
            raise RequestError(f"request {request.id}: {fault}")
        if 0 < request.sampling.temperature < _LEAST_TEMPERATURE:
            raise CapabilityError(
                f"request {request.id}: sampling.temperature is {request.sampling.temperature:g}; vLLM takes 0 "
                f"(greedy) or {_LEAST_TEMPERATURE} and more"
            )

    async def stream(self, request: Request, bounds: Bounds) -> AsyncGenerator[AnswerPart]:
        body = _body(request, bounds, self._inputs.masked)
        if request.media_spans:
            body["features"] = await self._images.features(request)
        async with aclosing(self.http.stream(_GENERATE, body)) as events:
            async for event in events:
                yield part_of(event)

    async def abort(self, ids: Sequence[str]) -> None:
        await self.http.post("/abort_requests", {"request_ids": [_ID_PREFIX + name for name in ids]})

    # ---- commands

    async def pause(self) -> None:
        await self.http.post("/pause", mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self.http.post("/resume")

    async def call_workers(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"method": "meshrl_call", "kwargs": {"step": step, "arguments": arguments}}
        return list((await self.http.post("/collective_rpc", body))["results"])

    async def begin_update(self, label: str, has_cache: bool) -> None:
        await self._drop_caches()

    async def end_update(self, label: str) -> None:
        await self.http.post("/update_weight_version", {"new_version": label})

    async def release(self, parts: set[str]) -> int:
        await self._drop_caches()
        return await self._memory("release", parts)

    async def restore(self, parts: set[str]) -> int:
        return await self._memory("restore", parts)

    async def _memory(self, step: str, parts: set[str]) -> int:
        return sum(answer["num_bytes"] for answer in await self._answers(step, {"parts": sorted(parts)}))

    async def _encode(self, arrays: dict[str, Any]) -> str:
        return str((await self._answers("encode", {"arrays": arrays}))[0]["text"])

    async def _answers(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        answers = await self.call_workers(step, arguments)
        for answer in answers:
            if "error" in answer:
                raise EngineFailure(f"{self.http.name}: {answer['error']}")
        return answers

    async def _drop_caches(self) -> None:
        """Drop the KV cache and the features of images, which /reset_prefix_cache would leave. Those of running
        requests are computed again. vLLM answers with an error if it can't."""
        await self.http.post("/pause", mode="keep", clear_cache=True)


def _body(request: Request, bounds: Bounds, masked: Sequence[int] = ()) -> dict[str, Any]:
    """masked: ids that are never sampled, as in the trainer's head."""
    topk = max(map(topk_of, request.want), default=0)
    sampling = sampling_body(request, bounds) | {
        "ignore_eos": True,
        "seed": continuation_seed(request),
        "max_tokens": bounds.limit,
        "logprobs": topk + 1 if topk else 0,
        "detokenize": False,
        "stream_interval": stream_interval(request),
        "logit_bias": dict.fromkeys(masked, MASKED) or None,
    }
    return {
        "request_id": request.id,
        "token_ids": full_ids(request),
        "sampling_params": sampling,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def part_of(event: dict[str, Any]) -> AnswerPart:
    """The first event echoes the prompt, and the last one has no choices."""
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    part = AnswerPart(context=event.get("prompt_token_ids"), cached_tokens=details.get("cached_tokens") or 0)
    for choice in event["choices"]:
        content = (choice["logprobs"] or {}).get("content") or []
        part.tokens = choice["token_ids"] or []
        part.logprobs = [entry["logprob"] for entry in content]
        part.logprob_ids = [entry["token_id"] for entry in content]
        part.top = [[(top["logprob"], top["token_id"]) for top in entry["top_logprobs"]] for entry in content]
        part.label_spans = choice.get("weight_versions") or []
        part.reason = choice["finish_reason"]
    return part


def start_vllm(spec: ServerSpec) -> VllmDialect:
    """Start the server and wait until it is ready. Blocks."""
    server, can_release = start_server(spec), spec.device.type == "cpu" or bool(spec.rollout.release_memory)
    return VllmDialect(http_of(server), server, can_release, ModelInputs(full_config(spec.model.path)))


def start_server(spec: ServerSpec) -> ServerProcess:
    """A server that is ready."""
    threads = _threads() if spec.device.type == "cpu" else {}
    environment = {**_ENVIRONMENT, **threads, **visible_devices(spec.device, spec.rollout.tp_size)}
    server = ServerProcess(spec.name, lambda folder: _command(spec, folder), environment, spec.logs)
    key, deadline_s = "rollout.vllm.start_deadline_s", spec.rollout.vllm.start_deadline_s
    server.wait_until(lambda: is_up("/health", socket=_socket_in(server.folder)), deadline_s, key)
    return server


def _threads() -> dict[str, str]:
    """The environment that gives each worker of the CPU build one rank's share of the cores, without binding: other
    ranks use the same cores."""
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": binding}


def http_of(server: ServerProcess) -> HttpClient:
    return HttpClient(server.name, socket=_socket_in(server.folder), server=server)


def _socket_in(folder: Path) -> Path:
    return folder / "http"


def _command(spec: ServerSpec, folder: Path) -> list[str]:
    """The command line. config/rollout.py refuses the flags that are set here in rollout.vllm.args; only --moe-backend
    may be there, and vLLM takes the last value."""
    cfg, on_cpu = spec.rollout.vllm, spec.device.type == "cpu"
    values: dict[str, object] = {
        "--model": spec.model.path,
        "--uds": _socket_in(folder),
        "--dtype": spec.model.dtype,
        "--max-model-len": spec.max_context_tokens,
        "--max-num-seqs": spec.rollout.max_running_requests,
        "--tensor-parallel-size": spec.rollout.tp_size,
        "--worker-extension-cls": "meshrl.rollout.vllm.worker.WeightsExtension",
        "--logprobs-mode": "processed_logprobs",  # logprobs of the distribution that was sampled from
        "--generation-config": "vllm",  # no sampling parameters from the model folder
        "--seed": 0,
    }
    if not on_cpu and has_experts(spec.model.path):
        # vLLM's other kernels of experts store permuted weights, which can't be compared with those that were sent.
        values["--moe-backend"] = "triton"
    kv_cache_bytes = cfg.kv_cache_bytes or (VLLM_CPU_CACHE_BYTES if on_cpu else None)
    if kv_cache_bytes is not None:
        values["--kv-cache-memory-bytes"] = kv_cache_bytes
    else:
        values["--gpu-memory-utilization"] = cfg.gpu_memory_utilization
    if ModelInputs(full_config(spec.model.path)).family is not None:
        values["--limit-mm-per-prompt"] = '{"video": 0}'
        values["--mm-processor-cache-gb"] = 0  # each request carries its features
        # Processed pixels are normalized; by default vLLM's model would normalize them again. vLLM's classes with a
        # tower need a tokenizer to be built.
        flags = ["--no-mm-device-do-normalize", *(["--skip-mm-profiling"] if on_cpu else [])]
    else:
        flags = ["--skip-tokenizer-init"]
    flags += [
        "--enable-scale-out",  # enables the endpoint that takes and returns ids
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]
    if on_cpu:
        flags.append("--no-enable-chunked-prefill")  # vLLM 0.32 crashes if it splits the prompt of a seeded request
    elif spec.rollout.release_memory:
        flags.append("--enable-sleep-mode")
    return command_line(cfg.python, "vllm.entrypoints.openai.api_server", values, flags, cfg.args)

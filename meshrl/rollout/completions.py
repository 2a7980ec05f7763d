"""Any running server with an OpenAI-like /v1/completions that takes ids and returns ids and logprobs (`rollout.engine:
endpoint`). meshrl does not start it.

FolderWeights writes the transfers of each sync as a new model folder, by the same steps as a server's worker
(`WorkerWeights`), and then the server gets a request to load it.

Three things can be proven about such a server: it continued the ids that it was sent, each token has a logprob, and,
in training, the logprobs agree with the trainer's own. It gets new weights as folders, if it can load one. It can't
pause a request, so a sync waits until the running requests have finished.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from meshrl.config.rollout import EndpointConfig
from meshrl.core.errors import CapabilityError, EngineFailure
from meshrl.core.types import Request
from meshrl.model.folder import INDEX, stored_tensors, write_tensors
from meshrl.process.leases import LeasedFolder
from meshrl.rollout.admission import Bounds
from meshrl.rollout.base import Capabilities
from meshrl.rollout.server.answer import AnswerPart, full_ids
from meshrl.rollout.server.dialect import Dialect, ServerSpec, continuation_seed, sampling_body
from meshrl.rollout.server.http import HttpClient, authorization, fetch
from meshrl.rollout.server.worker_weights import Assembly
from meshrl.sync.digest import lap
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec, layout_from_json

RELOAD_PATH = "/update_weights_from_disk"
_RELOAD_S = 1800.0  # a server may read a large model from a slow disk


def connect_endpoint(spec: ServerSpec) -> CompletionsDialect:
    """Ask the running server for its model. It is no child of this process, so it has no log here. Blocks."""
    cfg = spec.rollout.endpoint
    assert cfg.url is not None, "the config check requires an address"
    headers = authorization(cfg.api_key_env)
    model = cfg.model or only_model(fetch("/v1/models", cfg.url, headers), cfg.url)
    http = HttpClient(spec.name, cfg.url, headers=headers)
    return CompletionsDialect(http, cfg, model, Path(spec.model.path), spec.rollout.max_running_requests)


def only_model(answer: dict[str, Any], url: str) -> str:
    """The name of the one model in the answer of /v1/models."""
    names = [str(entry["id"]) for entry in answer["data"]]
    if not names:
        raise EngineFailure(f"{url} serves no model; start the server with the model that rollout.endpoint should use")
    if len(names) > 1:
        raise EngineFailure(f"{url} serves {', '.join(names)}; set rollout.endpoint.model to one of these names")
    return names[0]


class CompletionsDialect(Dialect):
    """A completions server. At most max_running requests run at a time; closing the connection aborts a request."""

    name = "the endpoint"
    capabilities = Capabilities()

    def __init__(self, http: HttpClient, cfg: EndpointConfig, model: str, model_folder: Path, max_running: int):
        """model: its name on the server. model_folder: the server was started with it."""
        super().__init__(http)
        self._cfg, self._model = cfg, model
        self._temporary = LeasedFolder()
        versions = self._temporary.path if cfg.folder is None else Path(cfg.folder)
        self._folders = FolderWeights(model_folder, versions, self._reload, http.name)
        self._connections = asyncio.Semaphore(max_running)
        self._aborts: dict[str, asyncio.Future[None]] = {}  # by id of each sent request; done when it is aborted

    async def stream(self, request: Request, bounds: Bounds) -> AsyncGenerator[AnswerPart]:
        aborted = self._aborts[request.id] = asyncio.get_running_loop().create_future()
        try:
            async with self._connections, aclosing(self._events(request, bounds, aborted)) as events:
                async for event in events:
                    if event["choices"]:
                        yield part_of(event, request.id)
            if aborted.done():
                yield AnswerPart(context=full_ids(request), reason="abort")
        finally:
            del self._aborts[request.id]

    async def _events(self, request: Request, bounds: Bounds, aborted: asyncio.Future[None]) -> AsyncGenerator[Any]:
        """The events until the last one, or until the request is aborted."""
        body = sampling_body(request, bounds) | {
            "model": self._model,
            "prompt": full_ids(request),  # ids, so the server neither tokenizes nor applies a template
            "max_tokens": bounds.limit,
            "seed": continuation_seed(request),
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            "stream": True,
        }
        async with aclosing(self.http.stream("/v1/completions", body)) as events:
            while not aborted.done():
                event = asyncio.ensure_future(anext(events, None))
                try:
                    await asyncio.wait([event, aborted], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not event.done():
                        event.cancel()
                        await asyncio.wait([event])
                if event.cancelled() or event.result() is None:
                    return
                yield event.result()

    async def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            if name in self._aborts and not self._aborts[name].done():
                self._aborts[name].set_result(None)

    async def call_workers(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if self._cfg.weights == "none":
            raise CapabilityError(
                f"{self.http.name} can't get weights: rollout.endpoint.weights is none, which is for evaluation only"
            )
        return await self._folders.call(step, arguments)

    async def _reload(self, folder: Path) -> None:
        url = self._cfg.reload_url or RELOAD_PATH
        answer = await self.http.post(url, {"model_path": str(folder)}, timeout_s=_RELOAD_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineFailure(
                f'{self.http.name}: {url} answered {answer!r:.200} for {folder}, not {{"success": true}}'
            )

    async def close(self) -> None:
        await super().close()
        self._temporary.close()


def part_of(event: dict[str, Any], request_id: str) -> AnswerPart:
    (choice,) = event["choices"]
    tokens = choice.get("token_ids") or []
    if choice.get("text") and not tokens:
        raise EngineFailure(f"request {request_id}: the endpoint returned text and no token ids (return_token_ids)")
    return AnswerPart(
        tokens=tokens,
        logprobs=(choice.get("logprobs") or {}).get("token_logprobs") or [],
        context=choice.get("prompt_token_ids", event.get("prompt_token_ids")),
        reason=choice.get("finish_reason"),
    )


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_FILE_BYTES = 1 << 30  # a file is written when its tensors have that many bytes

Reload = Callable[[Path], Awaitable[None]]
"""`await reload(folder)` returns when the server has loaded its weights. Raises: RequestError, EngineFailure."""


class FolderWeights:
    """Writes files during a sync. It has the tensors of one file in memory, and earlier versions on disk until the
    server has loaded the new one."""

    def __init__(self, model_folder: Path, versions: Path, reload: Reload, name: str):
        """model_folder: the server was started with it; its config and tokenizer are copied into every version."""
        self._model_folder, self._versions, self._reload, self._name = model_folder, versions, reload, name
        self._layout = Layout(tensors=(), senders=())
        self._assembly: Assembly | None = None
        self._waiting: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, str] = {}
        self._written: set[Path] = set()

    async def call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a step, as a server with one worker."""
        if step == "commit":
            return [await self.commit()]
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "reconcile": self.reconcile,
            "begin": self.begin,
            "receive": self.receive,
            "cancel": self.cancel,
        }
        return [steps[step](**arguments)]

    def reconcile(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Compare with the names in the files of the model folder: nothing else is known about the server's loader."""
        self._layout = sent = layout_from_json(layout)
        dtypes = {tensor.name: tensor.dtype for tensor in sent.tensors}
        common = next(iter(dtypes.values()), "float32")
        saved_shapes = {name: stored.shape for name, stored in stored_tensors(self._model_folder)[0].items()}
        fitting = [tensor.name for tensor in sent.tensors if saved_shapes.get(tensor.name) == tensor.shape]
        others = {name: shape for name, shape in saved_shapes.items() if name not in fitting and name not in sent.tied}
        return {
            "refused": {},
            "hidden": fitting,  # the server's parameters can't be read back
            "unfilled": {name: [list(shape), dtypes.get(name, common)] for name, shape in others.items()},
            "dtypes": {},
        }

    def begin(self, header: dict[str, Any]) -> dict[str, Any]:
        """Create the folder of this version, with copies of all files of the model folder except the weights."""
        self.cancel()
        self._assembly = Assembly(self._layout, SyncHeader(**header), self._name, torch.device("cpu"))
        folder = self._incoming
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in self._model_folder.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS and file.name != INDEX:
                shutil.copyfile(file, folder / file.name)
        return {}

    def receive(self, transfers: list[dict[str, Any]]) -> dict[str, Any]:
        """Take the tensors that these transfers complete."""
        assert self._assembly is not None
        self._add(self._assembly, self._assembly.take(transfers))
        return {}

    async def commit(self) -> dict[str, Any]:
        """Rename the folder and have the server load it."""
        assembly = self._assembly
        assert assembly is not None
        self._add(assembly, assembly.finish(), last=True)
        self._assembly = None
        started_at = time.perf_counter()
        total = sum(tensor.num_bytes for tensor in self._layout.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": self._file_of}
        (self._incoming / INDEX).write_text(json.dumps(index), encoding="utf-8")
        folder = self._versions / f"version_{assembly.header.version}"
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run may have left one
        self._incoming.rename(folder)
        self._written.add(folder)
        await self._reload(folder)
        for earlier in self._written - {folder}:  # several, if the server has not loaded one of them
            shutil.rmtree(earlier)
        self._written = {folder}
        lap(assembly.seconds, "load", started_at)
        return {"differing": [], "seconds": assembly.seconds}

    def cancel(self) -> dict[str, Any]:
        """Discard the open sync."""
        self._waiting, self._file_of = {}, {}
        if self._assembly is not None:
            self._assembly.close()
            self._assembly = None
            shutil.rmtree(self._incoming, ignore_errors=True)
        return {}

    @property
    def _incoming(self) -> Path:
        return self._versions / "arriving"

    def _add(self, assembly: Assembly, tensors: list[tuple[TensorSpec, torch.Tensor]], last: bool = False) -> None:
        started_at = time.perf_counter()
        self._waiting |= {spec.name: tensor for spec, tensor in tensors}
        if last or sum(tensor.nbytes for tensor in self._waiting.values()) >= _FILE_BYTES:
            name = f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors"
            write_tensors(self._waiting, self._incoming / name)
            self._file_of |= dict.fromkeys(self._waiting, name)
            self._waiting = {}
        lap(assembly.seconds, "load", started_at)

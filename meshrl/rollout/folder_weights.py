"""Weights for a server that loads them from a folder. The transfers of each sync are written as a new model folder, and
then the server gets a request to load it.

FolderWeights implements the same steps as a server's worker (`WorkerWeights`), for `ServerWeights`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from meshrl.model.folder import INDEX, stored_tensors, write_tensors
from meshrl.rollout.server.worker_weights import Assembly
from meshrl.sync.digest import lap
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec, layout_from_json

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

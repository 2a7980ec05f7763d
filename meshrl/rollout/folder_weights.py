"""Weights for a server that takes them as a folder: each version is written as a model folder, beside the last one,
from the transfers of its sync; then the server is asked to load it.

It answers to the steps of `ServerWeights`, as a server's worker does.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.model.weight_files import INDEX, stored_tensors, write_tensors
from meshrl.rollout.foreign.assembly import Assembly
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec, layout_from

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_FILE_BYTES = 1 << 30  # a file is written when its tensors are that long

Reload = Callable[[Path], Awaitable[None]]
"""`await reload(folder)` returns when the server computes with its weights. Raises: RequestError, EngineFailure."""


class FolderWeights:
    """Writes files while the transfers come; holds the tensors of one file, and keeps one full version on disk beside
    the one that arrives."""

    def __init__(self, model_folder: Path, versions: Path, reload: Reload, name: str):
        """model_folder: what the server was started with; its config and tokenizer go along with every version."""
        self._model_folder, self._versions, self._reload, self._name = model_folder, versions, reload, name
        self._layout = Layout(tensors=(), senders=())
        self._assembly: Assembly | None = None
        self._waiting: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, str] = {}
        self._current: Path | None = None
        self._write_s = 0.0

    async def call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """As a server with one worker. Raises: SyncError."""
        match step:
            case "reconcile":
                return [self.reconcile(layout_from(arguments["layout"]))]
            case "begin":
                return [self.begin(SyncHeader(**arguments["header"]))]
            case "receive":
                return [self.receive(arguments)]
            case "commit":
                return [await self.commit()]
            case "cancel":
                self._drop()
                return [{}]
        raise SyncError(f"{self._name}: unknown step {step!r}")

    def reconcile(self, layout: Layout) -> dict[str, Any]:
        """Compare with the names in the files of the model's folder, which is all that the server is known to load."""
        self._layout = layout
        dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
        common = next(iter(dtypes.values()), "float32")
        held = {name: stored.shape for name, stored in stored_tensors(self._model_folder).items()}
        fitting = [tensor.name for tensor in layout.tensors if held.get(tensor.name) == tensor.shape]
        others = {name: shape for name, shape in held.items() if name not in fitting and name not in layout.tied}
        return {
            "refused": {},
            "dropped": [],
            "hidden": fitting,  # what the server computes with can't be read back
            "unfilled": {name: [list(shape), dtypes.get(name, common)] for name, shape in others.items()},
            "dtypes": {},
        }

    def begin(self, header: SyncHeader) -> dict[str, Any]:
        """Start the folder of this version: everything but the weights is the model folder's own."""
        self._drop()
        self._assembly = Assembly(self._layout, header, self._name)
        part = self._part
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file in self._model_folder.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS and file.name != INDEX:
                shutil.copyfile(file, part / file.name)
        self._write_s = 0.0
        return {}

    def receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take the tensors that a transfer completes."""
        self._add(self._open().take(message))
        return {}

    async def commit(self) -> dict[str, Any]:
        """Put the folder in its place and have the server load it."""
        assembly = self._open()
        self._add(assembly.finish(), last=True)
        self._assembly = None
        began = time.perf_counter()
        total = sum(tensor.num_bytes for tensor in self._layout.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": self._file_of}
        (self._part / INDEX).write_text(json.dumps(index), encoding="utf-8")
        folder = self._versions / f"version_{assembly.header.version}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run before this one
        self._part.rename(folder)
        last, self._current = self._current, folder
        await self._reload(folder)
        if last is not None and last != folder:
            shutil.rmtree(last)
        load_s = assembly.copy_s + self._write_s + time.perf_counter() - began
        return {"differing": [], "seconds": {"load": load_s, "verify": assembly.progress.verify_s}}

    @property
    def _part(self) -> Path:
        return self._versions / "arriving"

    def _open(self) -> Assembly:
        if self._assembly is None:
            raise SyncError(f"{self._name}: no sync is open")
        return self._assembly

    def _add(self, tensors: list[tuple[TensorSpec, torch.Tensor]], last: bool = False) -> None:
        began = time.perf_counter()
        self._waiting |= {spec.name: tensor for spec, tensor in tensors}
        if last or sum(tensor.nbytes for tensor in self._waiting.values()) >= _FILE_BYTES:
            name = f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors"
            write_tensors(self._waiting, self._part / name)
            self._file_of |= dict.fromkeys(self._waiting, name)
            self._waiting = {}
        self._write_s += time.perf_counter() - began

    def _drop(self) -> None:
        self._waiting, self._file_of = {}, {}
        if self._assembly is not None:
            self._assembly.close()
            self._assembly = None
            shutil.rmtree(self._part, ignore_errors=True)

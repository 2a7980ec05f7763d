"""Weights for a server that takes them as a folder: each version is written as a model folder, beside the last one,
from the buckets of its sync; then somebody is asked to load it.

It answers to the method names of `RemoteWeights`, as a server's worker does.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from meshrl.core.errors import SyncError
from meshrl.model.weight_files import INDEX, KINDS, SINGLE, stored_tensors
from meshrl.rollout.foreign.arrival import Arrival, header_from, layout_from, ref_from
from meshrl.sync.digest import as_bytes
from meshrl.sync.manifest import Entry, Layout, SyncHeader
from meshrl.sync.transport import BucketRef, SharedRingView

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")

Reload = Callable[[Path], Awaitable[None]]
"""`await reload(folder)` returns when the server computes with its weights. Raises: RequestError, EngineFailure."""


class FolderWeights:
    """Writes in the layout's order while the buckets come; holds one tensor at a time, and keeps one whole version on
    disk beside the one that arrives."""

    def __init__(self, model_folder: Path, versions: Path, reload: Reload, name: str):
        """model_folder: what the server was started with; its config and tokenizer go along with every version."""
        self._model_folder, self._versions, self._reload, self._name = model_folder, versions, reload, name
        self._layout = Layout(entries=())
        self._arrival: Arrival | None = None
        self._offsets: dict[str, int] = {}
        self._file: BinaryIO | None = None
        self._current: Path | None = None
        self._write_s = 0.0

    async def call(self, method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """As a server with one worker."""
        match method:
            case "meshrl_reconcile":
                return [self.reconcile(layout_from(arguments["layout"]))]
            case "meshrl_begin":
                return [self.begin(header_from(arguments["header"]))]
            case "meshrl_receive":
                return [self.receive(arguments["ring"], ref_from(arguments["ref"]))]
            case "meshrl_commit":
                return [await self.commit()]
            case "meshrl_cancel":
                self._drop()
                return [{}]
        raise SyncError(f"{self._name}: unknown method {method!r}")

    def reconcile(self, layout: Layout) -> dict[str, Any]:
        """Compare with the names in the files of the model's folder, which is all that the server is known to load."""
        self._layout = layout
        dtypes = {entry.name: entry.dtype for entry in layout.entries}
        common = next(iter(dtypes.values()), "float32")
        held = {name: stored.shape for name, stored in stored_tensors(self._model_folder).items()}
        fitting = [entry.name for entry in layout.entries if held.get(entry.name) == entry.shape]
        others = {name: shape for name, shape in held.items() if name not in fitting and name not in layout.tied}
        return {
            "refused": {},
            "dropped": [],
            "hidden": fitting,  # nobody reads back what the server computes with
            "unfilled": {name: [list(shape), dtypes.get(name, common)] for name, shape in others.items()},
            "dtypes": {},
        }

    def begin(self, header: SyncHeader) -> dict[str, Any]:
        """Start the folder of this version: everything but the weights is the model folder's own."""
        self._drop()
        self._arrival = Arrival(self._layout, header, self._name)
        part = self._part
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file in self._model_folder.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS and file.name != INDEX:
                shutil.copyfile(file, part / file.name)
        self._file = (part / SINGLE).open("w+b")
        self._file.write(self._header())
        self._write_s = 0.0
        return {}

    def receive(self, ring: dict[str, Any], ref: BucketRef) -> dict[str, Any]:
        """Write the tensors that a bucket completes."""
        assert self._arrival is not None, "receive comes after begin"
        view = SharedRingView(**ring)
        for entry, tensor in self._arrival.take(view.bucket(ref)):
            self._write(entry, tensor)
        view.close()
        return {}

    async def commit(self) -> dict[str, Any]:
        """Put the folder in its place and have the server load it."""
        assert self._arrival is not None and self._file is not None, "commit comes after begin"
        for entry, tensor in self._arrival.finish():
            self._write(entry, tensor)
        arrival = self._arrival
        self._file.close()
        self._arrival = self._file = None
        began = time.perf_counter()
        folder = self._versions / f"version_{arrival.header.version}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run before this one
        self._part.rename(folder)
        last, self._current = self._current, folder
        await self._reload(folder)
        if last is not None and last != folder:
            shutil.rmtree(last)
        load_s = arrival.copy_s + self._write_s + time.perf_counter() - began
        seconds = {"load": load_s, "verify": arrival.verify_s}
        return {"differing": [], "seconds": seconds}

    @property
    def _part(self) -> Path:
        return self._versions / "arriving"

    def _header(self) -> bytes:
        """Of a safetensors file with all tensors end to end, the widest elements first, so that each is aligned."""
        facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in sorted(self._layout.entries, key=lambda e: -getattr(torch, e.dtype).itemsize):
            begin, end = end, end + entry.num_bytes
            facts[entry.name] = {
                "dtype": KINDS[getattr(torch, entry.dtype)],
                "shape": list(entry.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(facts).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._offsets = {name: start + fact["data_offsets"][0] for name, fact in facts.items() if name[:2] != "__"}
        return len(text).to_bytes(8, "little") + text

    def _write(self, entry: Entry, tensor: torch.Tensor) -> None:
        assert self._file is not None
        began = time.perf_counter()
        self._file.seek(self._offsets[entry.name])
        self._file.write(as_bytes(tensor).numpy().data)
        self._write_s += time.perf_counter() - began

    def _drop(self) -> None:
        self._arrival = None
        if self._file is not None:
            self._file.close()
            self._file = None
            shutil.rmtree(self._part, ignore_errors=True)

"""The weights inside one worker process of a server: full tensors are loaded by the server's own loader and read back
for the proof. Code for one kind of server is in rollout/vllm/worker.py and rollout/sglang/loader.py.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.rollout.server.assembly import Assembly
from meshrl.rollout.server.name_map import NameMap, WithoutData, trace_loader
from meshrl.rollout.server.read_back import ReadBackDigests
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec, layout_from_json


class WorkerWeights:
    """Runs the steps of a sync in a worker. Messages and answers are JSON."""

    def __init__(self, model: Any, name: str, without_data: WithoutData):
        self.model, self.name = model, name
        self.layout = Layout(tensors=(), senders=())
        self.map = NameMap()
        self._without_data = without_data
        self._device = next(model.parameters()).device  # during vLLM's reload its parameters have no device
        self._assembly: Assembly | None = None
        self._read_back = ReadBackDigests({}, -1)
        self._committed: ReadBackDigests | None = None
        self._load_s = 0.0

    def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run one step of a sync; returns `{"error": text}` after a failure: an exception would reach the client only
        as a status code, or end the server."""
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "reconcile": self.reconcile,
            "begin": self.begin,
            "receive": self.receive,
            "commit": self.commit,
            "cancel": self.cancel,
        }
        try:
            if method not in steps:
                raise SyncError(
                    f"the worker has no method {method!r}; server and client must run the same version of meshrl"
                )
            return steps[method](**arguments)
        except SyncError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}

    def reconcile(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Find out what the loader does with the names of the layout."""
        self.layout = layout_from_json(layout)
        self.map = found = trace_loader(self.model, self.layout, self._without_data)
        return {
            "refused": found.refused,
            "dropped": found.dropped,
            "hidden": found.hidden,
            "unfilled": found.unfilled,
            "dtypes": found.dtypes,
        }

    def begin(self, header: dict[str, Any]) -> dict[str, Any]:
        """Expect the transfers of this version."""
        self.cancel()
        opened = SyncHeader(**header)
        self.before_loading(opened)
        self._read_back = ReadBackDigests(self.map.patches, opened.version)
        self._assembly = Assembly(self.layout, opened, self.name)
        self._load_s = 0.0
        return {}

    def receive(self, **message: Any) -> dict[str, Any]:
        """Read a transfer from shared memory, and load the tensors that it completes."""
        self._load(self._open().take(message))
        return {}

    def commit(self) -> dict[str, Any]:
        """Load the last tensors, then read the model's parameters back and compare them."""
        assembly = self._open()
        self._load(assembly.finish())
        began = time.perf_counter()
        with self.loading(), torch.no_grad():
            self.after_loading()
        self._load_s += time.perf_counter() - began
        began = time.perf_counter()
        with torch.no_grad():
            held = self.read_back()
            differing = self._read_back.differing(held, self._committed, self.packed()) + self.differing_packed()
        verify_s = assembly.progress.verify_s + time.perf_counter() - began
        if not differing:
            self._committed = self._read_back
        self._assembly = None
        return {"differing": differing, "seconds": {"load": self._load_s + assembly.copy_s, "verify": verify_s}}

    def cancel(self) -> dict[str, Any]:
        """Discard the open sync."""
        if self._assembly is not None:
            self._assembly.close()
        self._assembly = None
        return {}

    # ---- overridden for each kind of server

    def before_loading(self, header: SyncHeader) -> None:
        """Prepare the model for new weights."""

    def after_loading(self) -> None:
        """Finish loading, so that the model computes with the new weights."""

    def loading(self) -> AbstractContextManager[None]:
        """The context in which the server's loader runs."""
        return nullcontext()

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Called with each verified full tensor, on the device of the parameters, before it is loaded."""

    def read_back(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers with which the model computes, by the engine's names."""
        held: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return held | dict(self.model.named_buffers(remove_duplicate=False))

    def packed(self) -> Container[str]:
        """Parameters that may exist only as a packed copy."""
        return ()

    def differing_packed(self) -> list[str]:
        """An error text for each packed copy with wrong values."""
        return []

    # ----

    def _open(self) -> Assembly:
        if self._assembly is None:
            raise SyncError(f"{self.name}: no sync is open in this worker; was the server restarted during the sync?")
        return self._assembly

    def _load(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> None:
        began = time.perf_counter()
        names = {spec.name: tensor.to(self._device) for spec, tensor in tensors}
        if not names:
            return
        tied: Mapping[str, str] = self.layout.tied
        names |= {a: names[source] for a, source in tied.items() if source in names and a in self.map.patches}
        moved = time.perf_counter()
        for name, tensor in names.items():
            self._read_back.note(name, tensor)
            self.note(name, tensor)
        noted = time.perf_counter()
        self._open().progress.verify_s += noted - moved
        with self.loading(), torch.no_grad():
            self.model.load_weights(list(names.items()))
        self._load_s += time.perf_counter() - noted + moved - began

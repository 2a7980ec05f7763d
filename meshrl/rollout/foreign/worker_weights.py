"""The weights inside one worker process of a server: full tensors, through the server's own loader, and back for the
proof. What differs between servers is in the subclasses of rollout/vllm/worker.py and rollout/sglang/loader.py.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.rollout.foreign.assembly import Assembly
from meshrl.rollout.foreign.name_map import NameMap, WithoutData, learn
from meshrl.rollout.foreign.resident import Resident
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec, layout_from


class WorkerWeights:
    """Which names the worker's loader takes, and the sync that is open. Messages and answers are JSON."""

    def __init__(self, model: Any, name: str, without_data: WithoutData):
        self.model, self.name = model, name
        self.layout = Layout(tensors=(), senders=())
        self.map = NameMap()
        self._without_data = without_data
        self._device = next(model.parameters()).device  # while vLLM reloads, its parameters have none
        self._assembly: Assembly | None = None
        self._resident = Resident({}, -1)
        self._committed: Resident | None = None
        self._load_s = 0.0

    def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One step of a sync; `{"error": text}` for what failed: an exception would reach the other side as a status
        code alone, or end the server."""
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "reconcile": self.reconcile,
            "begin": self.begin,
            "receive": self.receive,
            "commit": self.commit,
            "cancel": self.cancel,
        }
        try:
            if method not in steps:
                raise SyncError(f"the worker knows no method {method!r}; server and client must run the same meshrl")
            return steps[method](**arguments)
        except SyncError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}

    def reconcile(self, layout: dict[str, Any]) -> dict[str, Any]:
        """What the loader does with the names of the layout."""
        self.layout = layout_from(layout)
        self.map = found = learn(self.model, self.layout, self._without_data)
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
        self._resident = Resident(self.map.patches, opened.version)
        self._assembly = Assembly(self.layout, opened, self.name)
        self._load_s = 0.0
        return {}

    def receive(self, **message: Any) -> dict[str, Any]:
        """Read a transfer where it lies, and load the tensors that it completes."""
        self._load(self._open().take(message))
        return {}

    def commit(self) -> dict[str, Any]:
        """Load what was completed last, then read back what the model computes with."""
        assembly = self._open()
        self._load(assembly.finish())
        began = time.perf_counter()
        with self.loading(), torch.no_grad():
            self.after_loading()
        self._load_s += time.perf_counter() - began
        began = time.perf_counter()
        with torch.no_grad():
            held = self.read_back()
            differing = self._resident.differing(held, self._committed, self.packed()) + self.differing_packed()
        verify_s = assembly.progress.verify_s + time.perf_counter() - began
        if not differing:
            self._committed = self._resident
        self._assembly = None
        return {"differing": differing, "seconds": {"load": self._load_s + assembly.copy_s, "verify": verify_s}}

    def cancel(self) -> dict[str, Any]:
        """Give the open sync up."""
        if self._assembly is not None:
            self._assembly.close()
        self._assembly = None
        return {}

    # ---- for the servers

    def before_loading(self, header: SyncHeader) -> None:
        """Prepare the model for new weights."""

    def after_loading(self) -> None:
        """Have the model compute with what was loaded."""

    def loading(self) -> AbstractContextManager[None]:
        """Around the server's loader."""
        return nullcontext()

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """A full tensor that was verified, on the device of the parameters, before it is loaded."""

    def read_back(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the model computes with them, by the engine's names."""
        held: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return held | dict(self.model.named_buffers(remove_duplicate=False))

    def packed(self) -> Container[str]:
        """Parameters of which a packed copy is all that may be left."""
        return ()

    def differing_packed(self) -> list[str]:
        """What is wrong with packed copies."""
        return []

    # ----

    def _open(self) -> Assembly:
        if self._assembly is None:
            raise SyncError(f"{self.name}: no sync is open in this worker; was the server restarted since it began?")
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
            self._resident.note(name, tensor)
            self.note(name, tensor)
        noted = time.perf_counter()
        self._open().progress.verify_s += noted - moved
        with self.loading(), torch.no_grad():
            self.model.load_weights(list(names.items()))
        self._load_s += time.perf_counter() - noted + moved - began

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
from meshrl.rollout.server.name_map import MakePlaceholder, NameMap, Patch, trace_loader
from meshrl.sync.digest import as_bytes, digest_bytes, kind_for
from meshrl.sync.layout import Layout, SyncHeader, TensorSpec, layout_from_json
from meshrl.sync.threads import lap


class WorkerWeights:
    """Runs the steps of a sync in a worker. Messages and answers are JSON. steps: by name; a subclass may add some."""

    def __init__(self, model: Any, name: str, make_placeholder: MakePlaceholder):
        self.model, self.name = model, name
        self.layout = Layout(tensors=(), senders=())
        self.map = NameMap()
        self._make_placeholder = make_placeholder
        self._device = next(model.parameters()).device  # during vLLM's reload its parameters have no device
        self._assembly: Assembly | None = None
        self._read_back = ReadBackDigests({}, -1)
        self._committed: ReadBackDigests | None = None
        self.steps: dict[str, Callable[..., dict[str, Any]]] = {
            "reconcile": self.reconcile,
            "begin": self.begin,
            "receive": self.receive,
            "commit": self.commit,
            "cancel": self.cancel,
        }

    def call(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run one step; returns `{"error": text}` after a failure: an exception would reach the client only as a status
        code, or end the server."""
        try:
            if step not in self.steps:
                raise SyncError(
                    f"the worker has no step {step!r}; server and client must run the same version of meshrl"
                )
            return self.steps[step](**arguments)
        except SyncError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}

    def reconcile(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Find out what the loader does with the names of the layout. A sync that another client has left open is
        cancelled."""
        self.cancel()
        self._committed = None
        self.layout = layout_from_json(layout)
        self.map = name_map = trace_loader(self.model, self.layout, self._make_placeholder)
        return {
            "refused": name_map.refused,
            "hidden": name_map.hidden,
            "unfilled": name_map.unfilled,
            "dtypes": name_map.dtypes,
        }

    def begin(self, header: dict[str, Any]) -> dict[str, Any]:
        """Expect the transfers of this version."""
        self.cancel()
        opened = SyncHeader(**header)
        self.before_loading(opened)
        self._read_back = ReadBackDigests(self.map.patches, opened.version)
        self._assembly = Assembly(self.layout, opened, self.name)
        return {}

    def receive(self, **message: Any) -> dict[str, Any]:
        """Read a transfer from shared memory, and load the tensors that it completes."""
        self._load(self._open().take(message))
        return {}

    def commit(self) -> dict[str, Any]:
        """Load the last tensors, then read the model's parameters back and compare them."""
        assembly = self._open()
        self._load(assembly.finish())
        started_at = time.perf_counter()
        with self.loading(), torch.no_grad():
            self.after_loading()
        started_at = lap(assembly.seconds, "load", started_at)
        with torch.no_grad():
            differing = self.differing()
        lap(assembly.seconds, "verify", started_at)
        if not differing:
            self._committed = self._read_back
        self._assembly = None
        return {"differing": differing, "seconds": assembly.seconds}

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

    def differing(self) -> list[str]:
        """An error text for each block with which the model computes and that differs from the received one."""
        return self._read_back.differing(self._model_tensors(), self._committed)

    # ----

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, by the engine's names."""
        tensors: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return tensors | dict(self.model.named_buffers(remove_duplicate=False))

    def _open(self) -> Assembly:
        if self._assembly is None:
            raise SyncError(f"{self.name}: no sync is open in this worker; was the server restarted during the sync?")
        return self._assembly

    def _load(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> None:
        seconds, started_at = self._open().seconds, time.perf_counter()
        names = {spec.name: tensor.to(self._device) for spec, tensor in tensors}
        if not names:
            return
        tied: Mapping[str, str] = self.layout.tied
        names |= {a: names[source] for a, source in tied.items() if source in names and a in self.map.patches}
        started_at = lap(seconds, "load", started_at)
        for name, tensor in names.items():
            self._read_back.note(name, tensor)
            self.note(name, tensor)
        started_at = lap(seconds, "verify", started_at)
        with self.loading(), torch.no_grad():
            self.model.load_weights(list(names.items()))
        lap(seconds, "load", started_at)


Key = tuple[str, int]  # wire name, index of the patch among the patches of that name


class ReadBackDigests:
    """Digests of the blocks of one worker's parameters, for one version."""

    def __init__(self, patches: Mapping[str, list[Patch]], version: int):
        self.version = version
        self._patches = patches
        self._values: dict[Key, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def note(self, name: str, wire: torch.Tensor) -> None:
        """Record a received and verified tensor, on the device of the parameters."""
        self._dtypes[name] = wire.dtype
        for number, patch in enumerate(self._patches.get(name, ())):
            self._values[name, number] = _digest(patch.of_wire(wire))

    def differing(
        self, params: Mapping[str, torch.Tensor], before: ReadBackDigests | None, packed: Container[str] = ()
    ) -> list[str]:
        """An error text for each block that differs from the received one. before: digests of the last committed sync.

        params: parameters and buffers, by the engine's names. packed: parameters that may exist only as a packed copy;
        the caller compares that copy.
        """
        faults = []
        for name, patches in self._patches.items():
            for number, patch in enumerate(patches):
                param = params[patch.param]
                if param.numel() == 0 and patch.param in packed:
                    continue
                key = (name, number)
                if key not in self._values:
                    faults.append(f"{name} was not received")
                elif param.numel() == 0:
                    faults.append(f"{name} can't be read back: {patch.param} has no elements")
                elif (digest := _digest(patch.of_parameter(param).to(self._dtypes[name]))) != self._values[key]:
                    faults.append(f"{name} {self._explain(key, digest, before)}{self._cast(name, param)}")
        return faults

    def _cast(self, name: str, param: torch.Tensor) -> str:
        """For a buffer that the engine stores in another dtype: both dtypes."""
        sent = self._dtypes[name]
        return "" if param.dtype == sent else f" (sent as {sent}, stored as {param.dtype}, which may round the value)"

    def _explain(self, key: Key, digest: int, before: ReadBackDigests | None) -> str:
        if before is not None and before._values.get(key) == digest:
            return f"still has the values of version {before.version}"
        others = [name for (name, _), value in self._values.items() if value == digest]
        if others:
            return f"has the values of {others[0]}"
        return f"has digest {digest:016x}, the trainer's is {self._values[key]:016x}"


def _digest(block: torch.Tensor) -> int:
    return digest_bytes(kind_for(block.device), as_bytes(block.contiguous()))

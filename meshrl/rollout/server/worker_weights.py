"""The weights inside one worker process of a server: transfers are joined to full tensors, which are loaded by the
server's own loader and read back for the proof. Code for one kind of server is in rollout/vllm/worker.py and
rollout/sglang/loader.py.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from meshrl.core.device import empty_cache, synchronize
from meshrl.core.errors import SyncError
from meshrl.rollout.server.name_map import MakePlaceholder, NameMap, trace_loader
from meshrl.sync.delivery import Progress, SlotAddress, delivery_from_json
from meshrl.sync.digest import BlockDigests, RunningDigest, as_bytes, digest_bytes, kind_for, lap, values
from meshrl.sync.layout import Layout, Part, SyncHeader, TensorSpec, Transfer, layout_from_json
from meshrl.sync.shared_memory import open_slots


class Assembly(Progress):
    """Takes the transfers of one sync in order. Each tensor gets memory of its own, because a loader that waits for a
    complete layer may still need it when the transfer's memory is used again."""

    def __init__(
        self,
        layout: Layout,
        header: SyncHeader,
        name: str,
        device: torch.device,
        number: int = 0,
    ):
        """name: the receiver's name in errors. device, number: of this worker among those of its server."""
        super().__init__(layout, header, name)
        self._device, self._number = device, number
        self._slots: dict[str, list[torch.Tensor]] = {}  # the senders' memory
        self._open: dict[str, torch.Tensor] = {}  # incomplete tensors
        self._missing = {tensor.name: tensor.num_bytes for tensor in layout.tensors}

    def take(self, messages: list[dict[str, Any]]) -> list[tuple[TensorSpec, torch.Tensor]]:
        """The tensors that these transfers complete. messages: of `delivery_to_json`. Their bytes are verified where
        they are, by one read of all digests."""
        complete, sent, running = [], list[tuple[int, Transfer, Part]](), list[RunningDigest]()
        for message in messages:
            delivery = delivery_from_json(self.layout, message, self._slots_at)
            self.check(delivery)
            for digest, (part, _, section) in zip(delivery.digests, delivery.sections(), strict=True):
                started_at = time.perf_counter()
                running.append(RunningDigest(self.layout.digest))
                running[-1].update(running[-1].readable(section))
                sent.append((digest, delivery.transfer, part))
                started_at = lap(self.seconds, "verify", started_at)
                tensor, name = part.tensor, part.tensor.name
                if name not in self._open:
                    self._open[name] = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device=section.device)
                part.of(self._open[name]).copy_(section.view(tensor.torch_dtype).view(part.shape))
                self._missing[name] -= part.num_bytes
                lap(self.seconds, "load", started_at)
                if self._missing[name] == 0:
                    complete.append((tensor, self._open.pop(name)))
        started_at = time.perf_counter()
        for (digest, transfer, part), arrived in zip(sent, values(running), strict=True):
            self.require(digest, arrived, transfer, part)
        lap(self.seconds, "verify", started_at)
        return complete

    def _slots_at(self, address: SlotAddress) -> list[torch.Tensor]:
        if address.ring not in self._slots:
            self._slots[address.ring] = open_slots(address, self._device, self._number)
        return self._slots[address.ring]

    def finish(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """After the last transfer: returns the tensors without elements, which no transfer contains."""
        self.check_complete()
        self.close()
        return [(t, torch.empty(t.shape, dtype=t.torch_dtype)) for t in self.layout.tensors if t.num_bytes == 0]

    def close(self) -> None:
        """Unmap the senders' memory."""
        self._slots.clear()


class WorkerWeights:
    """Runs the steps of a sync in a worker. Messages and answers are JSON. steps: by name; a subclass may add some.
    packed: parameters that may exist only as a packed copy, which a subclass compares."""

    packed: Container[str] = ()

    def __init__(self, model: Any, name: str, make_placeholder: MakePlaceholder, number: int = 0):
        """number: of this worker among those of its server."""
        self.model, self.name, self.number = model, name, number
        self.layout = Layout(tensors=(), senders=())
        self.map = NameMap()
        self._make_placeholder = make_placeholder
        self._device = next(model.parameters()).device  # during vLLM's reload its parameters have no device
        self._assembly: Assembly | None = None
        self._digests: BlockDigests | None = None  # of the open sync
        self._committed: BlockDigests | None = None
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
        self._digests = BlockDigests(opened.version)
        self._assembly = Assembly(self.layout, opened, self.name, self._device, self.number)
        return {}

    def receive(self, transfers: list[dict[str, Any]]) -> dict[str, Any]:
        """Read the transfers of a window, and load the tensors that they complete."""
        self._load(self._open().take(transfers))
        synchronize(self._device)  # the memory of the transfers may be written again after the answer
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
            self._committed = self._digests
        self._assembly = None
        empty_cache(self._device)  # a server that sleeps allocates its KV cache outside of torch's cached memory
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
        assert self._digests is not None
        for patch in self.map.patches.get(name, ()):
            self._digests.add(name, patch, _digest(patch.of_wire(tensor)))

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, by the engine's names."""
        tensors: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return tensors | dict(self.model.named_buffers(remove_duplicate=False))

    def differing(self) -> list[str]:
        """An error text for each tensor with which the model computes and that differs from the received one."""
        assert self._digests is not None
        specs, params, faults = self.layout.by_name, self.model_tensors(), []
        for name, patches in self.map.patches.items():
            sent, digests, empty = specs[self.layout.tied.get(name, name)].torch_dtype, dict[int, int](), ""
            for number, patch in enumerate(patches):
                param = params[patch.param]
                if param.numel():
                    digests[number] = _digest(patch.of_parameter(param).to(sent))
                elif patch.param not in self.packed:
                    empty = patch.param
            if empty:
                faults.append(f"{name} can't be read back: {empty} has no elements")
            elif (fault := self._digests.fault(name, digests, self._committed)) is not None:
                stored = params[patches[0].param].dtype  # a buffer's may be another one than is sent
                cast = "" if stored == sent else f" (sent as {sent}, stored as {stored}, which may round the value)"
                faults.append(f"{name} {fault}{cast}")
        return faults

    # ----

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
            self.note(name, tensor)
        started_at = lap(seconds, "verify", started_at)
        with self.loading(), torch.no_grad():
            self.model.load_weights(list(names.items()))
        lap(seconds, "load", started_at)


def _digest(block: torch.Tensor) -> int:
    return digest_bytes(kind_for(block.device), as_bytes(block.contiguous()))

"""What meshrl adds to SGLang's workers: weights out of shared memory, by SGLang's own loader, and back for the proof.

The server is started with `--custom-weight-loader meshrl.rollout.sglang.loader.load`, SGLang's hook for loading in
another way. Each of its tensor-parallel workers then runs `load(model, named_tensors)` for a request to
/update_weights_from_tensor that names it as load_format. Of the tensors there is one, a message in bytes: method,
arguments, and a file for the answer, because the endpoint itself answers no more than "success". No weight is pickled
and none goes through HTTP.

Runs in SGLang's worker, in its one thread.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.core.files import write_text
from meshrl.rollout.foreign.arrival import Arrival, header_from, layout_from, ref_from
from meshrl.rollout.foreign.name_map import NameMap, learn
from meshrl.rollout.foreign.resident import Resident
from meshrl.sync.manifest import Entry, Layout, SyncHeader
from meshrl.sync.transport import BucketRef, SharedRingView

_WORKERS: dict[int, WorkerWeights] = {}  # by model: tests hold several ranks in one process


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Do what the message says, and write the answer, `{"error": text}` for what failed. Raises nothing: an exception
    here would end the server, and take its text along."""
    ((_, message),) = named_tensors
    order = json.loads(bytes(message.tolist()))
    try:
        weights = _WORKERS.setdefault(id(model), WorkerWeights(model))
        answer = weights.take(order["method"], order["arguments"])
    except SyncError as error:
        answer = {"error": str(error)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
    write_text(Path(order["answer"]), json.dumps(answer))


class WorkerWeights:
    """The weights of one worker: which names they have, and the sync that is under way."""

    def __init__(self, model: Any):
        self.model = model
        self._layout = Layout(entries=())
        self._map = NameMap()
        self._views: dict[str, SharedRingView] = {}  # of the senders' rings
        self._arrival: Arrival | None = None
        self._resident = Resident({}, -1)
        self._committed: Resident | None = None
        self._load_s = 0.0

    def take(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Methods and answers are those of `RemoteWeights`."""
        match method:
            case "meshrl_reconcile":
                return self.reconcile(layout_from(arguments["layout"]))
            case "meshrl_begin":
                return self.begin(header_from(arguments["header"]))
            case "meshrl_receive":
                return self.receive(arguments["ring"], ref_from(arguments["ref"]))
            case "meshrl_commit":
                return self.commit()
        raise SyncError(f"the loader knows no method {method!r}; server and client must run the same meshrl")

    def reconcile(self, layout: Layout) -> dict[str, Any]:
        """Watch SGLang's loader take every name of the layout; what it would do with them."""
        self._layout = layout
        self._map = found = learn(self.model, layout, _without_data)
        return {
            "refused": found.refused,
            "dropped": found.dropped,
            "hidden": found.hidden,
            "unfilled": found.unfilled,
            "dtypes": found.dtypes,
        }

    def begin(self, header: SyncHeader) -> dict[str, Any]:
        """Expect the buckets of this version."""
        self._resident = Resident(self._map.patches, header.version)
        self._arrival = Arrival(self._layout, header, f"sglang worker {os.getpid()}")
        self._load_s = 0.0
        for view in self._views.values():  # senders that were replaced have other rings
            view.close()
        self._views.clear()
        return {}

    def receive(self, ring: dict[str, Any], ref: BucketRef) -> dict[str, Any]:
        """Read a bucket where it lies, and load the tensors that it completes."""
        view = self._views.get(ring["name"])
        if view is None:
            view = self._views[ring["name"]] = SharedRingView(**ring)
        self._load(list(self._open().take(view.bucket(ref))))
        return {}

    def commit(self) -> dict[str, Any]:
        """Load what came last, then read back what the model computes with."""
        arrival = self._open()
        self._load(list(arrival.finish()))
        began = time.perf_counter()
        with torch.no_grad():
            held = dict(self.model.named_parameters(remove_duplicate=False))
            held |= self.model.named_buffers(remove_duplicate=False)
            differing = self._resident.differing(held, self._committed)
        arrival.verify_s += time.perf_counter() - began
        if not differing:
            self._committed = self._resident
        self._arrival = None
        seconds = {"load": self._load_s + arrival.copy_s, "verify": arrival.verify_s}
        return {"differing": differing, "seconds": seconds}

    def _open(self) -> Arrival:
        if self._arrival is None:
            raise SyncError("no sync is open in this worker; was the server restarted since it began?")
        return self._arrival

    def _load(self, tensors: list[tuple[Entry, torch.Tensor]]) -> None:
        if not tensors:
            return
        began = time.perf_counter()
        device = next(self.model.parameters()).device
        names = {entry.name: tensor.to(device) for entry, tensor in tensors}
        tied = self._layout.tied.items()
        names |= {alias: names[source] for alias, source in tied if source in names and alias in self._map.patches}
        moved = time.perf_counter()
        for name, tensor in names.items():
            self._resident.note(name, tensor)
        noted = time.perf_counter()
        self._open().verify_s += noted - moved
        with torch.no_grad():
            self.model.load_weights(list(names.items()))
        self._load_s += time.perf_counter() - noted + moved - began


@contextmanager
def _without_data(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The model with a twin without data in the place of each parameter and persistent buffer: {name: twin}, under the
    first of its names."""
    held = [
        (table, name, tensor)
        for layer in model.modules()
        for table in (layer._parameters, layer._buffers)
        for name, tensor in table.items()
        if tensor is not None and name not in layer._non_persistent_buffers_set
    ]
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    twins = {id(tensor): _bare(tensor) for _, _, tensor in held}
    try:
        for table, name, tensor in held:
            table[name] = twins[id(tensor)]
        yield {names[key]: twin for key, twin in twins.items()}
    finally:
        for table, name, tensor in held:
            table[name] = tensor


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Class and attributes of a tensor, among them SGLang's weight_loader, without its memory."""
    twin = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        twin = torch.nn.Parameter(twin, requires_grad=False)
        twin.__class__ = type(tensor)
    twin.__dict__.update(tensor.__dict__)
    return twin

"""What meshrl adds to vLLM's worker: weights out of shared memory, through vLLM's own loader, and back for the proof.

The server is started with `--worker-extension-cls meshrl.rollout.vllm.worker.WeightsExtension`; each of its workers
then has the `meshrl_*` methods. `/collective_rpc` calls them with JSON, and they answer with JSON: `{"error": text}`
for what failed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshrl.core.errors import SyncError
from meshrl.rollout.foreign.arrival import Arrival, header_from, layout_from, ref_from
from meshrl.rollout.foreign.name_map import NameMap, learn
from meshrl.rollout.foreign.resident import Resident
from meshrl.rollout.vllm.memory import WorkerMemory
from meshrl.rollout.vllm.packed import PackedLayers
from meshrl.rollout.vllm.twins import without_data
from meshrl.sync.manifest import Entry, Layout, SyncHeader
from meshrl.sync.transport import BucketRef, SharedRingView


class WeightsExtension:
    """Mixed into vLLM's worker class, whose attributes it uses: get_model(), model_config, vllm_config."""

    def meshrl_reconcile(self, layout: dict[str, Any]) -> dict[str, Any]:
        def run() -> dict[str, Any]:
            self._meshrl_weights = WorkerWeights(self, layout_from(layout))
            return self._meshrl_weights.reconcile()

        return _answer(run)

    def meshrl_begin(self, header: dict[str, Any]) -> dict[str, Any]:
        return _answer(lambda: self._meshrl_weights.begin(header_from(header)))

    def meshrl_receive(self, ring: dict[str, Any], ref: dict[str, Any]) -> dict[str, Any]:
        return _answer(lambda: self._meshrl_weights.receive(ring, ref_from(ref)))

    def meshrl_commit(self) -> dict[str, Any]:
        return _answer(lambda: self._meshrl_weights.commit())

    def meshrl_cancel(self) -> dict[str, Any]:
        return _answer(lambda: self._meshrl_weights.cancel())

    def meshrl_release(self, parts: list[str]) -> dict[str, Any]:
        return _answer(lambda: {"num_bytes": _memory_of(self).release(set(parts))})

    def meshrl_restore(self, parts: list[str]) -> dict[str, Any]:
        return _answer(lambda: {"num_bytes": _memory_of(self).restore(set(parts))})


class WorkerWeights:
    """The weights of one worker: which names they have, and the sync that is under way."""

    def __init__(self, worker: Any, layout: Layout):
        self.worker, self.layout = worker, layout
        self.model = worker.get_model()
        self.map: NameMap = learn(self.model, layout, without_data)
        self._views: dict[str, SharedRingView] = {}  # of the senders' rings
        self._arrival: Arrival | None = None
        self._packed = PackedLayers(self.model, -1)
        self._resident = Resident({}, -1)
        self._committed: Resident | None = None
        self._load_s = 0.0

    def reconcile(self) -> dict[str, Any]:
        """What the loader does with the layout."""
        sent = {entry.name: entry.dtype for entry in self.layout.entries}
        biases = [name for name, patches in self.map.patches.items() if self._packed.has_bias(patches[0].param)]
        return {
            "refused": self.map.refused,
            "dropped": self.map.dropped,
            "hidden": self.map.hidden,
            "unfilled": self.map.unfilled,
            "dtypes": self.map.dtypes | {name: sent[name] for name in biases if name in sent},
        }

    def begin(self, header: SyncHeader) -> dict[str, Any]:
        """Put the model into vLLM's layer-by-layer reload."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if "weights" in _memory_of(self.worker).asleep:
            raise SyncError(
                f"vllm worker {self.worker.rank}: the memory of the weights is released; restore it before a sync"
            )
        self._packed = PackedLayers(self.model, header.version)
        self._resident = Resident(self.map.patches, header.version)
        self._arrival = Arrival(self.layout, header, f"vllm worker {self.worker.rank}")
        self._load_s = 0.0
        self._close_views()  # senders that were replaced have other rings
        with self._loading():
            initialize_layerwise_reload(self.model)
        return {}

    def receive(self, ring: dict[str, Any], ref: BucketRef) -> dict[str, Any]:
        """Read a bucket where the trainer has laid it, and load the tensors that it completes."""
        assert self._arrival is not None, "receive comes after begin"
        view = self._views.get(ring["name"])
        if view is None:
            view = self._views[ring["name"]] = SharedRingView(**ring)
        self._load(list(self._arrival.take(view.bucket(ref))))
        return {}

    def commit(self) -> dict[str, Any]:
        """Finish the reload, then read back what the model computes with."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self._arrival is not None, "commit comes after begin"
        arrival = self._arrival
        self._load(list(arrival.finish()))
        began = time.perf_counter()
        with self._loading():
            finalize_layerwise_reload(self.model, self.worker.model_config)
            self._packed.pack_shared()
            self.worker.model_runner.reset_lora_state()
        loaded = time.perf_counter()
        with torch.no_grad():
            held = dict(self.model.named_parameters(remove_duplicate=False))
            held |= self.model.named_buffers(remove_duplicate=False)
            differing = self._resident.differing(held, self._committed, self._packed) + self._packed.differing()
        self._load_s += loaded - began
        arrival.verify_s += time.perf_counter() - loaded
        if not differing:
            self._committed = self._resident
        self._arrival = None
        return {
            "differing": differing,
            "seconds": {"load": self._load_s + arrival.copy_s, "verify": arrival.verify_s},
        }

    def cancel(self) -> dict[str, Any]:
        """Leave the reload, if one is open; the weights are a mixture."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._arrival is not None:
            self._arrival = None
            with self._loading():
                finalize_layerwise_reload(self.model, self.worker.model_config)
        return {}

    def _close_views(self) -> None:
        for view in self._views.values():
            view.close()
        self._views.clear()

    def _load(self, tensors: list[tuple[Entry, torch.Tensor]]) -> None:
        began = time.perf_counter()
        names = {entry.name: tensor.to(self.worker.device) for entry, tensor in tensors}
        tied = self.layout.tied.items()
        names |= {alias: names[source] for alias, source in tied if source in names and alias in self.map.patches}
        noted = time.perf_counter()
        for name, tensor in names.items():
            self._resident.note(name, tensor)
            for patch in self.map.patches.get(name, ()):
                if patch.param in self._packed:
                    self._packed.note(patch, tensor)
        assert self._arrival is not None
        self._arrival.verify_s += time.perf_counter() - noted
        self._load_s += noted - began
        began = time.perf_counter()
        with self._loading():
            self.model.load_weights(list(names.items()))
        self._load_s += time.perf_counter() - began

    @contextmanager
    def _loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.worker.vllm_config), torch.no_grad():
            yield


def _memory_of(worker: Any) -> WorkerMemory:
    if not hasattr(worker, "_meshrl_memory"):
        worker._meshrl_memory = WorkerMemory(worker)
    memory: WorkerMemory = worker._meshrl_memory
    return memory


def _answer(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The edge of the process: an exception here would only reach the other side as "500"."""
    try:
        return run()
    except SyncError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}

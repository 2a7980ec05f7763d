"""The weights of a server: their version, and syncs as transactions over the server's workers, one for each
tensor-parallel rank.

A server's loader takes full tensors. So a sync of changes only (rollout.sync_mode delta), or of adapters only, is
received into a copy of the weights in this process, and the server gets the full, merged weights of that copy. Both
transfers are proven: the first by the trainer's digests, as in any receiver; the second by digests of the copy.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from meshrl.core.errors import SyncError, UnloadedParamsError
from meshrl.model.lora import adapter_names, is_adapter, merged_rows
from meshrl.rollout.admission import WeightVersion
from meshrl.sync.delivery import Delivery, delivery_to_json
from meshrl.sync.layout import Ack, Layout, SyncHeader, layout_to_json, make_layout
from meshrl.sync.receiver import Receiver, SyncPhases
from meshrl.sync.reconcile import reconcile
from meshrl.sync.sender import Elements, HeldBox, WeightSender
from meshrl.sync.shared_memory import SharedRing
from meshrl.sync.threads import lap

_MAX_LISTED = 20  # tensors listed in an error

Call = Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]]
"""`await call(step, arguments)` runs a step of `WorkerWeights` in every worker; returns one answer from each."""


class ServerWeights(WeightVersion, SyncPhases):
    """The weights of one server."""

    def __init__(self, call: Call, name: str, keep_copy: bool = False, adapter_scale: float = 1.0):
        """keep_copy: keep a copy in this process, so that a sync can send changes only. adapter_scale: alpha / rank of
        adapters that the trainer sends separately."""
        super().__init__(name)
        self._call_workers, self._keep_copy, self._scale = call, keep_copy, adapter_scale
        self._layout: Layout | None = None  # the trainer's layout
        self._served = Layout(tensors=(), senders=())  # what the server gets: merged weights
        self._hidden: set[str] = set()  # names that are loaded through arithmetic and can't be read back
        self._ring: SharedRing | None = None  # for transfers that are not in shared memory already
        self._copy: _HostCopy | None = None
        self._num_bytes = 0  # received in the open sync

    @property
    def _received(self) -> int:
        return super(WeightVersion, self).version  # of SyncPhases

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the names that the server's loader loads, in both directions; forget earlier syncs.

        Raises: UnloadedParamsError; SyncError when there is no room for a copy.
        """
        self.close()
        self._layout, self._header, self._phase, self._last = layout, None, "idle", -1
        self._served = served = layout
        if self._keep_copy:
            self._copy = _HostCopy(layout, self.name, self._scale)
            self._served = served = self._copy.served
            self._ring = SharedRing(1, served.slot_bytes)
        answers = await self._call("reconcile", {"layout": layout_to_json(served)})
        self._hidden = {name for answer in answers for name in answer["hidden"]}
        shapes = {tensor.name: (tensor.shape, tensor.dtype) for tensor in served.tensors}
        shapes |= {alias: shapes[source] for alias, source in served.tied.items()}
        loaded = {name: shapes[name] for name in self._hidden}
        for answer in answers:
            loaded |= {name: (shapes[name][0], dtype) for name, dtype in answer["dtypes"].items()}
            loaded |= {name: (tuple(shape), dtype) for name, (shape, dtype) in answer["unfilled"].items()}
        try:
            reconcile(served, loaded, {alias: source for alias, source in served.tied.items() if alias not in loaded})
        except UnloadedParamsError as error:
            refused = {name: reason for answer in answers for name, reason in answer["refused"].items()}
            if refused:
                reasons = "\n".join(f"    {name}: {reason}" for name, reason in list(refused.items())[:_MAX_LISTED])
                raise UnloadedParamsError(f"{error}\nthe server's loader reported:\n{reasons}") from error
            raise

    async def begin(self, header: SyncHeader) -> None:
        """Open a sync. The workers always get all weights. Raises: SyncError."""
        layout = self._require_layout()
        self._replace()
        self._leave_for(header, layout)
        if self._copy is not None:
            self._copy.receiver.begin(header)
        elif header.mode != "full":
            raise SyncError(
                f"{self.name}: a sync of changes was begun, but this machine has no copy of the weights "
                "(rollout.sync_mode); send everything"
            )
        self._header, self._num_bytes = header, 0
        served = SyncHeader(version=header.version, layout_hash=self._served.hash)
        await self._call("begin", {"header": asdict(served)})
        self._finish_step("open", header)

    async def receive(self, delivery: Delivery) -> None:
        """Write one transfer into the copy, or have the workers read it. Raises: SyncError."""
        self._leave(delivery.transfer, "open")
        self._num_bytes += delivery.num_bytes
        header = self._header
        if self._copy is not None:
            self._copy.receiver.receive(delivery)
        else:
            await self._forward(delivery)
        self._finish_step("open", header)

    async def commit(self) -> Ack:
        """Have the workers finish and read back their parameters, and check the proofs. Raises: SyncError."""
        self._leave("commit", "open")
        header, layout = self._header, self._require_layout()
        assert header is not None
        ack = Ack(
            version=header.version,
            receiver=self.name,
            wire=True,
            read_back=None if self._hidden else True,
            num_bytes=self._num_bytes,
            num_tensors=len(layout.tensors),
            seconds={"load": 0.0, "verify": 0.0},
        )
        if self._copy is not None and self._ring is not None:
            ack = replace(self._copy.receiver.commit(), read_back=ack.read_back)
            started_at = time.perf_counter()
            for delivery in self._copy.deliveries(header.version, self._ring):
                lap(ack.seconds, "load", started_at)
                await self._forward(delivery)
                started_at = time.perf_counter()
        answers = await self._call("commit", {})
        faults = list(dict.fromkeys(fault for answer in answers for fault in answer["differing"]))
        self._require_in_place(header.version, faults, len(layout.tensors), _MAX_LISTED)
        self._finish_step("idle", header)
        self._last, self._header = header.version, None
        for stage in ack.seconds:
            ack.seconds[stage] += max(answer["seconds"][stage] for answer in answers)
        return ack

    async def cancel(self) -> None:
        """Give the sync up: its weights are mixed, and nothing is sampled before the next full sync."""
        self.drop()
        if self._layout is not None:
            await self._call("cancel", {})

    def drop(self) -> None:
        """Like `cancel`, without a call to the server: its weights are released already."""
        self._phase = "cancelled"
        self._replace()
        if self._copy is not None:
            self._copy.receiver.cancel()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
        self._ring = self._copy = None

    async def _forward(self, delivery: Delivery) -> None:
        """Have the workers read a transfer. It is copied into shared memory first, if it is not there already."""
        slot_address = delivery.slot_address
        if slot_address is None:
            assert delivery.payload is not None
            if self._ring is None:
                self._ring = SharedRing(1, self._served.slot_bytes)  # read before the next transfer comes
            self._ring.slots[0][: delivery.num_bytes].copy_(delivery.payload)
            slot_address = self._ring.slot_address(0)
        await self._call("receive", delivery_to_json(delivery, slot_address))

    def _finish_step(self, phase: Literal["idle", "open"], header: SyncHeader | None) -> None:
        """The step has succeeded. Raises: SyncError when its sync was cancelled meanwhile."""
        if self._header is not header:
            raise SyncError(f"{self.name}: the sync was cancelled while its server was still at work")
        self._phase = phase

    async def _call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        answers = await self._call_workers(step, arguments)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise SyncError(errors[0])
        return answers

    def _require_layout(self) -> Layout:
        if self._layout is None:
            raise SyncError(f"{self.name}: a sync came before reconcile; send the layout once, before the first sync")
        return self._layout


class _HostCopy:
    """A copy of the last weights in this process, and the transfers for the server, with each adapter merged into its
    weight. Host memory for each replica: one copy of the weights in the sampler's dtype."""

    def __init__(self, layout: Layout, name: str, scale: float):
        """scale: factor of B A."""
        self._tensors = {t.name: torch.empty(t.shape, dtype=t.torch_dtype) for t in layout.tensors}
        self._scale = scale
        self.receiver = Receiver(layout, lambda: self._tensors, name)
        served = {t.name: (t.shape, t.dtype) for t in layout.tensors if not is_adapter(t.name)}
        self.served = make_layout(served, None, layout.tied, layout.transfer_bytes, layout.digest)
        self._sender = WeightSender(self.served, 0, keep_base=False)

    def deliveries(self, version: int, ring: SharedRing) -> Iterator[Delivery]:
        """All transfers for the server, in the ring's slot; each one is valid until the next one is requested."""
        boxes: dict[str, list[HeldBox]] = {}
        for name in self.served.by_name:
            weight = self._tensors[name]
            a, b = adapter_names(name)
            rows = None
            if a in self._tensors:
                rows = merged_rows(weight, self._tensors[a], self._tensors[b], self._scale)
            boxes[name] = [HeldBox((0,) * weight.dim(), tuple(weight.shape), Elements(weight, rows))]
        self._sender.begin(boxes)
        for transfer in self.served.transfers:
            yield replace(self._sender.fill(transfer, ring.slots[0]), slot_address=ring.slot_address(0))
        self._sender.finish(version)

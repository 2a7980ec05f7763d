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
from typing import Any

import torch

from meshrl.core.errors import SyncError, UnloadedParamsError
from meshrl.model.lora import RoundedChange, adapter_names, is_adapter, merged_rows
from meshrl.sync.delivery import Delivery, delivery_to_json
from meshrl.sync.digest import BlockDigests, kind_for, lap, require_in_place
from meshrl.sync.layout import Ack, Layout, SyncHeader, layout_to_json, make_layout
from meshrl.sync.receiver import Incoming, reconcile
from meshrl.sync.sender import Elements, SourceBox, WeightSender
from meshrl.sync.shared_memory import SharedRing
from meshrl.sync.transaction import WeightState

_MAX_REASONS = 20  # of the server's loader, listed in an error

Call = Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]]
"""`await call(step, arguments)` runs a step of `WorkerWeights` in every worker; returns one answer from each."""


class ServerWeights:
    """The weights of one server."""

    def __init__(self, call: Call, name: str, keep_copy: bool = False, adapter_scale: float = 1.0):
        """keep_copy: keep a copy in this process, so that a sync can send changes only. adapter_scale: alpha / rank of
        adapters that the trainer sends separately."""
        self.state = WeightState(name)  # its layout is the trainer's
        self._call_workers, self._keep_copy, self._scale = call, keep_copy, adapter_scale
        self._served = Layout(tensors=(), senders=())  # what the server gets: merged weights
        self._hidden: set[str] = set()  # names that are loaded through arithmetic and can't be read back
        self._ring: SharedRing | None = None  # for transfers that are not in shared memory already
        self._copy: _HostCopy | None = None
        self._num_bytes = 0  # received in the open sync

    async def reconcile(self, layout: Layout) -> None:
        """Compare the layout with the names that the server's loader loads, both ways; forget earlier syncs."""
        self.close()
        self.state.reconcile(layout)
        self._served = served = layout
        if self._keep_copy:
            self._copy = _HostCopy(layout, self._scale)
            self._served = served = self._copy.served
            self._ring = self._new_ring()
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
                reasons = "\n".join(f"    {name}: {reason}" for name, reason in list(refused.items())[:_MAX_REASONS])
                raise UnloadedParamsError(f"{error}\nthe server's loader reported:\n{reasons}") from error
            raise

    async def begin(self, header: SyncHeader) -> None:
        """Open a sync. The workers always get all weights."""
        with self.state.begin(header):
            if self._copy is not None:
                self._copy.begin(header, self.state.name)
            elif header.mode != "full":
                raise SyncError(
                    f"{self.state.name}: a sync of changes was begun, but this machine has no copy of the weights "
                    "(rollout.sync_mode); send everything"
                )
            self._num_bytes = 0
            served = SyncHeader(version=header.version, layout_hash=self._served.hash)
            await self._call("begin", {"header": asdict(served)})

    async def receive(self, *deliveries: Delivery) -> None:
        """Write the next transfers into the copy, or have the workers read them by one call."""
        with self.state.step(deliveries[0].transfer):
            self._num_bytes += sum(delivery.num_bytes for delivery in deliveries)
            if self._copy is None:
                await self._forward(*deliveries)
            else:
                for delivery in deliveries:
                    self._copy.receive(delivery)

    async def commit(self) -> Ack:
        """Have the workers finish and read back their parameters, and check the proofs."""
        with self.state.step("commit", then="valid") as header:
            ack = Ack(
                version=header.version,
                receiver=self.state.name,
                wire=True,
                read_back=None if self._hidden else True,
                num_bytes=self._num_bytes,
                num_tensors=len(self._served.tensors),
                seconds={"load": 0.0, "verify": 0.0},
            )
            if self._copy is not None and self._ring is not None:
                ack = replace(self._copy.commit(), read_back=ack.read_back)
                started_at = time.perf_counter()
                for delivery in self._copy.deliveries(header.version, self._ring):
                    lap(ack.seconds, "load", started_at)
                    await self._forward(delivery)
                    started_at = time.perf_counter()
                ack = replace(ack, lora_change=self._copy.rounded.sums())
            answers = await self._call("commit", {})
            faults = list(dict.fromkeys(fault for answer in answers for fault in answer["differing"]))
            require_in_place(self.state.name, header.version, faults, len(self._served.tensors))
        for stage in ack.seconds:
            ack.seconds[stage] += max(answer["seconds"][stage] for answer in answers)
        return ack

    async def cancel(self) -> None:
        """Give the sync up: its weights are mixed, and nothing is sampled before the next full sync."""
        self.state.end("invalid")
        if self.state.layout is not None:
            await self._call("cancel", {})

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
        self._ring = self._copy = None

    async def _forward(self, *deliveries: Delivery) -> None:
        """Have the workers read transfers of one window. Those that are not in memory which other processes can open
        are copied into shared memory first."""
        messages = []
        for delivery in deliveries:
            slot_address, slot = delivery.slot_address, delivery.transfer.sender
            if slot_address is None:
                assert delivery.payload is not None
                if self._ring is None:
                    self._ring = self._new_ring()
                self._ring.slots[slot][: delivery.num_bytes].copy_(delivery.payload)
                slot_address = self._ring.slot_address(slot)
            messages.append(delivery_to_json(delivery, slot_address))
        await self._call("receive", {"transfers": messages})

    def _new_ring(self) -> SharedRing:
        """A slot for each transfer of a window, which are read before the next window comes."""
        return SharedRing(len(self._served.senders), self._served.slot_bytes)

    async def _call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        answers = await self._call_workers(step, arguments)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise SyncError(errors[0])
        return answers


class _HostCopy:
    """A copy of the last weights in this process, and the transfers for the server, with each adapter merged into its
    weight. Host memory for each replica: one copy of the weights in the sampler's dtype."""

    def __init__(self, layout: Layout, scale: float):
        """scale: factor of B A."""
        self._layout, self._scale = layout, scale
        self.rounded = RoundedChange(next((t.torch_dtype for t in layout.tensors), torch.float32))
        self._tensors = {t.name: torch.empty(t.shape, dtype=t.torch_dtype) for t in layout.tensors}
        self._incoming: Incoming | None = None
        self._committed: BlockDigests | None = None
        served = {t.name: (t.shape, t.dtype) for t in layout.tensors if not is_adapter(t.name)}
        in_host_memory = kind_for(torch.device("cpu"))
        self.served = make_layout(served, None, layout.tied, layout.transfer_bytes, in_host_memory)
        self._sender = WeightSender(self.served, 0, keep_base=False)

    def begin(self, header: SyncHeader, name: str) -> None:
        self._incoming = Incoming(self._layout, header, self._tensors, name)

    def receive(self, delivery: Delivery) -> None:
        assert self._incoming is not None
        self._incoming.take(delivery)

    def commit(self) -> Ack:
        """Prove that the copy has the trainer's weights, also those that were not sent again."""
        assert self._incoming is not None
        ack = self._incoming.prove(None, self._committed)
        self._committed = self._incoming.expected
        return ack

    def deliveries(self, version: int, ring: SharedRing) -> Iterator[Delivery]:
        """All transfers for the server, in the ring's slot; each one is valid until the next one is requested."""
        boxes: dict[str, list[SourceBox]] = {}
        for name in self.served.by_name:
            weight = self._tensors[name]
            a, b = adapter_names(name)
            rows = None
            if a in self._tensors:
                rows = merged_rows(weight, self._tensors[a], self._tensors[b], self._scale)
                rows = self.rounded.measured(weight, rows)
            boxes[name] = [SourceBox((0,) * weight.dim(), tuple(weight.shape), Elements(weight, rows))]
        self._sender.begin(boxes)
        for transfer in self.served.transfers:
            yield replace(self._sender.fill(transfer, ring.slots[0]), slot_address=ring.slot_address(0))
        self._sender.finish(version)

"""Transfers of colocated ranks by all-gather: by windows, through memory that a server opens, with few calls and reads,
whatever the number of ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from meta_device import META, DeviceCalls
from tiny_sync import Trainer, held_of, layout_on, weights_of
from transformers import AutoModelForCausalLM, Qwen2Config

from meshrl.core.device import export_memory, import_memory
from meshrl.rollout.server import worker_weights
from meshrl.rollout.server.worker_weights import Assembly
from meshrl.sync import collectives, shared_memory
from meshrl.sync.collectives import AllGather
from meshrl.sync.delivery import ALL, Delivery, SlotAddress, delivery_from_json, delivery_to_json
from meshrl.sync.layout import Box, Layout, SyncHeader, make_layout
from meshrl.sync.sender import Elements
from meshrl.sync.shared_memory import DeviceMemory, open_slots

CPU = torch.device("cpu")


@contextmanager
def gathering(layout: Layout, num_workers: int, limit_s: float = 20.0) -> Iterator[list[AllGather]]:
    """The transports of as many ranks as the layout has senders. limit_s: of a collective that one rank never joins."""
    ends = [AllGather(layout, rank, "127.0.0.1", CPU, limit_s, num_workers) for rank in range(len(layout.senders))]
    yield ends
    for end in ends:
        end.close()


async def exchanged(
    trainer: Trainer, ends: list[AllGather], connection_id: str = "first"
) -> list[list[list[Delivery]]]:
    """[window][rank] -> the deliveries, whose bytes are compared with the sender's in the memory of each rank."""

    async def one(end: AllGather, sender: Any, window: Any) -> list[Delivery]:
        filled = None
        for transfer in window:
            if transfer.sender == sender.sender:
                filled = sender.fill(transfer, await end.buffer(transfer))
        sent = None if filled is None else filled.payload.clone()
        deliveries = await end.exchange(window, filled, True)
        for delivery in deliveries:
            if filled is not None and delivery.transfer is filled.transfer:
                assert torch.equal(delivery.payload, sent)
        return deliveries

    addresses = {number: at for number, end in enumerate(ends) if (at := end.prepare(connection_id)) is not None}
    await asyncio.gather(*(end.connect(connection_id, addresses, number, 1) for number, end in enumerate(ends)))
    windows = []
    for window in trainer.layout.windows:
        calls = (one(end, sender, window) for end, sender in zip(ends, trainer.senders, strict=True))
        windows.append(await asyncio.gather(*calls))
        first, *others = windows[-1]
        for theirs in others:
            assert all(torch.equal(a.payload, b.payload) for a, b in zip(first, theirs, strict=True))
        for deliveries in windows[-1]:
            for delivery in deliveries:
                if (address := delivery.slot_address) is not None:
                    message = json.loads(json.dumps(delivery_to_json(delivery, address)))
                    there = delivery_from_json(trainer.layout, message, lambda at: open_slots(at, CPU, 0))
                    assert torch.equal(there.payload, delivery.payload) and there.facts() == delivery.facts()
    return windows


def begun(layout: Layout) -> Trainer:
    trainer = Trainer(layout, keep_base=False)
    for sender, boxes in zip(trainer.senders, layout.senders, strict=True):
        sender.begin(held_of(weights_of(), boxes))
    return trainer


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_rank_gets_each_window_at_once_where_its_server_can_open_it(num_workers):
    layout = layout_on("3 x 2", 700)
    with gathering(layout, num_workers) as ends:
        windows = asyncio.run(asyncio.wait_for(exchanged(begun(layout), ends), 60))
    assert len(windows) == len(layout.windows) > 2
    assert all(len(ranks[0]) == len(window) for ranks, window in zip(windows, layout.windows, strict=True))
    addresses = [delivery.slot_address is not None for ranks in windows for of_rank in ranks for delivery in of_rank]
    assert set(addresses) == {num_workers > 0}


def test_the_workers_of_a_server_open_the_memory_of_their_own_devices(monkeypatch: pytest.MonkeyPatch):
    """The memory of a device stands in for that of an accelerator: its handle is opened, and no byte is copied to the
    host. The server of rank 1 has workers on the devices of ranks 1 and 2."""
    layout, memories = layout_on("3 x 2", 700), dict[str, torch.Tensor]()

    def export(memory: torch.Tensor) -> str:
        memories[handle := "x" * len(memories) + "handle"] = memory
        return handle

    monkeypatch.setattr(shared_memory, "export_memory", export)
    monkeypatch.setattr(shared_memory, "import_memory", lambda handle, device: memories[handle])
    monkeypatch.setattr(
        collectives, "SharedRing", lambda num_slots, size: DeviceMemory(torch.empty(size, dtype=torch.uint8))
    )
    with gathering(layout, 2) as ends:
        slots = [end._memory for end in ends]
        windows = asyncio.run(asyncio.wait_for(exchanged(begun(layout), ends), 60))
    address = windows[0][1][0].slot_address
    assert address is not None and len(address.handles) == 2
    for number in (0, 1):
        assert open_slots(address, CPU, number)[0] is slots[1 + number]


def test_a_handle_is_text_with_all_that_another_process_needs(monkeypatch: pytest.MonkeyPatch):
    parts = (b"\x00h", 64, 16, b"c", 8, b"\xff", True)
    opened: list[Any] = []

    def open_again(*args: Any) -> torch.UntypedStorage:
        opened.append(args)
        return torch.arange(64, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: (0, *parts), raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_again, raising=False)
    handle = export_memory(torch.zeros(64, dtype=torch.uint8))
    memory = import_memory(handle + "  ", torch.device("cuda", 3))
    assert opened == [(3, *parts)] and memory.tolist() == list(range(64))


def test_a_server_reads_the_digests_of_a_window_together(monkeypatch: pytest.MonkeyPatch):
    """Where the transfers are in the memory of a device, their bytes stay there, too."""
    names = [f"layers.{i}.weight" for i in range(12)]
    boxes = [[Box(name, (48 * rank, 0), (48, 64)) for name in names] for rank in range(2)]
    layout = make_layout({name: ((96, 64), "bfloat16") for name in names}, boxes, None, 1 << 16, "sum64")
    memory = torch.empty(2 * layout.slot_bytes, dtype=torch.uint8, device=META)
    monkeypatch.setattr(worker_weights, "open_slots", lambda address, device, number: [memory])
    assembly = Assembly(layout, SyncHeader(version=0, layout_hash=layout.hash), "w", META)
    complete = []
    with DeviceCalls() as calls:
        for window in layout.windows:
            messages = []
            for transfer in window:
                zeros, counts = (0,) * len(transfer.parts), (ALL,) * len(transfer.parts)
                payload = memory[: transfer.num_bytes]
                delivery = Delivery(transfer=transfer, payload=payload, digests=zeros, counts=counts)
                at = transfer.sender * layout.slot_bytes
                address = SlotAddress(ring="r", num_slots=1, slot_bytes=memory.numel(), slot=0, at=at, handles=("h",))
                messages.append(delivery_to_json(delivery, address))
            complete += assembly.take(messages)
    assert [spec.name for spec, _ in complete] == names and {tensor.device for _, tensor in complete} == {META}
    assert calls.num_reads == len(layout.windows) < len(layout.transfers) < 2 * len(names)


@pytest.mark.parametrize("num_ranks", [1, 8, 32])
def test_a_sync_of_7b_parameters_takes_few_calls_on_any_number_of_ranks(num_ranks):
    """Qwen2-7B on accelerators: one all-gather and one call of a server for each window."""
    cfg = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
    )
    with META:
        lm = AutoModelForCausalLM.from_config(cfg)
    shapes = {name: tuple(p.shape) for name, p in lm.named_parameters()}
    boxes: list[list[Box]] = [[] for _ in range(num_ranks)]
    for name, (rows, *rest) in shapes.items():
        size = -(-rows // num_ranks)
        for rank, low in enumerate(range(0, rows, size)):
            boxes[rank].append(Box(name, (low, *(0 for _ in rest)), (min(size, rows - low), *rest)))
    layout = make_layout({name: (shape, "bfloat16") for name, shape in shapes.items()}, boxes, None, 1 << 30, "sum64")
    assert layout.num_bytes > 15e9 and len(layout.windows) <= 20
    most = max(sum(transfer.num_bytes for transfer in window) for window in layout.windows)
    assert most <= 1 << 30


class _Elsewhere(Elements):
    """Elements that state another device than the slot's."""

    device = META  # type: ignore[assignment]


@pytest.mark.parametrize("digest", ["xxh3", "sum64"])
def test_weights_for_a_slot_on_another_device_are_cast_and_digested_before_they_are_moved(digest):
    """With the same bytes and digests as on one device, and with half the bytes to move: the masters are fp32."""
    layout = make_layout({"w": ((6, 5), "bfloat16"), "v": ((7,), "bfloat16")}, digest=digest)
    weights, deliveries = {"w": torch.randn(6, 5), "v": torch.randn(7)}, []
    for kind in (Elements, _Elsewhere):
        trainer = Trainer(layout, keep_base=True)
        boxes = held_of(weights, layout.senders[0])
        trainer.senders[0].begin({n: [box._replace(elements=kind(weights[n])) for box in boxes[n]] for n in boxes})
        slot = torch.full((layout.slot_bytes,), 99, dtype=torch.uint8)
        deliveries.append(trainer.senders[0].fill(layout.transfers[0], slot))
    here, elsewhere = deliveries
    assert here.digests == elsewhere.digests and torch.equal(here.payload, elsewhere.payload)


def test_after_a_sync_that_failed_the_ranks_form_new_groups():
    """Rank 0 fails after the first window, while the others wait for the second one. They would wait in their group for
    ever, and a later collective would meet the unfinished one."""
    layout = layout_on("3 x 2", 700)

    async def main(ends: list[AllGather]) -> None:
        await exchanged(begun(layout), ends)
        waiting = [asyncio.ensure_future(end.exchange(layout.windows[1], None, True)) for end in ends[1:]]
        await asyncio.sleep(0.1)
        for end in ends:
            end.disconnect()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await exchanged(begun(layout), ends, "after a failure")

    with gathering(layout, 0, limit_s=6.0) as ends:  # the threads that wait end after this time
        asyncio.run(asyncio.wait_for(main(ends), 100))

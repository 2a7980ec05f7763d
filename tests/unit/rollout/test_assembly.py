"""Joining transfers to full tensors in a process without a model: from one sender, and from two senders with rows or
columns of each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny_sync import Trainer

from meshrl.core.errors import SyncError
from meshrl.rollout.server.worker_weights import Assembly
from meshrl.sync.delivery import Delivery, delivery_to_json
from meshrl.sync.layout import Box, Layout, SyncHeader, make_layout
from meshrl.sync.shared_memory import SharedRing

SHAPES = {"a": (7, 5), "b": (3,), "empty": (0, 4), "c": (40, 3), "d": (2, 2)}
BY_TWO = [
    [Box("a", (0, 0), (7, 2)), Box("b", (0,), (3,)), Box("c", (0, 0), (23, 3)), Box("d", (0, 0), (1, 2))],
    [Box("a", (0, 2), (7, 3)), Box("c", (23, 0), (17, 3)), Box("d", (1, 0), (1, 2))],
]
LAYOUTS = {
    "one sender": make_layout({name: (shape, "float32") for name, shape in SHAPES.items()}, None, {}, 128),
    "two senders": make_layout({name: (shape, "float32") for name, shape in SHAPES.items()}, BY_TWO, {}, 256),
}
WEIGHTS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}

CPU = torch.device("cpu")

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.fixture
def ring() -> Iterator[SharedRing]:
    ring = SharedRing(1, 256)
    yield ring
    ring.close()


def transfers_of(layout: Layout, weights: dict[str, torch.Tensor]) -> Iterator[Delivery]:
    return Trainer(layout, keep_base=False).deliveries(weights)


def assembly_of(layout: Layout) -> Assembly:
    return Assembly(layout, SyncHeader(version=1, layout_hash=layout.hash), "w", CPU)


def taken(assembly: Assembly, ring: SharedRing, delivery: Delivery) -> dict[str, torch.Tensor]:
    """The tensors that a transfer completes; the transfer is in shared memory and described as JSON."""
    assert delivery.payload is not None
    ring.slots[0][: delivery.num_bytes].copy_(delivery.payload)
    message = json.loads(json.dumps(delivery_to_json(delivery, ring.slot_address(0))))
    found = {spec.name: tensor for spec, tensor in assembly.take([message])}
    ring.slots[0].fill_(255)  # the sender uses the slot again
    return found


@layouts
def test_tensors_come_out_as_they_went_in_and_outlive_their_transfers(layout, ring):
    assembly, found = assembly_of(layout), {}
    for delivery in transfers_of(layout, WEIGHTS):
        found |= taken(assembly, ring, delivery)
    found |= {spec.name: tensor for spec, tensor in assembly.finish()}
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


@layouts
def test_a_part_that_is_another_tensors_is_named(layout, ring):
    assembly = assembly_of(layout)
    wrong = WEIGHTS | {"c": WEIGHTS["c"].roll(1, 0)}
    with pytest.raises(SyncError, match=r": c\[.* was sent with digest .*, received with"):
        for sent, given in zip(transfers_of(layout, WEIGHTS), transfers_of(layout, wrong), strict=True):
            taken(assembly, ring, replace(given, digests=sent.digests))
    assembly.close()

"""A server without adapters: a copy of base and adapters in the engine's process receives the syncs, and the server
gets merged weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_sync import held_of

from meshrl.core.errors import SyncError
from meshrl.rollout.completions import FolderWeights
from meshrl.rollout.server.weights import ServerWeights
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Ack, SyncHeader, make_layout
from meshrl.sync.receiver import describe
from meshrl.sync.sender import WeightSender

BASE = {"embed.weight": (40, 8), "layer.q_proj.weight": (24, 8), "layer.q_proj.bias": (24,), "norm.weight": (8,)}
ADAPTERS = {"layer.q_proj.lora_A.weight": (2, 8), "layer.q_proj.lora_B.weight": (24, 2)}
SCALE = 0.5
TRANSFER_BYTES = 256


class Pair:
    """A trainer with adapters, and a server that loads weights from folders."""

    def __init__(self, tmp_path: Path):
        torch.manual_seed(0)
        self.tensors = {name: torch.randn(shape).bfloat16() for name, shape in {**BASE, **ADAPTERS}.items()}
        tied = {"head.weight": "embed.weight"}
        self.layout = make_layout(describe(self.tensors), None, tied, TRANSFER_BYTES)
        self.sender = WeightSender(self.layout, 0, keep_base=False, frozen=frozenset(BASE))
        model = tmp_path / "model"
        model.mkdir()
        save_file({name: torch.zeros(shape).bfloat16() for name, shape in BASE.items()}, model / "model.safetensors")
        (model / "config.json").write_text(json.dumps({"model_type": "none"}))
        self.folders: list[Path] = []

        async def reload(folder: Path) -> None:
            self.folders.append(folder)

        self.server = FolderWeights(model, tmp_path / "versions", reload, "server")
        self.weights = ServerWeights(self.server.call, "server", keep_copy=True, adapter_scale=SCALE)

    async def sync(self, version: int, alone: bool = False, fault: str | None = None) -> Ack:
        """alone: send adapters only."""
        mode = {"base_version": version - 1, "mode": "adapter"} if alone else {}
        try:
            await self.weights.begin(SyncHeader(version=version, layout_hash=self.layout.hash, **mode))
            self.sender.begin(held_of(self.tensors, self.layout.senders[0]), changes=alone)
            for delivery in damaged(self.deliveries(), fault):
                await self.weights.receive(delivery)
            self.sender.finish(version)
            self.ack = await self.weights.commit()
            return self.ack
        except SyncError:
            await self.weights.cancel()
            raise

    def deliveries(self) -> Iterator[Delivery]:
        buffer = torch.empty(self.layout.slot_bytes, dtype=torch.uint8)
        for transfer in self.layout.transfers:
            yield self.sender.fill(transfer, buffer)

    def check(self) -> None:
        """The server's last folder has the merged weights, base + scale * B A, each element rounded once."""
        a, b = (self.tensors[name].float() for name in ADAPTERS)
        wanted = {name: self.tensors[name] for name in BASE}
        base = wanted["layer.q_proj.weight"].float()
        wanted["layer.q_proj.weight"] = torch.addmm(base, b, a, alpha=SCALE).bfloat16()
        exact, rounded = SCALE * b @ a, wanted["layer.q_proj.weight"].float() - base
        projection, square = self.ack.lora_change
        assert projection / square == pytest.approx(float((exact * rounded).sum() / exact.square().sum()), abs=1e-5)
        held = load_file(self.folders[-1] / "model-00001.safetensors")
        assert held.keys() == BASE.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


def damaged(deliveries: Iterator[Delivery], fault: str | None) -> Iterator[Delivery]:
    for number, delivery in enumerate(deliveries):
        if fault == "flipped" and delivery.payload is not None and delivery.payload.numel():
            delivery.payload[0] ^= 1
        if not (fault == "dropped" and number == 1):
            yield delivery


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.weights.close()


async def test_adapters_are_sent_alone_and_the_server_gets_merged_weights(pair):
    await pair.weights.reconcile(pair.layout)
    first = await pair.sync(0)
    pair.check()
    for name in ADAPTERS:
        pair.tensors[name] *= 0.05  # a change of about a step of the weights
    ack = await pair.sync(1, alone=True)
    pair.check()
    assert (ack.num_changed, pair.weights.state.version) == (2, 1)
    assert 0 < ack.num_bytes < first.num_bytes / 3


@pytest.mark.parametrize("alone", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("fault", ["flipped", "dropped"])
async def test_a_fault_before_the_copy_ends_the_sync(pair, fault, alone):
    await pair.weights.reconcile(pair.layout)
    await pair.sync(0)
    with pytest.raises(SyncError):
        await pair.sync(1, alone, fault)
    assert pair.weights.state.version == -1 and len(pair.folders) == 1
    await pair.sync(2)
    pair.check()


async def test_a_base_weight_that_has_changed_in_the_copy_is_named(pair):
    """A sync of adapters does not send the base again, so each one proves it again."""
    await pair.weights.reconcile(pair.layout)
    await pair.sync(0)
    pair.weights._copy._tensors["norm.weight"][3] += 1
    with pytest.raises(SyncError, match=r"version 1 is not in place(?s:.)*norm.weight"):
        await pair.sync(1, alone=True)


async def test_a_sync_of_adapters_is_refused_without_a_base(pair):
    await pair.weights.reconcile(pair.layout)
    await pair.sync(0)
    pair.weights.state.end("released")
    with pytest.raises(SyncError, match="send everything"):
        await pair.sync(1, alone=True)
    await pair.sync(1)
    pair.check()

"""A server without adapters, whose rank keeps the base and the adapters and hands on their sum (P14, P15)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.core.errors import SyncError
from meshrl.rollout.folder_weights import FolderWeights
from meshrl.rollout.foreign.adapted import AdaptedWeights
from meshrl.sync.manifest import Ack, make_layout
from meshrl.sync.receive import Bucket, describe
from meshrl.sync.send import make_header, send_weights
from meshrl.sync.shards import ShardSender

BASE = {"embed.weight": (40, 8), "layer.q_proj.weight": (24, 8), "layer.q_proj.bias": (24,), "norm.weight": (8,)}
ADAPTERS = {"layer.q_proj.lora_A.weight": (2, 8), "layer.q_proj.lora_B.weight": (24, 2)}
SCALE = 0.5
BUCKET_BYTES = 256


class Pair:
    """A trainer with adapters, and a server that takes weights as folders."""

    def __init__(self, tmp_path: Path):
        torch.manual_seed(0)
        self.tensors = {name: torch.randn(shape).bfloat16() for name, shape in {**BASE, **ADAPTERS}.items()}
        specs = [(name, *spec) for name, spec in describe(self.tensors).items()]
        self.layout = make_layout(specs, {"head.weight": "embed.weight"}, BUCKET_BYTES, 1, "xxh3")
        staging = [torch.empty(BUCKET_BYTES, dtype=torch.uint8)]
        self.sender = ShardSender(self.layout, 0, staging, keep_base=False, frozen=frozenset(BASE))
        model = tmp_path / "model"
        model.mkdir()
        save_file({name: torch.zeros(shape).bfloat16() for name, shape in BASE.items()}, model / "model.safetensors")
        (model / "config.json").write_text(json.dumps({"model_type": "none"}))
        self.folders: list[Path] = []

        async def reload(folder: Path) -> None:
            self.folders.append(folder)

        self.server = FolderWeights(model, tmp_path / "versions", reload, "server")
        self.weights = AdaptedWeights(self.server.call, "server", SCALE)

    async def sync(self, version: int, alone: bool = False, fault: str | None = None) -> Ack:
        header = make_header(self.layout, version, None, *((version - 1, "adapter") if alone else (None, "full")))
        buckets = damaged(self.sender.buckets(self.tensors, version, alone), fault)
        (ack,) = await send_weights(header, buckets, [self.weights])
        return ack

    def check(self) -> None:
        """The server's last folder is the base with B A added to it, each element rounded once."""
        a, b = (self.tensors[name].float() for name in ADAPTERS)
        wanted = {name: self.tensors[name] for name in BASE}
        base = wanted["layer.q_proj.weight"].float()
        wanted["layer.q_proj.weight"] = torch.addmm(base, b, a, alpha=SCALE).bfloat16()
        held = load_file(self.folders[-1] / "model.safetensors")
        assert held.keys() == BASE.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


def damaged(buckets: Iterator[Bucket], fault: str | None) -> Iterator[Bucket]:
    for number, bucket in enumerate(buckets):
        if fault == "flipped" and bucket.payload.numel():
            bucket.payload[0] ^= 1
        if not (fault == "dropped" and number == 1):
            yield bucket


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.weights.close()


def test_adapters_alone_come_and_the_sum_goes_on(pair):
    async def main():
        await pair.weights.reconcile(pair.layout)
        first = await pair.sync(0)
        pair.check()
        for name in ADAPTERS:
            pair.tensors[name] += 1
        ack = await pair.sync(1, alone=True)
        pair.check()
        assert (ack.num_changed, pair.weights.version) == (2, 1)
        assert 0 < ack.num_bytes < first.num_bytes / 3

    asyncio.run(main())


@pytest.mark.parametrize("alone", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("fault", ["flipped", "dropped"])
def test_what_went_wrong_on_the_way_to_the_rank_ends_the_sync(pair, fault, alone):
    async def main():
        await pair.weights.reconcile(pair.layout)
        await pair.sync(0)
        with pytest.raises(SyncError):
            await pair.sync(1, alone, fault)
        assert pair.weights.version == -1 and len(pair.folders) == 1
        await pair.sync(2)
        pair.check()

    asyncio.run(main())


def test_a_base_that_is_not_what_was_sent_once_is_named(pair):
    """P15: no sync of adapters brings it again, so each proves it again."""

    async def main():
        await pair.weights.reconcile(pair.layout)
        await pair.sync(0)
        pair.weights._held.targets()["norm.weight"][3] += 1
        with pytest.raises(SyncError, match=r"version 1 is not in place(?s:.)*norm.weight"):
            await pair.sync(1, alone=True)

    asyncio.run(main())


def test_adapters_alone_are_refused_while_no_base_is_there(pair):
    async def main():
        await pair.weights.reconcile(pair.layout)
        await pair.sync(0)
        pair.weights.drop()
        with pytest.raises(SyncError, match="send everything"):
            await pair.sync(1, alone=True)
        await pair.sync(1)
        pair.check()

    asyncio.run(main())

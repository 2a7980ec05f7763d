"""Tensor-parallel workers of a server: each proves its own slices of fused parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_sync import Trainer, boxes_on, header_of, trained

from meshrl.core.errors import SyncError, UnloadedParamsError
from meshrl.rollout.server.weights import ServerWeights
from meshrl.rollout.server.worker_weights import WorkerWeights
from meshrl.rollout.sglang.loader import make_placeholder
from meshrl.sync.layout import Layout, make_layout

SHAPES: dict[str, tuple[int, ...]] = {
    "q.weight": (8, 6),
    "k.weight": (4, 6),
    "o.weight": (6, 8),
    "embed.weight": (5, 6),
    **{f"experts.{e}.{part}.weight": (4, 6) for e in range(3) for part in ("gate", "up")},
}


class Worker(torch.nn.Module):
    """One of two ranks, with the parameters of a typical engine: q and k fused, o cut by columns, a padded vocabulary,
    gate and up of all experts fused."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        self.qk = torch.nn.Parameter(torch.zeros(6, 6))
        self.o = torch.nn.Parameter(torch.zeros(6, 4))
        self.embed = torch.nn.Parameter(torch.ones(3, 6))
        self.experts = torch.nn.Parameter(torch.zeros(3, 4, 6))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, full in weights:
            match name.split("."):
                case "q", _:
                    self.qk.data[:4].copy_(full.narrow(0, 4 * self.rank, 4))
                case "k", _:
                    self.qk.data[4:].copy_(full.narrow(0, 2 * self.rank, 2))
                case "o", _:
                    self.o.data.copy_(full.narrow(1, 4 * self.rank, 4))
                case "embed", _:
                    rows = full[3 * self.rank : 3 * self.rank + 3]
                    self.embed.data[: len(rows)].copy_(rows)
                    self.embed.data[len(rows) :].fill_(0)
                case "experts", expert, part, _:
                    at = 0 if part == "gate" else 2
                    self.experts.data[int(expert), at : at + 2].copy_(full.narrow(0, 2 * self.rank, 2))
                case _:
                    raise KeyError(name)
        return {"loaded"}


class Server:
    """Two workers; all calls go through JSON."""

    def __init__(self, **changes: Any):
        self.models = [Worker(rank) for rank in range(2)]
        self.workers = [WorkerWeights(model, f"worker {model.rank}", make_placeholder) for model in self.models]
        self.weights = ServerWeights(self.call, "server", **changes)

    async def call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        message = json.dumps(arguments)
        return [json.loads(json.dumps(worker.call(step, json.loads(message)))) for worker in self.workers]

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        wanted = [Worker(rank) for rank in range(2)]
        for model in wanted:
            model.load_weights(weights.items())
        names = dict(wanted[0].named_parameters())
        pairs = [(a.get_parameter(n), b.get_parameter(n)) for a, b in zip(wanted, self.models) for n in names]
        return all(torch.equal(a, b) for a, b in pairs)


def layout_of(mesh: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Layout:
    specs = {name: (shape, "float32") for name, shape in shapes.items()}
    return make_layout(specs, boxes_on(mesh, shapes), transfer_bytes=512)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


async def send(trainer: Trainer, server: Server, weights: Any, version: int, base: int | None = None) -> Any:
    await server.weights.begin(header_of(trainer.layout, version, base))
    for delivery in trainer.deliveries(weights, version, base is not None):
        await server.weights.receive(delivery)
    return await server.weights.commit()


@pytest.mark.parametrize("keep", [False, True], ids=["forwarded", "copied"])
@pytest.mark.parametrize("mesh", ["one rank", "rows", "columns", "3 x 2"])
async def test_each_worker_gets_and_proves_its_slices_for_any_boxes_of_the_trainer(mesh, keep):
    server, trainer, weights = Server(keep_copy=keep), Trainer(layout_of(mesh)), weights_of(0)
    await server.weights.reconcile(trainer.layout)
    for version in range(3):
        base = version - 1 if keep and version else None
        ack = await send(trainer, server, weights, version, base)
        assert (ack.version, ack.wire, ack.read_back) == (version, True, True) and server.holds(weights)
        assert (ack.num_bytes < trainer.layout.num_bytes / 2) == (base is not None)
        weights = trained(weights, version)
    server.weights.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("stale", r"k.weight still has the values of version 0"),
        ("experts swapped", r"experts.0.gate.weight has the values of experts.1.gate.weight"),
        ("gate and up swapped", r"experts.2.gate.weight has the values of experts.2.up.weight"),
        ("a bit", r"o.weight has digest"),
    ],
)
async def test_a_wrong_slice_of_any_worker_is_named(fault, complaint, rank):
    """A worker compares its loaded parameters with its own slices of the verified bytes."""
    server, trainer = Server(), Trainer(layout_of("3 x 2"))
    await server.weights.reconcile(trainer.layout)
    await send(trainer, server, weights_of(0), 0)
    worker, model = server.workers[rank], server.models[rank]
    before = model.qk.data[4:].clone()

    def after_loading() -> None:
        if fault == "stale":
            model.qk.data[4:] = before
        elif fault == "experts swapped":
            model.experts.data[[0, 1]] = model.experts.data[[1, 0]]
        elif fault == "gate and up swapped":
            model.experts.data[2] = model.experts.data[2].roll(2, 0)
        else:
            model.o.data.view(torch.int32)[5, 3] ^= 1

    worker.after_loading = after_loading
    with pytest.raises(SyncError, match=complaint):
        await send(trainer, server, weights_of(1), 1)
    assert server.weights.state.version == -1
    del worker.after_loading
    await send(trainer, server, weights_of(1), 1)
    assert server.weights.state.version == 1 and server.holds(weights_of(1))
    server.weights.close()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda sent: sent[:2] + sent[3:], "transfer 3 .* was received; expected transfer 2"),
        (lambda sent: sent[:-1], "commit after .* is the first tensor that is incomplete"),
        (lambda sent: [sent[0], *sent], "transfer 0 .* was received; expected transfer 1"),
        (
            lambda sent: [replace(d, payload=d.payload ^ 1) for d in sent],
            "q.weight.* was sent with digest .*, received with",
        ),
    ],
)
async def test_workers_refuse_damaged_transfers(damage, complaint):
    server, trainer = Server(), Trainer(layout_of("rows"))
    await server.weights.reconcile(trainer.layout)
    await server.weights.begin(header_of(trainer.layout, 0))
    with pytest.raises(SyncError, match=complaint):
        for delivery in damage(list(trainer.deliveries(weights_of(0)))):
            await server.weights.receive(delivery)
        await server.weights.commit()
    assert server.weights.state.version == -1
    server.weights.close()


async def test_names_that_the_loader_does_not_know_are_found_before_anything_is_sent():
    shapes = {**SHAPES, "experts.gate_up_proj": (3, 4, 6)}
    del shapes["q.weight"]
    server = Server()
    with pytest.raises(UnloadedParamsError, match=r"never sent(.|\n)*qk \[6, 6\](.|\n)*experts.gate_up_proj"):
        await server.weights.reconcile(layout_of("rows", shapes))
    server.weights.close()

"""Where the elements of a wire tensor are in an engine's parameters, found by tracing its own loader; and the read-back
proof."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from tiny_sync import Trainer, sync

from meshrl.core.errors import SyncError
from meshrl.rollout.server.name_map import trace_loader
from meshrl.rollout.server.weights import ServerWeights
from meshrl.rollout.server.worker_weights import WorkerWeights
from meshrl.rollout.sglang.loader import make_placeholder
from meshrl.sync.layout import Ack, Layout, layout_to_json, make_layout

NAMES = [
    ("q.weight", (4, 6)),
    ("k.weight", (2, 6)),
    ("o.weight", (6, 8)),
    ("embed.weight", (5, 6)),
    ("experts", (2, 3, 6)),
]


class Fused(torch.nn.Module):
    """Rank 1 of 2, with parameters as in an engine: q and k in one parameter, o sharded by columns, a padded
    vocabulary, and experts that are sent as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(3, 6))
        self.o = torch.nn.Parameter(torch.zeros(6, 4))
        self.embed = torch.nn.Parameter(torch.ones(4, 6))
        self.experts = torch.nn.Parameter(torch.zeros(2, 3, 3))
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, wire in weights:
            if name == "q.weight":
                self.qk.data[:2].copy_(wire.narrow(0, 2, 2))
            elif name == "k.weight":
                self.qk.data[2:].copy_(wire.narrow(0, 1, 1))
            elif name == "o.weight":
                assert wire.shape == (6, 8)
                self.o.data.copy_(wire.narrow(1, 4, 4))
            elif name == "embed.weight":
                self.embed.data[:2].copy_(wire.narrow(0, 3, 2))
                self.embed.data[2:].fill_(0)
            elif name == "experts":
                for expert in range(2):
                    self.experts.data[expert].copy_(wire[expert].narrow(1, 3, 3))
            elif name == "turned":
                self.o.data.copy_(wire.t().narrow(1, 0, 4))
            elif name != "rope.inv_freq":
                raise KeyError(name)
            else:
                return set()
        return {"something"}


def layout_of(names: Sequence[tuple[str, tuple[int, ...]]]) -> Layout:
    return make_layout({name: (shape, "float32") for name, shape in names})


@pytest.fixture
def wires() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in NAMES}


def test_each_block_is_found_where_the_loader_puts_it(wires):
    model = Fused()
    found = trace_loader(model, layout_of(NAMES), make_placeholder)
    assert not (found.refused or found.hidden or found.unfilled)
    assert model.qk.sum() == 0 and model.embed.sum() == 24  # tracing loads nothing
    model.load_weights(wires.items())
    params = dict(model.named_parameters(remove_duplicate=False))
    blocks = {name: patches for name, patches in found.patches.items()}
    assert {name: len(patches) for name, patches in blocks.items()} == {**dict.fromkeys(wires, 1), "experts": 2}
    for name, patches in blocks.items():
        for patch in patches:
            assert torch.equal(patch.of_parameter(params[patch.param]), patch.of_wire(wires[name]))
    assert (blocks["o.weight"][0].offsets, blocks["o.weight"][0].extent) == ((0, 4), (6, 4))
    assert (blocks["experts"][1].offsets, blocks["experts"][1].extent) == ((1, 0, 3), (1, 3, 3))


def test_names_that_the_loader_refuses_or_lacks_are_reported():
    names = [*NAMES[1:], ("extra", (2,)), ("rope.inv_freq", (3,)), ("o.weight", (6, 9))]
    found = trace_loader(Fused(), layout_of([n for n in names if n != ("o.weight", (6, 8))]), make_placeholder)
    assert set(found.refused) == {"extra", "o.weight"}
    assert "rope.inv_freq" not in {*found.patches, *found.hidden}
    assert set(found.unfilled) == {"qk", "o"}  # q is not sent, so its part of qk is not filled


def test_a_tensor_that_the_loader_transposes_is_reported_as_one_that_cannot_be_read_back():
    found = trace_loader(Fused(), layout_of([*NAMES[:2], ("turned", (8, 6)), *NAMES[3:]]), make_placeholder)
    assert found.hidden == ["turned"] and not found.unfilled


def worker_of(model: Fused, wires: dict[str, torch.Tensor], version: int) -> WorkerWeights:
    """A worker in the sync of this version, whose tensors were all received and not yet loaded."""
    layout = layout_of(NAMES)
    worker = WorkerWeights(model, "worker", make_placeholder)
    worker.reconcile(layout_to_json(layout))
    receive(worker, wires, version)
    return worker


def receive(worker: WorkerWeights, wires: dict[str, torch.Tensor], version: int) -> None:
    worker.begin({"version": version, "layout_hash": worker.layout.hash})
    for name, wire in wires.items():
        worker.note(name, wire)


@pytest.mark.parametrize("fault", ["stale", "swapped", "one bit", "none"])
def test_the_read_back_compares_each_block(wires, fault):
    model = Fused()
    worker = worker_of(model, wires, 0)
    model.load_weights(wires.items())
    assert not worker.differing()
    worker._committed = worker._digests
    doubled = {name: wire * 2 for name, wire in wires.items()}
    receive(worker, doubled, 1)
    if fault != "stale":
        model.load_weights(doubled.items())
    if fault == "swapped":
        one, two = model.experts.data.clone()
        model.experts.data[0], model.experts.data[1] = two, one
    elif fault == "one bit":
        model.o.data.view(torch.int32)[3, 2] ^= 1
    faults = worker.differing()
    expected = {
        "stale": [f"{name} still has the values of version 0" for name in wires],
        "swapped": ["experts has the values of experts in experts[0:1, 0:3, 3:6], and 1 more parts"],
        "one bit": ["o.weight has digest"],
        "none": [],
    }[fault]
    assert len(faults) == len(expected) and all(words in "\n".join(faults) for words in expected)


def test_a_parameter_without_memory_is_reported_unless_its_copy_is_compared_elsewhere(wires):
    model = Fused()
    worker = worker_of(model, wires, 0)
    model.load_weights(wires.items())
    assert not worker.differing()
    model.o = torch.nn.Parameter(torch.empty(0))
    assert worker.differing() == ["o.weight can't be read back: o has no elements"]
    worker.packed = {"o"}
    assert worker.differing() == []


class Routed(torch.nn.Module):
    """A router with a bias that is a buffer in the engine's own dtype, and with buffers that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6))
        self.register_buffer("bias", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("cache_scale", torch.ones(()))
        self.register_buffer("rotation", torch.ones(3), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, wire in weights:
            held[name].data.copy_(wire)
        return {"something"}


def _into(model: torch.nn.Module, bias: list[float], altered: bool = False) -> Ack:
    """A sync into one worker of a server. altered: the bias is overwritten after loading."""
    worker = WorkerWeights(model, "worker", make_placeholder)
    wires = {"weight": torch.arange(24.0).view(4, 6), "bias": torch.tensor(bias)}
    layout = layout_of([(name, tuple(wire.shape)) for name, wire in wires.items()])

    async def call(step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if altered and step == "commit":
            model.bias.zero_()
        return [worker.call(step, arguments)]

    weights = ServerWeights(call, "server")
    asyncio.run(weights.reconcile(layout))
    try:
        return sync(Trainer(layout, keep_base=False), weights, wires)
    finally:
        weights.close()


def test_a_buffer_is_loaded_and_read_back_in_the_dtype_that_was_sent():
    """A forward also reads buffers. In another dtype their values must be exactly equal; internal buffers of the
    engine stay unchanged."""
    model = Routed()
    assert _into(model, [0.5, -1.0, 2.0, 0.25]).read_back is True
    assert model.bias.tolist() == [0.5, -1.0, 2.0, 0.25] and model.bias.dtype == torch.bfloat16
    assert (model.cache_scale, model.rotation.tolist()) == (1, [1, 1, 1])


@pytest.mark.parametrize(
    ("bias", "altered", "expected"),
    [
        ([0.5, -1.0, 2.0, 0.1], False, r"bias has digest .*sent as torch\.float32, stored as torch\.bfloat16"),
        ([0.5, -1.0, 2.0, 0.25], True, "bias has digest"),
    ],
    ids=["a value that bf16 can't represent", "altered"],
)
def test_a_buffer_with_other_values_is_named(bias, altered, expected):
    with pytest.raises(SyncError, match=expected):
        _into(Routed(), bias, altered)

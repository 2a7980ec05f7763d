"""Every copy of a weight that sampling uses, left stale by a sync, ends the run before the next update, under each
schedule: the copies are compared by what is sampled with them, like those that this list does not have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_mixture
from tiny_run import steps_of, train, write_run

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import phase
from meshrl.core.errors import SamplerMismatchError, SyncError
from meshrl.sync.transaction import SyncOrder

pytestmark = pytest.mark.timeout(240)
STALE_VERSION = 2
OPTIONS = (
    "cluster.executor=inline",
    "loop.num_steps=5",
    "loop.prompts_per_step=2",
    "train.optimizer.lr=0.05",  # an update changes logprobs by more than the ceiling of the proof
    "algo.correction=off",
    "rollout.release_memory=false",  # releasing it drops all copies, too
)
KINDS = {
    "colocated": ("loop.kind=colocated",),
    "one_step_off": ("loop.kind=one_step_off",),
    "fully_async": ("loop.kind=fully_async", "loop.max_staleness=2"),
}
LORA = ("model.lora.enabled=true", "model.lora.rank=4", "model.lora.alpha=16")
# Called with the engine before the stale version is sent. What it returns is called when that version is committed.
Fault = Callable[[Any], Callable[[], None]]


def nothing(*args: Any) -> None: ...


def prepacked_head(engine: Any) -> Callable[[], None]:
    runner, flush = engine._runner, engine._runner.flush

    def keep_head() -> None:
        head = runner._head
        flush()
        runner._head = head

    def check() -> None:
        assert runner._head.packed is not None, "the head was not prepacked"

    runner.flush = keep_head
    return check


def prepacked_layers(engine: Any) -> Callable[[], None]:
    fast = engine._runner._fast
    pack = fast.pack

    def pack_once() -> None:
        pack()
        fast.pack = nothing

    def check() -> None:
        assert all(linear._packed is not None for linear in fast._fused()), "the layers were not prepacked"

    fast.unpack, fast.pack = nothing, pack_once
    return check


def tied_embedding(engine: Any) -> Callable[[], None]:
    """The head has the new weights."""
    engine._runner._fast.embedding = engine._runner._fast.embedding.clone()
    return nothing


def norms(engine: Any) -> Callable[[], None]:
    fast = engine._runner._fast
    for norm in (fast.norm, *(norm for layer in fast.layers for norm in (layer.before_attention, layer.before_mlp))):
        norm.weight = norm.weight.clone()
    return nothing


def fused_projections(engine: Any) -> Callable[[], None]:
    for layer in engine._runner._fast.layers:
        for linear in (layer.qkv, layer.gate_up):
            linear._joint = linear._joint.clone()
    return nothing


def table_of_rotations(engine: Any) -> Callable[[], None]:
    """It has no weights, so it is not stale, but of other positions."""

    def stretch() -> None:
        fast = engine._runner._fast
        fast._table = tuple(table[torch.arange(len(table)) // 2] for table in fast._table)

    return stretch


def adapters(engine: Any) -> Callable[[], None]:
    for linear in engine._runner._fast._fused():
        linear._adapters = [
            (start, end, replace(adapter, a=adapter.a.clone(), b=adapter.b.clone()))
            for start, end, adapter in linear._adapters
        ]
    return nothing


def joint_experts(engine: Any) -> Callable[[], None]:
    """They are received and read back as separate tensors."""
    experts = [m for m in engine._runner.model.modules() if hasattr(m, "gate_up_proj")]
    old = [m.gate_up_proj.clone() for m in experts]

    def restore() -> None:
        for module, weights in zip(experts, old, strict=True):
            module.gate_up_proj = torch.nn.Parameter(weights, requires_grad=False)

    return restore


def keys_and_values(engine: Any) -> Callable[[], None]:
    """Running requests go on with those of the old weights."""
    engine._scheduler.preempt_all = engine._runner.bound.clear = nothing
    return nothing


FAULTS: dict[Fault, tuple[str, ...]] = {
    prepacked_head: (),
    prepacked_layers: (),
    tied_embedding: (),
    norms: (),
    fused_projections: (),
    table_of_rotations: (),
    adapters: LORA,
    joint_experts: ("model.path=mixture",),
}
IN_FLIGHT = ("rollout.sampling.max_new_tokens=96", "rollout.max_running_requests=8")
CASES = {f"{fault.__name__}-{kind}": (fault, kind, options) for fault, options in FAULTS.items() for kind in KINDS}
CASES["prepacked_head-several updates"] = (prepacked_head, "colocated", ("train.updates_per_step=2",))
CASES["keys_and_values-fully_async"] = (keys_and_values, "fully_async", IN_FLIGHT)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("stale"))
    facts = json.loads((path.parent / "model" / "config.json").read_text())
    tiny_mixture(vocab_size=facts["vocab_size"], initializer_range=0.1).save_pretrained(path.parent / "mixture")
    for file in (path.parent / "model").iterdir():
        if not (path.parent / "mixture" / file.name).exists():
            shutil.copy(file, path.parent / "mixture")
    return path


@pytest.mark.parametrize(("fault", "kind", "options"), CASES.values(), ids=CASES)
def test_a_stale_copy_ends_the_run_before_the_next_update(
    fault: Fault, kind: str, options: Sequence[str], config: Path, monkeypatch: pytest.MonkeyPatch
):
    """The sampler reports the new version, and its parameters are the trainer's."""
    sync, committed = RankWorker.sync, list[Callable[[], None]]()

    @phase("sync")
    async def leaves_a_copy(self: RankWorker, order: SyncOrder) -> Any:
        answer = await sync(self, order)
        if order.header.version == STALE_VERSION - 1:
            committed.append(fault(self.sampler))
        elif order.header.version == STALE_VERSION:
            committed.pop()()
        return answer

    monkeypatch.setattr(RankWorker, "sync", leaves_a_copy)
    name = f"{fault.__name__}_{kind}_{len(options)}"
    texts = {fused_projections: "is not a view of the fused", keys_and_values: "keys and values of weight version 1"}
    text = texts.get(fault, f"at weight version {STALE_VERSION} the logprobs of sampler")
    with pytest.raises(SyncError if fault in texts else SamplerMismatchError, match=text):
        train(config, name, *OPTIONS, *KINDS[kind], *options)
    assert sum("loss/policy" in step for step in steps_of(config.parent / "runs" / name)) <= STALE_VERSION

"""A rank that trains adapters and samples has the frozen weights once: trainer and embedded sampler use one memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tiny_engines import ask
from tiny_models import tiny_lm, tiny_qwen2
from tiny_specs import worker_spec

from meshrl.cluster import rank_sync
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.inline import InlineExecutor
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import RunConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import MeshrlError, SyncError
from meshrl.model import fast_decoder
from meshrl.model.costs import run_memory
from meshrl.model.lora import is_adapter, named_weights
from meshrl.plan.memory import RankMemory
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.layout import Ack, SyncHeader, make_layout
from meshrl.sync.sender import WeightSender
from meshrl.sync.transaction import SyncOrder, make_header, with_reports
from meshrl.train import engine

LORA = LoraConfig(enabled=True, rank=4, alpha=8)


class Rank:
    """A rank that trains and samples, in this process, and the controller's part in its syncs."""

    def __init__(self, worker: RankWorker):
        self.worker = worker
        self.trainer, self.sampler = worker.engines["policy"], cast(EmbeddedEngine, worker.sampler)
        boxes = worker.weights()
        self.layout = make_layout(boxes.tensors, [boxes.boxes], boxes.tied, 4096, boxes.digest)

    async def sync(self, version: int) -> Ack:
        await self.worker.set_layout(self.layout)
        header = make_header(self.layout, version, [self.worker.sync_state("0")], "adapter")
        ack, report = await self.worker.sync(SyncOrder(header=header, connection_id="0"))
        assert ack is not None and report is not None
        assert report.num_bytes == ack.num_bytes
        return with_reports([ack], [report], header)[0]

    def adapter_bytes(self) -> int:
        return sum(p.nbytes for name, p in named_weights(self.trainer.model.lm) if is_adapter(name))

    def base(self) -> dict[str, torch.Tensor]:
        """The trainer's frozen tensors."""
        return {n: p.detach() for n, p in named_weights(self.trainer.model.lm) if not is_adapter(n)}

    def memory(self, *models: Any) -> int:
        """Bytes of all distinct storages of the parameters of these models."""
        storages = [p.untyped_storage() for lm in models for p in lm.parameters()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def spec_of(folder: Path, **train: Any) -> Any:
    return worker_spec(
        model=ModelConfig(path=str(folder), dtype="float32", lora=LORA),
        train=TrainConfig(**train),
        rollout=RolloutConfig(),
    )


def planned(folder: Path, device: str, **train: Any) -> RankMemory:
    """The memory of this rank by its plan."""
    run = {"data": {"path": "rows.jsonl"}, "loop": {"num_steps": 1}, "reward": {"terms": {"a": {"kind": "a:b"}}}}
    train["max_tokens_per_microbatch"] = 8
    model = {"path": str(folder), "dtype": "float32", "lora": LORA.model_dump()}
    _, (rank,) = run_memory(RunConfig.model_validate({**run, "model": model, "train": train}), device)
    return rank


MODELS = {
    "tied head": tiny_qwen2,
    "own head": lambda: tiny_qwen2(tie=False),
    "mixture": lambda: tiny_lm("qwen3_moe"),  # its experts are joint in memory, and without adapters
}


@pytest.fixture(params=MODELS)
def rank(request: Any, tmp_path: Path) -> Iterator[Rank]:
    MODELS[request.param]().save_pretrained(tmp_path)
    executor = InlineExecutor([spec_of(tmp_path, param_offload=True)])
    try:
        asyncio.run(executor.start())
        yield Rank(executor.worker)
    finally:
        asyncio.run(executor.close())


async def test_the_frozen_weights_exist_once_and_only_adapters_are_sent(rank: Rank, tmp_path: Path):
    """Also by the first sync, which is a full one, and by the full sync after a cancelled one."""
    base, saved = rank.sampler.shared, load_file(tmp_path / "model.safetensors")
    own = sum(t.nbytes for t in rank.base().values())
    both = rank.memory(rank.trainer.model.lm, rank.sampler._weights.lm)
    assert both == own + 2 * rank.adapter_bytes()  # of views of joint tensors, too
    parts = planned(tmp_path, "cpu").device
    assert both == parts["masters"]["rollout"] + parts["sampler's weights"]["rollout"]
    moved = planned(tmp_path, "cuda", param_offload=True).host
    assert moved["masters"] == {"rollout": rank.adapter_bytes()}
    for version in range(3):
        ack = await rank.sync(version)
        assert ack.num_bytes == rank.adapter_bytes() and ack.read_back
        assert ack.num_shared == len(base) > 0
        if version == 1:
            await rank.worker.cancel_sync()
            assert rank.sampler.stats().version == -1
    assert base.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in base.items())


async def test_no_sync_can_write_a_shared_tensor(rank: Rank):
    """A sender in this process gets no target for it, and a transfer that has its values is refused."""
    await rank.worker.set_layout(rank.layout)
    await rank.sampler.begin(SyncHeader(version=0, layout_hash=rank.layout.hash))
    assert rank.sampler.targets().keys() == rank.layout.by_name.keys() - rank.sampler.shared.keys()
    assert all(map(is_adapter, rank.sampler.targets())) and rank.sampler.targets()
    sender = WeightSender(rank.layout, 0, keep_base=False)  # of a trainer that shares nothing
    sender.begin(rank.trainer.weights().sources)
    first = sender.fill(rank.layout.transfers[0], torch.empty(rank.layout.slot_bytes, dtype=torch.uint8))
    with pytest.raises(SyncError, match="which is the trainer's own tensor"):
        await rank.sampler.receive(first)


async def test_the_base_stays_while_the_sampler_has_released_its_memory(rank: Rank):
    await rank.sync(0)
    base = {name: t.clone() for name, t in rank.base().items()}
    assert await rank.worker.release_memory() == rank.adapter_bytes()
    assert all(torch.equal(tensor, base[name]) for name, tensor in rank.base().items())
    await rank.sampler.restore({"weights", "kv_cache"})
    ack = await rank.sync(1)
    assert ack.read_back and ack.num_bytes == rank.adapter_bytes()
    assert len((await rank.worker.generate(ask("a", [1, 2], ignore_eos=True))).output_ids) == 16


async def test_the_base_stays_while_the_trainers_parameters_are_in_host_memory(rank: Rank, monkeypatch: Any):
    """As in a rank of an accelerator: the trained ones leave, the sampler works, and they are restored."""
    for module in (rank_sync, engine):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)
    device = rank_sync.SharedDevice(rank.worker.spec, torch.device("cpu"), rank.worker.engines, rank.sampler)
    await rank.sync(0)
    adapters = [p for name, p in named_weights(rank.trainer.model.lm) if is_adapter(name)]
    before = [p.detach().clone() for p in adapters]
    want = (await rank.worker.generate(ask("before", [1, 2], seed=1))).output_ids.tolist()
    device.make_room("kv_cache")
    assert all(p.untyped_storage().nbytes() == 0 for p in adapters)
    assert (await rank.worker.generate(ask("after", [1, 2], seed=1))).output_ids.tolist() == want
    with device.policy():
        assert all(torch.equal(p, value) for p, value in zip(adapters, before, strict=True))
    device.for_training()
    assert all(torch.equal(p, value) for p, value in zip(adapters, before, strict=True))


async def test_a_base_that_has_changed_or_is_no_longer_one_tensor_fails_the_next_sync(rank: Rank):
    await rank.sync(0)
    name, p = next((n, p) for n, p in named_weights(rank.trainer.model.lm) if "layers.1.self_attn.q_proj.w" in n)
    p.data[1, 2] += 1
    with pytest.raises(SyncError, match=rf"version 1 is not in place.*\n.*{name} has digest"):
        await rank.sync(1)
    p.data[1, 2] -= 1
    layer = rank.trainer.model.lm.get_submodule("model.layers.1.self_attn.q_proj.base_layer")
    layer.weight = torch.nn.Parameter(p.detach().clone(), requires_grad=False)
    with pytest.raises(SyncError, match=f"{name} of trainer and sampler is no longer one tensor"):
        await rank.sync(1)


async def test_a_sampler_that_changes_the_base_while_it_is_built_is_refused(tmp_path: Path, monkeypatch: Any):
    """Trainer and sampler would agree on the wrong values."""
    original = fast_decoder._joined

    def joined(parameters: Any) -> torch.Tensor:
        return cast(torch.Tensor, original(parameters)).mul_(2)

    monkeypatch.setattr(fast_decoder, "_joined", joined)
    tiny_qwen2().save_pretrained(tmp_path)
    executor = InlineExecutor([spec_of(tmp_path)])
    try:
        with pytest.raises(MeshrlError, match=r"has changed .* of the .* tensors that it shares with the trainer"):
            await executor.start()
    finally:
        await executor.close()


EXPERTS = {"targets": ["all-linear", "experts"]}


@pytest.mark.parametrize(
    ("lora", "engine_name", "num_train", "num_rollout", "reason"),
    [
        ({}, "embedded", 1, 0, ""),
        ({"enabled": False}, "embedded", 1, 0, "all weights are trained"),
        (EXPERTS, "embedded", 1, 0, "adapters of experts merged"),
        ({}, "vllm", 1, 0, "engine vllm has its weights in other processes"),
        ({}, "embedded", 1, 1, "ranks of their own"),
        ({}, "embedded", 2, 0, "has a shard"),
    ],
)
def test_only_one_rank_with_an_embedded_sampler_and_linear_adapters_shares(
    lora: dict[str, Any], engine_name: Any, num_train: int, num_rollout: int, reason: str
):
    cfg = LoraConfig(**{"enabled": True, **lora})
    spec = worker_spec(
        num_train_ranks=num_train,
        num_rollout_ranks=num_rollout,
        model=ModelConfig(path="unused", lora=cfg),
        rollout=RolloutConfig(engine=engine_name),
    )
    assert reason in spec.second_copy and bool(reason) == bool(spec.second_copy)

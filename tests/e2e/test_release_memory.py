"""`rollout.release_memory`: samplers release their memory for the colocated trainer, and nothing else changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_http import answering
from tiny_run import steps_of, train, write_run

from meshrl.cluster import rank_sync
from meshrl.cluster.actors import RankWorker
from meshrl.core.errors import CapabilityError
from meshrl.core.types import Request, Turn
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.rollout.sglang.dialect import LOADER
from meshrl.train import engine
from meshrl.train.checkpoint_files import state_folder

pytestmark = pytest.mark.timeout(400)
RELEASED = "memory/released_bytes"
CACHE_BYTES = 1 << 18  # of the sampler's pages
LORA = ("model.lora.enabled=true", "model.lora.rank=4")


def model_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(folder / "model" / "model.safetensors").values())


@pytest.mark.parametrize(
    "layout",
    [
        ("cluster.executor=inline",),
        ("cluster.num_train_ranks=2",),
        ("cluster.executor=inline", *LORA),
    ],
    ids=["one rank", "two ranks", "LoRA"],
)
def test_a_run_that_releases_memory_is_the_same_to_the_bit(tmp_path: Path, layout: tuple[str, ...]):
    """During each step's update the samplers have no weights; a full sync restores them. With LoRA on one rank only the
    adapters leave, since the trainer computes with the rest."""
    config = write_run(tmp_path)
    without = train(config, "without_release", *layout)
    with_release = train(config, "with_release", *layout, "rollout.release_memory=true")
    assert steps_of(with_release) == steps_of(without)
    ranks = 2 if "cluster.num_train_ranks=2" in layout else 1
    with_bytes = ("s", "tokens/s", "GB/s")
    released = [step[RELEASED] for step in steps_of(with_release, with_bytes)]
    if LORA[0] in layout:
        assert all(0 < size - CACHE_BYTES < model_bytes(tmp_path) for size in released)
    else:
        assert all(size >= ranks * model_bytes(tmp_path) for size in released)
    assert all(RELEASED not in step for step in steps_of(without, with_bytes))


def test_the_memory_is_free_while_the_gradient_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []
    forward_backward = RankWorker.forward_backward

    def recording(worker: RankWorker, *args: object) -> object:
        assert isinstance(worker.sampler, EmbeddedEngine)
        held.append(sum(p.untyped_storage().nbytes() for p in worker.sampler._weights.lm.parameters()))
        return forward_backward(worker, *args)

    monkeypatch.setattr(RankWorker, "forward_backward", recording)
    config = write_run(tmp_path)
    train(config, "with_release", "cluster.executor=inline", "rollout.release_memory=true")
    train(config, "without_release", "cluster.executor=inline")
    assert held[:2] == [0, 0] and min(held[2:]) >= model_bytes(tmp_path)


def test_the_trainer_frees_its_cached_memory_before_samplers_restore_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server can't allocate memory that the trainer's allocator caches."""
    seen: list[str] = []
    restore = EmbeddedEngine.restore

    async def recording(engine: EmbeddedEngine, parts: set[str]) -> int:
        seen.extend(parts)
        return await restore(engine, parts)

    monkeypatch.setattr(EmbeddedEngine, "restore", recording)
    monkeypatch.setattr(rank_sync, "empty_cache", lambda device: seen.append("freed"))
    train(write_run(tmp_path), "release", "cluster.executor=inline", "rollout.release_memory=true")
    assert len(seen) >= 8 and seen == ["freed", "weights", "freed", "kv_cache"] * (len(seen) // 4)


@pytest.mark.parametrize(
    "more", [(), LORA, ("algo.kl.coef=0.1", "rollout.release_memory=true")], ids=["", "LoRA", "KL"]
)
def test_a_trainer_whose_state_is_on_the_host_while_it_is_not_needed_trains_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
):
    """Also across a resume, with a checkpoint that is saved while the state is on the host."""
    config = write_run(tmp_path)
    options = ("cluster.executor=inline", "loop.save_every_steps=1", *more)
    usual = train(config, "usual", *options)
    while_sampling: list[int] = []
    generate, backward = RankWorker.generate, engine.TrainEngine.forward_backward

    async def generates(worker: RankWorker, request: Request) -> Turn:
        sizes = [trainer.memory() for trainer in worker.engines.values()]
        while_sampling.append(sum(parts["params"] + parts["optimizer"] for parts in sizes))
        return await generate(worker, request)

    def trains(trainer: engine.TrainEngine, *args: Any, **kwargs: Any) -> engine.ForwardBackward:
        parts = trainer.memory()
        assert parts["params"] >= model_bytes(tmp_path) and parts["optimizer"] == 0
        return backward(trainer, *args, **kwargs)

    for module in (rank_sync, engine):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)
    monkeypatch.setattr(RankWorker, "generate", generates)
    monkeypatch.setattr(engine.TrainEngine, "forward_backward", trains)
    options = (*options, "train.optimizer_offload=true", "train.param_offload=true")
    offloaded = train(config, "offloaded", *options)
    shared = model_bytes(tmp_path) if LORA[0] in more else 0  # the base, with which the sampler computes
    assert while_sampling == [shared] * 2 * 16
    assert steps_of(offloaded) == steps_of(usual)
    resumed = train(config, "resumed", *options, f"run.resume={state_folder(offloaded / 'checkpoints', 1)}")
    assert steps_of(resumed)[-1] == steps_of(usual)[-1] and {*while_sampling} == {shared}
    for folder in (offloaded, resumed):
        for kind in ("model/model.safetensors", "state/policy_rank_00000.safetensors"):
            files = [load_file(run / "checkpoints" / "step_000002" / kind) for run in (usual, folder)]
            assert files[0].keys() == files[1].keys()
            assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_a_server_that_cannot_release_its_memory_is_refused_before_anything_is_sampled(tmp_path: Path):
    """An SGLang server that was started without --enable-memory-saver."""
    config = write_run(tmp_path)
    info = {"version": "0.5.23", "tp_size": 1, "custom_weight_loader": [LOADER], "max_req_input_len": 1 << 20}
    answers = {"/server_info": info, "/model_info": {"weight_version": "default"}}

    async def handle(path: str, body: Any) -> Any:
        return answers[path]

    async def main() -> None:
        async with answering(handle) as url:
            server = ("rollout.engine=sglang", f"rollout.sglang.url={url}", "rollout.sglang.deterministic=false")
            options = ("cluster.executor=inline", *server, "rollout.release_memory=true")
            await asyncio.to_thread(train, config, "refused", *options)

    with pytest.raises(CapabilityError, match="with --enable-memory-saver"):
        asyncio.run(main())

"""What the accelerator's memory never holds: [T, V] logits, [T, T] scores, a second copy of the weights."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.config.train import TrainConfig
from meshrl.core.device import memory_stats, reset_peak_memory
from meshrl.core.types import POLICY
from meshrl.model.attention import AttentionSpec, PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.logprob import Head, token_logprobs
from meshrl.model.recipe import cast_parameters
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.digest import kind_for
from meshrl.sync.layout import SyncHeader, make_layout
from meshrl.sync.sender import WeightSender
from meshrl.sync.transaction import SyncOrder, sync_rank
from meshrl.train.engine import TrainEngine

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def _peak(device: torch.device, work: Callable[[], Any]) -> int:
    """The peak of the bytes that `work` allocates."""
    gc.collect()
    before = memory_stats(device)["allocated_bytes"]
    reset_peak_memory(device)
    work()
    return memory_stats(device)["peak_bytes"] - before


def test_the_head_holds_one_chunk_of_logits_at_a_time(accelerator):
    """16,384 tokens of a vocabulary of 65,536 would be 4 GiB of fp32 logits, and as much again in backward."""
    n, d, v, chunk = 16384, 64, 65536, 512
    weight = torch.randn(v, d, device=accelerator, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.randn(n, d, device=accelerator, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, v, (n,), device=accelerator)

    def work() -> None:
        ones = torch.ones(n, device=accelerator)
        logp, ent = token_logprobs(hidden, Head(weight), targets, ones, chunk_tokens=chunk, entropy=True)
        (logp.sum() + ent.sum()).backward()

    assert _peak(accelerator, work) < 10 * chunk * v * 4 < n * v * 4 / 3


@pytest.mark.parametrize("kind", ["rows", "family"])
def test_attention_holds_no_scores(accelerator, kind):
    """Rows of up to 16,384 tokens in bf16, and eight answers of 4,096 tokens to a prompt of 4,096: the scores of the
    four heads would be 2 GiB in both cases."""
    lengths = [16384, 8192] if kind == "rows" else [4096] * 9
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    packed = PackedAttention(cu, accelerator, None if kind == "rows" else [-1, *[0] * 8])
    if not packed.use_varlen:
        pytest.skip("PyTorch has no kernel for packed rows on this accelerator")
    qkv = [torch.randn(cu[-1], h, 64, device=accelerator, dtype=torch.bfloat16) for h in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in qkv]
    assert _peak(accelerator, lambda: packed.attend(0, *leaves, AttentionSpec(0.125)).sum().backward()) < 400 * MIB


def _wide(seed: int = 0) -> torch.nn.Module:
    """About 90 M parameters, 180 MiB in bf16; the largest tensor has 8 MiB."""
    shape = dict(vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=24)
    return tiny_qwen2(seed=seed, initializer_range=0.02, **shape)


def _sampler(device: torch.device) -> EmbeddedEngine:
    lm = cast_parameters(_wide(1), torch.bfloat16).to(device).eval().requires_grad_(False)
    return EmbeddedEngine(
        CausalModel(lm), stop_token_ids=(), max_running=8, max_context_tokens=256, engine_id="gpu", device=device
    )


@pytest.mark.parametrize("fsdp2", [False, True], ids=["copies", "FSDP2"], indirect=True)
def test_blocks_have_their_parameters_in_16_bits_one_after_the_other(fsdp2, meshes, accelerator):
    """In a forward without gradients, and with activation checkpointing in any forward. The 24 blocks have 150 MiB of
    them together; embedding and head, which are tied, have 8 MiB for all of the forward."""
    engine = TrainEngine.wrap(_wide(), TrainConfig(), meshes[accelerator.type], POLICY, torch.bfloat16)
    samples = weigh(random_samples(0, [40]))
    batch = engine.pack(samples, [0])
    engine.forward([batch])
    assert _peak(accelerator, lambda: engine.forward([batch])) < 60 * MIB
    assert _peak(accelerator, lambda: engine._outputs(batch, entropy=False)) < 60 * MIB


def test_a_sync_in_place_takes_only_the_memory_of_its_digests(meshes, accelerator):
    """Never a second copy of the weights."""
    engine = TrainEngine.wrap(_wide(), TrainConfig(), meshes[accelerator.type], POLICY, torch.bfloat16)
    sampler = _sampler(accelerator)
    held = engine.weights()
    layout = make_layout(held.tensors, [held.boxes()], held.tied, 4 * MIB, kind_for(accelerator))
    sender = WeightSender(layout, 0, keep_base=False)

    async def sync(version: int) -> None:
        if version == 0:
            await sampler.reconcile(layout)
        sender.begin(engine.weights().sources)
        order = SyncOrder(header=SyncHeader(version=version, layout_hash=layout.hash), connection_id="")
        await sync_rank(order, layout, None, sender, sampler, sampler.targets)

    asyncio.run(sync(0))  # creates the digest's key tables, which stay in memory
    # No slots and no gathered tensors: the digest of at most one transfer converts its words to int64, twice as long.
    # One at a time, that is 8 MiB; the read-back digests as many at once as torch has threads: up to 72 MiB with 16.
    assert _peak(accelerator, lambda: asyncio.run(sync(1))) < 80 * MIB < layout.num_bytes / 2
    assert sampler.stats().version == 1


def test_released_memory_is_restored(accelerator):
    """Weights and KV cache are released while the trainer works, and restored afterwards."""
    sampler = _sampler(accelerator)
    weights = sum(p.numel() * p.element_size() for p in sampler._weights.lm.parameters())

    async def scenario() -> tuple[int, int, int]:
        full = memory_stats(accelerator)["allocated_bytes"]
        freed = await sampler.release({"weights", "kv_cache"})
        empty = memory_stats(accelerator)["allocated_bytes"]
        taken = await sampler.restore({"weights", "kv_cache"})
        assert freed == taken == weights
        return full, empty, memory_stats(accelerator)["allocated_bytes"]

    full, empty, again = asyncio.run(scenario())
    assert full - empty >= weights
    assert abs(again - full) < MIB


def test_the_engine_reports_the_memory_that_it_holds(meshes, accelerator):
    """TrainEngine.memory() equals what the allocator reports for the engine: fp32 masters, gradients, two moments."""
    gc.collect()
    before = memory_stats(accelerator)["allocated_bytes"]
    engine = TrainEngine.wrap(_wide(), TrainConfig(), meshes[accelerator.type], POLICY, torch.bfloat16)
    for p in engine.model.parameters():
        p.grad = torch.zeros_like(p)
    engine.optim_step(1e-6)
    gc.collect()
    held = memory_stats(accelerator)["allocated_bytes"] - before
    counted = sum(engine.memory().values())
    assert counted == pytest.approx(held, rel=0.1)

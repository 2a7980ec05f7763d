"""A mixture of experts that two ranks train: its joint tensors are sent as the tensors of the model's files, and the
samplers' logprobs are the trainer's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from harness import EXPERTS_LORA, engine_over
from synced_ranks import SyncedRank
from tiny_engines import ask, tiny_engine
from tiny_models import tiny_lm
from tiny_samples import turn_sample

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.model.lora import add_adapters, named_weights, randomize_adapters
from meshrl.parallel.fsdp import full_tensor
from meshrl.train.packing import pack

MIXTURE: dict[str, Any] = dict(hidden_size=64, num_experts=4)
NUM_STEPS = 3


def _trained(rank: int, world: int, way: str, has_adapters: bool) -> dict[str, Any]:
    """Sync, sample and train in turn: the acks, the differences of sampler's and trainer's logprobs, whether the
    sampler has the trainer's weights, and which ones the last sync changed. has_adapters: also of experts."""
    lm = tiny_lm("qwen3_moe", **MIXTURE)
    if has_adapters:
        add_adapters(lm, EXPERTS_LORA, torch.float32, "tiny")
        randomize_adapters(lm)
    trainer = engine_over(lm, world)
    sampler = tiny_engine(tiny_lm("qwen3_moe", seed=1, **MIXTURE), trusted=False)
    synced = SyncedRank(trainer, sampler, way)
    loss = make_policy_loss(AlgoConfig())
    found: dict[str, Any] = {"names": set(synced.layout.by_name), "acks": [], "nats": [], "equal": [], "moved": []}

    async def run() -> None:
        await synced.reconcile()
        held = dict(named_weights(sampler._weights.lm))
        for version in range(NUM_STEPS):
            before = {name: p.detach().clone() for name, p in held.items()}
            found["acks"].append(await synced.sync(version))
            full = {name: full_tensor(p.detach()) for name, p in named_weights(trainer.model.lm)}
            found["equal"].append(held.keys() == full.keys() and all(torch.equal(held[n], full[n]) for n in full))
            found["moved"].append({name for name, p in held.items() if not torch.equal(p, before[name])})
            turn = await sampler.generate(ask("a", range(5, 25), seed=NUM_STEPS * rank + version, ignore_eos=True))
            sample = turn_sample(turn, advantage=1.0 - 2 * rank)
            scored = trainer.forward_backward([pack([sample], [0])], loss).logprobs[0]
            found["nats"].append(float(np.abs(scored - sample.rollout_logprobs)[sample.mask].max()))
            trainer.optim_step(0.01)

    asyncio.run(run())
    synced.close()
    return found | {"tensors": len(list(sampler._weights.lm.parameters()))}


@pytest.mark.parametrize("way", ["shared memory", "sockets"])
def test_all_proofs_hold_while_a_mixture_is_trained(pool, way):
    """The wire, the read-back, and the logprobs of sampled tokens, after each of several steps."""
    for found in pool.run(_trained, 2, way, False):
        experts = {name.split("experts.")[1] for name in found["names"] if ".layers.1.mlp.experts." in name}
        assert experts == {f"{e}.{part}_proj.weight" for e in range(4) for part in ("gate", "up", "down")}
        proofs = [(ack.version, ack.wire, ack.read_back) for ack in found["acks"]]
        assert proofs == [(version, True, True) for version in range(NUM_STEPS)]
        assert found["equal"] == [True] * NUM_STEPS
        moved = [len(names) / found["tensors"] for names in found["moved"]]
        assert min(moved[1:]) > 0.9, moved  # at first, norms are 1 in both models
        assert max(found["nats"]) < 1e-4, found["nats"]


@pytest.mark.parametrize("way", ["shared memory", "sockets"])
def test_a_sampler_gets_the_experts_of_adapters_merged_and_has_the_trainers_logprobs(pool, way):
    for found in pool.run(_trained, 2, way, True):
        proofs = [(ack.version, ack.wire, ack.read_back) for ack in found["acks"]]
        assert proofs == [(version, True, True) for version in range(NUM_STEPS)]
        assert max(found["nats"]) < 1e-4, found["nats"]
        changed = {name.removesuffix(".weight").rpartition(".")[2] for name in found["moved"][-1]}
        assert changed == {"gate_up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"}

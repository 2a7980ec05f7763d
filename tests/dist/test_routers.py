"""Routers of mixtures of experts: their metrics, the loss that balances the experts' loads, and replayed selections do
not depend on ranks and micro-batches."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import norm_of, partitioned, random_partition, worst
from synced_ranks import SyncedRank
from tiny_engines import ask
from tiny_models import tiny_mixture
from tiny_samples import random_groups, turn_sample

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.batch import Outputs
from meshrl.core.types import POLICY, Sample, Turn
from meshrl.monitor.metrics import divide, merge
from meshrl.parallel.mesh import build_mesh
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

COEF = 0.3
LOSS = make_policy_loss(AlgoConfig())
GROUPS: dict[str, Any] = dict(prompts=[9, 1, 17], answers=[1, 12, 5, 20])
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "ulysses": (2, {"mesh": {"ulysses": 2}}),
    "tp": (2, {"mesh": {"tp": 2}}),
}


def _unsharded(samples: list[Sample], coef: float) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Gradients and router metrics by plain Transformers, row by row. The loss that balances the experts is
    Transformers' own, of the logits of all rows at once, one layer after the other."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    lm: Any = tiny_mixture(torch.float64)
    lm.config._attn_implementation = "sdpa"
    logits: list[list[torch.Tensor]] = []
    chosen: list[list[torch.Tensor]] = []
    routes: Any = None
    for number, router in enumerate(m for m in lm.modules() if isinstance(m, Qwen3MoeTopKRouter)):
        logits.append([])
        chosen.append([])

        def select(_: Any, args: Any, out: Any, number: int = number) -> Any:
            selected = out[2]
            if routes is not None:
                given = torch.from_numpy(routes[:, number].astype(np.int64))
                selected = torch.where(given < 0, selected, given)
            scores = out[0].softmax(-1).gather(-1, selected)
            logits[number].append(out[0])
            chosen[number].append(selected)
            return out[0], scores / scores.sum(-1, keepdim=True), selected

        router.register_forward_hook(select)
    total = torch.zeros((), dtype=torch.float64)
    for i, s in enumerate(samples):
        routes = s.routed_experts
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        logq = torch.log_softmax(lm(tokens[None]).logits[0] / float(np.float32(s.temperature)), dim=-1)
        where = torch.from_numpy(s.mask.nonzero()[0])
        logp = torch.zeros(len(s), dtype=logq.dtype).index_put((where,), logq[where - 1, tokens[where]])
        total = total + LOSS(Outputs(logprobs=logp), pack([s], [i]))[0]
    layers = [torch.cat(seen) for seen in logits]
    loads = [torch.bincount(torch.cat(seen).flatten(), minlength=4).double() for seen in chosen]
    balance = torch.stack([4 * (n / len(x) * x.softmax(-1).mean(0)).sum() for n, x in zip(loads, layers)]).mean()
    if samples[0].routed_experts is None:  # theirs counts the experts of the highest logits, in fp32
        theirs = [load_balancing_loss_func((x.detach(),), 4, 2) for x in layers]
        assert float(balance.detach()) == pytest.approx(float(torch.stack(theirs).mean()), rel=1e-6)
    (total + coef * balance).backward()
    probs = [layer.detach().softmax(-1) for layer in layers]
    metrics = {
        "router/entropy": float(torch.stack([torch.special.entr(p).sum(-1).mean() for p in probs]).mean()),
        "router/balance_loss": float(balance.detach()) / 2,
        "router/dead_experts": float(torch.stack([(load == 0).double().mean() for load in loads]).mean()),
        "router/max_load": max(float(load.max() / load.mean()) for load in loads),
    }
    return {n: p.grad.numpy().copy() for n, p in lm.named_parameters()}, metrics


def _compare(pool: Any, samples: list[Sample], mesh: str, coef: float, settings: dict[str, Any]) -> None:
    """Gradients, their norm and router metrics of random partitions with those of the reference."""
    world, train = MESHES[mesh]
    want, metrics = _unsharded(samples, coef)
    num_data = 1 if "mesh" in train else world
    for micro in (1, 3):
        partition = random_partition(np.random.default_rng(world), len(samples), num_data, micro)
        cfg = {**train, **settings, "router_aux_loss_coef": coef, "activation_checkpointing": micro == 3}
        got = pool.run(partitioned, world, tiny_mixture, {"dtype": torch.float64}, samples, partition, LOSS, cfg)
        for rank in got:
            distance, name = worst(rank["grads"], want)
            assert distance < 1e-10, f"{name} is {distance:.2e} of its norm off"
            assert rank["norm"] == pytest.approx(norm_of(want), rel=1e-6)
        reported = divide(merge([m for rank in got for m in rank["metrics"] if m.name in metrics]))
        assert reported == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize("shares", [True, False], ids=["shared prompts", "one by one"])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_loss_that_balances_experts_does_not_depend_on_micro_batches_and_ranks(pool, mesh, shares):
    """Of all tokens of all rows of the optimizer step, also with recomputed activations; a prompt's tokens count for
    each of its answers."""
    samples = random_groups(6, **GROUPS)
    assert worst(_unsharded(samples, 0.0)[0], _unsharded(samples, COEF)[0])[0] > 0.1, "the loss has a gradient"
    _compare(pool, samples, mesh, COEF, {"share_prompts": shares})


@pytest.mark.parametrize("mesh", MESHES)
def test_replayed_experts_compute_with_the_scores_of_the_trainers_router(pool, mesh):
    """Rows without a selection, and tokens of which none was recorded, are routed by the trainer; the experts' loads
    are those of the replayed selection."""
    samples, rng = random_groups(6, **GROUPS), np.random.default_rng(1)
    for i, s in enumerate(samples):
        routes = np.argsort(rng.random((len(s), 2, 4)), axis=-1)[..., :2].astype(np.int16)
        routes[rng.random(len(s)) < 0.3] = -1
        s.routed_experts = None if i % 5 == 4 else routes
    own = [dataclasses.replace(s, routed_experts=None) for s in samples]
    assert worst(_unsharded(own, 0.0)[0], _unsharded(samples, 0.0)[0])[0] > 0.1, "other experts have been selected"
    _compare(pool, samples, mesh, COEF, {})


def _in_fp32(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The dtypes of routers' logits in the trainer and a synced sampler, both in bf16; and the proofs."""
    model_cfg = ModelConfig(path=str(folder), dtype="bfloat16", router_dtype="float32")
    mesh = build_mesh(TrainConfig().mesh_shape(world), "cpu")
    trainer = TrainEngine.build(model_cfg, TrainConfig(), mesh, POLICY)
    sampler = build_embedded_engine(model_cfg, RolloutConfig(), torch.device("cpu"), "s", (), synced=True)
    dtypes = set[torch.dtype]()
    for routing in (trainer.model.routing, sampler._runner.model.routing):
        assert routing is not None
        for router in routing.routers:
            router.register_forward_hook(lambda _, args, out: dtypes.add(out[0].dtype))
    synced = SyncedRank(trainer, sampler)

    async def run() -> tuple[Any, Turn]:
        await synced.reconcile()
        return await synced.sync(0), await sampler.generate(ask("a", range(5, 25), seed=rank, ignore_eos=True))

    ack, turn = asyncio.run(run())
    sample = turn_sample(turn, advantage=1.0)
    logprobs = trainer.forward_backward([trainer.pack([sample], [0])], LOSS).logprobs[0]
    grads = {p.grad.dtype for p in trainer.model.parameters() if p.grad is not None}
    synced.close()
    difference = np.abs(logprobs - sample.rollout_logprobs)[sample.mask].max()
    return {"dtypes": dtypes, "proofs": (ack.wire, ack.read_back), "nats": difference, "grads": grads}


def test_routers_in_fp32_are_the_same_in_trainer_and_sampler(pool, tmp_path):
    """The start's comparison with Transformers, the sync's proofs, and the logprobs of sampled tokens hold."""
    tiny_mixture(initializer_range=0.1).save_pretrained(tmp_path)
    for found in pool.run(_in_fp32, 2, tmp_path):
        assert found["dtypes"] == {torch.float32} and found["grads"] == {torch.float32}
        assert found["proofs"] == (True, True)
        assert found["nats"] < 0.02, "the rounding in bf16"

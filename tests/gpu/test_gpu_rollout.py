"""The embedded engine on the accelerator, and full steps of trainer and sampler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_engines import ask, layout_of, plain, run, scores, sync
from tiny_models import tiny_qwen2

from meshrl.algo.losses import make_policy_loss
from meshrl.algo.mismatch import mismatch_metrics
from meshrl.cluster.launch import launched
from meshrl.cluster.weight_sync import sync_weights
from meshrl.config.algo import AlgoConfig
from meshrl.config.cluster import ClusterConfig
from meshrl.config.data import DataConfig
from meshrl.config.loop import LoopConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import RunConfig
from meshrl.config.train import TrainConfig
from meshrl.core.device import device_count
from meshrl.core.types import Sample, Turn
from meshrl.model.causal import CausalModel
from meshrl.model.fast_decoder import fast_decoder
from meshrl.model.recipe import cast_parameters
from meshrl.monitor.metrics import divide, merge
from meshrl.rollout.embedded.engine import EmbeddedEngine

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 64}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], list(range(3, 40)), [4]]


def _engine(device: torch.device, dtype: torch.dtype, trusted: bool = True, fast: bool = False) -> EmbeddedEngine:
    """fast: with the fast decoder, whose steps are graphs."""
    model = CausalModel(tiny_qwen2(**SHAPE).to(device).eval().requires_grad_(False))
    decoder = fast_decoder(model) if fast else None
    cast_parameters(model.lm, dtype)
    engine = EmbeddedEngine(
        model,
        fast=decoder,
        stop_token_ids=(),
        max_running=8,
        max_context_tokens=256,
        engine_id="gpu",
        device=device,
    )
    if trusted:
        engine.trust_loaded_weights()
    return engine


def _requests(**changes) -> list:
    return [
        ask(f"{p}-{i}", prompt, seed=10 * p + i, max_new_tokens=20 + 15 * i, **changes)
        for p, prompt in enumerate(PROMPTS)
        for i in range(4)
    ]


@pytest.mark.parametrize(
    ("dtype", "nats", "fast"),
    [(torch.float32, 1e-3, False), (torch.bfloat16, 0.2, False), (torch.bfloat16, 0.2, True)],
    ids=["fp32", "bf16", "bf16 graphs"],
)
def test_its_logprobs_are_those_of_a_full_forward(accelerator, dtype, nats, fast):
    """Groups that share a prompt, rows of mixed lengths, and more rows than run at the same time."""
    engine = _engine(accelerator, dtype, fast=fast)
    for turn in run(engine, _requests()).values():
        ids = np.concatenate([turn.context_ids, turn.output_ids])
        scored = scores(engine._runner.model, ids)[len(turn.context_ids) :]
        assert np.abs(turn.logprobs - scored).max() < nats
        assert np.abs(turn.logprobs - scored).mean() < nats / 5


def test_graphs_follow_weights_and_memory_that_change(accelerator):
    """After a sync the same graphs compute with the new weights; after memory was released, new graphs do."""
    engine = _engine(accelerator, torch.bfloat16, trusted=False, fast=True)

    async def scenario() -> list[float]:
        off = []
        await engine.reconcile(layout_of(tiny_qwen2(**SHAPE).bfloat16()))
        for version in range(3):
            if version == 2:
                await engine.release({"weights", "kv_cache"})
                await engine.restore({"weights", "kv_cache"})
            await sync(tiny_qwen2(seed=version, **SHAPE).bfloat16(), engine, version)
            request = ask(f"{version}", PROMPTS[2], seed=version, max_new_tokens=30)
            turn = await engine.generate(request)
            scored = scores(engine._runner.model, [*turn.context_ids, *turn.output_ids])
            off.append(float(np.abs(turn.logprobs - scored[len(turn.context_ids) :]).mean()))
        return off

    assert max(asyncio.run(scenario())) < 0.04


def test_greedy_answers_are_those_of_generate(accelerator):
    lm = tiny_qwen2(**SHAPE)
    turns = run(_engine(accelerator, torch.float32), _requests(temperature=0.0))
    reference = plain(lm).to(accelerator)
    for p, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt], device=accelerator)
        want = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert turns[f"{p}-0"].output_ids.tolist() == want[0, len(prompt) :].tolist()


def test_sampled_tokens_are_those_of_the_cpu(accelerator):
    """They depend on (seed, position), not on the device."""
    here, there = (run(_engine(d, torch.float32), _requests()) for d in (accelerator, torch.device("cpu")))
    same = [np.array_equal(here[name].output_ids, turn.output_ids) for name, turn in there.items()]
    assert np.mean(same) > 0.8  # near a boundary, rounding may choose the neighbouring token


def test_weights_sent_from_the_cpu_are_received_completely(accelerator):
    """Digests of both devices are equal, and no cache has anything of the old weights."""
    engine, new = _engine(accelerator, torch.float32, trusted=False), tiny_qwen2(seed=1, **SHAPE)

    async def send() -> tuple[int, bool | None]:
        await engine.reconcile(layout_of(new))
        ack = await sync(new, engine, 0)
        return ack.version, ack.read_back

    assert asyncio.run(send()) == (0, True)
    turn = run(engine, [ask("a", PROMPTS[0], temperature=0.0)])["a"]
    cold = EmbeddedEngine(
        CausalModel(new.to(accelerator).eval()),
        stop_token_ids=(),
        max_running=8,
        max_context_tokens=256,
        engine_id="cold",
        device=accelerator,
    )
    cold.trust_loaded_weights()
    assert run(cold, [ask("a", PROMPTS[0], temperature=0.0)])["a"].output_ids.tolist() == turn.output_ids.tolist()


def _sample(name: str, turn: Turn, advantage: float, weight: float) -> Sample:
    tokens = np.concatenate([turn.context_ids, turn.output_ids]).astype(np.int32)
    context = len(turn.context_ids)
    mask = np.arange(len(tokens)) >= context
    pad = np.full(context, np.nan, np.float32)
    return Sample(
        trajectory_id=name,
        group_id=name.split("-")[0],
        row=0,
        prefix_len=context,
        tokens=tokens,
        mask=mask,
        turn=np.where(mask, 0, -1).astype(np.int16),
        rollout_logprobs=np.concatenate([pad, turn.logprobs]).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=np.zeros(len(tokens), np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        loss_weight=np.where(mask, weight, 0).astype(np.float32),
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("executor", "samplers", "dtype", "fsdp2"),
    [
        ("inline", 0, "float32", False),
        ("inline", 0, "bfloat16", False),
        ("inline", 0, "bfloat16", True),
        ("processes", 0, "bfloat16", False),
        ("processes", 1, "bfloat16", False),
    ],
    indirect=["fsdp2"],
)
def test_steps_of_trainer_and_sampler(fsdp2, accelerator, tmp_path: Path, executor, samplers, dtype):
    """In this process, in another, and with the sampler in a separate one: three steps; each samples with the weights
    of the last one, and the trainer scores the tokens again, equal up to rounding, before its update."""
    if samplers and device_count() == 1:
        pytest.skip("needs a device for each rank; this machine has one")
    tiny_qwen2(**SHAPE).save_pretrained(tmp_path)
    limit = 1e-4 if dtype == "float32" else 0.05

    async def scenario() -> list[float]:
        found = []
        cfg = RunConfig(
            model=ModelConfig(path=str(tmp_path), dtype=dtype),
            train=TrainConfig(),
            rollout=RolloutConfig(),
            data=DataConfig(),
            loop=LoopConfig(num_steps=3),
            cluster=ClusterConfig(executor=executor, num_rollout_ranks=samplers),
        )
        async with launched(cfg, 1, samplers) as groups:
            trainer, rollouts = groups.trainer, groups.rollouts
            assert trainer is not None and rollouts is not None
            layout = await trainer.layout(20_000)
            await rollouts.reconcile(layout)
            for step in range(3):
                (ack,) = await sync_weights(trainer, rollouts, layout)
                assert (ack.version, ack.wire, ack.read_back) == (step, True, True)
                requests = _requests(min_version=step)
                turns = await asyncio.gather(*(rollouts.generate(r) for r in requests))
                total = sum(len(t.output_ids) for t in turns)
                samples = [
                    _sample(r.id, t, 1.0 if i % 2 else -1.0, 1 / total)
                    for i, (r, t) in enumerate(zip(requests, turns, strict=True))
                ]
                report = await trainer.forward_backward(
                    trainer.plan_rows(samples), "policy", make_policy_loss(AlgoConfig())
                )
                found.append(
                    divide(merge(mismatch_metrics(np.stack([*report.mismatch.values()]))))[
                        "proof/logprob_abs_diff_mean"
                    ]
                )
                assert (await trainer.optim_step("policy", 1e-3)).grad_norm > 0
        return found

    off = asyncio.run(scenario())
    assert max(off) < limit, off

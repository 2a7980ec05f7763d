"""Old logprobs, the number of forwards, and the sampler's distribution in the trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import engine_over
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.agent.flatten import flatten
from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.core.types import Metric, Prompt, Request, SamplingParams, Trajectory
from meshrl.model.causal import CausalModel
from meshrl.monitor.metrics import divide, merge
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.train.batch_plan import make_batch_plan
from meshrl.train.packing import pack

LENGTHS = [12, 3, 40, 7, 7, 21, 2, 30]


def _updates(
    rank: int, world: int, dtype: torch.dtype, checkpointing: bool, score_first: bool
) -> tuple[list[Metric], list[Metric], int, int]:
    """Two optimizer steps on the same samples: metrics of both, and forwards and micro-batches of the first."""
    engine = engine_over(tiny_qwen2(), world, {"activation_checkpointing": checkpointing}, dtype)
    samples = weigh(random_samples(0, LENGTHS))
    plan = make_batch_plan([len(s) for s in samples], world, 40)
    forwards: list[int] = []
    engine.model.register_forward_pre_hook(lambda module, args: forwards.append(1))

    def batches() -> list[Any]:
        return [pack([samples[i] for i in micro], micro) for micro in plan.micro_batches[rank]]

    for s in samples:
        s.old_logprobs = None
    if score_first:
        for i, row in engine.forward(batches()).items():
            samples[i].old_logprobs = row
        forwards.clear()
    loss = make_policy_loss(AlgoConfig())
    first = engine.forward_backward(batches(), loss)
    count = len(forwards)
    engine.optim_step(0.01)
    second = engine.forward_backward(batches(), loss)
    return first.metrics, second.metrics, count, len(plan.micro_batches[rank])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("score_first", [False, True], ids=["one update", "several updates"])
def test_the_first_update_has_ratio_one_and_no_extra_forward(pool, dtype, score_first, checkpointing):
    """Exactly one, in a single on-policy update (without old logprobs) and in the first of several (with old
    logprobs that were scored with the same batch plan). In the second of several updates the ratio differs."""
    answers = pool.run(_updates, 2, dtype, checkpointing, score_first)
    for _, _, forwards, micro_batches in answers:
        assert forwards == micro_batches > 1
    first, second = (divide(merge([m for a in answers for m in a[i]])) for i in (0, 1))
    exact = ("loss/ratio_mean", "loss/ratio_max", "loss/approx_kl", "loss/clip_fraction_low", "loss/clip_fraction_high")
    assert [first[name] for name in exact] == [1, 1, 0, 0, 0]
    moved = second["loss/ratio_mean"] != 1 and second["loss/approx_kl"] > 0
    assert moved == score_first, "without old logprobs the ratio is always one"


def _rescored(rank: int, world: int, temperature: float, trained_at: float | None) -> float:
    """Sample with the embedded engine, flatten, re-score with the trainer: the largest |ratio - 1|."""
    model = CausalModel(tiny_qwen2().eval().requires_grad_(False))
    sampler = EmbeddedEngine(
        model,
        stop_token_ids=(1,),
        max_running=4,
        max_context_tokens=64,
        engine_id="s",
        device=torch.device("cpu"),
    )
    sampler.trust_loaded_weights()
    prompts = {f"r{i}": np.arange(3 + i, 9 + i, dtype=np.int32) for i in range(6)}
    for i, (name, ids) in enumerate(prompts.items()):
        sampling = SamplingParams(temperature=temperature)
        sampler.submit(Request(id=name, context_ids=ids, sampling=sampling, seed=i, max_new_tokens=24))
    turns = {}
    while sampler.has_work:
        turns.update(dict(sampler.step()))
    samples, _ = flatten(
        [
            Trajectory(prompt=Prompt(id=n, ordinal=i), group_id=n, index=0, turns=[turns[n]], reward=1.0)
            for i, n in enumerate(prompts)
        ]
    )
    for s in samples:
        assert s.temperature == pytest.approx(temperature)
        s.temperature = trained_at or s.temperature
    rows = engine_over(tiny_qwen2(), world).forward([pack(samples, list(range(len(samples))))])
    return max(float(np.abs(np.exp(rows[i] - s.rollout_logprobs)[s.mask] - 1).max()) for i, s in enumerate(samples))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_trainer_scores_at_the_temperature_of_sampling(pool, temperature):
    """The ratio of trainer and sampler is 1 at the temperature of sampling, and at no other."""
    assert pool.run(_rescored, 1, temperature, None)[0] < 2e-5
    assert pool.run(_rescored, 1, temperature, temperature + 0.2)[0] > 0.05

"""Rows without a gradient of which only some are scored: which ones, and what an update of them gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_qwen2
from tiny_samples import random_groups, sampled_row
from tiny_specs import worker_spec

from meshrl.algo.mismatch import SHORT_ROW_TOKENS
from meshrl.cluster.inline import InlineExecutor
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.model import ModelConfig
from meshrl.config.run import RunConfig
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Sample
from meshrl.loops.sync_and_probe import SCORED_ONE_IN, SamplerProof
from meshrl.loops.train_step import StepWork, annotate, split_updates, update
from meshrl.monitor.metrics import divide, merge
from meshrl.monitor.recorder import Spans

VERSION, CALIBRATED = 0, SamplerProof(threshold=1e-3)


def drawn(samples: Sequence[Sample], rows: Sequence[int], seed: int = 0) -> set[int]:
    return CALIBRATED.rows_to_score(samples, rows, VERSION, seed)


@pytest.mark.parametrize("seed", range(20))
def test_one_row_in_eight_of_each_sampler_is_scored_and_more_where_they_are_short(seed: int):
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 200))
    lengths = rng.integers(0, rng.choice([4, 100]), num_rows)
    samples = [sampled_row([-1.0] * n, engine_id=f"s{rng.integers(3)}") for n in lengths]
    rows = sorted(rng.choice(num_rows, rng.integers(0, num_rows + 1), replace=False).tolist())
    chosen = drawn(samples, rows, seed)
    assert chosen <= {*rows} and chosen == drawn(samples, rows[::-1], seed)
    for engine in {samples[i].engine_id for i in rows}:
        own = [i for i in rows if samples[i].engine_id == engine]
        scored = [i for i in own if i in chosen]
        tokens = sum(len(samples[i]) for i in scored)
        assert len(scored) >= len(own) / SCORED_ONE_IN
        assert tokens >= min(SHORT_ROW_TOKENS, sum(len(samples[i]) for i in own))
        if len(scored) - 1 >= len(own) / SCORED_ONE_IN:  # no more than that
            assert tokens - max(len(samples[i]) for i in scored) < SHORT_ROW_TOKENS


def test_the_draw_differs_from_step_to_step_and_all_rows_calibrate():
    samples = [sampled_row([-1.0] * 40) for _ in range(64)]
    draws = {frozenset(CALIBRATED.rows_to_score(samples, range(64), version, 3)) for version in range(20)}
    assert len(draws) == 20 and {len(draw) for draw in draws} == {8}
    assert SamplerProof().rows_to_score(samples, range(64), VERSION, 3) == {*range(64)}


def test_rows_with_a_token_that_can_be_compared_come_first():
    samples = [sampled_row([-1.0] * 40) for _ in range(64)]
    for stale in (sample for i, sample in enumerate(samples) if i not in (17, 33)):
        stale.versions[:] = VERSION - 1
    assert {17, 33} <= drawn(samples, range(64))
    for sample in samples:
        sample.versions[:] = VERSION - 1  # nothing can be compared: the number of tokens demands no further rows
    assert len(drawn(samples, range(64))) == 8


CONFIG = {"data": {"path": "d"}, "loop": {"num_steps": 9}, "reward": {"terms": {"right": {"kind": "exact_match"}}}}
TRAINED, IDLE = "trained", "without a gradient"


def rows_of_two_samplers() -> list[Sample]:
    """8 rows of one sampler have advantages; 32 of the other have none, 2 of which are masked."""
    samples = random_groups(1, [5] * 5, [9] * 8)
    for i, sample in enumerate(samples):
        sample.engine_id, sample.temperature, sample.old_logprobs = TRAINED if i < 8 else IDLE, 1.0, None
        if i >= 8:
            sample.advantages = np.zeros_like(sample.advantages)
        sample.turn, sample.truncated = np.where(sample.mask, 0, -1).astype(np.int16), i > 37
    return samples


async def step_of(
    folder: Path, samples: list[Sample], proof: SamplerProof, num_updates: int, nats: float = 0.0
) -> tuple[dict[str, float], list[torch.Tensor], Any]:
    """The metrics of a step, its new weights and token values. nats: error of the sampler without a gradient."""
    model = ModelConfig(path=str(folder), dtype="float32")
    executor = InlineExecutor([worker_spec(model=model)])
    trainer = TrainGroup(executor)
    cfg = RunConfig.model_validate({**CONFIG, "model": model.model_dump(), "algo": {"truncated": "mask"}})
    work = StepWork(cfg=cfg, trainer=trainer, proof=proof, step=0, spans=Spans(), note=print, logs_values=True)
    try:
        await executor.start()
        trainer.version, trainer.is_synced = VERSION, True
        for i, row in (await trainer.forward(trainer.plan_rows(samples), "policy")).items():
            samples[i].rollout_logprobs = row + np.float32(nats * (samples[i].engine_id == IDLE))
        work.begin(samples)
        updates = split_updates(work, samples, num_updates)
        metrics = await annotate(work, updates) + await update(work, updates)
        lm = executor.worker.engines["policy"].model.lm
        return divide(merge(metrics)), [p.detach().clone() for p in lm.parameters()], work.values
    finally:
        await executor.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_qwen2(initializer_range=0.1).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("num_updates", [1, 2])
def test_weights_and_the_loss_are_those_of_a_step_that_scores_all_rows(folder: Path, num_updates: int):
    (few, weights, values), (everything, want, _) = (
        asyncio.run(step_of(folder, rows_of_two_samplers(), proof, num_updates))
        for proof in (SamplerProof(1e-3), SamplerProof())
    )
    assert all(torch.equal(a, b) for a, b in zip(weights, want, strict=True))
    assert few["loss/policy"] == pytest.approx(everything["loss/policy"], rel=1e-6)  # weights are fp32
    assert few["train/grad_norm"] == everything["train/grad_norm"] > 0
    assert few["train/no_gradient_fraction"] == everything["train/no_gradient_fraction"] == 32 / 40
    scored = round(40 * (1 - few["train/no_forward_fraction"]))
    assert 8 + 32 / SCORED_ONE_IN <= scored < 40 and everything["train/no_forward_fraction"] == 0
    of_turns = values.by_turn()
    assert len(of_turns) == 40 and sum("logprobs" in columns for columns in of_turns.values()) == scored
    assert all(("entropies" in columns) == ("logprobs" in columns) for columns in of_turns.values())


@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_sampler_of_which_no_row_has_a_gradient_is_caught_in_the_same_step(folder: Path, num_updates: int):
    with pytest.raises(SamplerMismatchError, match=f"sampler {IDLE} differ from the trainer's by 0.05 nats"):
        asyncio.run(step_of(folder, rows_of_two_samplers(), SamplerProof(1e-3), num_updates, nats=0.05))


def test_a_reward_with_a_kl_term_needs_the_logprobs_of_all_rows(folder: Path):
    samples = rows_of_two_samplers()
    job: Any = SimpleNamespace(proof=SamplerProof(1e-3), trainer=SimpleNamespace(version=VERSION))
    planned: list[Any] = []
    job.trainer.plan_rows = lambda samples, scored, unscored: planned.append((scored, unscored))
    for place in ("loss", "reward"):
        config = {**CONFIG, "model": {"path": "m"}, "algo": {"truncated": "mask", "kl": {"coef": 0.1, "place": place}}}
        job.cfg = RunConfig.model_validate(config)
        split_updates(job, samples, 1)
    (scored, unscored), (all_scored, none) = planned
    assert scored | unscored == {38, 39} and all_scored == {*range(8, 40)} and not none

"""The rows that the proof of a sync scores on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_samples import random_samples

from meshrl.config.run import RunConfig
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric, Sample
from meshrl.loops.job import Job
from meshrl.loops.sync_and_probe import rows_to_probe, sync
from meshrl.monitor.spans import Spans


def picked_of(samples: list[Sample], max_context_tokens: int) -> list[Sample] | None:
    job: Any = SimpleNamespace(task=SimpleNamespace(max_context_tokens=max_context_tokens))
    return rows_to_probe(job, samples)


def rows(lengths: list[int], max_context_tokens: int) -> list[int] | None:
    picked = picked_of(random_samples(0, lengths), max_context_tokens)
    if picked is None:
        return None
    assert all(s.mask.any() and s.temperature == 1 and len(s.tokens) == len(s.rollout_logprobs) for s in picked)
    return [len(s) for s in picked]


@pytest.mark.parametrize(
    ("lengths", "probed"),
    [
        ([50, 20, -5, 40, 30, 60, 10], [10, 20, 30, 40]),
        ([1500, 1000, 900], [900, 1000]),
        ([1024, 1024], [1024, 1024]),
        ([1024, 1025], [1024]),
        ([2048], [2048]),
        ([2050, 2049], [2049]),
        ([-8, -5], None),
    ],
)
def test_the_shortest_rows_with_trained_tokens_are_picked(lengths, probed):
    """As many as have 2,048 tokens together, but at least one, however long it is."""
    assert rows(lengths, 4096) == probed


@pytest.mark.parametrize(("length", "probed"), [(30, 30), (31, 31), (32, 31)])
def test_a_row_that_fills_the_context_is_cut_so_that_a_server_can_score_it(length, probed):
    assert rows([length, length], 32) == [probed, probed]


def test_a_row_whose_trained_tokens_no_server_can_score_is_not_probed():
    (sample,) = random_samples(0, [32])
    sample.mask[:] = np.arange(32) == 31
    assert picked_of([sample], 32) is None
    sample.mask[30] = True
    assert picked_of([sample], 32) is not None


def logprobs_of(tokens: np.ndarray) -> np.ndarray:
    return (-(tokens % 7) - 1).astype(np.float32)


def job_of(score: Callable[[np.ndarray], Awaitable[dict[int, np.ndarray]]]) -> Job:
    """A job with trainer weights of version 1. score: as the samplers."""

    async def forward(samples: Any, role: str) -> list[np.ndarray]:
        return [logprobs_of(s.tokens) for s in samples]

    sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "loop": {"num_steps": 9}}
    sections |= {"reward": {"terms": {"right": {"kind": "exact_match"}}}}
    trainer = SimpleNamespace(version=1, is_synced=False, forward=forward, plan_rows=lambda samples: samples)
    parts: dict[str, Any] = dict.fromkeys(("task", "scorer", "layout", "rollout_log"))
    parts |= {"cfg": RunConfig.model_validate(sections), "trainer": trainer}
    parts |= {"rollouts": SimpleNamespace(score=score), "run": SimpleNamespace(spans=Spans(), note=print)}
    job = Job(**parts)
    job.proof.threshold = 1e-3
    return job


def probed(job: Job, monkeypatch: pytest.MonkeyPatch) -> list[Metric] | None:
    """The metrics of the probe that a sync starts; None when it starts none."""

    async def no_sync(job: Any) -> list[Any]:
        return []

    async def scenario() -> list[Metric] | None:
        await sync(job)
        return None if job.probe is None else await job.probe

    monkeypatch.setattr("meshrl.loops.sync_and_probe._sync", no_sync)
    return asyncio.run(scenario())


@pytest.mark.parametrize("lengths", [[], [-20], [20, -20]], ids=["no_row", "no_token", "no_token_of_one_row"])
def test_a_probe_that_compares_nothing_is_an_error(lengths, monkeypatch):
    """An empty comparison has no difference, and must not pass as a proof."""

    async def score(tokens: np.ndarray) -> dict[int, np.ndarray]:
        return {0: logprobs_of(tokens)}

    job = job_of(score)
    job.probed = random_samples(0, lengths)
    with pytest.raises(SamplerMismatchError, match=rf"version 1 the probe .* {len(lengths)} rows"):
        probed(job, monkeypatch)


def test_a_step_without_a_row_to_score_and_lost_samplers_leave_nothing_to_prove(monkeypatch):
    async def lost(tokens: np.ndarray) -> dict[int, np.ndarray]:
        return {}

    job = job_of(lost)
    assert probed(job, monkeypatch) is None
    job.probed = random_samples(0, [20])
    assert probed(job, monkeypatch) == []


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_probe_compares_every_sampler(wrong, monkeypatch):
    """And names the one that differs; the metric is the largest difference of a row."""
    nats = 0.0009

    async def score(tokens: np.ndarray) -> dict[int, np.ndarray]:
        return {rank: logprobs_of(tokens) + np.float32(nats * (rank == wrong)) for rank in (0, 1)}

    job = job_of(score)
    job.probed = random_samples(0, [20, 30])
    (metric,) = probed(job, monkeypatch) or []
    assert (metric.name, metric.reduce) == ("proof/probe_diff_mean", "max")
    assert metric.sum == pytest.approx(nats, rel=1e-3)
    nats = 0.21
    job.trainer.is_synced = False
    with pytest.raises(SamplerMismatchError, match=f"the logprobs of sampler rank {wrong} differ"):
        probed(job, monkeypatch)


def test_a_probe_compares_its_own_rows_when_a_later_step_has_chosen_others(monkeypatch):
    """A step that trains nothing chooses rows, but does not wait for the probe of the last sync."""

    async def no_sync(job: Any) -> list[Any]:
        return []

    async def scenario() -> None:
        scored = asyncio.Event()

        async def score(tokens: np.ndarray) -> dict[int, np.ndarray]:
            await scored.wait()
            return {0: logprobs_of(tokens)}

        job = job_of(score)
        job.probed = random_samples(0, [20, 20, 20])
        await sync(job)
        await asyncio.sleep(0)
        job.probed = random_samples(1, [8, 9])
        scored.set()
        assert job.probe is not None
        (metric,) = await job.probe
        assert metric.name == "proof/probe_diff_mean" and metric.sum == 0

    monkeypatch.setattr("meshrl.loops.sync_and_probe._sync", no_sync)
    asyncio.run(scenario())

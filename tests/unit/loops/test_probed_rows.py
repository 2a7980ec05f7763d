"""The rows that the proof of a sync scores on both sides (P15)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny_samples import random_samples

from meshrl.config.run import RunConfig
from meshrl.loops.job import Job
from meshrl.loops.step import _rows_to_probe, sync
from meshrl.monitor.spans import Spans


def rows(lengths: list[int], max_context_tokens: int) -> list[int]:
    job: Any = SimpleNamespace(task=SimpleNamespace(max_context_tokens=max_context_tokens))
    picked = _rows_to_probe(job, random_samples(0, lengths))
    assert all(s.mask.any() and s.temperature == 1 and len(s.tokens) == len(s.rollout_logprobs) for s in picked)
    return [len(s) for s in picked]


def test_the_shortest_rows_with_trained_tokens_are_picked():
    assert rows([50, 20, -5, 40, 30, 60, 10], 4096) == [10, 20, 30, 40]
    assert rows([1500, 1000, 900], 4096) == [900, 1000]


def test_a_row_that_fills_the_context_is_cut_so_that_a_server_can_score_it():
    assert rows([32, 32], 32) == [31, 31]
    assert rows([-8], 32) == []


def test_a_probe_compares_its_own_rows_when_a_later_step_has_chosen_others(monkeypatch):
    """A step that trains nothing chooses rows, but does not wait for the probe of the last sync."""

    async def no_sync(job: Any) -> list[Any]:
        return []

    async def scenario() -> None:
        scored = asyncio.Event()

        def logprobs(tokens: np.ndarray) -> np.ndarray:
            return (-(tokens % 7) - 1).astype(np.float32)

        async def forward(samples: Any, batch_plan: Any, engine: str) -> list[np.ndarray]:
            return [logprobs(s.tokens) for s in samples]

        async def score(tokens: np.ndarray) -> dict[int, np.ndarray]:
            await scored.wait()
            return {0: logprobs(tokens)}

        sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "loop": {"num_steps": 9}}
        sections |= {"reward": {"terms": {"right": {"kind": "exact_match"}}}}
        trainer = SimpleNamespace(version=1, is_synced=False, forward=forward, batch_plan=lambda samples: None)
        parts: dict[str, Any] = dict.fromkeys(("task", "scorer", "layout", "rollout_log"))
        parts |= {"cfg": RunConfig.model_validate(sections), "trainer": trainer}
        parts |= {"rollouts": SimpleNamespace(score=score), "run": SimpleNamespace(spans=Spans())}
        job = Job(**parts)
        job.proof.threshold = 1e-3
        job.probed = random_samples(0, [20, 20, 20])
        await sync(job)
        await asyncio.sleep(0)
        job.probed = random_samples(1, [8, 9])
        scored.set()
        assert job.probe is not None
        (metric,) = await job.probe
        assert metric.name == "proof/probe_diff_mean" and metric.sum == 0

    monkeypatch.setattr("meshrl.loops.step._sync", no_sync)
    asyncio.run(scenario())

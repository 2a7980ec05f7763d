"""The probe of a sync: requests to every sampler, whose tokens the trainer scores with the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_samples import random_samples

from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.config.run import RunConfig
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric, Request, Sample, Turn
from meshrl.loops.job import Job
from meshrl.loops.sync_and_probe import NUM_PROBES, PROBED_TOKENS, contexts_to_probe, sync
from meshrl.monitor.recorder import Spans

VERSION = 1
CONTEXTS = [np.array([3, 1, 4], np.int32), np.array([2, 7], np.int32)]


def samples_of(lengths: list[int]) -> list[Sample]:
    """Rows of these lengths, each of another group; the first half of the tokens is the context."""
    samples = random_samples(0, lengths)
    for i, sample in enumerate(samples):
        sample.group_id, sample.mask = str(i), np.arange(len(sample)) >= len(sample) // 2
    return samples


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([50, 20, 40, 30], [10, 15]), ([3000, 2000], [512, 512]), ([1500, 40], [20, 512]), ([8], [4]), ([], None)],
)
def test_the_shortest_contexts_of_different_groups_are_probed(lengths, expected):
    samples = samples_of(lengths)
    contexts = contexts_to_probe(samples)
    assert (None if contexts is None else [len(context) for context in contexts]) == expected
    of_rows = [sample.tokens[: sample.mask.argmax()] for sample in samples]
    parts = [np.concatenate([x[:256], x[-256:]]) if len(x) > 512 else x for x in of_rows]
    assert all(any(np.array_equal(context, part) for part in parts) for context in contexts or [])


def test_a_group_gives_one_context_and_a_row_without_a_sampled_token_none():
    samples = samples_of([20, 30, 40])
    samples[1].group_id = samples[0].group_id
    samples[2].mask[:] = False
    assert [len(context) for context in contexts_to_probe(samples) or []] == [10]
    assert contexts_to_probe(samples[2:]) is None


def logprobs_of(tokens: np.ndarray) -> np.ndarray:
    return (-(tokens % 7) - 1).astype(np.float32)


def answer(request: Request, rank: int, nats: float = 0.0, num_tokens: int = PROBED_TOKENS) -> Turn:
    output = np.arange(num_tokens, dtype=np.int32) + request.seed % 50 + rank
    return Turn(
        context_ids=request.context_ids,
        output_ids=output.astype(np.int32),
        logprobs=logprobs_of(output) - np.float32(nats),
        versions=np.full(num_tokens, VERSION, np.int32),
        stop_reason="length",
        sampling=request.sampling,
        engine_id=f"tiny-{rank}",
    )


def job_of(answers: Callable[[list[Request]], list[Turn]], temperature: float = 1.0) -> Job:
    """A job with trainer weights of VERSION. answers: of all samplers."""

    async def forward(samples: Any, role: str) -> dict[int, np.ndarray]:
        assert all(sample.temperature == temperature for sample in samples)
        return {i: logprobs_of(sample.tokens) for i, sample in enumerate(samples)}

    async def probe(requests: list[Request]) -> list[Turn]:
        return answers(requests)

    sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "loop": {"num_steps": 9}}
    sections |= {"reward": {"terms": {"right": {"kind": "exact_match"}}}}
    sections["rollout"] = {"sampling": {"temperature": temperature}}
    trainer = SimpleNamespace(version=VERSION, is_synced=False, forward=forward, plan_rows=lambda samples: samples)
    parts: dict[str, Any] = dict.fromkeys(("keeper", "task", "scorer", "layout", "rollout_log"))
    parts |= {"cfg": RunConfig.model_validate(sections), "trainer": trainer}
    parts |= {"rollouts": SimpleNamespace(probe=probe), "run": SimpleNamespace(spans=Spans(), note=print)}
    job = Job(**parts)
    job.proof.threshold = 1e-3
    return job


def probed(job: Job, monkeypatch: pytest.MonkeyPatch, contexts: list[np.ndarray] | None) -> list[Metric] | None:
    """The metrics of the probe that a sync starts; None when it starts none."""

    async def no_sync(job: Any) -> list[Any]:
        return []

    async def scenario() -> list[Metric] | None:
        job.probed = contexts
        await sync(job)
        job.probed = [np.array([9, 9, 9], np.int32)]  # a later step chooses others, also if it trains nothing
        return None if job.probe is None else await job.probe

    monkeypatch.setattr("meshrl.loops.sync_and_probe._sync", no_sync)
    return asyncio.run(scenario())


def test_a_probe_is_a_request_of_the_run_and_urgent(monkeypatch):
    """At its temperature, of this version, with tokens that no stop id ends early, and with seeds of the version."""
    asked: list[Request] = []

    def answers(requests: list[Request]) -> list[Turn]:
        asked.extend(requests)
        return [answer(request, 0) for request in requests]

    assert probed(job_of(answers, 0.7), monkeypatch, CONTEXTS)
    assert [request.context_ids.tolist() for request in asked] == [context.tolist() for context in 2 * CONTEXTS]
    assert len({request.id for request in asked}) == len({request.seed for request in asked}) == NUM_PROBES
    for request in asked:
        assert (request.min_version, request.max_new_tokens, request.is_urgent) == (VERSION, PROBED_TOKENS, True)
        assert (request.sampling.temperature, request.sampling.ignore_eos) == (0.7, True)
        assert not request.session


@pytest.mark.parametrize("num_tokens", [[], [8, 8, 8, 0], [0, 0, 0, 0]], ids=["no_answer", "one_is_empty", "no_token"])
def test_a_probe_that_compares_nothing_is_an_error(num_tokens, monkeypatch):
    """An empty comparison has no difference, and must not pass as a proof."""

    def answers(requests: list[Request]) -> list[Turn]:
        return [answer(r, 0, num_tokens=n) for r, n in zip(requests, num_tokens, strict=False)]

    compared = sum(n > 0 for n in num_tokens)
    with pytest.raises(SamplerMismatchError, match=rf"version 1 the probe .* {compared} of {len(num_tokens)} answers"):
        probed(job_of(answers), monkeypatch, CONTEXTS)


def test_tokens_of_other_weights_prove_nothing(monkeypatch):
    def answers(requests: list[Request]) -> list[Turn]:
        turns = [answer(request, 0) for request in requests]
        turns[2].versions += 1
        return turns

    with pytest.raises(SamplerMismatchError, match="compared tokens in 3 of 4 answers"):
        probed(job_of(answers), monkeypatch, CONTEXTS)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_probe_compares_every_sampler(wrong, monkeypatch):
    """And names the one that differs; the metric is the largest difference of a row. Probes are no load of a route."""
    nats = 0.0009

    class Ranks:
        specs = tuple(SimpleNamespace(rank=rank, samples=True, trains=False) for rank in (0, 1))

        async def call(self, rank: int, method: Any, request: Request) -> Turn:
            assert job.rollouts.routes.num_running == 0
            return answer(request, rank, nats * (rank == wrong))

    ranks: Any = Ranks()
    job = job_of(lambda requests: [])
    job.rollouts = RolloutGroup(ranks)
    (metric,) = probed(job, monkeypatch, CONTEXTS) or []
    assert (metric.name, metric.reduce) == ("proof/probe_diff_mean", "max")
    assert metric.sum == pytest.approx(nats, rel=1e-3)
    nats = 0.21
    job.trainer.is_synced, job.probe = False, None
    with pytest.raises(SamplerMismatchError, match=f"the logprobs of sampler tiny-{wrong} differ"):
        probed(job, monkeypatch, CONTEXTS)


def test_a_step_without_a_context_has_no_probe(monkeypatch):
    assert probed(job_of(lambda requests: []), monkeypatch, None) is None

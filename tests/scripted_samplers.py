"""Samplers that follow a script, and a job of a fully asynchronous run that uses them; no model, no process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from meshrl.cluster.sampler_group import Routes
from meshrl.config.run import RunConfig
from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.data.order import PromptSource
from meshrl.loops.buffer import GroupBuffer
from meshrl.loops.collect import ScoredBatch
from meshrl.loops.job import Job
from meshrl.monitor.recorder import Spans

PER_STEP, NUM_STEPS = 2, 20


class Samplers:
    """Stands in for the ranks: `finish` ends the answers to a prompt, with tokens of the given versions."""

    def __init__(self) -> None:
        self.ended: dict[int, asyncio.Future[list[int]]] = {}
        self.routes = Routes([0])
        self.tools: list[dict[str, Any]] = []
        self.rewards = lambda ordinal, index: None

    async def kv_cache_bytes(self) -> int | None:
        return None

    async def run(self, prompt: Prompt, index: int, generate: Any, ctx: Any) -> Trajectory:
        versions = await self.ended.setdefault(prompt.ordinal, asyncio.get_running_loop().create_future())
        return Trajectory(prompt=prompt, group_id=ctx.group_id, index=index, turns=[turn(versions)])

    @property
    def started(self) -> list[int]:
        return sorted(self.ended)

    async def finish(self, *ordinals: int, versions: tuple[int, ...] = (0,)) -> None:
        for ordinal in ordinals:
            self.ended[ordinal].set_result([*versions])
        await settled()

    async def generate(self, request: Any) -> Any: ...
    def computed_tokens(self) -> int:
        return 0

    async def score(self, trajectories: Any) -> list[Any]:
        for t in trajectories:
            t.reward = self.rewards(t.prompt.ordinal, t.index)
        return []


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def turn(versions: list[int]) -> Turn:
    n = len(versions)
    ids, logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
    at = np.array(versions, np.int32)
    return Turn(context_ids=ids, output_ids=ids, logprobs=logprobs, versions=at, stop_reason="stop")


def job_of(
    samplers: Samplers,
    staleness: int,
    oversampling: float = 0.0,
    step: int = 0,
    max_running_requests: int = 256,
    **of_loop: Any,
) -> Job:
    loop = {"num_steps": NUM_STEPS, "prompts_per_step": PER_STEP, "samples_per_prompt": 2, "kind": "fully_async"}
    loop |= {"max_staleness": staleness, "oversampling": oversampling} | of_loop
    cfg = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {"max_running_requests": max_running_requests},
            "loop": loop,
            "reward": {"terms": {"right": {"kind": "exact_match"}}},
        }
    )
    prompts = [Prompt(id=str(i), ordinal=0, ids=np.array([i], np.int32)) for i in range(99)]
    task = SimpleNamespace(
        agent=samplers,
        tokenizer=None,
        stop_token_ids=(),
        max_context_tokens=9,
        train_prompts=PromptSource(prompts, seed=0, shuffle=False),
    )
    run: Any = SimpleNamespace(spans=Spans(), ends_early=False, progress=lambda text: None)
    parts: dict[str, Any] = {"cfg": cfg, "run": run, "task": task, "rollouts": samplers, "scorer": samplers}
    parts |= {"trainer": SimpleNamespace(version=step), "layout": None, "rollout_log": None, "step": step}
    parts["keeper"] = SimpleNamespace(restarts=0)
    return Job(**parts)


def trained(batch: ScoredBatch) -> list[int]:
    return [*dict.fromkeys(t.prompt.ordinal for t in batch.trained)]


async def take(buffer: GroupBuffer, job: Job) -> list[int]:
    """One step of the loop: take, train, sync."""
    ordinals = trained(await asyncio.wait_for(buffer.take(), 5))
    job.cursor = buffer.cursor()
    job.step, job.trainer.version = job.step + 1, job.trainer.version + 1
    return ordinals

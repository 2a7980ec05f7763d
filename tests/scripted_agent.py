"""A sampler and an agent that follow a script and give every shape that a trajectory can have; they need only numpy.

The trajectories of `scripted_trajectories` have a continued turn, a branch, a rewritten history, an image span, mixed
weight versions, aborted and continued turns, routed experts and an extra for each token.

The tree of each trajectory, with rows [0, 1], [2] and [0, 3]:

    image + question -- turn 0 --+-- turn 1
                                 +-- turn 3
    image + rewritten  -- turn 2
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np

from meshrl.agent.flatten import path_ids
from meshrl.agent.loop import AgentContext, start_trajectory, take_turn
from meshrl.core.types import Generate, Media, Prompt, Request, SamplingParams, Times, Trajectory, Turn, mix64
from meshrl.rollout.base import join_turns

STOP = 1
IMAGE = 2  # the placeholder's id; text ids start at 3
NUM_LAYERS, NUM_CHOSEN, NUM_EXPERTS = 2, 2, 8


class ScriptedEngine:
    """Draws each token from (seed, output position) only, so a continued turn equals an uninterrupted one.

    abort_every: every n-th new request is aborted after two tokens. The first two tokens of a turn have the weight
    version `version`, and each two tokens that follow have the next version, as if weights changed during a request.
    """

    def __init__(self, vocab_size: int = 64, abort_every: int = 0, version: int = 0):
        self.vocab_size, self.abort_every, self.version = vocab_size, abort_every, version
        self.requests: list[Request] = []
        self._fresh = 0

    async def generate(self, request: Request) -> Turn:
        self.requests.append(request)
        start = len(request.prefix_output)
        self._fresh += start == 0
        cut = start == 0 and self.abort_every and self._fresh % self.abort_every == 0
        limit = 2 if cut else request.max_new_tokens
        ids: list[int] = []
        while start + len(ids) < limit and (not ids or ids[-1] != STOP):
            draw = mix64(request.seed ^ mix64(start + len(ids)))
            ids.append(STOP if draw % 7 == 0 else 3 + draw % (self.vocab_size - 3))
        stop_reason = "stop" if ids[-1] == STOP else "abort" if cut else "length"
        places = range(start, start + len(ids))
        return Turn(
            context_ids=request.context_ids,
            output_ids=np.array(ids, np.int32),
            logprobs=np.array([-0.01 - mix64(request.seed + p) % 1000 / 250 for p in places], np.float32),
            versions=np.array([self.version + p // 2 for p in places], np.int32),
            stop_reason=stop_reason,
            routed_experts=self._routed(request, start, ids),
            extras={"entropy": np.array([p / 10 for p in places], np.float32)},
            sampling=request.sampling,
            seed=request.seed,
            engine_id="scripted-0",
            times=Times(decode_s=0.5, cached_tokens=start),
        )

    def _routed(self, request: Request, start: int, ids: list[int]) -> np.ndarray:
        """[C+R, L, K], derived from the position in the row. The last token never passed the model, so it has none."""
        num_context = len(request.context_ids)
        places = [*range(num_context), *range(num_context + start, num_context + start + len(ids))]
        shape = (NUM_LAYERS, NUM_CHOSEN)
        out = np.stack([np.arange(4).reshape(shape) + 3 * p for p in places]) % NUM_EXPERTS
        out[-1] = -1
        return out.astype(np.int16)


async def generate_to_the_end(engine: ScriptedEngine, request: Request) -> Turn:
    """Repeat an aborted request, with the output so far, until the turn is complete."""
    parts = [await engine.generate(request)]
    while parts[-1].stop_reason == "abort":
        so_far = np.concatenate([p.output_ids for p in parts])
        parts.append(await engine.generate(dataclasses.replace(request, prefix_output=so_far)))
    return join_turns(parts)


class IdTokenizer:
    """Decodes ids as numbers, for agents that need a readable text only."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


class ScriptedAgent:
    """Takes the four turns of the tree above."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        trajectory = start_trajectory(prompt, index, ctx)
        spans = [("cat", 1, prompt.media["cat"].num_tokens)]
        question = prompt.ids
        assert question is not None
        await take_turn(trajectory, question, generate, ctx, media_spans=spans)
        answered = path_ids(trajectory.turns, 0)
        for context in (
            np.append(answered, np.array([4, 5], np.int32)),
            np.append(question, np.array([6, 7, 8], np.int32)),
            np.append(answered, np.array([9], np.int32)),
        ):
            await take_turn(trajectory, context, generate, ctx, media_spans=spans)
        return trajectory


def scripted_context(group_id: str = "p-0", **changes: Any) -> AgentContext:
    facts: dict[str, Any] = dict(
        tokenizer=IdTokenizer(),
        sampling=SamplingParams(stop_token_ids=(STOP,)),
        max_new_tokens=6,
        max_context_tokens=64,
        run_seed=7,
        group_id=group_id,
    )
    return AgentContext(**{**facts, **changes})


def scripted_prompt(ordinal: int, media_outputs: dict[str, np.ndarray] | None = None) -> Prompt:
    """A prompt of 8 tokens; an image of 3 follows the first. media_outputs: the inputs of a vision model."""
    cat = Media(kind="image", digest="c47", source="cat.png", outputs=media_outputs or {}, num_tokens=3)
    ids = np.array([3, IMAGE, IMAGE, IMAGE, 10, 11, 12, 13 + ordinal], np.int32)
    return Prompt(id=f"p-{ordinal}", ordinal=ordinal, ids=ids, media={"cat": cat}, answer="42")


def scripted_trajectories(
    num_prompts: int = 2,
    samples_per_prompt: int = 2,
    vocab_size: int = 64,
    media_outputs: dict[str, np.ndarray] | None = None,
    abort_every: int = 3,
) -> list[Trajectory]:
    """Scored groups from the scripted agent; turn 1 of each trajectory carries a process reward of 0.25."""

    async def collect() -> list[Trajectory]:
        engine = ScriptedEngine(vocab_size, abort_every)
        made = []
        for ordinal in range(num_prompts):
            prompt = scripted_prompt(ordinal, media_outputs)
            for index in range(samples_per_prompt):
                ctx = scripted_context(f"{prompt.id}@{ordinal}")
                trajectory = await ScriptedAgent().run(prompt, index, lambda r: generate_to_the_end(engine, r), ctx)
                trajectory.turns[1].reward = 0.25
                trajectory.rewards = {"answer": float(index)}
                trajectory.reward = index + 0.25
                made.append(trajectory)
        return made

    return asyncio.run(collect())

"""What an agent asks in its first turn, and where the media of a later turn begin."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from scripted_agent import IMAGE, ScriptedEngine, scripted_context, scripted_prompt
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent.flatten import path_ids
from meshrl.agent.loop import MultiTurn, start_trajectory, take_turn
from meshrl.agent.resolve import resolve_agent
from meshrl.config.agent import AgentConfig
from meshrl.core.errors import ConfigError
from meshrl.core.types import Prompt, SamplingParams
from meshrl.data.chat import render


def needs_a_value(value: int, other: int = 0) -> Any:
    """An agent's constructor with an argument without a default."""
    raise AssertionError("it is never called")


@pytest.mark.parametrize("args", [{}, {"other": 1}, {"value": 1, "third": 2}])
def test_args_that_an_agent_needs_or_does_not_take_are_config_errors(args):
    with pytest.raises(ConfigError, match=r"don't fit agent\.kind"):
        resolve_agent(AgentConfig(kind=f"{__name__}:needs_a_value", args=args))


def test_the_first_context_of_an_agent_with_tools_shows_them():
    tokenizer, user, agent = tiny_tokenizer(), {"role": "user", "content": "ab?"}, MultiTurn(max_turns=1)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + tokenizer.chat_template
    )
    engine = ScriptedEngine(len(tokenizer))
    ctx = scripted_context(tokenizer=tokenizer, sampling=SamplingParams(), max_context_tokens=4000)
    asyncio.run(agent.run(Prompt(id="p", ordinal=0, messages=[user]), 0, engine.generate, ctx))
    sent = engine.requests[0].context_ids.tolist()
    assert sent == render(tokenizer, [user], tools=agent.tools).tolist()
    assert sent != render(tokenizer, [user], tools=[]).tolist()


@pytest.mark.parametrize("gap", [0, 1])
def test_an_image_at_the_beginning_of_a_later_context_belongs_to_that_turn(gap):
    """gap: tokens between the previous turn and the image."""

    async def second_turn() -> Any:
        prompt, ctx, engine = scripted_prompt(0), scripted_context(), ScriptedEngine()
        trajectory = start_trajectory(prompt, 0, ctx)
        assert prompt.ids is not None
        first = [("cat", 1, 3)]
        await take_turn(trajectory, prompt.ids, engine.generate, ctx, media_spans=first)
        answered = path_ids(trajectory.turns, 0)
        added = np.array([4] * gap + [IMAGE] * 3 + [5], np.int32)
        spans = [*first, ("cat", len(answered) + gap, 3)]
        return await take_turn(trajectory, np.append(answered, added), engine.generate, ctx, media_spans=spans)

    turn = asyncio.run(second_turn())
    assert turn.parent == 0 and turn.media_spans == [("cat", gap, 3)]

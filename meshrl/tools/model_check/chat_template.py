"""What a model's chat template supports, found by rendering short conversations with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshrl.agent.loop import AgentContext, next_context, start_trajectory
from meshrl.core.errors import DataError
from meshrl.core.types import Prompt, SamplingParams, Turn
from meshrl.data.chat import Message, load_tokenizer, render, render_text, sft_row, stop_token_ids

SYSTEM: Message = {"role": "system", "content": "stand-in instruction"}
QUESTION: Message = {"role": "user", "content": "stand-in question"}
ANSWER: Message = {"role": "assistant", "content": "stand-in answer"}
RESULT: Message = {"role": "tool", "content": "stand-in result"}
PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer", "description": "a number"}}}
TOOL = {"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": PARAMETERS}}


def template_lines(model: str) -> list[str]:
    """A line for each of the facts of a model's template, or the reason why it has none. model: a folder, or a hub id
    in the cache."""
    try:
        tokenizer = load_tokenizer(model)
        stops = stop_token_ids(tokenizer, model)
    except DataError as cause:
        return [f"no chat template: {cause}"]
    if not tokenizer.chat_template:
        return ["no chat template: data.chat_template names one"]
    return [f"chat template, {name}: {fact}" for name, fact in template_facts(tokenizer, stops).items()]


def template_facts(tokenizer: Any, stops: Sequence[int]) -> dict[str, str]:
    """What the template supports, or the reason why it does not. stops: the ids that end a turn."""
    facts = {}
    for name, check in CHECKS.items():
        try:
            facts[name] = check(tokenizer, frozenset(stops))
        except DataError as cause:
            facts[name] = f"refused: {cause}"
    return facts


def _further_turn(tokenizer: Any, stops: frozenset[int]) -> str:
    """Whether the context after an answer and another question continues the answer's row. Either way it has to be the
    conversation as the template renders it."""
    ctx = AgentContext(
        tokenizer=tokenizer,
        sampling=SamplingParams(stop_token_ids=tuple(sorted(stops))),
        max_new_tokens=1,
        max_context_tokens=1,
        run_seed=0,
        group_id="",
    )
    conversation = render(tokenizer, [QUESTION, ANSWER, QUESTION])
    after_question = len(render(tokenizer, [QUESTION], add_generation_prompt=False))
    end = next((i for i in conversation[after_question:].tolist() if i in stops), None)
    if end is None:
        raise DataError("no stop id follows an answer")
    sampled = [*tokenizer.encode(ANSWER["content"], add_special_tokens=False), end]
    trajectory = start_trajectory(Prompt(id="", ordinal=0, messages=[QUESTION]), 0, ctx)
    turn = Turn(
        context_ids=render(tokenizer, [QUESTION]),
        output_ids=np.array(sampled, np.int32),
        logprobs=np.zeros(len(sampled), np.float32),
        versions=np.zeros(len(sampled), np.int32),
        stop_reason="stop",
        messages=[ANSWER],
    )
    trajectory.turns.append(turn)
    context = next_context(trajectory, [QUESTION], ctx)
    if not np.array_equal(context, conversation):
        raise DataError(f"the context {tokenizer.decode(context.tolist())!r} is not what the template renders")
    row = [*turn.context_ids, *sampled]
    continues = context[: len(row)].tolist() == row
    return "continues the row" if continues else "a row of its own, since answers are rewritten"


def _tools(tokenizer: Any, stops: frozenset[int]) -> str:
    if render_text(tokenizer, [QUESTION], [TOOL]) == render_text(tokenizer, [QUESTION]):
        return "not described"
    text = render_text(tokenizer, [QUESTION, ANSWER, RESULT], [TOOL])
    return "described, " + ("results rendered" if RESULT["content"] in text else "results left out")


CHECKS: dict[str, Callable[[Any, frozenset[int]], str]] = {
    "system message": lambda t, _: (
        "rendered" if SYSTEM["content"] in render_text(t, [SYSTEM, QUESTION]) else "left out"
    ),
    "an answer ends with": lambda t, stops: repr(t.decode(sft_row(t, [QUESTION, ANSWER], stops)[0][-1:].tolist())),
    "a further turn": _further_turn,
    "SFT of several answers": lambda t, stops: sft_row(t, [QUESTION, ANSWER] * 2, stops) and "one row",
    "tools": _tools,
}

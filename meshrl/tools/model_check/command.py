"""`meshrl model-check`: what is proven of a model, what is not, and what to do; and what its chat template supports,
found by rendering short conversations with it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers.utils import logging

from meshrl.agent.loop import AgentContext, next_context, start_trajectory
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.types import Prompt, SamplingParams, Turn
from meshrl.data.chat import Message, load_tokenizer, needs_calls, render, render_text, sft_row, stop_token_ids
from meshrl.process.connect import LOOPBACK, interface_of
from meshrl.tools.model_check.checks import findings
from meshrl.tools.model_check.small_model import write_first_layers

GUIDE = "docs/add_a_model.md states what to do about it"
RANKS_TIMEOUT_S = 300.0


def check_model(model: str, show: Callable[[str], None]) -> bool:
    """Show the result of each check; whether all are proven. model: a model's folder, or a hub id."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        show(write_first_layers(model, Path(name)))
        all_proven = True
        try:
            for check, finding in findings(Path(name), on_ranks):
                show(f"{'proven' if finding.proven else 'NOT PROVEN':11} {check}: {finding}")
                all_proven &= finding.proven
        except ConfigError as cause:
            raise ConfigError(f"{str(cause).replace(name, model)}; {GUIDE}") from cause
    for line in template_lines(model):
        show(line)
    show("nothing has to be written: this model trains and samples" if all_proven else GUIDE)
    return all_proven


def on_ranks(function: Callable[..., float], world: int, *args: Any) -> list[float]:
    """The results of function(rank, world, *args) in processes that form a gloo process group."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, mp_context=get_context("spawn")) as ranks:
        calls = [ranks.submit(_in_group, f"{folder}/store", function, rank, world, *args) for rank in range(world)]
        return [call.result() for call in calls]


def _in_group(store: str, function: Callable[..., float], rank: int, world: int, *args: Any) -> float:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(LOOPBACK) or "lo")
    timeout = timedelta(seconds=RANKS_TIMEOUT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    try:
        return function(rank, world, *args)
    finally:
        dist.destroy_process_group()


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
    is_shown = needs_calls(tokenizer) or RESULT["content"] in render_text(tokenizer, [QUESTION, ANSWER, RESULT], [TOOL])
    return "described, " + ("results rendered" if is_shown else "results left out")


CHECKS: dict[str, Callable[[Any, frozenset[int]], str]] = {
    "system message": lambda t, _: (
        "rendered" if SYSTEM["content"] in render_text(t, [SYSTEM, QUESTION]) else "left out"
    ),
    "an answer ends with": lambda t, stops: repr(t.decode(sft_row(t, [QUESTION, ANSWER], stops)[0][-1:].tolist())),
    "a further turn": _further_turn,
    "SFT of several answers": lambda t, stops: sft_row(t, [QUESTION, ANSWER] * 2, stops) and "one row",
    "tools": _tools,
}

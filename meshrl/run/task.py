"""Loads a run's tokenizer, prompts and agent before the ranks start, and starts and tries the reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from meshrl.agent.loop import Task, require_tools_in_template
from meshrl.agent.resolve import AGENTS, resolve_agent
from meshrl.config.data import MEDIA_CACHE_BYTES
from meshrl.config.kinds import REWARDS, needs_answer
from meshrl.config.load import Loaded
from meshrl.config.precedence import DEFAULT
from meshrl.config.rollout import require_engine_for_images
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.train import require_mesh_for_images
from meshrl.core.errors import ConfigError
from meshrl.core.terminal import counted
from meshrl.core.types import Prompt, Sample
from meshrl.data.chat import ChatFiles, load_tokenizer, stop_token_ids
from meshrl.data.datasets import PromptMaker, SftRow, listed, load_sft_rows
from meshrl.data.decode import ending_ids, text_of
from meshrl.data.order import SftSource, content_of, load_eval_prompts, open_feed
from meshrl.data.processor import load_vision
from meshrl.model.limits import full_config, limits_of, text_config
from meshrl.reward.sandbox import Log
from meshrl.reward.score import Scorer
from meshrl.reward.self_test import NUM_REFERENCES, NUM_ROWS, try_built_in, try_on_answers, try_references
from meshrl.run.inputs import Objects

MAX_SHOWN = 400  # characters of the first prompt
_SHOWN = 4  # special tokens in a note


def load_task(cfg: RunConfig, objects: Objects, training: bool) -> Task:
    """Load tokenizer, agent and prompts, without importing the code of loops and ranks, which takes seconds. training:
    also load the training rows.
    """
    tokenizer = load_tokenizer(cfg.model.path, cfg.data.chat_template, cfg.data.chat_template_kwargs, cfg.run.date)
    agent = resolve_agent(cfg.agent) if objects.agent is None else objects.agent
    bad = list[str]() if cfg.data.bad_rows == "leave_out" else None
    answer_for = [name for name, term in cfg.reward.terms.items() if needs_answer(term.kind) and term.envs is None]
    max_context_tokens, vocab_size = limits_of(cfg.model.path, cfg.rollout.max_context_tokens)  # as in the samplers
    vision = load_vision(cfg.model.path, tokenizer, cfg.data.media_cache_bytes)
    make = PromptMaker(cfg.data, tokenizer, agent.tools, vocab_size, answer_for, bad=bad, vision=vision)
    feed = open_feed(make, cfg.run.seed, objects.table("data.path")) if training else None
    eval_key = "data.path" if cfg.data.eval_path is None else "data.eval_path"
    held_out, left_out = load_eval_prompts(make, objects.table(eval_key))
    by, columns = cfg.data.eval_by, {cfg.data.answer, *(name for prompt in held_out for name in prompt.meta)}
    if by is not None and held_out and by not in columns:
        names = ", ".join(sorted(filter(None, columns)))
        raise ConfigError(f"data.eval_by: no held-out row has the column {by!r}; they have {names}")
    task = Task(
        tokenizer=tokenizer,
        agent=agent,
        train_prompts=feed,
        eval_prompts=held_out,
        num_eval_left_out=left_out,
        stop_token_ids=stop_token_ids(tokenizer, cfg.model.path, cfg.rollout.sampling.stop_token_ids),
        max_context_tokens=max_context_tokens,
        row_note=_note_on_bad_rows(bad, vision.num_animated if vision else 0),
    )
    if vision is not None and any(prompt.media for prompt in _first_prompts(task)):
        require_engine_for_images(cfg.rollout.engine, full_config(cfg.model.path).model_type)
        require_mesh_for_images(cfg.train)
    for prompt in _first_prompts(task)[:1] if agent.tools else ():
        own = f"the chat template of {cfg.model.path}"
        template = own if cfg.data.chat_template is None else f"data.chat_template = {cfg.data.chat_template[:200]}"
        note = require_tools_in_template(agent, tokenizer, prompt.messages or [], template)
        task = replace(task, tool_note=note)
    return task


def first_prompt(task: Task) -> str | None:
    """The text of a prompt as the model reads it, in quotes and cut, with the number of its tokens; None if the agent
    renders its prompts by itself."""
    prompt = next(iter(_first_prompts(task)), None)
    if prompt is None or prompt.ids is None:
        return None
    ids = prompt.ids
    for _, start, size in reversed(prompt.media_spans):  # one token for each image
        ids = np.delete(ids, np.s_[start + 1 : start + size])
    text = repr(task.tokenizer.decode(ids.tolist()))
    cut = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"
    return f"{len(prompt.ids)} tokens, {cut}"


def note_on_default_reward(loaded: Loaded[RunConfig]) -> str | None:
    """None if the config or a Python caller has chosen the reward."""
    if loaded.origins.get("reward.terms.answer.kind") != DEFAULT:
        return None
    kind = loaded.config.reward.terms["answer"].kind
    return f"the reward is the default, {kind}: {REWARDS[kind].text}. reward.terms chooses another (docs/data.md)"


def note_on_overlap(task: Task) -> str | None:
    """About held-out prompts whose text is that of a training prompt; None if there are none."""
    texts = [content_of(prompt) for prompt in task.eval_prompts if prompt.ids is not None]
    shared = set() if task.train_prompts is None else task.train_prompts.shared({*texts})
    return _overlap(texts, shared, "prompts", "the held-out score", "data.eval_path")


def _overlap(texts: list[bytes], shared: set[bytes], rows: str, score: str, key: str) -> str | None:
    count = f"{sum(text in shared for text in texts)} of {len(texts)} held-out {rows} are training {rows}, too"
    advice = f"so {score} does not show what the model learns beyond them. Give other rows as {key}"
    return f"{count}, {advice}" if shared else None


def note_on_special(task: Task) -> str | None:
    """What is removed from the text of answers; None if the tokenizer has no special tokens except those that end a
    turn, those of the first prompt, and BOS and the unknown token."""
    tokenizer, ends = task.tokenizer, ending_ids(task.tokenizer, task.stop_token_ids)
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    prompt = [i for prompt in _first_prompts(task)[:1] if prompt.ids is not None for i in prompt.ids.tolist()]
    known = {*ends, *prompt, tokenizer.bos_token_id, tokenizer.unk_token_id}
    others = [text for i, text in special.items() if i not in known]
    removed = ", ".join(text for i, text in special.items() if i in ends) or "none"
    shown = f"{', '.join(others[:_SHOWN])}{f' and {len(others) - _SHOWN} more' if len(others) > _SHOWN else ''}"
    text = f"special tokens such as {shown} stay in the text of answers; those that end it are removed ({removed})"
    return f"{text}. A reward function with the parameter raw or tokens gets all of them" if others else None


def _note_on_bad_rows(bad: list[str] | None, num_animated: int = 0) -> str | None:
    several = f"of {counted(num_animated, 'image')} with several frames only the first is used"
    left_out = f"left out {counted(len(bad or ()), 'row')} that can't be used:{listed(bad or (), 3)}"
    return "\n".join([several] * bool(num_animated) + [left_out] * bool(bad)) or None


def load_sft_source(cfg: SftRunConfig, objects: Objects) -> tuple[SftSource, list[Sample], list[str], ChatFiles]:
    """The rows, those that are held out, notes on those that are left out, and the text of sft.chat_template with the
    stop ids."""
    path = cfg.model.path
    tokenizer = load_tokenizer(path, cfg.sft.chat_template, cfg.sft.chat_template_kwargs, cfg.run.date)
    table = objects.table("sft.path") or cfg.sft.path
    vocab_size = text_config(path).vocab_size
    stops = stop_token_ids(tokenizer, path)
    bad = list[str]() if cfg.sft.bad_rows == "leave_out" else None
    held_out = list[SftRow]()
    vision = load_vision(path, tokenizer, MEDIA_CACHE_BYTES)
    rows, left_out = load_sft_rows(table, cfg.sft, tokenizer, stops, vocab_size, bad, held_out, vision)
    if any(row.media for row in rows):
        require_mesh_for_images(cfg.train)
    if cfg.sft.eval_path is not None:
        table, own = objects.table("sft.eval_path") or cfg.sft.eval_path, {"split": cfg.sft.eval_split}
        of_file = cfg.sft.model_copy(update=own)
        held_out, num_too_long = load_sft_rows(table, of_file, tokenizer, stops, vocab_size, bad, None, vision)
        left_out += num_too_long
    too_long = f"left out {left_out} rows over {cfg.sft.max_row_tokens} tokens" if left_out else None
    texts = [row.content for row in held_out]
    shared = {*texts}.intersection(row.content for row in rows)
    overlap = _overlap(texts, shared, "rows", "eval/loss", "sft.eval_path")
    notes = [note for note in (_note_on_bad_rows(bad), too_long, overlap and f"note: {overlap}") if note]
    template = tokenizer.chat_template if cfg.sft.chat_template is not None else None
    samples = [row.sample(row.id) for row in held_out]
    source = SftSource(rows, cfg.run.seed, cfg.sft.shuffle, held_out)
    return source, samples, notes, ChatFiles(template, stops)


@asynccontextmanager
async def reward_workers(
    cfg: RunConfig, objects: Objects, task: Task, note: Callable[[str], None], log: Log
) -> AsyncIterator[tuple[Scorer, asyncio.Task[None]]]:
    """A started Scorer, after the self-tests of its built-in terms, and the trial of a user's reward functions on the
    task's rows, a task that runs while the ranks start. The workers end with the block. log: gets their output."""
    scorer = Scorer(cfg.reward, objects.rewards, note, log, partial(text_of, task.tokenizer, special=True))
    try:
        await scorer.start()
        await try_built_in(scorer, cfg.reward.terms, note)
        # Not with a user's agent: a reward function may read messages that only that agent writes.
        tried = _first_prompts(task) if cfg.agent.kind in AGENTS else []
        trial = asyncio.create_task(_try_on_rows(scorer, cfg, task, tried, note))
        try:
            yield scorer, trial
        finally:
            trial.cancel()
    finally:
        await scorer.close()


async def _try_on_rows(
    scorer: Scorer, cfg: RunConfig, task: Task, tried: list[Prompt], note: Callable[[str], None]
) -> None:
    await try_on_answers(scorer, cfg.reward, tried, note)
    if any(needs_answer(term.kind) for term in cfg.reward.terms.values()):
        rows = _first_prompts(task, NUM_REFERENCES) + task.eval_prompts[:NUM_REFERENCES]
        await try_references(scorer, cfg.reward.terms, rows, note)


def _first_prompts(task: Task, num_rows: int = NUM_ROWS) -> list[Prompt]:
    """A few prompts, of the training rows if there are any; the feed keeps its position."""
    feed = task.train_prompts
    if feed is None:
        return task.eval_prompts[:num_rows]
    position = feed.state()
    prompts = feed.next(num_rows)
    feed.load_state(position)
    return prompts

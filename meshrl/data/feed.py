"""What a run draws its prompts from: data.path, data.sources or a caller's rows, in memory or streamed, as one
PromptFeed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshrl.config.data import DataConfig
from meshrl.core.types import Prompt
from meshrl.data.datasets import PromptMaker, load_prompts
from meshrl.data.sampler import PromptFeed, PromptMixture, PromptSource
from meshrl.data.streaming import PromptStream
from meshrl.data.tables import RowTable, open_table


def open_feed(
    cfg: DataConfig,
    tokenizer: Any,
    seed: int,
    tools: list[dict] | None = None,
    vocab_size: int | None = None,
    answer_for: Sequence[str] = (),
    rows: RowTable | None = None,
) -> PromptFeed:
    """The training prompts. tools: schemas of the agent's tools, for templates that put them into the prompt.
    vocab_size: of the model that is to read them, where it is known. answer_for: names of the reward terms that need
    an answer in every row. rows: in memory, in place of those at data.path.

    Raises: DataError for rows that are not as the config says; when streaming, only for those read at the start.
    """
    if not cfg.sources:
        return _open_one(cfg, rows or cfg.path, tokenizer, seed, tools, None, vocab_size, answer_for)
    feeds = {
        name: _open_one(_of_source(cfg, name), source.path, tokenizer, seed, tools, name, vocab_size, answer_for)
        for name, source in cfg.sources.items()
    }
    return PromptMixture(feeds, {name: source.weight for name, source in cfg.sources.items()}, seed)


def load_eval_prompts(
    cfg: DataConfig,
    tokenizer: Any,
    tools: list[dict] | None = None,
    vocab_size: int | None = None,
    answer_for: Sequence[str] = (),
    rows: RowTable | None = None,
) -> tuple[list[Prompt], int]:
    """The held-out prompts, from the first data.eval_limit rows of data.eval_path, and how many were left out for
    being longer than data.max_prompt_tokens; ([], 0) without an eval_path. rows: in memory, in place of those at
    data.eval_path.

    Their ordinals count down from -1: seeds of evaluation never meet those of training, whose ordinals count up from 0.

    Raises: DataError, as load_prompts.
    """
    if cfg.eval_path is None:
        return [], 0
    prompts, left_out = load_prompts(
        rows or cfg.eval_path,
        cfg,
        tokenizer,
        cfg.eval_limit,
        tools,
        split=cfg.eval_split,
        vocab_size=vocab_size,
        answer_for=answer_for,
    )
    for i, prompt in enumerate(prompts):
        prompt.ordinal = -1 - i
    return prompts, left_out


def _open_one(
    cfg: DataConfig,
    path: str | RowTable | None,
    tokenizer: Any,
    seed: int,
    tools: list[dict] | None,
    source: str | None,
    vocab_size: int | None,
    answer_for: Sequence[str],
) -> PromptFeed:
    assert path is not None, "the config's check asks for data.path or data.sources"
    if not cfg.streaming:
        prompts, left_out = load_prompts(
            path,
            cfg,
            tokenizer,
            tools=tools,
            split=cfg.split,
            source=source,
            vocab_size=vocab_size,
            answer_for=answer_for,
        )
        return PromptSource(prompts, seed, cfg.shuffle, left_out)
    return PromptStream(
        open_table(path, cfg.format, cfg.subset, cfg.split),
        PromptMaker(cfg, tokenizer, tools, source, vocab_size, answer_for),
        cfg.max_prompt_tokens,
        seed=seed,
        shuffle=cfg.shuffle,
        buffer_rows=cfg.shuffle_buffer_rows,
    )


def _of_source(cfg: DataConfig, name: str) -> DataConfig:
    """The config of a source as if it were the only one: what it does not name itself is data's."""
    source = cfg.sources[name]
    own = {key: getattr(source, key) for key in ("prompt", "answer", "map") if getattr(source, key) is not None}
    place = {key: getattr(source, key) for key in ("path", "format", "subset", "split")}
    return cfg.model_copy(update={**own, **place, "sources": {}})

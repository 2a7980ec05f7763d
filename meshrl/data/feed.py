"""The prompts of a run: data.path, data.sources or a caller's rows, in memory or streamed, as one PromptFeed."""

from __future__ import annotations

import dataclasses

from meshrl.core.types import Prompt
from meshrl.data.datasets import PromptMaker, load_prompts
from meshrl.data.order import PromptFeed, PromptMixture, PromptSource, PromptStream
from meshrl.data.tables import RowTable, open_table


def open_feed(make: PromptMaker, seed: int, rows: RowTable | None = None) -> PromptFeed:
    """The training prompts of make.cfg. rows: rows in memory, in place of those at data.path.

    Raises: DataError for rows that do not fit the config; when streaming, only for rows that are read at the start.
    """
    sources = make.cfg.sources
    if not sources:
        return _open_one(make, seed, rows)
    feeds = {name: _open_one(_source_maker(make, name), seed, None) for name in sources}
    return PromptMixture(feeds, {name: source.weight for name, source in sources.items()}, seed)


def load_eval_prompts(make: PromptMaker, rows: RowTable | None = None) -> tuple[list[Prompt], int]:
    """The held-out prompts, from the first data.eval_limit rows of data.eval_path, and the number of rows left out
    because they are longer than data.max_prompt_tokens; ([], 0) without an eval_path. rows: rows in memory, in place of
    those at data.eval_path.

    Their ordinals count down from -1, so that no seed is also a seed of training, where ordinals count up from 0.

    Raises: DataError, as load_prompts.
    """
    cfg = make.cfg
    if cfg.eval_path is None:
        return [], 0
    prompts, left_out = load_prompts(rows or cfg.eval_path, make, cfg.eval_limit, cfg.eval_split)
    for i, prompt in enumerate(prompts):
        prompt.ordinal = -1 - i
    return prompts, left_out


def _open_one(make: PromptMaker, seed: int, rows: RowTable | None) -> PromptFeed:
    cfg = make.cfg
    path = rows or cfg.path
    assert path is not None, "the config's check requires data.path or data.sources"
    if cfg.streaming:
        table = open_table(path, cfg.format, cfg.subset, cfg.split)
        return PromptStream(table, make, seed)
    prompts, left_out = load_prompts(path, make, split=cfg.split)
    return PromptSource(prompts, seed, cfg.shuffle, left_out)


def _source_maker(make: PromptMaker, name: str) -> PromptMaker:
    """The maker for one source of a mixture: keys that the source does not set are those of data."""
    source = make.cfg.sources[name]
    columns = {key: getattr(source, key) for key in ("prompt", "answer", "map") if getattr(source, key) is not None}
    place = {key: getattr(source, key) for key in ("path", "format", "subset", "split")}
    return dataclasses.replace(make, cfg=make.cfg.model_copy(update={**columns, **place, "sources": {}}), source=name)

"""Rows of a JSONL file -> Prompts (for RL) and SftRows (for SFT). A bad row is an error that names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.config.task import DataConfig, SftConfig
from meshrl.core.errors import DataError
from meshrl.core.types import Prompt
from meshrl.data.chat import Message, render, sft_row

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRow:
    """One rendered conversation: ids int32[T], mask bool[T] (what is trained), both read-only."""

    id: str
    ids: np.ndarray
    mask: np.ndarray


def load_rows(path: str | Path, limit: int | None = None) -> list[tuple[int, Row]]:
    """(line number from 1, row) for each non-blank line of a UTF-8 JSONL file; the first `limit` of them.

    Raises: DataError for a missing or empty file, and for a line that is not UTF-8, not JSON or not an object.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"data file {str(path)!r} {what} (working folder: {Path.cwd()}); give a JSONL file")
    rows: list[tuple[int, Row]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and len(rows) == limit:
                break
            if line.strip():
                rows.append((number, _parse_line(line, f"{path}:{number}")))
    if not rows:
        raise DataError(f"{path} holds no rows; each line should be one JSON object")
    return rows


def _parse_line(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as cause:
        raise DataError(f"{where}: not UTF-8 at byte {cause.start}; save the file as UTF-8") from cause
    except ValueError as cause:
        raise DataError(f"{where}: not JSON ({cause}); each line should be one whole JSON object") from cause
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}; each line should be one JSON object {{column: value}}")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def prompt_from_row(row: Row, cfg: DataConfig, prompt_id: str, ordinal: int, where: str) -> Prompt:
    """One row as an unrendered Prompt. Columns other than prompt and answer travel in `meta`.

    Raises: DataError when a column named in the config is missing or holds something else than it should.
    """
    content = _column(row, cfg.prompt, "data.prompt", where)
    messages = _messages(content, where, cfg.prompt, text_role="user")
    if cfg.system is not None:
        if messages[0]["role"] == "system":
            raise DataError(
                f"{where}: column {cfg.prompt!r} begins with a system message and data.system is set too; keep one"
            )
        messages = [{"role": "system", "content": cfg.system}, *messages]
    answer = None
    if cfg.answer is not None:
        answer = _column(row, cfg.answer, "data.answer", where)
        if answer is None:
            raise DataError(
                f"{where}: column {cfg.answer!r} is null; set data.answer: null if no reward needs a ground truth"
            )
    meta = {k: v for k, v in row.items() if k not in (cfg.prompt, cfg.answer)}
    return Prompt(id=prompt_id, ordinal=ordinal, messages=messages, answer=answer, meta=meta)


def load_prompts(
    path: str | Path, cfg: DataConfig, tokenizer: Any, limit: int | None = None, tools: list[dict] | None = None
) -> tuple[list[Prompt], int]:
    """All prompts of a file, rendered once, and how many were left out for being longer than max_prompt_tokens.

    The id is "<file stem>-<line>", the ordinal the place in the file (PromptSource gives each draw its own).
    tools: schemas of the agent's tools, for templates that put them into the prompt.

    Raises: DataError as load_rows and prompt_from_row, when the template refuses a row, and when no row is left.
    """
    prompts, lengths = [], []
    for ordinal, (number, row) in enumerate(load_rows(path, limit)):
        where = f"{path}:{number}"
        prompt = prompt_from_row(row, cfg, f"{Path(path).stem}-{number}", ordinal, where)
        try:
            prompt.ids = render(tokenizer, prompt.messages or [], tools=tools)
        except DataError as cause:
            raise DataError(f"{where}: {cause}") from cause
        prompt.ids.flags.writeable = False
        lengths.append(len(prompt.ids))
        prompts.append(prompt)
    kept = [p for p, length in zip(prompts, lengths) if length <= cfg.max_prompt_tokens]
    _require_rows(path, len(kept), lengths, "data.max_prompt_tokens", cfg.max_prompt_tokens)
    return kept, len(prompts) - len(kept)


def load_sft_rows(
    path: str | Path, cfg: SftConfig, tokenizer: Any, stop_ids: Iterable[int]
) -> tuple[list[SftRow], int]:
    """All conversations of a file as rendered rows, and how many were left out for being over max_row_tokens.

    Raises: DataError as load_rows and sft_row, with file and line, and when no row is left.
    """
    stops = tuple(stop_ids)
    rows, lengths = [], []
    for number, row in load_rows(path):
        where = f"{path}:{number}"
        messages = _messages(_column(row, cfg.messages, "sft.messages", where), where, cfg.messages, text_role=None)
        try:
            ids, mask = sft_row(tokenizer, messages, stops)
        except DataError as cause:
            raise DataError(f"{where}: {cause}") from cause
        ids.flags.writeable = mask.flags.writeable = False
        lengths.append(len(ids))
        if len(ids) <= cfg.max_row_tokens:
            rows.append(SftRow(id=f"{Path(path).stem}-{number}", ids=ids, mask=mask))
    _require_rows(path, len(rows), lengths, "sft.max_row_tokens", cfg.max_row_tokens)
    return rows, len(lengths) - len(rows)


def _column(row: Row, name: str, key: str, where: str) -> Any:
    if name not in row:
        raise DataError(f"{where}: no column {name!r} (columns: {', '.join(row) or 'none'}); set {key} to one of them")
    return row[name]


def _messages(value: Any, where: str, column: str, text_role: str | None) -> list[Message]:
    """A column as a message list: such a list as it stands, or (where text_role is given) a text as one message."""
    wanted = "a list of {role, content} messages" + (" or a text" if text_role else "")
    if isinstance(value, str) and text_role:
        if not value.strip():
            raise DataError(f"{where}: column {column!r} is an empty text; it should be {wanted}")
        return [{"role": text_role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: column {column!r} is {_shown(value)}; it should be {wanted}")
    for i, message in enumerate(value):
        good = isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        if not good or not isinstance(message["content"], str):
            raise DataError(
                f"{where}: message {i} of column {column!r} is {_shown(message)}; "
                'it should be like {"role": "user", "content": "text"}'
            )
    return list(value)


def _require_rows(path: str | Path, num_kept: int, lengths: list[int], key: str, limit: int) -> None:
    if num_kept == 0:
        raise DataError(
            f"{path}: all {len(lengths)} rows are longer than {key} = {limit} tokens "
            f"(shortest {min(lengths)}); raise it or shorten the rows"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"

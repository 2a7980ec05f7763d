"""The data of view.html: an index with a few numbers for each answer, and compressed chunks that the page decodes on
demand, of texts (JSON) and of token values (columns). Neither torch nor the tokenizer is needed.

A chunk has complete groups of one file. Each of its answers has the number of its tokens in each turn, so the columns
of a chunk need no offsets.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.errors import DataError
from meshrl.monitor.rollout_log import read_records
from meshrl.monitor.token_log import TokenFile, read_token_file

Record = dict[str, Any]
CHUNK_BYTES = 600_000  # of texts and values, before they are compressed
_TOKEN_BYTES = 18  # 14 for the values
_TOKENS = 4  # place of the number of tokens in a row
PREVIEW = 90  # characters of a prompt or answer in the list
MAX_NATS = 25.0  # larger distances from 0 are shown as this one
NO_VALUE = 255


@dataclass(slots=True)
class RolloutFile:
    """One file of rollouts. kind: step or eval. notes: its faults, filled by `read_chunks`."""

    path: Path
    kind: str
    step: int
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """texts, values: compressed, as base64. groups, rows: of the index, a row for each answer."""

    texts: str
    values: str
    groups: list[Record]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """shown: the part of the texts. prompt: its id and begin; None if an earlier answer has them. row: of the index,
    without its group. parts: where its tokens are in the file."""

    shown: Record
    prompt: tuple[str, str] | None
    row: tuple[Any, ...]
    parts: list[slice]


def read_chunks(file: RolloutFile) -> Iterator[Chunk]:
    """The answers of a file, as far as they can be read."""
    groups, tokens = dict[str, list[_Answer]](), None
    try:
        tokens = read_token_file(file.path)
        if tokens is None:
            file.notes.append(f"{file.path} has no file of token values next to it, so its tokens have no values")
    except DataError as damage:
        file.notes.append(str(damage))
    answers = read_records(file.path, lambda record: (str(record["group_id"]), _answer(record, tokens)), file.notes)
    for name, answer in answers:
        groups.setdefault(name, []).append(answer)
    chosen, size = dict[str, list[_Answer]](), 0
    for name, group in groups.items():
        chosen[name] = group
        size += sum(answer.row[_TOKENS] * _TOKEN_BYTES + len(answer.row[-1]) for answer in group)
        if size > CHUNK_BYTES:
            yield _chunk(chosen, tokens)
            chosen, size = {}, 0
    if chosen:
        yield _chunk(chosen, tokens)


def _answer(record: Record, tokens: TokenFile | None) -> _Answer:
    turns, parts, oldest, version = [], list[slice](), list[int](), None
    for number, turn in enumerate(record["turns"]):
        values = tokens.turn(record["id"], number) if tokens is not None else None
        if values is None or values.columns["characters"].sum() != len(turn["text"]):  # or of other answers
            count = 0
        else:
            count, version = len(turn["output_ids"]), values.trainer_version
            parts.append(values.place)
            oldest += values.columns["versions"].min(keepdims=True).tolist() if count else []
        messages = turn["messages"]
        if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            messages = messages[:-1]  # the last one is the sampled text
        same = {name: turn[name] for name in ("parent", "text", "stop_reason", "reward")}
        turns.append({**same, "messages": messages, "tokens": count})
    prompt, reward = record["prompt"], record["reward"]
    shown = {
        "prompt": prompt and {name: prompt[name] for name in ("id", "messages", "answer")},
        **{name: record[name] for name in ("rewards", "failure")},
        "turns": turns,
    }
    row = (
        int(record["index"]),
        float(reward) if reward is not None and np.isfinite(float(reward)) else None,
        str(record["status"]),
        str(record["turns"][-1]["stop_reason"]) if turns else "none",
        sum(len(turn["output_ids"]) for turn in record["turns"]),
        len(turns),
        version - min(oldest) if oldest and version is not None else None,
        _preview(turns[-1]["text"]) if turns else "",
    )
    return _Answer(shown, prompt and (str(prompt["id"]), _asked(prompt)), row, parts)


def _asked(prompt: Record) -> str:
    texts = [m["content"] for m in prompt["messages"] or [] if isinstance(m, dict) and m.get("content")]
    return _preview(texts[-1]) if texts else f"(prompt of {len(prompt['ids'] or [])} tokens)"


def _chunk(groups: dict[str, list[_Answer]], tokens: TokenFile | None) -> Chunk:
    answers = [answer for group in groups.values() for answer in group]
    prompts = []
    for name, group in groups.items():
        prompt, asked = next((answer.prompt for answer in group if answer.prompt), ("", ""))
        prompts.append({"id": name, "prompt": prompt, "asked": asked})
    parts = [part for answer in answers for part in answer.parts]
    texts = json.dumps([answer.shown for answer in answers], separators=(",", ":"), default=str)
    return Chunk(
        packed(texts.encode()),
        packed(_values(tokens, parts)) if tokens is not None and parts else "",
        prompts,
        [(number, *answer.row) for number, group in enumerate(groups.values()) for answer in group],
    )


def _preview(text: Any) -> str:
    return " ".join(str(text)[: 4 * PREVIEW].split())[:PREVIEW]


def _values(tokens: TokenFile, parts: list[slice]) -> bytes:
    """The columns of these tokens end to end: versions int32, advantages float32, characters uint16, then one byte for
    each of log ratio, sampler's logprob, entropy, trained."""
    cut = {name: np.concatenate([array[part] for part in parts]) for name, array in tokens.columns.items()}
    columns = [
        cut["versions"].astype("<i4"),
        cut["advantages"].astype("<f4"),
        np.minimum(cut["characters"], 65535).astype("<u2"),
        log_ratio_bytes(cut["logprobs"].astype(np.float64) - cut["rollout_logprobs"]),
        root_bytes(-cut["rollout_logprobs"]),
        root_bytes(cut["entropies"]),
        cut["trained"].astype(np.uint8),
    ]
    return b"".join(column.tobytes() for column in columns)


def root_bytes(values: np.ndarray) -> np.ndarray:
    """One byte for each value from 0 to MAX_NATS: 254 sqrt(value / MAX_NATS), rounded. NO_VALUE stands for NaN."""
    scaled = np.rint(254 * np.sqrt(np.clip(values, 0, MAX_NATS) / MAX_NATS))
    return np.where(np.isnan(values), NO_VALUE, scaled).astype(np.uint8)


def log_ratio_bytes(values: np.ndarray) -> np.ndarray:
    """One byte for each log ratio: 128 for less than 1e-6 in size, above or below it 18 steps for each factor of ten,
    up to 10. 0 stands for NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.clip(np.rint(1 + 18 * np.log10(np.abs(values) / 1e-6)), 0, 127)
    return np.where(np.isnan(values), 0, 128 + np.sign(values) * size).astype(np.uint8)


def packed(data: bytes) -> str:
    """For a page's script: compressed, as base64."""
    return base64.b64encode(zlib.compress(data, 5)).decode("ascii")

"""The data of view.html: an index with a few numbers for each answer, and compressed chunks that the page decodes on
demand, of texts (JSON) and of token values (columns). Neither torch nor the tokenizer is needed.

A chunk has complete groups of one file. Each of its answers has the number of its tokens in each turn, so the columns
of a chunk need no offsets.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.errors import DataError
from meshrl.core.types import SCHEMA
from meshrl.monitor.jsonl import data_errors, read_lines
from meshrl.monitor.token_log import TokenFile, read_token_file

Record = dict[str, Any]
CHUNK_BYTES = 200_000  # of texts, before they are compressed
CHUNK_TOKENS = 40_000
PREVIEW = 90  # characters of a prompt or answer in the list
MAX_NATS = 25.0  # larger distances from 0 are shown as this one
NO_VALUE = 255


@dataclass(slots=True)
class RolloutFile:
    """One file of rollouts. kind: step or eval."""

    path: Path
    kind: str
    step: int
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """texts, values: compressed, as base64. rows: of the index, one for each answer."""

    texts: str
    values: str
    groups: list[Record]
    rows: list[tuple[Any, ...]]

    @property
    def num_bytes(self) -> int:
        return len(self.texts) + len(self.values) + 160 * len(self.rows)


def read_chunks(file: RolloutFile) -> Iterator[Chunk]:
    """The answers of a file, as far as they can be read; faults are added to its notes."""
    tokens = None
    try:
        tokens = read_token_file(file.path)
        if tokens is None:
            file.notes.append(f"{file.path.name} has no file of token values next to it, so its tokens have no values")
    except DataError as damage:
        file.notes.append(str(damage))
    groups: list[list[Record]] = []
    size = count = 0
    for group in _groups(file):
        groups.append(group)
        texts = [str(turn["text"]) for record in group for turn in record["turns"]]
        size, count = size + sum(map(len, texts)), count + sum(len(t["output_ids"]) for r in group for t in r["turns"])
        if size > CHUNK_BYTES or count > CHUNK_TOKENS:
            yield _chunk(groups, tokens)
            groups, size, count = [], 0, 0
    if groups:
        yield _chunk(groups, tokens)


def _groups(file: RolloutFile) -> Iterable[list[Record]]:
    """The records of each group; those before a damaged line."""
    groups: dict[str, list[Record]] = {}
    number = 0
    try:
        for number, record in enumerate(read_lines(file.path), start=1):
            where = f"{file.path}:{number}"
            if record.get("schema") != SCHEMA:
                raise DataError(f"{where}: schema {record.get('schema')!r:.40}; this version reads schema {SCHEMA}")
            with data_errors(where, "a trajectory"):
                _check(record)
                groups.setdefault(record["group_id"], []).append(record)
    except DataError as damage:
        file.notes.append(f"{damage}; the lines before it are shown")
    return groups.values()


def _check(record: Record) -> None:
    """Access what the page needs, so that a record of another program raises here."""
    int(record["index"]), str(record["id"]), str(record["status"]), dict(record["rewards"]), record["reward"]
    record["failure"], (record["prompt"] or {"id": ""})["id"]
    for turn in record["turns"]:
        int(turn["parent"]), list(turn["messages"]), str(turn["text"]), turn["stop_reason"], len(turn["output_ids"])


def _chunk(groups: list[list[Record]], tokens: TokenFile | None) -> Chunk:
    made = Chunk("", "", [], [])
    answers, parts = [], list[slice]()
    for group in groups:
        prompt = next((record["prompt"] for record in group if record["prompt"]), None) or {}
        asked = _asked(prompt)
        made.groups.append({"id": str(group[0]["group_id"]), "prompt": str(prompt.get("id", "")), "asked": asked})
        for record in group:
            turns, oldest, version = [], None, None
            for number, turn in enumerate(record["turns"]):
                values = tokens.turn(record["id"], number) if tokens is not None else None
                fits = values is not None and values.columns["characters"].sum() == len(turn["text"])
                if tokens is not None and values is not None and fits:
                    row = tokens.rows[record["id"], number]
                    parts.append(slice(tokens.ends[row], tokens.ends[row + 1]))
                    version = values.trainer_version
                    versions = values.columns["versions"]
                    oldest = min(v for v in (oldest, int(versions.min())) if v is not None) if len(versions) else oldest
                turns.append(_turn(turn, fits))
            age = None if version is None or oldest is None else version - oldest
            answers.append(_answer(record, turns))
            made.rows.append((len(made.groups) - 1, *_index_row(record, age)))
    made.texts = _packed(json.dumps(answers, separators=(",", ":"), default=str).encode())
    made.values = _packed(_values(tokens, parts)) if tokens is not None and parts else ""
    return made


def _asked(prompt: Record) -> str:
    """The begin of a prompt's last message with text."""
    for message in reversed(prompt.get("messages") or []):
        if isinstance(message, dict) and message.get("content"):
            return _preview(message["content"])
    return f"(prompt of {len(prompt.get('ids') or [])} tokens)"


def _preview(text: Any) -> str:
    return " ".join(str(text)[: 4 * PREVIEW].split())[:PREVIEW]


def _answer(record: Record, turns: list[Record]) -> Record:
    prompt = record["prompt"]
    return {
        "prompt": prompt and {key: prompt.get(key) for key in ("id", "messages", "answer", "env", "meta", "media")},
        "rewards": record["rewards"],
        "failure": record["failure"],
        "turns": turns,
    }


def _turn(turn: Record, has_values: bool) -> Record:
    """messages: those before the sampled text. tokens: their number; 0 if they have no values in the chunk."""
    messages = turn["messages"]
    if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return {
        **{name: turn[name] for name in ("parent", "text", "stop_reason")},
        "reward": turn.get("reward"),
        "messages": messages,
        "tokens": len(turn["output_ids"]) if has_values else 0,
    }


def _index_row(record: Record, age: int | None) -> tuple[Any, ...]:
    """answer, reward, status, stop reason, tokens, turns, age of its weights, begin of the last turn."""
    turns, reward = record["turns"], record["reward"]
    stop = str(turns[-1]["stop_reason"]) if turns else "none"
    length = sum(len(turn["output_ids"]) for turn in turns)
    number = float(reward) if reward is not None else None
    shown = number if number is None or np.isfinite(number) else None
    text = _preview(turns[-1]["text"]) if turns else ""
    return record["index"], shown, str(record["status"]), stop, length, len(turns), age, text


def _values(tokens: TokenFile | None, parts: list[slice]) -> bytes:
    """The columns of these tokens end to end: versions int32, advantages float32, characters uint16, then one byte for
    each of log ratio, sampler's logprob, entropy, trained."""
    assert tokens is not None
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


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 5)).decode("ascii")

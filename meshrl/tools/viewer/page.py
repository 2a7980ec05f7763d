"""view.html: a page about all answers of a run that needs no other file, written by `meshrl view`.

Its data are an index with a few numbers for each answer, and compressed chunks that the page decodes on demand, of
texts (JSON) and of token values (columns). Neither torch nor the tokenizer is needed. A chunk has complete groups of
one file. Each of its answers has the number of its tokens in each turn, so the columns of a chunk need no offsets.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.config.reward import PassScore, has_passed
from meshrl.core.columns import columns_for
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.terminal import counted
from meshrl.core.types import Media
from meshrl.monitor.rollout_log import answer_files, read_records
from meshrl.monitor.thumbnails import read_thumbnail
from meshrl.monitor.token_log import TokenFile, read_token_file
from meshrl.tools.page.document import data_block, document, package_text, write_page
from meshrl.tools.report.folder import criterion_of, read_settings, text_with_images
from meshrl.tools.state import read_part
from meshrl.tools.viewer.answers import require_rollouts, step_name, time_text

Record = dict[str, Any]
_TOKEN_BYTES = 18  # 14 for the values
_TOKENS = 5  # place of the number of tokens in a row
PREVIEW = 90  # characters of a prompt or answer in the list
MAX_NATS = 25.0  # larger distances from 0 are shown as this one
NO_VALUE = 255


@dataclass(slots=True)
class RolloutFile:
    """One file of rollouts. kind: step or eval. criterion: as criterion_of. notes: its faults, filled by
    `read_chunks`."""

    path: Path
    kind: str
    step: int
    criterion: tuple[str, PassScore]
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """texts, values: compressed, as base64. groups, rows: of the index, a row for each answer. images: the digests of
    those in the prompts."""

    texts: str
    values: str
    groups: list[Record]
    rows: list[tuple[Any, ...]]
    images: list[str]


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
    answers = read_records(
        file.path, lambda record: (str(record["group_id"]), _answer(record, tokens, file.criterion)), file.notes
    )
    for name, answer in answers:
        groups.setdefault(name, []).append(answer)
    chosen, size = dict[str, list[_Answer]](), 0
    for name, group in groups.items():
        chosen[name] = group
        size += sum(answer.row[_TOKENS] * _TOKEN_BYTES + len(answer.row[-1]) for answer in group)
        if size > 600_000:  # of texts and values, before they are compressed
            yield _chunk(chosen, tokens)
            chosen, size = {}, 0
    if chosen:
        yield _chunk(chosen, tokens)


def _answer(record: Record, tokens: TokenFile | None, criterion: tuple[str, PassScore]) -> _Answer:
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
        same["source"] = turn.get("source", "")
        turns.append({**same, "messages": messages, "tokens": count, "took": time_text(turn.get("times") or {})})
    prompt, reward = record["prompt"], record["reward"]
    shown = {
        "prompt": prompt and {name: prompt[name] for name in ("id", "messages", "answer", "media")},
        "rewards": record["rewards"] | {f"metric {name}": n for name, n in record.get("metrics", {}).items()},
        "failure": record["failure"],
        "turns": turns,
    }
    score = record["rewards"].get(criterion[0], reward)
    row = (
        int(record["index"]),
        int(has_passed(None if isinstance(score, dict) else score, record["rewards"], criterion[1])),
        float(reward) if reward is not None and np.isfinite(float(reward)) else None,
        str(record["status"]),
        str(record["turns"][-1]["stop_reason"]) if turns else "none",
        sum(len(turn["output_ids"]) for turn in record["turns"]),
        len(turns),
        version - min(oldest) if oldest and version is not None else None,
        _preview(turns[-1]["text"]) if turns else "",
    )
    if prompt is not None:
        media = {name: Media(outputs={}, **fields) for name, fields in prompt["media"].items()}
        texts = [m["content"] for m in prompt["messages"] or [] if isinstance(m, dict) and m.get("content")]
        asked = (
            _preview(text_with_images(texts[-1], media)) if texts else f"(prompt of {len(prompt['ids'] or [])} tokens)"
        )
        prompt = str(prompt["id"]), asked
    return _Answer(shown, prompt, row, parts)


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
        [m["digest"] for answer in answers for m in ((answer.shown["prompt"] or {}).get("media") or {}).values()],
    )


def _preview(text: Any) -> str:
    return " ".join(str(text)[: 4 * PREVIEW].split())[:PREVIEW]


def _values(tokens: TokenFile, parts: list[slice]) -> bytes:
    """The columns of these tokens end to end: versions int32, advantages and further columns float32, characters
    uint16, then one byte for each of log ratio, sampler's logprob, entropy, trained."""
    cut = {name: np.concatenate([array[part] for part in parts]) for name, array in tokens.columns.items()}
    columns = [
        cut["versions"].astype("<i4"),
        cut["advantages"].astype("<f4"),
        *(cut[name].astype("<f4") for name in further_columns()),
        np.minimum(cut["characters"], 65535).astype("<u2"),
        log_ratio_bytes(cut["logprobs"].astype(np.float64) - cut["rollout_logprobs"]),
        root_bytes(-cut["rollout_logprobs"]),
        root_bytes(cut["entropies"]),
        cut["trained"].astype(np.uint8),
    ]
    return b"".join(column.tobytes() for column in columns)


def further_columns() -> list[str]:
    """Columns without a presentation of their own: the page has their values as numbers."""
    return [column.name for column in columns_for("view") if column.name not in _PRESENTED]


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


MAX_PAGE_BYTES = 200_000_000
_COLUMNS = ("group", "answer", "passed", "reward", "status", "stop", "tokens", "turns", "age", "text")
_PRESENTED = {"versions", "advantages", "characters", "logprobs", "rollout_logprobs", "entropies", "trained"}
_WORDS = ("status", "stop")  # columns of few different texts, which the index has as numbers
_HERE = "meshrl.tools.viewer"


def write_view(folder: Path, out: Path | None = None, steps: str | None = None) -> list[str]:
    """Write `folder`/view.html, or `out`. steps: such as 10-20, for view_10-20.html. Returns lines for the user: the
    path, and what the page does not have. Without answers that can be read, the page states so."""
    damaged = list[str]()
    criterion = criterion_of(read_part(damaged, read_settings, folder / "config.yaml") or [])
    files = rollout_files(folder, criterion, steps)
    images = dict[str, str]()
    chunks, notes = _read(files, folder, images)
    notes += damaged
    text = page(folder.resolve().name, files, chunks, notes, images)
    out = out or folder / ("view.html" if steps is None else f"view_{steps}.html")
    return [f"wrote {write_page(out, text)}", *notes]


def rollout_files(folder: Path, criterion: tuple[str, PassScore], steps: str | None = None) -> list[RolloutFile]:
    """The files of a run's rollouts/, in the order of their steps, an evaluation before the step of its number."""
    first, last = 0, math.inf
    if steps is not None:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", steps)
        if match is None:
            raise ConfigError(f"--steps {steps!r}: write a step or a range, such as 12 or 10-20")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ConfigError(f"--steps {steps}: the range ends before it begins; write {last}-{first}")
    require_rollouts(folder)
    files = [(step, kind, path) for kind in ("eval", "step") for step, path in answer_files(folder, kind).items()]
    chosen = [RolloutFile(path, kind, step, criterion) for step, kind, path in sorted(files) if first <= step <= last]
    if not chosen:
        raise ConfigError(f"--steps {steps}: {folder} has the steps {min(files)[0]} to {max(files)[0]}")
    return chosen


def _read(files: list[RolloutFile], folder: Path, images: dict[str, str]) -> tuple[list[list[Chunk]], list[str]]:
    """The chunks of each file, within the limit of the page: the last steps first. Also lines about what is missing.
    images: gets the thumbnails of the prompts, as base64 by digest."""
    chunks: dict[int, list[Chunk]] = {}
    room, left_out = MAX_PAGE_BYTES, list[RolloutFile]()
    for i in reversed(range(len(files))):
        for chunk in read_chunks(files[i]) if room > 0 else ():
            new = {d: read_thumbnail(files[i].path.parent, d) for d in chunk.images if d not in images}
            images |= {digest: base64.b64encode(content).decode() for digest, content in new.items() if content}
            room -= sum(len(images.get(digest, "")) for digest in new)
            room -= len(chunk.texts) + len(chunk.values) + 160 * len(chunk.rows)
            if room > 0:
                chunks.setdefault(i, []).append(chunk)
        if room <= 0:
            left_out.append(files[i])
    same: dict[str, list[str]] = {}
    for file in files:
        for note in file.notes:
            same.setdefault(note.replace(file.path.stem, ""), []).append(note)
    notes = [f"{first} (and {counted(len(more), 'other file')})" if more else first for first, *more in same.values()]
    if left_out:
        to = f"{left_out[-1].step}-{left_out[0].step}"
        notes.append(
            f"the page is limited to {MAX_PAGE_BYTES / 1e6:.0f} MB: answers of the steps {to} are left out. "
            f"See them by: meshrl view {folder} --steps {to} --out FILE"
        )
    return [chunks.get(i, []) for i in range(len(files))], notes


def page(
    name: str, files: list[RolloutFile], chunks: list[list[Chunk]], notes: list[str], images: Mapping[str, str]
) -> str:
    """The complete page. The images and the chunks come after the script, so that the list appears before they are
    read."""
    every = [chunk for of_file in chunks for chunk in of_file]
    blocks = "".join(f'<script type="text/plain" id="image-{d}">{data}</script>\n' for d, data in images.items())
    blocks += "".join(
        f'<script type="text/plain" id="{kind}{i}">{text}</script>\n'
        for i, chunk in enumerate(every)
        for kind, text in (("texts", chunk.texts), ("values", chunk.values))
    )
    shown = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return document(
        f"{name} · view",
        [f"<header><h1>{escape(name)}</h1></header>{shown}", package_text(_HERE, "view.html")],
        style=[package_text(_HERE, "view.css")],
        scripts=[package_text(_HERE, "view.js")],
        data=data_block("index", _index(files, chunks)),
        tail=blocks,
    )


def _index(files: list[RolloutFile], chunks: list[list[Chunk]]) -> dict[str, Any]:
    """The numbers of each answer, as columns."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    groups: dict[str, list[Any]] = {"id": [], "prompt": [], "asked": [], "file": []}
    starts = [0]
    for number, of_file in enumerate(chunks):
        for chunk in of_file:
            first = len(groups["id"])
            for group in chunk.groups:
                for name, values in groups.items():
                    values.append(number if name == "file" else group[name])
            for name, column in zip(_COLUMNS, zip(*chunk.rows)):
                columns[name] += [first + group for group in column] if name == "group" else column
            starts.append(len(columns["group"]))
    words = {name: sorted(set(columns[name])) for name in _WORDS}
    for name, distinct in words.items():
        numbers = {word: i for i, word in enumerate(distinct)}
        columns[name] = [numbers[word] for word in columns[name]]
    return {
        "files": [{"kind": f.kind, "step": f.step, "name": step_name(f.kind, f.step)} for f in files],
        "groups": groups,
        "answers": columns,
        "words": words,
        "starts": starts,
        "max_nats": MAX_NATS,
        "columns": further_columns(),
    }

"""view.html: a page about all answers of a run that needs no other file, written by `meshrl view`."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from meshrl.core.errors import ConfigError
from meshrl.core.terminal import counted
from meshrl.monitor.rollout_log import answer_files
from meshrl.tools.page.document import data_block, document, package_text, write_page
from meshrl.tools.viewer.answers import require_rollouts, step_name
from meshrl.tools.viewer.chunks import MAX_NATS, Chunk, RolloutFile, read_chunks

MAX_PAGE_BYTES = 200_000_000
_COLUMNS = ("group", "answer", "reward", "status", "stop", "tokens", "turns", "age", "text")
_WORDS = ("status", "stop")  # columns of few different texts, which the index has as numbers
_HERE = "meshrl.tools.viewer"


def write_view(folder: Path, out: Path | None = None, steps: str | None = None) -> list[str]:
    """Write `folder`/view.html, or `out`. steps: such as 10-20, for view_10-20.html. Returns lines for the user: the
    path, and what the page does not have. Without answers that can be read, the page states so.

    Raises: MeshrlError when it is not a run's folder; ConfigError for wrong steps; OutputError.
    """
    files = rollout_files(folder, steps)
    chunks, notes = _read(files, folder)
    text = page(folder.resolve().name, files, chunks, notes)
    out = out or folder / ("view.html" if steps is None else f"view_{steps}.html")
    return [f"wrote {write_page(out, text)}", *notes]


def rollout_files(folder: Path, steps: str | None = None) -> list[RolloutFile]:
    """The files of a run's rollouts/, in the order of their steps, an evaluation before the step of its number. Raises:
    MeshrlError when there are none."""
    first, last = _range(steps)
    require_rollouts(folder)
    files = [(step, kind, path) for kind in ("eval", "step") for step, path in answer_files(folder, kind).items()]
    chosen = [RolloutFile(path, kind, step) for step, kind, path in sorted(files) if first <= step <= last]
    if not chosen:
        raise ConfigError(f"--steps {steps}: {folder} has the steps {min(files)[0]} to {max(files)[0]}")
    return chosen


def _range(steps: str | None) -> tuple[int, float]:
    if steps is None:
        return 0, float("inf")
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", steps)
    if match is None:
        raise ConfigError(f"--steps {steps!r}: write a step or a range, such as 12 or 10-20")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ConfigError(f"--steps {steps}: the range ends before it begins; write {last}-{first}")
    return first, last


def _read(files: list[RolloutFile], folder: Path) -> tuple[list[list[Chunk]], list[str]]:
    """The chunks of each file, within the limit of the page: the last steps first. Also lines about what is missing."""
    chunks: dict[int, list[Chunk]] = {}
    room, left_out = MAX_PAGE_BYTES, list[RolloutFile]()
    for i in reversed(range(len(files))):
        for chunk in read_chunks(files[i]) if room > 0 else ():
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


def page(name: str, files: list[RolloutFile], chunks: list[list[Chunk]], notes: list[str]) -> str:
    """The complete page. The chunks come after the script, so that the list appears before they are read."""
    every = [chunk for of_file in chunks for chunk in of_file]
    blocks = "".join(
        f'<script type="text/plain" id="{kind}{i}">{text}</script>\n'
        for i, chunk in enumerate(every)
        for kind, text in (("texts", chunk.texts), ("values", chunk.values))
    )
    shown = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    parts = [
        f"<header><h1>{escape(name)}</h1></header>{shown}",
        package_text(_HERE, "view.html"),
    ]
    return document(
        f"{name}: rollouts",
        parts,
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
    }

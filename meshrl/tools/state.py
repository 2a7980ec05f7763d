"""The state of a run: whether it is alive, or how it ended. Its files may be missing or damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshrl.core.errors import MeshrlError
from meshrl.core.files import is_there
from meshrl.monitor.jsonl import data_errors, read_object
from meshrl.monitor.status import STATUS_FILE, Status, read_status
from meshrl.run.folder import is_leased, is_running, similar_runs

T = TypeVar("T")
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class State:
    """word: running, done, failed, interrupted, killed (it has ended without a result), or unknown: the run is another
    user's, or its result can't be read. status: None if status.json is missing or damaged. result: of result.json;
    empty if that is missing, damaged, or of an earlier part of the run. problems: a line for each file of the run that
    can't be read, or not completely; its readers add theirs."""

    word: str
    status: Status | None
    result: dict[str, Any]
    problems: list[str]

    @property
    def text(self) -> str:
        """The word; of a run that has ended well without learning anything: done, no signal."""
        return f"{self.word}, no signal" if self.word == "done" and self.result.get("no_signal") else self.word

    @property
    def step(self) -> int:
        """Number of finished steps, of an evaluation of scored answers; 0 if no file has it."""
        steps = self.result.get("steps") or self.result.get("answers") or 0
        return max(steps, self.status.step if self.status else 0)


def is_run(folder: Path) -> bool:
    return is_there(folder / METRICS_FILE) or is_there(folder / STATUS_FILE)


def require_run(folder: Path) -> None:
    """Raises: MeshrlError when it is not a run's folder; it names the most similar runs."""
    if not is_run(folder):
        problem = f"is not a run's folder: it has no {METRICS_FILE}"
        if not (is_there(folder) and folder.is_dir()):
            wrong = "is a file" if is_there(folder) else "does not exist"
            problem = f"{wrong}; give the folder of a run, such as runs/NAME"
        raise MeshrlError(f"{folder} {problem}{similar_runs(folder)}")


def read_state(folder: Path) -> State:
    problems = list[str]()
    status = read_part(problems, read_status, folder) if is_there(folder / STATUS_FILE) else None
    path = folder / "result.json"
    if is_there(path) and (status is None or path.stat().st_mtime >= status.started):
        result = read_part(problems, _read_result, path) or {}
        return State(result.get("status") or "unknown", status, result, problems)
    alive = read_part(problems, is_running, folder, status) if status else read_part(problems, is_leased, folder)
    return State("unknown" if alive is None else "running" if alive else "killed", status, {}, problems)


def _read_result(path: Path) -> dict[str, Any]:
    result = read_object(path)
    with data_errors(str(path), "the result of a run"):
        for key, kinds in (("status", str), ("error", str), ("wall_s", (int, float)), ("steps", int), ("answers", int)):
            if not isinstance(result.get(key), (kinds, type(None))):
                raise TypeError(f"{key} is {result[key]!r:.80}")
    return result


def read_part(problems: list[str], part: Callable[..., T], *arguments: Any) -> T | None:
    """What `part` returns; None if it raises a MeshrlError, whose text is then added to `problems`."""
    try:
        return part(*arguments)
    except MeshrlError as damage:
        problems.append(str(damage))
        return None

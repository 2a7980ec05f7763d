"""Writes and reads the trajectories of a step: one line each in rollouts/step_XXXXXX.jsonl. Torch is not imported, so
that viewers start fast. rollouts/images/ has the thumbnails of prompts' images (thumbnails.py).

A file contains a group's prompt and the context of its first turn once: in the lines of later attempts, null stands for
those of the first line that has them. Only `read_rollouts` restores them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshrl.core.errors import DataError, Failure, Graded
from meshrl.core.files import replacing
from meshrl.core.types import SCHEMA, Media, Prompt, SamplingParams, Times, Trajectory, Turn
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.jsonl import data_errors, read_lines, to_line
from meshrl.monitor.thumbnails import Thumbnails, read_thumbnail
from meshrl.monitor.token_log import TokenTexts, TrainerValues, tokens_file, write_tokens

Record = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoggedTrajectory:
    """A trajectory read from a file. texts: each turn's sampled tokens decoded, with special tokens.

    The Trajectory is restored to the bit, except the arrays and the text of its media, which are not written. An image
    whose thumbnail is gone has none.
    """

    step: int
    trajectory: Trajectory
    texts: list[str]


class RolloutLog:
    """Writes `folder`/rollouts/step_000012.jsonl for each step; `folder` is the run's folder.

    decode: ids int32[R] -> text with special tokens. writes: counts failed writes, which end no run; by default the log
    has its own counter. every_steps: steps 1, 1 + every_steps, 1 + 2 * every_steps, ... have files, and all
    evaluations; 0 = nothing has a file. note: as for Thumbnails.

    Called in an event loop, a write only makes the lines; a thread writes them and the values of the tokens
    (FailedWrites.write). At most one step's waits in memory.
    """

    def __init__(
        self,
        folder: str | Path,
        decode: Callable[[np.ndarray], str],
        writes: FailedWrites | None = None,
        every_steps: int = 1,
        note: Callable[[str], None] = lambda text: None,
    ):
        self._folder, self._decode, self._every_steps = Path(folder) / "rollouts", decode, every_steps
        self._writes, self._token_texts = writes or FailedWrites(), TokenTexts(decode)
        self._thumbnails = Thumbnails(self._folder, note)

    def has_file(self, step: int, name: str = "step") -> bool:
        """Whether this step has a file."""
        return self._every_steps > 0 and (name != "step" or (step - 1) % self._every_steps == 0)

    def write(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        name: str = "step",
        append: bool = False,
        trainer: TrainerValues | None = None,
    ) -> Path | None:
        """Write a step's trajectories to a complete file, which replaces one of an interrupted run, and the values of
        its tokens next to it (token_log). A folder that was removed is created again. Returns the file, also if it
        can't be written; None if this step has no file.

        name: the first word of the file's name; "eval" for evaluations. append: add these groups to the file, without
        token values, which `write_tokens` writes at the end.
        """
        if not self.has_file(step, name):
            return None
        self._writes.wait()
        path, lines = self._folder / f"{name}_{step:06d}.jsonl", list[str]()
        groups: dict[str, _Group] = {}
        texts, images = self._texts(trajectories), self._thumbnails.missing(trajectories)
        for trajectory, of_turns in zip(trajectories, texts):
            record = _trajectory_record(trajectory, of_turns)
            # Null stands for the prompt and the first context of the group, if an earlier line has them.
            group = groups.setdefault(trajectory.group_id, _Group())
            if group.prompt is trajectory.prompt:
                record["prompt"] = None
            group.prompt = group.prompt or trajectory.prompt
            for turn, turn_record in zip(trajectory.turns[:1], record["turns"]):
                if group.context_ids is None:
                    group.context_ids = turn.context_ids
                elif np.array_equal(group.context_ids, turn.context_ids):
                    turn_record["context_ids"] = None
            lines.append(to_line({"schema": SCHEMA, "step": step, **record}))

        def write_files() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            tokens_file(path).unlink(missing_ok=True)
            place = _appended(path) if append else replacing(path)
            with place as aside, aside.open("a" if append else "w", encoding="utf-8") as file:
                file.writelines(lines)
            if not append:
                write_tokens(tokens_file(path), trajectories, texts, self._token_texts, trainer)
            self._thumbnails.write(images)

        self._writes.write("rollouts", write_files)
        return path

    def write_tokens(self, step: int, trajectories: Sequence[Trajectory], name: str) -> None:
        """Write the values of the tokens of these trajectories, which `write` has appended to a file."""
        path = tokens_file(self._folder / f"{name}_{step:06d}.jsonl")
        texts = self._texts(trajectories)
        self._writes.write("rollouts", partial(write_tokens, path, trajectories, texts, self._token_texts, None))

    def _texts(self, trajectories: Sequence[Trajectory]) -> list[list[str]]:
        return [[self._decode(turn.output_ids) for turn in t.turns] for t in trajectories]


@contextmanager
def _appended(path: Path) -> Iterator[Path]:
    """Context for adding lines to a file. What a failed write has added is removed: later lines would continue it."""
    size = path.stat().st_size if path.exists() else 0
    try:
        yield path
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


@dataclass(slots=True)
class _Group:
    """The prompt and the first context of a group, which its file contains once."""

    prompt: Prompt | None = None
    context_ids: np.ndarray | None = None


def step_files(folder: Path, first_step: int) -> list[Path]:
    """The files of step `first_step` and later ones in a run's rollouts/, also of evaluations after these steps."""
    paths = sorted([*folder.glob("*_*.jsonl"), *folder.glob("*_*.tokens.parquet")])
    numbers = [path.name.partition(".")[0].rpartition("_")[2] for path in paths]
    return [path for path, number in zip(paths, numbers) if number.isdecimal() and int(number) >= first_step]


def answer_files(run: Path, kind: str) -> dict[int, Path]:
    """The files of a run's rollouts by step, in rising order. kind: "step", or "eval" for evaluations after these
    steps."""
    numbered = ((path.stem.rpartition("_")[2], path) for path in (run / "rollouts").glob(f"{kind}_*.jsonl"))
    return dict(sorted((int(number), path) for number, path in numbered if number.isdecimal()))


def read_rollouts(path: str | Path, notes: list[str] | None = None) -> Iterator[LoggedTrajectory]:
    """The trajectories of one step's file, one at a time. Attempts of one group may share their Prompt. notes, Raises:
    as for `read_records`."""
    groups: dict[str, _Group] = {}

    def logged(record: Record) -> LoggedTrajectory:
        trajectory = _trajectory(record, groups.setdefault(record["group_id"], _Group()))
        for media in trajectory.prompt.media.values() if record["prompt"] else ():
            media.thumbnail = read_thumbnail(Path(path).parent, media.digest)
        return LoggedTrajectory(record["step"], trajectory, [turn["text"] for turn in record["turns"]])

    return read_records(path, logged, notes)


def read_records(path: str | Path, convert: Callable[[Record], T], notes: list[str] | None = None) -> Iterator[T]:
    """The converted records of one step's file, one at a time. notes: gets a sentence if the rest of the file can't be
    read. Without notes, this is an error, and an incomplete last line is ignored.
    """
    try:
        for number, record in enumerate(read_lines(path, all_complete=notes is not None), start=1):
            if record.get("schema") != SCHEMA:
                raise DataError(f"{path}:{number}: schema {record.get('schema')!r}; this version reads schema {SCHEMA}")
            with data_errors(f"{path}:{number}", "a trajectory"):
                converted = convert(record)
            yield converted
    except DataError as damage:
        if notes is None:
            raise
        notes.append(f"{damage}; the file is shown up to there")


# Fields that a record has as they are.
_TRAJECTORY = ("group_id", "index", "purpose", "status")
_PROMPT = ("id", "ordinal", "messages", "answer", "env", "meta")
_MEDIA = ("kind", "digest", "source", "num_tokens")
_TURN = ("parent", "stop_reason", "messages", "seed", "engine_id")
_SAMPLING, _TIMES = ([field.name for field in fields(kind)] for kind in (SamplingParams, Times))
# Arrays of a turn, of which a record has the values only.
_TOKENS = {"context_ids": np.int32, "output_ids": np.int32, "logprobs": np.float32, "versions": np.int32}


def _fields(record: Any, names: Sequence[str]) -> Record:
    return {name: getattr(record, name) for name in names}


def _trajectory_record(t: Trajectory, texts: list[str]) -> Record:
    return {
        "id": t.id,
        **_fields(t, _TRAJECTORY),
        "failure": asdict(t.failure) if t.failure else None,
        "reward": t.reward,
        "has_abstained": t.has_abstained,
        "metrics": t.metrics,
        "rewards": {n: {"failure": asdict(r)} if isinstance(r, Failure) else r for n, r in t.rewards.items()},
        "prompt": {
            **_fields(t.prompt, _PROMPT),
            "ids": t.prompt.ids,
            "media": {name: _fields(media, _MEDIA) for name, media in t.prompt.media.items()},
            "media_spans": [list(span) for span in t.prompt.media_spans],
        },
        "turns": [
            {
                "text": text,
                **_fields(turn, [*_TURN, *_TOKENS]),
                "source": turn.source,
                "reward": turn.reward,
                "media_spans": [list(span) for span in turn.media_spans],
                "routed_experts": None if turn.routed_experts is None else _array_record(turn.routed_experts),
                "extras": {name: _array_record(array) for name, array in turn.extras.items()},
                "sampling": _fields(turn.sampling, _SAMPLING),
                "times": _fields(turn.times, _TIMES),
            }
            for text, turn in zip(texts, t.turns)
        ],
    }


def _array_record(array: np.ndarray) -> Record:
    return {"dtype": str(array.dtype), "shape": list(array.shape), "values": array.ravel()}


def _array(record: Record) -> np.ndarray:
    return np.array(record["values"], dtype=record["dtype"]).reshape(record["shape"])


def _trajectory(r: Record, group: _Group) -> Trajectory:
    prompt = group.prompt
    if (saved := r["prompt"]) is not None:
        prompt = Prompt(
            **{name: saved[name] for name in _PROMPT},
            ids=None if saved["ids"] is None else np.array(saved["ids"], np.int32),
            media={name: Media(outputs={}, **fields) for name, fields in saved["media"].items()},
            media_spans=[tuple(span) for span in saved.get("media_spans", ())],
        )
    if prompt is None:
        raise ValueError(f"its prompt is null, and no earlier line has the prompt of group {r['group_id']}")
    group.prompt = group.prompt or prompt
    turns = [_turn(turn, group.context_ids) for turn in r["turns"]]
    if group.context_ids is None and turns:
        group.context_ids = turns[0].context_ids
    return Trajectory(
        **{name: r[name] for name in _TRAJECTORY},
        prompt=prompt,
        turns=turns,
        failure=Failure(**r["failure"]) if r["failure"] else None,
        rewards={n: _graded(result) for n, result in r["rewards"].items()},
        reward=_number(r["reward"]),
        has_abstained=bool(r.get("has_abstained")),
        metrics=r.get("metrics", {}),
    )


def _turn(r: Record, first_context: np.ndarray | None) -> Turn:
    """first_context: the one of the group's first turn, for which null stands."""
    sampling = r["sampling"]
    sampling |= {"stop_token_ids": tuple(sampling["stop_token_ids"]), "stop": tuple(sampling.get("stop", ()))}
    if r["context_ids"] is None:
        if first_context is None:
            raise ValueError("its context_ids are null, and no earlier line has the first context of its group")
        r = {**r, "context_ids": first_context}
    tokens: Record = {name: np.array(r[name], dtype) for name, dtype in _TOKENS.items()}
    return Turn(
        **{name: r[name] for name in _TURN},
        **tokens,
        source=r.get("source", ""),
        reward=_number(r["reward"]),
        media_spans=[(name, start, size) for name, start, size in r["media_spans"]],
        routed_experts=None if r["routed_experts"] is None else _array(r["routed_experts"]),
        extras={name: _array(array) for name, array in r["extras"].items()},
        sampling=SamplingParams(**sampling),
        times=Times(**r["times"]),
    )


def _graded(saved: Any) -> Graded:
    return Failure(**saved["failure"]) if isinstance(saved, dict) else None if saved is None else float(saved)


def _number(value: float | str | None) -> float | None:
    """The original number: non-finite numbers were written as texts."""
    return float(value) if isinstance(value, str) else value

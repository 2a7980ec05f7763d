"""What a check of a config gets, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from meshrl.core.best_models import read_best
from meshrl.core.errors import CheckpointError, ConfigError
from meshrl.core.files import is_there
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, similar_names

if TYPE_CHECKING:
    from meshrl.config.run import RunConfig, SftRunConfig

Purpose = Literal["train", "eval", "sft"]


@dataclass(frozen=True, slots=True)
class Value:
    """A value as given. origin: "gsm8k.yaml:12", "command line", source.CONFIG_DICT or source.PYTHON_OBJECT. folder: a
    relative path in the value starts there."""

    value: Any
    origin: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a config: its keys (the first is the wrong one), and a text with what to do. origin: where the fault
    is, "" = where the keys were given. void: those of the keys that are left out if another of them has a stronger
    origin, such as the command line over a file; reason: of the note about this, "" = the text's first sentence."""

    keys: tuple[str, ...]
    text: str
    origin: str = ""
    void: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Input of the checks. given: the values of files and command line by dotted key; all other keys have defaults.

    table_names: of the reward and agent tables, {"reward": {...}, "agent": {...}}; without an entry only the form of
    a kind is checked. rows: rows in memory, by the config key that they replace. starts: whether the run starts on
    this machine, now; None = it starts on another one. fitted: defaults that were lowered to fit the model -> the
    default.
    """

    config: RunConfig | SftRunConfig
    given: dict[str, Value]
    folder: Path
    purpose: Purpose
    table_names: dict[str, set[str]] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    starts: bool | None = True
    fitted: Mapping[str, int] = field(default_factory=dict)

    @property
    def rl(self) -> RunConfig:
        """The config of a training or an evaluation, for checks that are made only of these."""
        return cast("RunConfig", self.config)

    def find(self, key: str) -> tuple[Path | None, list[Path]]:
        """(the file or folder that the path of a given key names, places tried). The path is relative to the config
        file, else to the working folder. A run in place of a model names its best model, else its newest."""
        given = self.given[key]
        try:
            path = Path(given.value).expanduser()
        except RuntimeError:  # ~name, where there is no such user
            path = Path(given.value)
        places = list(dict.fromkeys(start / path for start in (given.folder, self.folder, Path.cwd())))
        there = next((place.resolve() for place in places if is_there(place)), None)
        model = model_of_run(there) if there is not None and key == "model.path" else None
        return model or there, places


def model_of_run(folder: Path) -> Path | None:
    """The best model of a run, or the newest if no evaluation has recorded one, of its folder or its checkpoints; the
    model of one checkpoint. None = the folder is none of these, or has no model."""
    if (folder / "config.json").is_file():
        return None
    run = folder.parent if folder.name == "checkpoints" else folder
    models = sorted(run.glob("checkpoints/step_*/model"), key=lambda path: (len(path.parent.name), path))
    try:
        models += [Path(best.model)] if (best := read_best(run)) is not None else []
    except CheckpointError as cause:
        raise ConfigError(f"{cause}. Or name a model's folder in place of the run") from cause
    if models and not models[-1].is_dir():  # a hub id, if no step of the run was better, or it was removed
        raise ConfigError(f"the best model of {run} is {models[-1]}, which is no folder; give a model's folder or id")
    models.append(folder / "model")
    return next((path.resolve() for path in reversed(models) if (path / "config.json").is_file()), None)


Check = Callable[[Case], Iterable[Problem]]


def name_problems(key: str, name: str, names: Collection[str]) -> Iterator[Problem]:
    """Of a word of a table, or a dotted path. names: of the table; empty = only the form is checked."""
    if name in names:
        return
    if DOTTED_PATH.fullmatch(name):
        if not can_be_imported(name):
            where = f"neither installed, nor next to the config, nor in PYTHONPATH or {Path.cwd()}"
            yield Problem((key,), f"no such module: {where}.")
    elif names or not name.isidentifier():
        close = similar_names(name, names)
        meant = f" Nearest: {', '.join(close)}." if close else ""
        choices = f"one of {', '.join(sorted(names))}" if names else "a name"
        yield Problem((key,), f"must be {choices}, or a dotted path package.module:name.{meant}")

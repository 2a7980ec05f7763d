"""The names that other frameworks give to settings, and the keys that meshrl has in their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from meshrl.config.schema import meant_by

FRAMEWORKS = {"verl": "verl", "trl": "TRL", "prime-rl": "prime-rl", "other": "other frameworks"}
"""Column of other_frameworks.yaml -> the framework."""
MOST_MEANINGS = 3  # a name such as `path`, which has more, gives no hint without its section


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A row of the table. names: framework -> its names of the setting. here: keys of meshrl; empty = there is none.
    note: how the values differ, or without a key what to do instead. unwritten, only, values, rule, defaults: how
    `meshrl translate` translates a value, as at the top of the table.

    Example: Setting(topic="Batches and steps", names={"TRL": ("num_train_epochs",)}, here=("loop.num_steps",),
    note="counts steps: ...").
    """

    topic: str
    names: dict[str, tuple[str, ...]]
    here: tuple[str, ...]
    note: str
    unwritten: frozenset[str] = frozenset()
    only: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    rule: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """What a name of another framework means here. here: keys of meshrl, of the command whose config is read; empty =
    meshrl has no such key. note: as in Setting."""

    name: str
    framework: str
    here: tuple[str, ...]
    note: str

    def __str__(self) -> str:
        if not self.here:
            return f"{self.name} of {self.framework} is {self.note}."
        *others, last = self.here
        here = f"{', '.join(others)} and {last}" if others else last
        note = f": {self.note}" if self.note else ""
        return f"{self.name} of {self.framework} is {here} here{note}."


@cache
def settings() -> tuple[Setting, ...]:
    """All rows of the table, in its order."""
    text = resources.files("meshrl.config").joinpath("other_frameworks.yaml").read_text(encoding="utf-8")
    topics = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C it takes a tenth of the time
    return tuple(
        Setting(
            topic=topic,
            names={
                title: tuple(row[column].replace("~", "").split())
                for column, title in FRAMEWORKS.items()
                if column in row
            },
            here=tuple(row.get("here", "").split()),
            note=row.get("note") or row.get("instead", ""),
            unwritten=frozenset(
                name[:-1] for column in FRAMEWORKS for name in row.get(column, "").split() if name.endswith("~")
            ),
            **{name: row[name] for name in ("only", "values", "rule", "defaults") if name in row},
        )
        for topic, rows in topics.items()
        for row in rows
    )


@cache
def _by_last_part() -> dict[str, list[tuple[list[str], str, Setting]]]:
    """Last part of a name, in lower case -> (parts of the name, framework, setting) of each name that ends with it."""
    by_part = defaultdict(list)
    for setting in settings():
        for framework, names in setting.names.items():
            for name in names:
                parts = name.lower().split(".")
                by_part[parts[-1]].append((parts, framework, setting))
    return dict(by_part)


def meanings(path: str, keys: Collection[str]) -> list[Meaning]:
    """What a dotted name of another framework means, a name with or without its sections; at most MOST_MEANINGS.
    keys: the known keys of meshrl. Empty if no other framework has this name, or if its meaning depends on the section.

    The name itself comes first, then a section of the table that contains it, then the names with most equal parts at
    the end.
    """
    parts = path.lower().split(".")
    names = _by_last_part().get(parts[-1], [])
    candidates = [each for each in names if each[0] == parts]
    if not candidates:
        candidates = [each for each in _by_last_part()["*"] if f".{'.'.join(each[0][:-1])}." in f".{'.'.join(parts)}."]
    if not candidates:
        most = max((_num_equal(parts, each[0]) for each in names), default=0)
        candidates = [each for each in names if _num_equal(parts, each[0]) == most]
        contradict = most == 1 and all(len(each[0]) > 1 for each in candidates) and len(parts) > 1
        if contradict and len({each[2].here for each in candidates}) > 1:
            return []
    by_setting: dict[int, Meaning] = {}
    for name, framework, setting in candidates:
        here = tuple(key for key in setting.here if key in keys)
        if here or not setting.here:
            meaning = Meaning(name=".".join(name), framework=framework, here=here, note=setting.note)
            by_setting.setdefault(id(setting), meaning)
    return list(by_setting.values()) if len(by_setting) <= MOST_MEANINGS else []


def setting_of(name: str, framework: str) -> tuple[Setting, str] | None:
    """The setting of a full dotted name of a framework, and the rest of the name: the part below a section that the
    setting is, or "". None if the table has neither the name nor its section."""
    name, titles = name.lower(), (framework, FRAMEWORKS["other"])
    parts = name.split(".")
    tries = [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(len(parts), 0, -1)]
    for known, rest in [tries[0], *((f"{section}.*", rest) for section, rest in tries), *tries[1:]]:
        for candidate, title, setting in _by_last_part().get(known.rpartition(".")[2], []):
            if (
                ".".join(candidate) == known
                and title in titles
                and (setting.topic != "Sections" or known in setting.unwritten)
            ):
                return setting, "" if known.endswith("*") else rest
    return None


def misspelt_meanings(path: str, keys: Collection[str]) -> list[Meaning]:
    """As `meanings`, for a path whose last part is a misspelt form of that of a known name."""
    section, dot, leaf = path.rpartition(".")
    close = meant_by(leaf, _by_last_part())
    return meanings(f"{section}{dot}{close[0]}", keys) if close else []


def _num_equal(first: list[str], second: list[str]) -> int:
    """Number of equal parts at the ends of two names."""
    pairs = list(zip(reversed(first), reversed(second)))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

"""Every dotted key of a configuration, read from the slices: for errors, `meshrl config` and docs/config.md."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from meshrl.config.base import Slice
from meshrl.config.values import show

LONGEST_MISSPELT = 200  # characters; a longer key is no misspelt key, and comparing it with all keys would take minutes
NAME = "NAME"  # the part of a dotted key that the user chooses, as in reward.terms.NAME.kind
_ANY = TypeAdapter(Any)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key. allowed: its type and limits in words. default: as YAML, None = required.

    Example: Key(path="train.optimizer.lr", allowed="number > 0", default="1e-06", text="peak learning rate; ...",
    is_section=False).
    """

    path: str
    allowed: str
    default: str | None
    text: str
    is_section: bool

    @property
    def is_dict(self) -> bool:
        """Whether the user chooses the names in it."""
        return self.allowed.startswith("names")


_KEYS: dict[tuple[type[Slice], str], dict[str, Key]] = {}


def all_keys(model: type[Slice], prefix: str = "") -> dict[str, Key]:
    """Every key of a slice by its dotted path, sections before their keys, in the order of the slices."""
    if (model, prefix) in _KEYS:
        return _KEYS[model, prefix]
    keys: dict[str, Key] = {}
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        section, entries = _as_slice(info.annotation), _entry_slice(info.annotation)
        value = None if info.is_required() else info.get_default(call_default_factory=True)
        default = _ANY.dump_python(value, mode="json", exclude_defaults=True)
        keys[path] = Key(
            path=path,
            allowed="a section" if section else _allowed(info),
            default=None if info.is_required() else show(default),
            text=" ".join((info.description or "").split()),
            is_section=bool(section or entries),
        )
        if section:
            keys |= all_keys(section, f"{path}.")
        if entries:
            path = f"{path}.{NAME}"
            text = f"one entry of {prefix}{name}"
            keys[path] = Key(path=path, allowed="a section", default=None, text=text, is_section=True)
            keys |= all_keys(entries, f"{path}.")
    _KEYS[model, prefix] = keys
    return keys


def locate(keys: dict[str, Key], path: str) -> tuple[Key | None, str]:
    """The deepest known key that leads to a dotted path, and the rest of the path below it ("" = the key itself).

    Example: "reward.terms.answer.kid" -> (the key reward.terms.NAME, "kid").
    """
    parts, prefix = path.split("."), ""
    for i, part in enumerate(parts):
        tries = [f"{prefix}.{name}".lstrip(".") for name in (part, NAME)]
        longer = next((candidate for candidate in tries if candidate in keys), None)
        if longer is None:
            return keys.get(prefix), ".".join(parts[i:])
        prefix = longer
    return keys[prefix], ""


def nearest(keys: dict[str, Key], path: str, is_section: bool = False, near_section: bool = False) -> list[str]:
    """At most three keys whose last part is that of the path, or at most two edits from it: those with fewest edits,
    in the most similar sections. is_section: the unknown key is a section. near_section: only misspelt keys of the same
    section, and keys with this last part in the same top-level section."""
    if len(path) > LONGEST_MISSPELT:
        return []
    section, _, leaf = path.rpartition(".")
    most = most_edits(leaf)
    edits: dict[str, int] = {}
    for candidate, key in keys.items():
        candidate_section, _, candidate_leaf = candidate.rpartition(".")
        if key.is_section != is_section or (near_section and candidate.split(".")[0] != path.split(".")[0]):
            continue
        count = num_edits(leaf.lower(), candidate_leaf, most)
        if count <= most and not (near_section and count and candidate_section != section):
            edits[candidate] = count
    fewest = min(edits.values(), default=0)
    likeness = {
        candidate: difflib.SequenceMatcher(None, section, candidate.rpartition(".")[0]).ratio()
        for candidate, n in edits.items()
        if n == fewest
    }
    names, written = [], path.split(".")
    for candidate in sorted(likeness, key=lambda k: -likeness[k]):
        parts = enumerate(candidate.split("."))  # the user's own name stands for NAME
        names.append(".".join(written[i] if part == NAME and i < len(written) else part for i, part in parts))
    return list(dict.fromkeys(names))[:3]


def most_edits(word: str) -> int:
    """Edits that make a word a misspelt form of another one: two, in a short word one."""
    return 0 if len(word) < 2 else 1 if len(word) < 6 else 2


def num_edits(word: str, target: str, most: int) -> int:
    """The number of letters to insert, delete, replace or exchange with their neighbour, or most + 1 if
    there are more. Source: optimal string alignment."""
    if abs(len(word) - len(target)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(target) + 1))
    for i, letter in enumerate(word, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(target, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == target[j - 2] and word[i - 2] == wanted:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return most + 1
    return min(row[-1], most + 1)


def _allowed(info: FieldInfo) -> str:
    limits = [
        f"{symbol} {show(getattr(rule, name))}"
        for rule in info.metadata
        for name, symbol in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, name, None) is not None
    ]
    allowed = words(info.annotation)
    base, null, _ = allowed.partition(" or null")
    return f"{base} {' and '.join(limits)}{null}" if limits else allowed


_WORDS: dict[Any, str] = {str: "string", bool: "true | false", int: "integer", float: "number", Any: "anything"}
_WORDS[datetime] = "date and time"


def words(annotation: Any) -> str:
    """The values that a field of this type takes. Raises: KeyError for a type that no field of a config has."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(show(value) for value in args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arg is type(None) else words(arg) for arg in args)
    if origin is list:
        plural = "" if typing.get_origin(args[0]) is Literal else "s"
        return f"list of {words(args[0])}{plural}"
    if origin is tuple:
        return f"[{', '.join(words(arg) for arg in args)}]"
    if origin is dict:
        return "names -> sections" if _entry_slice(annotation) else "names -> values"
    return _WORDS[annotation]


def _as_slice(annotation: Any) -> type[Slice] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Slice) else None


def _entry_slice(annotation: Any) -> type[Slice] | None:
    args: Sequence[Any] = typing.get_args(annotation)
    return _as_slice(args[1]) if typing.get_origin(annotation) is dict else None

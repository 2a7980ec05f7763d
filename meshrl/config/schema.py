"""Every dotted key of a configuration, read from the slices: for errors, `meshrl config` and docs/config.md."""

from __future__ import annotations

import difflib
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from meshrl.config.base import Slice
from meshrl.config.values import show
from meshrl.core.lookup import similar_names

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
    """At most three keys whose last part is most similar to that of the path, in the most similar sections. is_section:
    the unknown key is a section. near_section: only misspelt keys of the same section, and keys with this last part in
    the same top-level section."""
    section, _, leaf = path.rpartition(".")
    by_leaf: dict[str, list[tuple[str, str]]] = defaultdict(list)  # last part -> (section, key) of each key with it
    for candidate, key in keys.items():
        its_section, _, its_leaf = candidate.rpartition(".")
        is_near = its_section == section or (its_leaf == leaf and candidate.split(".")[0] == path.split(".")[0])
        if key.is_section == is_section and (is_near or not near_section):
            by_leaf[its_leaf].append((its_section, candidate))
    candidates = [each for close in meant_by(leaf, by_leaf) for each in by_leaf[close]]
    candidates.sort(key=lambda each: -difflib.SequenceMatcher(None, section, each[0]).ratio())
    names, written = [], path.split(".")
    for _, candidate in candidates:
        parts = enumerate(candidate.split("."))  # the user's own name stands for NAME
        names.append(".".join(written[i] if part == NAME and i < len(written) else part for i, part in parts))
    return list(dict.fromkeys(names))[:3]


def meant_by(word: str, names: Collection[str]) -> list[str]:
    """The names, all equally similar, of which the word may be a misspelt form: a letter or two are wrong, missing or
    too many, or letters are exchanged."""
    close = similar_names(word, names, 3, max(0.8, 1 - 2 / max(1, len(word))))
    if not close:
        letters = sorted(word.lower())
        return [name for name in names if sorted(name) == letters]
    likeness = [difflib.SequenceMatcher(None, word.lower(), name).ratio() for name in close]
    return [name for name, ratio in zip(close, likeness) if ratio == likeness[0]]


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

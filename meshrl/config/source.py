"""Config files, Python dicts and command-line overrides as trees of values with the place where each was written.

A tree is a dict of trees and Values; lists and scalars are Values. Each layer (base file, file, each override) is read,
its shorthands are written out, then the layers are merged: a later layer wins; sections merge, all else is replaced.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Union

import yaml

from meshrl.config.schema import Key, locate
from meshrl.config.values import scalar
from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, is_there, read_text

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
COMMAND_LINE = "command line"
CONFIG_DICT = "config-dict"  # a config that is a Python dict: its name, and the origin of its values
PYTHON_OBJECT = "Python object"
MAX_BYTES = 256 << 10  # of a config file: YAML is parsed at about this rate per second
MAX_DEPTH = 30  # sections in sections; an alias that contains itself has no end
MAX_VALUES = 10_000  # with each alias written out: nine lines of aliases can mean a billion values
YAML_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))  # text, list and section, unmarked


@dataclass(frozen=True, slots=True)
class Value:
    """A value as given. origin: "gsm8k.yaml:12", "command line", CONFIG_DICT or PYTHON_OBJECT. folder: a relative path
    in the value starts there."""

    value: Any
    origin: str
    folder: Path


Tree: TypeAlias = dict[str, Union["Tree", Value]]


class ShorthandSection(dict[str, Any]):
    """A section written out from a shorthand: it replaces the section of earlier layers instead of merging with it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a config: its keys (the first is the wrong one), and a text with what to do. origin: where the fault
    is, "" = where the keys were given."""

    keys: tuple[str, ...]
    text: str
    origin: str = ""


def find(given: Value, folder: Path) -> tuple[Path | None, list[Path]]:
    """(the file or folder that a path names, places tried). The path is relative to the config file, else to the
    working folder."""
    try:
        path = Path(given.value).expanduser()
    except RuntimeError:  # ~name, where there is no such user
        path = Path(given.value)
    places = list(dict.fromkeys(start / path for start in (given.folder, folder, Path.cwd())))
    return next((place.resolve() for place in places if is_there(place)), None), places


def dotted(path: str, name: str) -> str:
    """The dotted key of an entry of a section; "" is the top."""
    return f"{path}.{name}" if path else name


class Reader:
    """Reads one run's files and overrides, and collects the problems after which reading can go on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.problems: list[Problem] = []
        self._num_values = 0

    def files(self, path: Path, seen: tuple[Path, ...] = ()) -> list[Tree]:
        """The layers of a file, after those of its base. Raises: ConfigError if one can't be read or is its base."""
        return self._on_base(path, self._file(path), seen)

    def mapping(self, config: Mapping[str, Any], origin: str) -> list[Tree]:
        """The layers of a dict in the form of a config file, after those of its base. Raises: ConfigError, as `files`,
        and for a key that is not text or a value that a config file can't contain."""
        return self._on_base(self.folder / CONFIG_DICT, self._section(config, origin, ""), ())

    def _on_base(self, path: Path, tree: Tree, seen: tuple[Path, ...]) -> list[Tree]:
        base = tree.pop("base", None)
        if base is None:
            return [tree]
        if not isinstance(base, Value) or not isinstance(base.value, str):
            raise ConfigError(f"{path}: `base` must be the name of one config file to inherit from")
        below = path.parent / base.value
        if not is_there(below):
            raise ConfigError(
                f"{path}: base file {base.value!r} not found; it is looked up in the folder of this file, as {below}"
            )
        chain = (*seen, path.resolve())
        if below.resolve() in chain:
            raise ConfigError(
                f"{path}: `base: {base.value}` leads back to a file that is already being read; remove it"
            )
        return [*self.files(below, chain), tree]

    def _section(self, section: Mapping[str, Any], origin: str, path: str) -> Tree:
        tree: Tree = {}
        for name, value in section.items():
            if not isinstance(name, str):
                raise ConfigError(f"{origin}: {path or 'top level'}: the key {name!r} must be a text")
            inner = dotted(path, name)
            if isinstance(value, Mapping):
                tree[name] = self._section(value, origin, inner)
                continue
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            try:
                tree[name] = Value(json.loads(json.dumps(value)), origin, self.folder)
            except (TypeError, ValueError) as cause:
                raise ConfigError(
                    f"{origin}: {inner} is {type(value).__name__} {value!r:.80}, which can't be in a config ({cause}); "
                    "give text, numbers, true or false, null, or lists and dicts of these"
                ) from cause
        return tree

    def override(self, text: str) -> Tree:
        """The layer of one `dotted.key=value`; the value is YAML, as in a file."""
        path, equals, value = text.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"{text!r} is not an override: write dotted.key=value, such as train.optimizer.lr=1e-6")
        node = _compose(value, f"the value of {path} on the command line")
        read = self._read(node, COMMAND_LINE, path, self.folder) if node else Value(None, COMMAND_LINE, self.folder)
        for part in reversed(path.split(".")):
            read = {part: read}
        assert isinstance(read, dict)
        return read

    def _file(self, path: Path) -> Tree:
        try:
            text = read_text(path, MAX_BYTES)
        except Unreadable as cause:
            raise ConfigError(f"config file {str(path)!r}: {cause} (working folder {Path.cwd()})") from cause
        node = _compose(text, str(path))
        name = os.path.relpath(path.resolve(), self.folder)
        tree = self._read(node, name, "", path.resolve().parent) if node else {}
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{path}: a config file is a mapping of sections (model:, train:, ...), not a single value"
            )
        return tree

    def _read(
        self, node: yaml.Node, name: str, path: str, folder: Path, key_line: int | None = None, depth: int = 0
    ) -> Tree | Value:
        """The tree of a YAML node. name: of the file. key_line: the line of the node's key."""
        line = node.start_mark.line + 1 if key_line is None else key_line
        origin = name if name == COMMAND_LINE else f"{name}:{line}"
        if depth > MAX_DEPTH:
            raise ConfigError(f"{origin}: sections nested more than {MAX_DEPTH} deep")
        if not isinstance(node, yaml.MappingNode):
            return Value(self._plain(node, origin), origin, folder)
        _require_no_tag(node, origin)
        tree: Tree = {}
        for key, entry in self._entries(node, name, path):
            inner, at = dotted(path, key.value), key.start_mark.line + 1
            tree[key.value] = self._read(entry, name, inner, folder, at, depth + 1)
        return tree

    def _plain(self, node: yaml.Node, origin: str, depth: int = 0) -> Any:
        """A list or a single value; entries of a list have no origins of their own."""
        self._num_values += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{origin}: lists nested more than {MAX_DEPTH} deep")
        if self._num_values > MAX_VALUES:
            raise ConfigError(
                f"{origin}: more than {MAX_VALUES:,} values, counting those of an alias (*name) in each place "
                "where it is used; a normal config has some hundred values. Remove the aliases, or give the "
                "rows as a data file"
            )
        _require_no_tag(node, origin)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(entry, origin, depth + 1) for entry in node.value]
        if isinstance(node, yaml.MappingNode):
            name = origin.rpartition(":")[0] or origin
            return {key.value: self._plain(entry, origin, depth + 1) for key, entry in self._entries(node, name, "")}
        quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
        return node.value if quoted else scalar(node.value)

    def _entries(self, node: yaml.MappingNode, name: str, path: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        first: dict[str, int] = {}
        for key, entry in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{name}:{line}: a key must be a single word, not a list or a mapping")
            if key.value in first:
                origin = name if name == COMMAND_LINE else f"{name}:{line}"
                text = f"given twice, first in line {first[key.value]}: YAML would ignore one of them. Remove one."
                self.problems.append(Problem((dotted(path, key.value),), text, origin))
                continue
            first[key.value] = line
            yield key, entry


def _require_no_tag(node: yaml.Node, origin: str) -> None:
    if node.tag not in YAML_TAGS:
        raise ConfigError(f"{origin}: the YAML tag {node.tag!r} is not used here; write the plain value")


def _compose(text: str, where: str) -> yaml.Node | None:
    loader = None
    try:
        # The BaseLoader reads every scalar as text; values.scalar gives its meaning.
        loader = yaml.BaseLoader(text)
        return loader.get_single_node()
    except yaml.YAMLError as e:
        raise ConfigError(f"{where} is not valid YAML: {e}\nText that contains {{, [, %, # or ': ' needs quotes") from e
    except (RecursionError, ValueError, OverflowError) as e:  # the last two for escapes that are not a character
        at = f" in line {loader.line + 1}" if loader is not None else ""
        what = "sections or lists are nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise ConfigError(f"{where} is not valid YAML{at}: {what}") from e


def expand(tree: Tree, keys: dict[str, Key], path: str = "") -> Tree:
    """Write out the shorthands of one layer (`algo.loss: ppo_clip`, `algo.kl: off`, a section left empty).

    Raises: ConfigError for a dotted key in a file, which would otherwise be reported as an unknown key only.
    """
    written: Tree = {}
    for name, entry in tree.items():
        inner = dotted(path, name)
        if "." in name and inner in keys:
            origin = next((value.origin for _, value in leaves({name: entry})), "")
            raise ConfigError(f"{origin}: {name}: in a file write each part of a dotted key as a section of its own")
        if isinstance(entry, dict):
            written[name] = expand(entry, keys, inner)
            continue
        short = _SHORTHANDS.get((inner, type(entry.value)))
        key, rest = locate(keys, inner)
        if short:
            meant = short(entry.value)
            if isinstance(meant, dict):
                section = {part: Value(v, entry.origin, entry.folder) for part, v in meant.items()}
                written[name] = ShorthandSection(section)
            else:
                written[name] = Value(meant, entry.origin, entry.folder)
        elif entry.value is None and key is not None and key.is_section and not rest:
            written[name] = {}
        else:
            written[name] = entry
    return written


_SHORTHANDS: dict[tuple[str, type], Any] = {  # (key, type of the value) -> the section; YAML reads `off` as false
    ("algo.loss", str): lambda kind: {"kind": kind},
    ("algo.kl", bool): lambda on: on or {"coef": 0.0},
    ("algo.kl", str): lambda word: {"coef": 0.0} if word == "off" else word,  # of a Python dict, or quoted
    ("algo.correction", bool): lambda on: on or {"kind": "off"},
    ("algo.correction", str): lambda kind: {"kind": kind},
    ("algo.correction.kind", bool): lambda on: on or "off",
    ("algo.correction.rejection", bool): lambda on: on or {"measure": "off"},
    ("algo.correction.rejection", str): lambda word: {"measure": "off"} if word == "off" else word,
    ("algo.correction.rejection.measure", bool): lambda on: on or "off",
    ("model.lora", bool): lambda on: {"enabled": on},
    ("model.lora", str): lambda word: {"enabled": word == "on"} if word in ("on", "off") else word,
}


def merge(below: Tree, above: Tree) -> Tree:
    """The layer `above` over the layer `below`: sections merge; values, lists and written-out shorthands replace."""
    merged = dict(below)
    for name, entry in above.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(entry, dict) and not isinstance(entry, ShorthandSection):
            merged[name] = merge(old, entry)
        else:
            merged[name] = entry
    return merged


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Value]]:
    """Every (dotted key, Value) of a tree."""
    for name, entry in tree.items():
        inner = dotted(path, name)
        if isinstance(entry, dict):
            yield from leaves(entry, inner)
        else:
            yield inner, entry


def plain(tree: Tree) -> dict[str, Any]:
    """The tree without origins, for validation."""
    return {name: plain(entry) if isinstance(entry, dict) else entry.value for name, entry in tree.items()}

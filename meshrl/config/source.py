"""Config files, Python dicts and command-line overrides as trees of values with the place where each was written.

A tree is a dict of trees and Values; lists and scalars are Values. Each layer (base file, file, each override) is read,
its short forms are written out, then the layers are merged: a later layer wins; sections merge, all else is replaced.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Union

import yaml

from meshrl.config.case import Problem, Value
from meshrl.config.schema import NAME, Key, locate
from meshrl.config.values import scalar
from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, is_there, read_text

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
COMMAND_LINE = "command line"
CONFIG_DICT = "config-dict"  # a config that is a Python dict: its name, and the origin of its values
PYTHON_OBJECT = "Python object"
MAX_BYTES = 256 << 10  # of a config file: YAML is parsed at about this rate per second
MAX_DEPTH = 30  # sections and lists in each other; an alias that contains itself has no end
MAX_VALUES = 10_000  # with each alias written out: nine lines of aliases can mean a billion values
YAML_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))  # text, list and section, unmarked


Tree: TypeAlias = dict[str, Union["Tree", Value]]


class Removed(Value):
    """In place of an entry of a section with names (reward.terms.NAME): the entry of earlier layers is removed."""


class ShortSection(dict[str, Any]):
    """A section written out from a short form: it replaces the section of earlier layers instead of merging with it."""


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

    def override(self, text: str) -> Tree:
        """The layer of one `dotted.key=value`; the value is YAML, as in a file."""
        path, equals, value = text.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"{text!r} is not an override: write dotted.key=value, such as train.optimizer.lr=1e-6")
        node = _compose(value, f"the value of {path} on the command line")
        empty = Value(None, COMMAND_LINE, self.folder)
        read = empty if node is None else self._read(node, node, COMMAND_LINE, self.folder, path)
        return nested(path, read)

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
                raise ConfigError(f"{origin}: {path or 'top level'}: the key {name!r} must be a string")
            inner = dotted(path, name)
            if isinstance(value, Mapping) and value:
                tree[name] = self._section(value, origin, inner)
                continue
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            try:
                tree[name] = Value(json.loads(json.dumps(value)), origin, self.folder)
            except (TypeError, ValueError) as cause:
                raise ConfigError(
                    f"{origin}: {inner} is {type(value).__name__} {value!r:.80}, which can't be in a config ({cause}); "
                    "give strings, numbers, true or false, null, or lists and dicts of these"
                ) from cause
        return tree

    def _file(self, path: Path) -> Tree:
        try:
            text = read_text(path, MAX_BYTES)
        except Unreadable as cause:
            raise ConfigError(f"config file {str(path)!r}: {cause} (working folder {Path.cwd()})") from cause
        node = _compose(text, str(path))
        name = os.path.relpath(path.resolve(), self.folder)
        tree = {} if node is None else self._read(node, node, name, path.resolve().parent)
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{path}: a config file is a mapping of sections (model:, train:, ...), not a single value"
            )
        return tree

    def _read(
        self, node: yaml.Node, key: yaml.Node, name: str, folder: Path, path: str = "", depth: int = 0
    ) -> Tree | Value:
        """A mapping as a tree, anything else as a Value; the entries of a list have no origins of their own. key: the
        node in whose line the value begins. name: of the file. path: the dotted key."""
        origin = _origin(name, key)
        self._num_values += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{origin}: sections or lists nested more than {MAX_DEPTH} deep")
        if self._num_values > MAX_VALUES:
            raise ConfigError(
                f"{origin}: more than {MAX_VALUES:,} values, counting those of an alias (*name) in each place "
                "where it is used; a normal config has a few hundred values. Remove the aliases, or give the "
                "rows as a data file"
            )
        if node.tag not in YAML_TAGS:
            raise ConfigError(f"{origin}: the YAML tag {node.tag!r} is not used here; write the plain value")
        if isinstance(node, yaml.MappingNode) and (node.value or not path):
            return {
                inner.value: self._read(entry, inner, name, folder, dotted(path, inner.value), depth + 1)
                for inner, entry in self._entries(node, name, path)
            }
        if isinstance(node, yaml.SequenceNode):
            entries = [plain(self._read(entry, key, name, folder, path, depth + 1)) for entry in node.value]
            return Value(entries, origin, folder)
        if isinstance(node, yaml.MappingNode):
            return Value({}, origin, folder)
        assert isinstance(node, yaml.ScalarNode)
        is_quoted = node.style is not None
        return Value(node.value if is_quoted else scalar(node.value), origin, folder)

    def _entries(self, node: yaml.MappingNode, name: str, path: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        first: dict[str, int] = {}
        for key, entry in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{_origin(name, key)}: a key must be a single word, not a list or a mapping")
            if key.value in first:
                text = f"given twice, first in line {first[key.value]}: YAML would ignore one of them. Remove one."
                self.problems.append(Problem((dotted(path, key.value),), text, _origin(name, key)))
                continue
            first[key.value] = key.start_mark.line + 1
            yield key, entry


def _origin(name: str, node: yaml.Node) -> str:
    return name if name == COMMAND_LINE else f"{name}:{node.start_mark.line + 1}"


def _compose(text: str, place: str) -> yaml.Node | None:
    loader = None
    try:
        # The BaseLoader reads every scalar as text; values.scalar gives its meaning.
        loader = yaml.BaseLoader(text)
        return loader.get_single_node()
    except yaml.YAMLError as e:
        raise ConfigError(f"{place} is not valid YAML: {e}\nText that contains {{, [, %, # or ': ' needs quotes") from e
    except (RecursionError, ValueError, OverflowError) as e:  # the last two for escapes that are not a character
        at = f" in line {loader.line + 1}" if loader is not None else ""
        reason = "sections or lists are nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise ConfigError(f"{place} is not valid YAML{at}: {reason}") from e


def expand(tree: Tree, keys: dict[str, Key], path: str = "") -> Tree:
    """Write out the short forms of one layer (`algo.loss: ppo_clip`, `algo.kl: off`, a section left empty).

    Raises: ConfigError for a dotted key in a file, which would otherwise be reported as an unknown key only.
    """
    written: Tree = {}
    for name, entry in tree.items():
        inner = dotted(path, name)
        if "." in name and inner in keys:
            origin = next((value.origin for value in given_in({name: entry}).values()), "")
            raise ConfigError(f"{origin}: {name}: in a file write each part of a dotted key as a section of its own")
        if isinstance(entry, dict):
            written[name] = expand(entry, keys, inner)
            continue
        _, meaning = SHORT_FORMS.get(inner, ("", None))
        value = meaning(entry.value) if meaning else entry.value
        if entry.value is None or entry.value == {}:
            written[name] = _empty(entry, *locate(keys, inner))
        elif isinstance(value, dict):
            written[name] = ShortSection({part: replace(entry, value=v) for part, v in value.items()})
        else:
            written[name] = replace(entry, value=value)
    return written


def _empty(entry: Value, key: Key | None, rest: str) -> Tree | Value:
    """The meaning of null or {}. rest: as of `locate`. A section takes nothing from earlier layers away; of a dict,
    whose names the user chooses, {} replaces all entries, and an entry that is a section is removed."""
    if key is None or rest:
        return entry
    if key.path.endswith(f".{NAME}"):
        return Removed(None, entry.origin, entry.folder)
    if key.is_dict:
        return replace(entry, value={})
    return {} if key.is_section else entry


def _off(meaning: Any) -> Callable[[Any], Any]:
    """YAML reads `off` as false; in a Python dict, or quoted, it is text."""
    return lambda value: meaning if value is False or value == "off" else value


def _kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _switch(value: Any) -> Any:
    is_on = {"on": True, "off": False}.get(value) if isinstance(value, str) else value
    return {"enabled": is_on} if isinstance(is_on, bool) else value


SHORT_FORMS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # key -> (its short forms in words, value -> its meaning)
    "algo.loss": ("the name of a loss", _kind),
    "algo.kl": ("off", _off({"coef": 0.0})),
    "algo.correction": ("auto, off, truncate or mask", lambda value: _kind(_off("off")(value))),
    "algo.correction.kind": ("off", _off("off")),
    "algo.correction.rejection": ("off", _off({"measure": "off"})),
    "algo.correction.rejection.measure": ("off", _off("off")),
    "model.lora": ("off", _switch),
}


def merge(below: Tree, above: Tree) -> Tree:
    """The layer `above` over the layer `below`: sections merge; values, lists and written-out short forms replace."""
    merged = dict(below)
    for name, entry in above.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(entry, dict) and not isinstance(entry, ShortSection):
            merged[name] = merge(old, entry)
        elif old is not None and isinstance(entry, Removed):
            del merged[name]
        else:
            merged[name] = entry
    return merged


def without(tree: Tree, path: str) -> Tree:
    """The tree without the entry at this dotted key."""
    left: Tree = {}
    for name, entry in tree.items():
        if isinstance(entry, dict) and path.startswith(f"{name}."):  # a name may have dots in it
            left[name] = without(entry, path[len(name) + 1 :])
        elif name != path:
            left[name] = entry
    return left


def nested(path: str, entry: Any) -> dict[str, Any]:
    """A dict of dicts with one entry, at this dotted key."""
    for part in reversed(path.split(".")):
        entry = {part: entry}
    tree: dict[str, Any] = entry
    return tree


def leaves(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The entries of nested dicts that are no dicts, or empty ones, by their dotted keys."""
    entries: dict[str, Any] = {}
    for name, entry in tree.items():
        inner = dotted(path, name)
        entries |= leaves(entry, inner) if isinstance(entry, dict) and entry else {inner: entry}
    return entries


def given_in(tree: Tree) -> dict[str, Value]:
    """Every value of a tree by its dotted key."""
    return {key: value for key, value in leaves(tree).items() if isinstance(value, Value)}


def plain(entry: Tree | Value, without: Collection[str] = (), path: str = "") -> Any:
    """The content of a tree or value without origins, for validation. without: dotted keys to leave out."""
    if isinstance(entry, Value):
        return entry.value
    keys = {name: dotted(path, name) for name in entry}
    return {name: plain(inner, without, keys[name]) for name, inner in entry.items() if keys[name] not in without}

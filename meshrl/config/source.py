"""Config files, Python dicts and command-line overrides as layers: values with the place where each was written.

Lists and scalars are values, and a section or dict without entries is the value {}.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from meshrl.config.case import Problem, Value
from meshrl.config.schema import NAME, Key, locate
from meshrl.config.values import scalar
from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, is_there, read_text

HUB_ID = re.compile(r"(?!runs/)[\w][\w.-]*/[\w][\w.-]*")  # runs/NAME is a run, also where there is no such folder
COMMAND_LINE = "command line"
CONFIG_DICT = "config-dict"  # a config that is a Python dict: its name, and the origin of its values
PYTHON_OBJECT = "Python object"
MAX_BYTES = 256 << 10  # of a config file: YAML is parsed at about this rate per second
MAX_DEPTH = 30  # sections and lists in each other; an alias that contains itself has no end
MAX_VALUES = 10_000  # with each alias written out: nine lines of aliases can mean a billion values
YAML_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))  # text, list and section, unmarked
Names: TypeAlias = tuple[str, ...]  # of the sections of a value, and its own; () = the top
Layer: TypeAlias = dict[Names, Value]
CLEARED, REMOVED = object(), object()  # values: weaker layers' entries at this key go; and there must be one


def dotted(path: str, name: str) -> str:
    """The dotted key of an entry of a section; "" is the top."""
    return f"{path}.{name}" if path else name


class Reader:
    """Reads one run's files and overrides, and collects the problems after which reading can go on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.problems: list[Problem] = []
        self._num_values = 0

    def files(self, path: Path, seen: tuple[Path, ...] = ()) -> list[Layer]:
        """The layers of a file, after those of its base. Raises: ConfigError if one can't be read or is its base."""
        return self._on_base(path, self._file(path), seen)

    def mapping(self, config: Mapping[str, Any], origin: str) -> list[Layer]:
        """The layers of a dict in the form of a config file, after those of its base. Raises: ConfigError, as `files`,
        and for a key that is not text or a value that a config file can't contain."""
        return self._on_base(self.folder / CONFIG_DICT, dict(self._section(config, origin, ())), ())

    def override(self, text: str) -> Layer:
        """The layer of one `dotted.key=value`; the value is YAML, as in a file."""
        path, equals, value = text.partition("=")
        names = tuple(path.split("."))
        if not equals or not all(names):
            raise ConfigError(f"{text!r} is not an override: write dotted.key=value, such as train.optimizer.lr=1e-6")
        node = _compose(value, f"the value of {path} on the command line")
        if node is None:
            return {names: Value(None, COMMAND_LINE, self.folder)}
        return self._read(node, node, COMMAND_LINE, self.folder, names)

    def _on_base(self, path: Path, layer: Layer, seen: tuple[Path, ...]) -> list[Layer]:
        given = [layer.pop(names) for names in [*layer] if names[0] == "base"]
        if not given:
            return [layer]
        base = given[0].value
        if len(given) > 1 or not isinstance(base, str):
            raise ConfigError(f"{path}: `base` must be the name of one config file to inherit from")
        below = path.parent / base
        if not is_there(below):
            raise ConfigError(
                f"{path}: base file {base!r} not found; it is looked up in the folder of this file, as {below}"
            )
        chain = (*seen, path.resolve())
        if below.resolve() in chain:
            raise ConfigError(f"{path}: `base: {base}` leads back to a file that is already being read; remove it")
        return [*self.files(below, chain), layer]

    def _section(self, section: Mapping[str, Any], origin: str, names: Names) -> Iterator[tuple[Names, Value]]:
        for name, value in section.items():
            if not isinstance(name, str):
                raise ConfigError(f"{origin}: {'.'.join(names) or 'top level'}: the key {name!r} must be a string")
            inner = (*names, name)
            if isinstance(value, Mapping) and value:
                yield from self._section(value, origin, inner)
                continue
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            if hasattr(value, "save_pretrained"):
                raise ConfigError(
                    f"{origin}: {'.'.join(inner)} is a {type(value).__name__} in memory; meshrl reads models from "
                    "folders. Write it and its tokenizer by save_pretrained(FOLDER), and give model.path=FOLDER"
                )
            try:
                yield inner, Value(json.loads(json.dumps(value)), origin, self.folder)
            except (TypeError, ValueError) as cause:
                raise ConfigError(
                    f"{origin}: {'.'.join(inner)} is {type(value).__name__} {value!r:.80}, which can't be in a config "
                    f"({cause}); give strings, numbers, true or false, null, or lists and dicts of these"
                ) from cause

    def _file(self, path: Path) -> Layer:
        try:
            text = read_text(path, MAX_BYTES)
        except Unreadable as cause:
            raise ConfigError(f"config file {str(path)!r}: {cause} (working folder {Path.cwd()})") from cause
        node = _compose(text, str(path))
        name = os.path.relpath(path.resolve(), self.folder)
        layer = {} if node is None else self._read(node, node, name, path.resolve().parent)
        if () in layer:
            raise ConfigError(
                f"{path}: a config file is a mapping of sections (model:, train:, ...), not a single value"
            )
        return layer

    def _read(
        self, node: yaml.Node, key: yaml.Node, name: str, folder: Path, names: Names = (), depth: int = 0
    ) -> Layer:
        """The values of a node; the entries of a list have no origins of their own. key: the node in whose line the
        value begins. name: of the file."""
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
        if isinstance(node, yaml.MappingNode) and (node.value or not names):
            layer: Layer = {}
            for inner, entry in self._entries(node, name, names):
                layer |= self._read(entry, inner, name, folder, (*names, inner.value), depth + 1)
            return layer
        value: Any = {}
        if isinstance(node, yaml.SequenceNode):
            value = [content(self._read(each, key, name, folder, names, depth + 1), names) for each in node.value]
        elif isinstance(node, yaml.ScalarNode):
            is_quoted = node.style is not None
            value = node.value if is_quoted else scalar(node.value)
        return {names: Value(value, origin, folder)}

    def _entries(self, node: yaml.MappingNode, name: str, names: Names) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        first: dict[str, int] = {}
        for key, entry in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{_origin(name, key)}: a key must be a single word, not a list or a mapping")
            if key.value in first:
                text = f"given twice, first in line {first[key.value]}: YAML would ignore one of them. Remove one."
                self.problems.append(Problem((".".join((*names, key.value)),), text, _origin(name, key)))
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


def expand(layer: Layer, keys: dict[str, Key]) -> Iterator[tuple[Names, Value]]:
    """Write out the short forms of one layer (`algo.loss: ppo_clip`, `algo.kl: off`, a section left empty), which
    replace sections of weaker layers.

    Raises: ConfigError for a dotted key in a file, which would otherwise be reported as an unknown key only.
    """
    for names, entry in layer.items():
        for path, name in zip(accumulate(names, dotted), names):
            if "." in name and path in keys:
                where = f"{entry.origin}: {name}"
                raise ConfigError(f"{where}: in a file write each part of a dotted key as a section of its own")
        path, (key, rest) = ".".join(names), locate(keys, ".".join(names))
        _, meaning = SHORT_FORMS.get(path, ("", None))
        value = meaning(entry.value) if meaning else entry.value
        is_known = key is not None and (key.is_section or key.is_dict) and not rest
        if key is not None and is_known and (value is None or value == {}):
            # A section that is left empty takes nothing from weaker layers, but a dict with the user's names does.
            if key.path.endswith(f".{NAME}") or key.is_dict:
                yield names, replace(entry, value={} if key.is_dict else REMOVED)
        elif isinstance(value, dict) and value:
            yield names, replace(entry, value=CLEARED)
            yield from (((*names, part), replace(entry, value=each)) for part, each in value.items())
        else:
            yield names, replace(entry, value=value)


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


def leaves(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The entries of nested dicts that are no dicts, or empty ones, by their dotted keys."""
    entries: dict[str, Any] = {}
    for name, entry in tree.items():
        inner = dotted(path, name)
        entries |= leaves(entry, inner) if isinstance(entry, dict) and entry else {inner: entry}
    return entries


def given_in(layer: Layer) -> dict[str, Value]:
    """Every value of a layer by its dotted key."""
    return {".".join(names): value for names, value in layer.items()}


def content(layer: Layer, below: Names = ()) -> Any:
    """The values of a layer, without origins, as nested dicts. below: the names of the section to return."""
    made: Any = {}
    for names, value in layer.items():
        if names == below:
            return value.value
        inner = made
        for name in names[len(below) : -1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = value.value
    return made

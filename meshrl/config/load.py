"""Makes a checked config from a YAML file or a dict, and `key=value` overrides. `meshrl train` does this before torch
is imported."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshrl.config import check as checks
from meshrl.config.algo import LOSS_KIND
from meshrl.config.base import Slice
from meshrl.config.case import Case, Check, Problem, Purpose, Value
from meshrl.config.model import fitting_lengths
from meshrl.config.of_run import code_of_the_run, trusted_folder
from meshrl.config.other_frameworks import FRAMEWORKS, meanings, misspelt_meanings
from meshrl.config.precedence import DEFAULT, Layers, cut, value_and_origin
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.schema import NAME, Key, all_keys, locate, nearest
from meshrl.config.source import (
    CONFIG_DICT,
    PYTHON_OBJECT,
    SHORT_FORMS,
    Layer,
    Names,
    Reader,
    content,
    dotted,
    given_in,
    leaves,
)
from meshrl.config.values import show
from meshrl.core.errors import ConfigError
from meshrl.core.files import is_there
from meshrl.core.lookup import similar_names

Source = str | Path | Mapping[str, Any] | RunConfig | SftRunConfig  # a config in any form
COMMANDS: dict[type[Slice], str] = {RunConfig: "meshrl train", SftRunConfig: "meshrl sft"}
_NUMBER = re.compile(r"^<\d+")  # of rows, at the beginning of the text for them
C = TypeVar("C", bound=RunConfig | SftRunConfig)
PATH_KEYS = (
    *("model.path", "data.path", f"data.sources.{NAME}.path", "data.eval_path", f"data.eval_sets.{NAME}.path"),
    *("data.chat_template", "sft.path", "sft.eval_path", "sft.chat_template", "run.resume"),
    f"reward.terms.{NAME}.args.calibration",
)
ONE_OF_DATA = "data.path or data.sources (for `meshrl eval` data.eval_path)"  # one of them is required
MAX_SHOWN = 50  # wrong keys that are explained at once; each is compared with all known keys
MAX_LISTED = 100  # others, whose names are listed
UNKNOWN_STEPS = 1 << 30  # until the rows of the epochs are counted
NO_PATHS = ("auto", "never")  # words that run.resume takes in place of a path


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[C]):
    """A checked config and the origin of its values. Its paths are absolute; -1 and aliases of the mesh, and
    the auto of algo.correction, are resolved.

    origins: dotted key of every value -> "gsm8k.yaml:12", "command line" or "default"; file names are relative to
    the folder of the config file, or for a dict to the working folder. path: of the file, or CONFIG_DICT. notices:
    lines to print at the start of a run.
    """

    config: C
    origins: dict[str, str]
    path: Path
    notices: tuple[str, ...]


class WrongConfig(ConfigError):
    """A config with problems, which its text lists."""

    def __init__(self, text: str, problems: Sequence[Problem] = ()):
        super().__init__(text)
        self.problems = problems


@dataclass(frozen=True, kw_only=True, slots=True)
class InMemory:
    """Objects that a Python caller gives in place of the names in a config.

    values: sections of a config with a text in place of each object, such as {"agent": {"kind": "__main__:Mine"}}.
    rows: rows in place of the files of data.path, data.eval_path, sft.path or sft.eval_path, by that key. unused:
    further keys that have no effect with these objects, such as "agent.args".
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unused: Sequence[str] = ()


NOTHING_IN_MEMORY = InMemory()


def load_run_config(
    source: Source,
    overrides: Sequence[str] = (),
    table_names: dict[str, set[str]] | None = None,
    purpose: Purpose = "train",
    in_memory: InMemory = NOTHING_IN_MEMORY,
    further: Sequence[Check] = (),
    starts: bool | None = True,
    of_run: Path | None = None,
) -> Loaded[RunConfig]:
    """The config of `meshrl train`, or with purpose "eval" of `meshrl eval`, where top_p and other filters are allowed.

    source: a file, a dict with the content of a file, or a config. table_names, starts: as in Case. further: checks of
    higher packages, made together with those of the config. of_run: the folder of the run whose config.yaml this is.

    Raises: ConfigError that lists all problems at once, each with key, value, origin and what to do.
    """
    case = partial(Case, table_names=table_names or {}, purpose=purpose, rows=in_memory.rows, starts=starts)
    return _load(RunConfig, source, overrides, case, in_memory, further, of_run)


def load_sft_config(
    source: Source,
    overrides: Sequence[str] = (),
    in_memory: InMemory = NOTHING_IN_MEMORY,
    further: Sequence[Check] = (),
    starts: bool | None = True,
) -> Loaded[SftRunConfig]:
    """The config of `meshrl sft`. Raises: ConfigError, as load_run_config."""
    case = partial(Case, purpose="sft", rows=in_memory.rows, starts=starts)
    return _load(SftRunConfig, source, overrides, case, in_memory, further)


def is_sft(source: Source) -> bool:
    """Whether this is a config of `meshrl sft`. Raises: ConfigError when it can't be read."""
    return _has_sft(_read(source)[-1])


def _has_sft(parts: list[Layer]) -> bool:
    return any(names[0] == "sft" for part in parts for names in part)


def _load(
    model: type[C],
    source: Source,
    overrides: Sequence[str],
    make_case: partial[Case],
    in_memory: InMemory,
    further: Sequence[Check],
    of_run: Path | None = None,
) -> Loaded[C]:
    if isinstance(overrides, str | Mapping):
        raise ConfigError(f"overrides is {overrides!r:.80}; it must be a list of strings: ['train.optimizer.lr=1e-6']")
    path, reader, parts = _read(source)
    layers = Layers(all_keys(model))
    is_eval = make_case.keywords["purpose"] == "eval" and not _has_sft(parts)
    lines, steps = [reader.override(text) for text in overrides], tuple(model.NUM_STEPS_KEY.split("."))
    has_epochs = any((steps[0], "num_epochs") in part for part in (*parts, *lines))
    if is_eval or has_epochs:  # an evaluation has no steps; those of epochs follow from the rows (run/inputs.py)
        parts.insert(0, {steps: Value(1 if is_eval else UNKNOWN_STEPS, DEFAULT, reader.folder)})
    for part in parts:
        layers.add(part)
    layers.add(*lines)
    (objects,) = reader.mapping(in_memory.values, PYTHON_OBJECT)
    written = given_in(layers.values)
    modules = _module_folder(written, reader.folder, of_run)
    if of_run is not None and (refused := [*code_of_the_run(written, of_run)]):
        raise ConfigError(_report(path, refused, written, {}))
    twice = _given_twice(given_in(objects) | dict.fromkeys(in_memory.unused), written)
    layers.add_objects(objects, len(parts))
    make_case = partial(make_case, folder=reader.folder)
    while True:
        given = given_in(layers.values) | {key: written[key] for problem in twice for key in problem.keys}
        config, case, faults = _checked(model, layers, given, make_case, [checks.check, *further])
        if not layers.leave_out(faults):
            break
    problems = [*reader.problems, *twice, *layers.problems, *faults]
    if config is None or case is None or problems:
        values = _flat_values(config) if config is not None else {}
        required = {key.path for key in layers.keys.values() if key.default is None}  # they may have stand-ins
        defaults = {key: value for key, value in values.items() if key not in required}
        raise WrongConfig(_report(path, problems, given, defaults), problems)
    config, resolved = _resolve(config, case, layers.keys, modules)
    origins = {key: given[key].origin if key in given else DEFAULT for key in _flat_values(config)}
    origins |= {key: f"{origins[key]}, {how}" for key, how in resolved.items()}
    notices = (*layers.notes(), *checks.notices(case))
    return Loaded(config=config, origins=origins, path=path, notices=notices)


def _module_folder(values: Mapping[str, Value], folder_of_config: Path, of_run: Path | None) -> str:
    """The absolute path of run.module_folder, which is added to Python's path, here and by that in all processes that
    this one starts."""
    value, folder = values.get("run.module_folder"), folder_of_config
    if value is not None and isinstance(value.value, str):
        folder = value.folder / Path(value.value).expanduser()
    path = str((folder if of_run is None else trusted_folder(value, folder, of_run)).resolve())
    if path not in sys.path:
        sys.path.append(path)  # last, so that no file next to a config replaces an installed package
    return path


def _checked(
    model: type[C], layers: Layers, given: dict[str, Value], make_case: partial[Case], all_checks: Sequence[Check]
) -> tuple[C | None, Case | None, list[Problem]]:
    """The config, its case, and all problems of both. Config and case are None if there are too many problems."""
    keys = layers.keys
    config, problems, wrong = _validate(model, content(layers.values), keys)
    stand_ins: dict[Names, Value] = {}
    if problems:  # without the wrong values, the rest may have further problems, for the same message
        for key in (keys[name] for name in wrong if name in keys):
            if key.default is None and not key.is_section:  # it is required
                value = 1 if key.allowed.startswith("integer") else "unknown"
                stand_ins[tuple(key.path.split("."))] = Value(value, DEFAULT, Path())
        right = {n: v for n, v in layers.values.items() if not any(path in wrong for path in accumulate(n, dotted))}
        config, _, _ = _validate(model, content(right | stand_ins), keys)
    if config is None:
        return None, None, problems
    case = make_case(config=config, given=given | given_in(stand_ins))
    lengths, defaults = fitting_lengths(case), _flat_values(config)
    for name, length in lengths.items():
        config = _replaced(config, name.split("."), length)
    case = replace(case, config=config, fitted={name: defaults[name] for name in lengths})
    faulty = {*wrong, *(problem.keys[0] for problem in layers.problems)}
    for problem in (problem for check in all_checks for problem in check(case)):
        # It may follow from a fault that is already reported: a default replaced the wrong value.
        if not any(fault == key or fault.startswith(f"{key}.") for fault in faulty for key in problem.keys):
            problems.append(problem)
    return config, case, problems


def _read(source: Source) -> tuple[Path, Reader, list[Layer]]:
    """The path of the config for messages, and its layers. Raises: ConfigError."""
    if isinstance(source, (RunConfig, SftRunConfig)):
        source = source.model_dump(mode="json", exclude_unset=True)
    if isinstance(source, Mapping):
        reader = Reader(Path.cwd())
        return Path(CONFIG_DICT), reader, reader.mapping(source, CONFIG_DICT)
    if not isinstance(source, (str, Path)):
        raise ConfigError(
            f"the config is {type(source).__name__} {source!r:.80}; it must be the path of a YAML file, a dict of its "
            "sections, or a RunConfig or SftRunConfig"
        )
    path = Path(source)
    reader = Reader(path.resolve().parent if is_there(path) else path.parent)
    return path, reader, reader.files(path)


def _given_twice(replaced: Mapping[str, Value | None], written: dict[str, Value]) -> list[Problem]:
    """Keys of a config that a Python object replaces; but the config.yaml of a run has the text for such an object.
    null removes such a key; below it, null is an argument. replaced: key or section -> this text."""
    problems = []
    for key, value in written.items():
        text = replaced.get(key)  # of the same object, or of other rows of the same argument
        is_same = text is not None and _NUMBER.sub("<", str(value.value)) == _NUMBER.sub("<", str(text.value))
        if is_same or value.value == {} or (value.value is None and key in replaced):
            continue
        if any(key == name or key.startswith(f"{name}.") for name in replaced):
            how = f"; {key}=null removes this one" if key in replaced else ""
            problem = f"would have no effect: a Python object is given in its place. Remove one of them{how}."
            problems.append(Problem((key,), problem, value.origin))
    return problems


def _validate(
    model: type[C], content: dict[str, Any], keys: dict[str, Key]
) -> tuple[C | None, list[Problem], set[str]]:
    """The config, or its problems, and the keys and unknown sections that are wrong."""
    try:
        # As JSON, strictly: a list fills a tuple, 1 a float, but true is no number and "8" no integer.
        return cast(C, model.model_validate_json(json.dumps(content), strict=True)), [], set()
    except ValidationError as e:
        errors = {".".join(map(str, error["loc"])): error for error in e.errors(include_url=False)}
    other = next(kind for kind in COMMANDS if kind is not model)
    here, there = model.model_fields.keys(), other.model_fields.keys()
    foreign = [] if (here - there) & content.keys() else [name for name in content if name in there - here]
    faults = [
        (error, key) for path, error in errors.items() if path not in foreign for key in _faulty(error, path, keys)
    ]
    problems = list(dict.fromkeys(_problem(error, key, keys) for error, key in faults[:MAX_SHOWN]))
    if foreign:
        text = f"this is a config of `{COMMANDS[other]}`: this command does not read {_listed(foreign)}."
        problems.insert(0, Problem(("config",), text, "entire config"))
    if more := [cut(path) for _, path in faults[MAX_SHOWN:]]:
        listed = f": {', '.join(more)}" if len(more) <= MAX_LISTED else ""
        text = f"{len(more)} more keys are wrong{listed}. Correct the others first; then these are explained."
        problems.append(Problem(("config",), text, "entire config"))
    wrong = {path if error["type"] == "extra_forbidden" else _known(keys, path)[1] for path, error in errors.items()}
    return None, problems, wrong


def _listed(names: Sequence[str], word: str = "and") -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def _faulty(error: ErrorDetails, path: str, keys: dict[str, Key]) -> list[str]:
    """The dotted keys that an error is about: the key itself, or for a section of another framework the keys inside."""
    if error["type"] != "extra_forbidden" or not isinstance(error["input"], dict):
        return [path]
    inside = list(leaves(error["input"], path))
    is_foreign = bool(meanings(path, keys)) or not nearest(keys, path, is_section=True)
    return inside if is_foreign and any(meanings(key, keys) for key in inside) else [path]


def _known(keys: dict[str, Key], path: str) -> tuple[Key | None, str]:
    """The deepest known key on this path, and the path as far as this key."""
    key, rest = locate(keys, path)
    return key, path.removesuffix(f".{rest}") if rest else path


def _problem(error: ErrorDetails, path: str, keys: dict[str, Key]) -> Problem:
    (key, at), kind, value = _known(keys, path), error["type"], error["input"]
    if kind == "extra_forbidden":
        is_section = isinstance(value, dict) and path == ".".join(map(str, error["loc"]))
        return Problem((path,), _unknown(path, is_section, keys))
    if key is None:  # text that JSON can't carry, such as half a surrogate pair
        return Problem(("config",), f"can't be read: {error['msg']}.")
    if kind == "missing" and at == path:
        needed = [k for k in keys if k.startswith(f"{path}.") and keys[k].default is None and not keys[k].is_section]
        needed = [k for k in needed if NAME not in k.split(".")] or [ONE_OF_DATA]
        are = f"{_listed(needed)} {'are' if len(needed) > 1 else 'is'} required, but not given."
        return Problem((path,), are if key.is_section else f"required, but not given: {key.text}.")
    if key.is_section:
        inside = ", ".join(k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == key.path)
        also = f", or {SHORT_FORMS[at][0]}" if at in SHORT_FORMS else ""
        return Problem((at,), f"must be a section with keys of its own ({inside}){also}.")
    if kind == "literal_error":
        choices = key.allowed.removeprefix("list of ").split(" | ")
        a_list = "a list of " if key.allowed.startswith("list") else ""
        kinds = ", or a dotted path package.module:name" if key.path == LOSS_KIND else ""
        close = similar_names(value, choices, 1) if isinstance(value, str) else []
        near = f" Nearest: {close[0]}." if close else ""
        absent = [str(each) for each in meanings(str(value), keys) if not each.here]  # such as fp8
        return Problem((at,), f"must be {a_list}{_listed(choices, 'or')}{kinds}.{' '.join(['', *absent]) or near}")
    form = ""  # how to write a value that has the right content in the wrong form
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        form = " Quote it, so that YAML reads a string."
    elif kind == "list_type" and type(value) is (int if "integers" in key.allowed else str):
        form = f" Write a list: {at}={show([value])}."
    return Problem((at,), f"allowed: {key.allowed} ({key.text}).{form}")


def _unknown(path: str, is_section: bool, keys: dict[str, Key]) -> str:
    for model, command in COMMANDS.items():
        if path in all_keys(model):
            return f"not a key of this command's config, but of the config of `{command}`. Remove it here."
    near = nearest(keys, path, is_section, near_section=True)
    meant = [] if near else meanings(path, keys)
    near = near or ([] if meant else nearest(keys, path, is_section))
    meant = meant or ([] if near else misspelt_meanings(path, keys))
    if meant:
        return " ".join(["unknown key.", *(str(meaning) for meaning in meant)])
    if not near:
        return "unknown key, and no known key is similar. `meshrl config` lists them all."
    return f"unknown key. Nearest: {', '.join(near)}."


def _report(path: Path, problems: list[Problem], given: dict[str, Value], defaults: dict[str, Any]) -> str:
    count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    lines = [f"{path}: {count} in this config"]
    wrapped = textwrap.TextWrapper(100, " " * 6, " " * 6, break_long_words=False, break_on_hyphens=False)
    for problem in problems:
        lines.append("")
        for key in problem.keys:
            value, origin = value_and_origin(key, given, defaults)
            lines.append(f"  {cut(key)}{value}   [{problem.origin or origin}]")
        lines.append(wrapped.fill(problem.text))
    if any(f" of {name} is " in problem.text for problem in problems for name in FRAMEWORKS.values()):
        lines += ["", "docs/from_verl_and_trl.md lists the keys of verl, TRL and prime-rl, with those of meshrl."]
    return "\n".join(lines)


def _flat_values(config: Slice) -> dict[str, Any]:
    """Every value, and every empty section, by its dotted key."""
    return leaves(config.model_dump(mode="json"))


def _resolve(config: C, case: Case, keys: dict[str, Key], module_folder: str) -> tuple[C, dict[str, str]]:
    """The config with absolute paths, and with aliases, the mesh and algo.correction written out; and for each value
    that another one replaces, how."""
    how: dict[str, str] = {}
    changes: dict[str, Any] = {}
    given = {key: value for key, value in case.given.items() if value.value is not None}
    for key, value in given.items():
        schema_key, rest = locate(keys, key)
        named = f"{schema_key.path}.{rest}".rstrip(".") if schema_key else ""
        if named in PATH_KEYS and value.value not in NO_PATHS:
            path, _ = case.find(key)
            if path is not None:
                changes[key] = str(path)
    if config.run.module_folder != module_folder:
        changes["run.module_folder"], how["run.module_folder"] = module_folder, f"here {module_folder}"
    for name, size in zip(("dp_replicate", "dp_shard"), config.train.mesh_shape(config.cluster.num_train_ranks)):
        written = getattr(config.train.mesh, name)
        if written != size:
            changes[f"train.mesh.{name}"], how[f"train.mesh.{name}"] = size, f"from {written}"
    if isinstance(config, RunConfig) and config.algo.correction.kind == "auto":
        changes["algo.correction.kind"], reason = config.correction
        how["algo.correction.kind"] = f"from {reason}"
    how |= {key: f"from {was}, since the model has no positions for longer rows" for key, was in case.fitted.items()}
    for key, (here, reason) in checks.defaults_of_the_machine(case).items():
        changes[key], how[key] = here, f"here {here}: {reason}"
    changes |= {key: given[alias].value for alias, key in checks.ALIASES.items() if alias in given}
    for key, value in changes.items():
        config = _replaced(config, key.split("."), value)
    return config, how


def _replaced(part: Any, names: list[str], value: Any) -> Any:
    name, *rest = names
    inner = part[name] if isinstance(part, dict) else getattr(part, name)
    changed = {name: _replaced(inner, rest, value) if rest else value}
    return part | changed if isinstance(part, dict) else part.model_copy(update=changed)

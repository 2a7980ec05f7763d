"""The settings in a file of another framework: a YAML or TOML config, the shell script of a recipe, or a Python script
with a GRPOConfig. They are read as text; nothing of the file is executed."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshrl.config.other_frameworks import FRAMEWORKS, setting_of
from meshrl.config.source import Reader, leaves
from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, read_text

Settings = dict[str, Any]
"""Values by their full dotted names."""


class Code(str):
    """An expression in place of a value that only its program could compute."""


def read_settings(path: Path) -> tuple[str, Settings]:
    """(the framework, its settings in this file). Raises: ConfigError if the file can't be read or has none."""
    try:
        if path.suffix in (".yaml", ".yml"):
            settings = {".".join(n): v.value for n, v in Reader(path.parent).files(path)[-1].items()}
        elif path.suffix == ".toml":
            settings = leaves(tomllib.loads(read_text(path)))
        else:
            settings = (_in_python if path.suffix == ".py" else _in_shell)(read_text(path))
    except (Unreadable, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    titles = [title for name, title in FRAMEWORKS.items() if name != "other"]
    rows = {title: [row[0] for name in settings if (row := setting_of(name, title)) is not None] for title in titles}
    framework = max(titles, key=lambda title: sum(title in row.names for row in rows[title]))
    if not rows[framework]:
        forms = "a YAML file or shell script of verl, a Python or YAML file of TRL, or a TOML file of prime-rl"
        raise ConfigError(f"{path} has no setting of {', '.join(titles)}; give {forms}")
    for name, value in settings.items():  # OmegaConf's ${other.name} and ${oc.select:other.name,default}
        match = re.fullmatch(r"\$\{(?:oc\.select:)?(\w[\w.]*)(?:,([^}]*))?\}", value) if type(value) is str else None
        settings[name] = value if match is None else settings.get(match[1], yaml_value(match[2]) if match[2] else value)
    return framework, settings


def yaml_value(text: str) -> Any:
    """A value as YAML, such as 1e-6, True or [a, b]; text that is none stays text."""
    with suppress(ConfigError, KeyError):
        return Reader(Path()).override(f"x={text}")[("x",)].value
    return text


_NODES: tuple[type[ast.AST], ...] = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Dict, ast.IfExp, ast.Compare, ast.Lt),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub),
)
_OPERATIONS = (ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Load)


def computed(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression of constants, names and arithmetic of small numbers; Code for any other."""
    with suppress(SyntaxError, LookupError, NameError, TypeError, ArithmeticError, RecursionError, MemoryError):
        tree = ast.parse(text.strip(), mode="eval")
        if isinstance(tree.body, ast.IfExp) and type(test := computed(ast.unparse(tree.body.test), names)) is bool:
            return computed(ast.unparse(tree.body.body if test else tree.body.orelse), names)
        sums = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
        leaves = [node for each in sums[:100] for node in ast.walk(each) if not isinstance(node, _OPERATIONS)]
        numbers = [names[leaf.id] if isinstance(leaf, ast.Name) else getattr(leaf, "value", None) for leaf in leaves]
        is_cheap = len(sums) < 100 and all(isinstance(each, (int, float)) and abs(each) < 1e15 for each in numbers)
        if is_cheap and all(isinstance(node, _NODES) for node in ast.walk(tree)):
            return eval(compile(tree, text, "eval"), {"__builtins__": {}}, names)
    return Code(text)


def _in_shell(text: str) -> Settings:
    """Overrides key=value of Hydra. Variables that the script sets are replaced; within `if` and `case` only those are
    read that nothing else has set."""
    text = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ")  # also the comments within a command
    for _ in range(3):
        text = re.sub(r"\$\((?!\()[^()]*\)", "UNKNOWN", text)  # the output of a command
    text = re.sub(r"\$\(\(((?:(?!\$\(\().)*)\)\)", lambda match: re.sub(r"\s", "", match[0]), text)
    variables, settings, depth = {"HOME": "~"}, dict[str, Any](), 0
    for line in text.splitlines():
        words: list[str] = []
        with suppress(ValueError):  # a quoted text of several lines
            words = shlex.split(line.rpartition(" -- ")[2], comments=True)  # after the options of `ray job submit`
        depth += bool({"if", "case"} & {*words[:1]}) - bool({"fi", "esac"} & {*words[:1]})
        for match in filter(None, (re.fullmatch(r"(?s)(--|\+*)([A-Za-z_][\w.-]*)=(.*)", word) for word in words)):
            target: Settings = settings if match[1] or "." in match[2] else variables
            if not depth or match[2] not in target:
                value = _expanded(match[3], variables)
                target[match[2]] = value if target is variables else yaml_value(value)
    return settings


def _expanded(text: str, variables: dict[str, str]) -> str:
    """$NAME, ${NAME}, ${NAME:-default} and $((arithmetic)) replaced, from the inside; unknown variables remain."""
    numbers = {name: yaml_value(value) for name, value in variables.items()} if "$((" in text else {}

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    def number(match: re.Match[str]) -> str:
        return str(computed(match[1], numbers)).removesuffix(".0")

    for _ in range(10):  # PATH=$PATH:... never ends
        expanded = re.sub(r"\$\{(\w+)(?::?-([^${}]*))?\}|\$(\w+)", value, text)
        expanded = re.sub(r"\$\(\((.+?)\)\)(?!\))", number, expanded)
        text = expanded if len(expanded) < 10_000 else text
    return text


class _Names(dict[str, Any]):
    """Values of a script's variables."""

    def __missing__(self, name: str) -> Any:
        return Code(name)


_CALLS = {"GRPOTrainer": ("model", "reward_funcs"), "GRPOConfig": ("output_dir",)}
_HELD_OUT = {"dataset_name": "eval_dataset", "dataset_train_split": "dataset_test_split"}


def _in_python(text: str) -> Settings:
    """The arguments of GRPOConfig, GRPOTrainer, LoraConfig and load_dataset, with the names of TRL's command line, and
    the last function of a `.map` as dataset.map."""
    names, settings, rows, first = _Names(), dict[str, Any](), dict[str, Settings](), dict[str, Any]()
    maps: Settings = {}
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Assign, ast.Call))]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if isinstance(node, ast.Assign):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names |= dict.fromkeys(targets, computed(ast.unparse(node.value), names))
            rows |= dict.fromkeys(targets, _rows(node.value, names, rows))
            continue
        if (call := ast.unparse(node.func).rpartition(".")[2]) == "load_dataset":
            first = first or _dataset(_rows(node, names, rows))  # in place of rows of the trainer that can't be read
        elif call == "map" and isinstance(node.func, ast.Attribute) and node.args:
            maps = {"dataset.map": Code(ast.unparse(node.args[0]))}
        elif call == "LoraConfig":
            settings |= {f"lora_{name.removeprefix('lora_')}": v for name, v in _arguments(node, (), names).items()}
        elif call in _CALLS:
            given = _arguments(node, _CALLS[call], names)
            settings |= {"model_name_or_path" if name == "model" else name: given[name] for name in given}
            of = {each.arg: _dataset(_rows(each.value, names, rows)) for each in node.keywords}
            settings |= of.get("train_dataset", {})
            if (held_out := of.get("eval_dataset", {})) != of.get("train_dataset"):  # not two parts of one file
                settings |= {name: held_out[other] for other, name in _HELD_OUT.items() if other in held_out}
    settings |= maps if settings else {}  # `.map` of other programs is no setting
    settings = settings if "dataset_name" in settings else first | settings
    return leaves({name: value for name, value in settings.items() if name not in ("args", "train_dataset")})


def _arguments(call: ast.Call, positional: tuple[str, ...], names: Mapping[str, Any]) -> Settings:
    given = [*zip(positional, call.args), *((each.arg, each.value) for each in call.keywords)]
    return {name: computed(ast.unparse(value), names) for name, value in given if name is not None}


def _rows(expression: ast.AST, names: Mapping[str, Any], rows: Mapping[str, Settings]) -> Settings:
    """The arguments of the load_dataset in an expression, or of that of a variable in it; {} if there is none."""
    found: Settings = {}
    for node in ast.walk(expression):
        base = node.value if isinstance(node, ast.Subscript) else node
        own = rows.get(base.id, {}) if isinstance(base, ast.Name) else {}
        if isinstance(base, ast.Call) and ast.unparse(base.func).rpartition(".")[2] == "load_dataset":
            own = _arguments(base, ("path", "name"), names)
        if own and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            own = own | {"split": node.slice.value}
        found = own | found
    return found


def _dataset(rows: Settings) -> Settings:
    """Rows with the names of TRL's command line."""
    files, split = rows.get("data_files"), rows.get("split")
    path = files.get(split or "train") if isinstance(files, dict) else files or rows.get("path")
    named = {"dataset_name": path, "dataset_config": rows.get("name"), "dataset_train_split": None if files else split}
    return {name: value for name, value in named.items() if value is not None}

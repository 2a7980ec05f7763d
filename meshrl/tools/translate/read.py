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
    except (Unreadable, ValueError, SyntaxError) as error:
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


def computed(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression of constants, names and arithmetic; Code for any other."""
    with suppress(SyntaxError, NameError, TypeError, ArithmeticError):
        tree = ast.parse(text.strip(), mode="eval")
        if all(isinstance(node, _NODES) for node in ast.walk(tree)):
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
            words = shlex.split(line, comments=True)
        depth += bool({"if", "case"} & {*words[:1]}) - bool({"fi", "esac"} & {*words[:1]})
        for match in filter(None, (re.fullmatch(r"(?s)(--|\+*)([A-Za-z_][\w.-]*)=(.*)", word) for word in words)):
            target: Settings = settings if match[1] or "." in match[2] else variables
            if not depth or match[2] not in target:
                value = _expanded(match[3], variables)
                target[match[2]] = value if target is variables else yaml_value(value)
    return settings


def _expanded(text: str, variables: dict[str, str]) -> str:
    """$NAME, ${NAME}, ${NAME:-default} and $((arithmetic)) replaced, from the inside; unknown variables remain."""
    numbers = {name: yaml_value(value) for name, value in variables.items()}

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    def number(match: re.Match[str]) -> str:
        return str(computed(match[1], numbers)).removesuffix(".0")

    before = ""
    while text != before:
        before, text = text, re.sub(r"\$\{(\w+)(?::?-([^${}]*))?\}|\$(\w+)", value, text)
        text = re.sub(r"\$\(\((.+?)\)\)(?!\))", number, text)
    return text


class _Names(dict[str, Any]):
    """Values of a script's variables."""

    def __missing__(self, name: str) -> Any:
        return Code(name)


_CALLS = {"GRPOTrainer": ("model", "reward_funcs"), "GRPOConfig": ("output_dir",), "LoraConfig": (), "load_dataset": ()}


def _in_python(text: str) -> Settings:
    """The arguments of GRPOConfig, GRPOTrainer, LoraConfig and load_dataset, with the names of TRL's command line."""
    names, settings = _Names(), dict[str, Any]()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Assign, ast.Call))]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if isinstance(node, ast.Assign):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names |= dict.fromkeys(targets, computed(ast.unparse(node.value), names))
            continue
        if (call := ast.unparse(node.func).rpartition(".")[2]) not in _CALLS:
            continue
        values = [computed(ast.unparse(arg), names) for arg in node.args]
        given = dict(zip(_CALLS[call], values))
        given |= {each.arg: computed(ast.unparse(each.value), names) for each in node.keywords if each.arg is not None}
        if call == "load_dataset" and values:
            split, path = given.get("split"), given.get("data_files", values[0])
            data = {"dataset_name": path, "dataset_config": [*values, None][1], "dataset_train_split": split}
            settings = {name: value for name, value in data.items() if value is not None} | settings
        elif call == "LoraConfig":
            settings |= {f"lora_{name.removeprefix('lora_')}": value for name, value in given.items()}
        else:
            given = {{"model": "model_name_or_path"}.get(name, name): value for name, value in given.items()}
            settings |= {name: value for name, value in given.items() if name != "args"}
    if "dataset_name" in settings:
        settings = {name: value for name, value in settings.items() if name not in ("train_dataset", "eval_dataset")}
    return leaves(settings)

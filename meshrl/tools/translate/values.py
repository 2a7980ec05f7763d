"""Values of another framework as values of keys of meshrl, by the rows of other_frameworks.yaml."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrl.config.docs import every_key
from meshrl.config.other_frameworks import Setting
from meshrl.config.schema import NAME, locate
from meshrl.data.files import FILE_SUFFIXES
from meshrl.tools.translate.read import Code, Settings, computed

KEYS = every_key()


def translated(setting: Setting, name: str, rest: str, there: Settings, here: Settings) -> Settings | str:
    """Values by keys of meshrl for a setting of a file, or the reason why there are none.

    rest: of the name, below the setting. there: all settings, with the defaults of their framework. here: what was
    translated before, in the order of the table.
    """
    keys = [key.replace(NAME, "answer") for key in setting.here if not key.startswith("sft")]
    value, known = there[name], setting.values
    if name in setting.unwritten or not keys:
        return setting.note or f"{keys[0]} follows from another setting"
    if rest:
        key, below = locate(KEYS, f"{keys[0]}.{rest}")
        return {f"{keys[0]}.{rest}": value} if key and (not below or key.is_dict) else f"not a key of {keys[0]}"
    if missing := _missing(setting.only.replace("SECTION", name.rpartition(".")[0]), there, here):
        return f"no effect there: {missing}"
    if isinstance(value, str) and (re.search(r"\$\{?\w", value) or (setting.rule and isinstance(value, Code))):
        return "can't be computed: it has a variable that the file does not set"
    if setting.rule:
        return RULES[setting.rule](keys, name, value, here)
    text = "{}" if value == {} else "null" if value is None else str(value).lower()
    if isinstance(value, list) and known and "*" not in known:
        result: Any = [[known[each] for each in map(str.lower, map(str, value)) if each in known]]
        if result == [[]]:
            return f"none of them has a counterpart: {setting.note}"
    elif text in known or value is None:
        result = known.get(text)
    elif known and "*" not in known and (value == {} or isinstance(value, (str, bool))):
        return f"{text} has no counterpart: {setting.note}"
    else:
        result = known.get("*", [value] * len(keys))
    if result is None:
        return "not set there, or as it is here"
    result = _with_values(result, _names(value, there, here))
    result = result if isinstance(result, dict) else dict(zip(keys, result if isinstance(result, list) else [result]))
    found = {key: each for key, each in result.items() if not isinstance(each, Code)}
    if found or "nothing" in str(result):
        return found or setting.note
    unknown = ", ".join(result.values())
    return f"can't be computed: {unknown}{'; --rows gives the number of rows' if 'num_steps' in unknown else ''}"


def _missing(needed: str, there: Settings, here: Settings) -> str:
    """Why a condition `name`, `not name` or `name!=value` does not hold, or "". name: of a setting, or of a key."""
    name, _, other = needed.removeprefix("not ").partition("!=")
    value = there.get(name, here.get(name))
    if other:
        return f"{name} is {other}" if value == other else ""
    return "" if not name or bool(value) != ("not " in needed) else f"{name} is {'not set' if value is None else value}"


def _names(value: Any, there: Settings, here: Settings) -> Settings:
    """What expressions of the table read: the value, and all others by the last parts of their names."""
    names = {name.rpartition(".")[2]: each for name, each in [*there.items(), *here.items()]}
    names |= {"value": len(value) if isinstance(value, list) else value}
    names |= {"is_file": Path(str(here.get("data.path"))).suffix in FILE_SUFFIXES}
    expressions = {name: each[1:] for name, each in names.items() if isinstance(each, str) and each.startswith("=")}
    return names | {name: computed(text, names) for name, text in expressions.items()}  # of defaults


def _with_values(result: Any, names: Settings) -> Any:
    """A result of the table, with the values of the texts in it that begin with "="."""
    if isinstance(result, dict):
        return {key: _with_values(each, names) for key, each in result.items()}
    if isinstance(result, list):
        return [_with_values(each, names) for each in result]
    return computed(result[1:], names) if isinstance(result, str) and result.startswith("=") else result


def _files(keys: list[str], name: str, value: Any, here: Settings) -> Settings | str:
    paths = [str(path) for path in (value if isinstance(value, list) else [value])]
    if len(paths) == 1:
        return {keys[0]: paths[0]}
    section = "eval_sets" if keys[0] == "data.eval_path" else "sources"
    names = [re.sub(r"\W", "_", Path(path).parent.name) for path in paths]
    is_unique = len({*names}) == len(names) and all(each.isidentifier() for each in names)
    return {f"data.{section}.{names[i] if is_unique else f'set_{i}'}.path": path for i, path in enumerate(paths)}


def _server_args(keys: list[str], name: str, value: Any, here: Settings) -> Settings | str:
    flag = name.rpartition(".")[2].replace("_", "-")
    if here.get("rollout.engine") != "vllm" or (".engine_kwargs." in name and ".vllm." not in name):
        return "an argument of another server than that of rollout.engine"
    flag = {"True": f"--{flag}", "False": f"--no-{flag}"}.get(str(value), f"--{flag}={value}")
    return {keys[0]: [*here.get(keys[0], []), flag]}


def _reward_function(keys: list[str], name: str, value: Any, here: Settings) -> Settings | str:
    """The row of the file comes before that of the function's name, which is compute_score by default."""
    if name.endswith(".path"):
        path = Path(str(value)).expanduser().resolve()
        kind = dict(zip(keys, (f"{path.stem}:compute_score", str(path.parent))))
        return kind if path.is_file() else f"there is no file {value} here; the reward is math_answer until it is named"
    module, colon, _ = here[keys[0]].partition(":")
    return {keys[0]: f"{module}:{value}"} if colon else "of a function whose file is not here"


RULES: dict[str, Callable[[list[str], str, Any, Settings], Settings | str]] = {
    "files": _files,
    "reward_function": _reward_function,
    "server_args": _server_args,
}

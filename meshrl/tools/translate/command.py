"""`meshrl translate`: a config of meshrl from one of another framework. A setting that has no counterpart becomes a
comment with the reason; so does one that the checks of configs refuse."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.config.case import Value
from meshrl.config.explain import section_lines
from meshrl.config.load import PATH_KEYS, WrongConfig, load_run_config
from meshrl.config.other_frameworks import setting_of, settings
from meshrl.config.schema import locate
from meshrl.config.source import content
from meshrl.config.values import show
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.files import output_errors
from meshrl.data.tables import open_table
from meshrl.tools.translate.read import Settings, read_settings
from meshrl.tools.translate.values import KEYS, translated

UNKNOWN = "not in the table of names; what it does has to be looked up"
KNOWN = {  # framework -> what its files need not state: key -> (value, comment)
    "verl": {
        "rollout.engine": ("vllm", "the default of verl"),
        "data.answer": ("reward_model.ground_truth", "where the rows of verl have it"),
        "reward.terms.answer.kind": ("math_answer", "verl chooses by data_source; or a function package.module:name"),
    },
    "TRL": {"reward.terms.answer.kind": ("math_answer", "PLACEHOLDER: a function; no term with rewards= in Python")},
    "prime-rl": {"rollout.engine": ("vllm", "prime-rl samples with vLLM")},
}
PLACEHOLDERS = {  # required key -> the same
    "model.path": ("organisation/model", "PLACEHOLDER: a model's folder, or a hub id"),
    "data.path": ("organisation/dataset", "PLACEHOLDER: rows with a question and its answer, a file or a hub id"),
    "loop.num_steps": (100, "PLACEHOLDER: epochs x rows / prompts_per_step; --rows gives the number of rows"),
}


@dataclass(kw_only=True)
class Translation:
    """there: the settings of the file. here: values by keys of meshrl. names: key of meshrl -> settings that set it;
    those that are not in the file are defaults of their framework. reasons: of settings that have no key here.
    rounded: what a comment adds to the value of a key that was no integer."""

    framework: str
    there: Settings
    here: Settings = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{len(self.there) - len(self.reasons)} of {len(self.there)} settings are keys here, the others comments"


def translate_file(path: Path, out: Path | None, rows: int | None, devices: int) -> str:
    """Translate a file and write the config to `out`. Returns what to print: the config itself without `out`.

    rows: of the training data, for epochs; None = counted, if the data is on this machine. devices: TRL counts answers
    on each of them. Raises: ConfigError if the file has no settings of another framework, or `out` is there.
    """
    read = read_settings(path)
    made = translate_settings(*read, {"rows": rows, "num_processes": devices})
    table = Path(str(made.here.get("data.path"))).expanduser()
    if rows is None and table.exists():
        with suppress(DataError):  # what is there is no table: then the number of rows is a placeholder
            rows = open_table(str(table), "auto").num_rows
        made = translate_settings(*read, {"rows": rows, "num_processes": devices})
    if out is None:
        return render(made, path.name)
    with output_errors(out, "Give another file by --out", ConfigError), out.open("x", encoding="utf-8") as file:
        file.write(render(made, path.name))
    return f"wrote {out}: {made}\ncheck it:  meshrl train {out} --explain\nwithout GPUs:  docs/from_verl_and_trl.md\n"


def translate_settings(framework: str, there: Settings, numbers: Settings) -> Translation:
    """The translation of settings by their full names. numbers: of rows and devices, unless the settings have them."""
    made, table = Translation(framework=framework, there=there), settings()
    made.here |= {key: value for key, (value, _) in KNOWN.get(framework, {}).items()}
    defaults = {n: value for row in table for n, value in row.defaults.items() if n in row.names.get(framework, ())}
    numbers = {**numbers, "num_steps": "=num_epochs * rows / prompts_per_step", "eval_path": "=dataset_name"}
    given, found = numbers | defaults | there, {name: setting_of(name, framework) for name in {**defaults, **there}}
    made.reasons |= {name: UNKNOWN for name in there if found[name] is None}
    places = {id(setting): i for i, setting in enumerate(table)}
    rows = [(*row, name) for name, row in found.items() if row is not None]
    for setting, rest, name in sorted(rows, key=lambda row: places[id(row[0])]):
        result = translated(setting, name, rest, given, made.here)
        if isinstance(result, dict):
            for key, value in result.items():
                made.here[key] = fitting = _fitting(key, value)
                is_rounded = isinstance(value, float) and abs(fitting - value) > 1e-6
                devices = ": check --devices" if framework == "TRL" and key == "loop.prompts_per_step" else ""
                made.rounded[key] = f", rounded up from {value:g}{devices}" if is_rounded else ""
                made.names.setdefault(key, []).append(name)
        elif name in there:
            made.reasons[name] = result
    others = {"data.path": "data.sources.", "loop.num_steps": "loop.num_epochs"}  # they need no placeholder then
    missing = [key for key in PLACEHOLDERS if not any(known.startswith(others.get(key, key)) for known in made.here)]
    made.here = {key: PLACEHOLDERS[key][0] for key in missing} | made.here
    while _leave_out(made):
        continue
    return made


def _fitting(key: str, value: Any) -> Any:
    """The value in the type of its key."""
    allowed = found.allowed if (found := locate(KEYS, key)[0]) else ""
    if isinstance(value, float) and allowed.startswith("integer"):
        return math.ceil(round(value, 6))
    if isinstance(value, list) != allowed.startswith(("list", "[")):
        return [value] if not isinstance(value, list) else value[0] if len(value) == 1 else value
    return value


def _leave_out(made: Translation) -> bool:
    """Take out the keys that the checks of configs refuse, with the reasons. Returns whether there were any."""
    try:
        load_run_config(nested(made.here), starts=False)
    except WrongConfig as error:
        refused: dict[str, str] = {}
        for problem in error.problems:
            wrong = [*problem.void, *problem.keys, *(key.rpartition(".")[0] for key in problem.keys)]
            keys = [key for path in wrong for key in made.here if f"{key}.".startswith(f"{path}.")]
            refused |= {key: problem.text for key in keys[:1] if key not in (*PATH_KEYS, *PLACEHOLDERS)}
        for key, text in refused.items():
            reason = f"{key}: {show(made.here.pop(key))} is refused: {text.removesuffix('.')}"
            still = {name for k, names in made.names.items() if k in made.here for name in names}
            made.reasons |= {n: reason for n in made.names.pop(key, []) if n in made.there and n not in still}
        return bool(refused)
    return False


def nested(values: Settings) -> Settings:
    """Sections in sections, in the order of the list of keys."""
    order = [*KEYS]
    keys = sorted(values, key=lambda key: order.index(found.path) if (found := locate(KEYS, key)[0]) else 0)
    nested: Settings = content({tuple(key.split(".")): Value(values[key], "", Path()) for key in keys})
    return nested


def render(made: Translation, name: str) -> str:
    """The config file. name: of the file that was translated."""
    origins = {key: comment for key, (_, comment) in [*KNOWN.get(made.framework, {}).items(), *PLACEHOLDERS.items()]}
    for key, names in made.names.items():
        there = [n for n in names if n in made.there]
        texts = [n if made.there[n] == made.here[key] else f"{n} = {_short(made.there[n])}" for n in there]
        origin = "; ".join(texts) or f"default of {made.framework}: {names[0]}"
        origins[key] = _in_a_line(origin + made.rounded[key])
    lines = [f"# Translated from {_in_a_line(name)} ({made.framework}) by `meshrl translate`:", f"# {made}.", ""]
    lines += section_lines(nested(made.here), "", origins, {})
    by_reason = defaultdict(list)
    for setting, reason in made.reasons.items():
        by_reason[" ".join(reason.split())].append(f"#   {_in_a_line(setting)} = {_short(made.there[setting])}")
    for reason, those in by_reason.items():
        wrapped = textwrap.wrap(f"No key: {reason}.", 118, initial_indent="# ", subsequent_indent="# ")
        lines += ["", *wrapped, *those]
    return "\n".join([*lines, ""])


def _in_a_line(text: str) -> str:
    """A name of the file may have line breaks, which would end the comment."""
    return " ".join(text.split())


def _short(value: Any) -> str:
    text = show(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""The resolved config as YAML with the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshrl.config.check import unused
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.source import dotted
from meshrl.config.values import show

ORIGIN_COLUMN = 48
NO_RULES: Mapping[str, tuple[Any, str]] = MappingProxyType({})


def to_yaml(loaded: Loaded[RunConfig] | Loaded[SftRunConfig], rules: Mapping[str, tuple[Any, str]] = NO_RULES) -> str:
    """The resolved config as a config file: loading it gives the same config. Keys without effect are commented out.
    rules: keys that are commented out because the machine of the run decides them: (value here, reason) by key."""
    lines: list[str] = [f"# resolved from {loaded.path}"]
    comments = dict(rules) | {key: (..., f"unused: {why}") for key, (why, _) in unused(loaded.config).items()}
    lines += section_lines(loaded.config.model_dump(mode="json"), "", loaded.origins, comments)
    return "\n".join(lines) + "\n"


def section_lines(
    section: dict[str, Any], path: str, origins: Mapping[str, str], comments: Mapping[str, tuple[Any, str]]
) -> list[str]:
    """The lines of a section, with the origin of each value. comments: as rules of to_yaml, with `...` for no value."""
    lines = []
    indent = "  " * (path.count(".") + 1 if path else 0)
    for name, value in section.items():
        inner = dotted(path, name)
        if isinstance(value, dict) and value:
            lines += [f"{indent}{show(name)}:", *section_lines(value, inner, origins, comments)]
            continue
        mark, origin = "", origins[inner]
        if inner in comments:
            here, origin = comments[inner]
            mark, value = "# ", value if here is ... else here
        line = f"{indent}{mark}{name if mark else show(name)}: {show(value)}"
        lines.append(f"{line:<{ORIGIN_COLUMN}}  # {origin}")
    return lines

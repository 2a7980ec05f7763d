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
    _section(loaded.config.model_dump(mode="json"), "", loaded.origins, comments, lines)
    return "\n".join(lines) + "\n"


def _section(
    section: dict[str, Any], path: str, origins: dict[str, str], comments: dict[str, tuple[Any, str]], lines: list[str]
) -> None:
    indent = "  " * (path.count(".") + 1 if path else 0)
    for name, value in section.items():
        inner = dotted(path, name)
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{show(name)}:")
            _section(value, inner, origins, comments, lines)
            continue
        mark, origin = "", origins[inner]
        if inner in comments:
            here, origin = comments[inner]
            mark, value = "# ", value if here is ... else here
        line = f"{indent}{mark}{name if mark else show(name)}: {show(value)}"
        lines.append(f"{line:<{ORIGIN_COLUMN}}  # {origin}")

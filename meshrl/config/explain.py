"""The resolved config as YAML with the origin of every value, and what it adds up to."""

from __future__ import annotations

from typing import Any

from meshrl.config.arithmetic import batch_lines
from meshrl.config.check import unused
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.source import dotted
from meshrl.config.values import show

ORIGIN_COLUMN = 48


def explain(loaded: Loaded[RunConfig] | Loaded[SftRunConfig], num_data_rows: int | None = None) -> str:
    """What `--explain` prints. All of it is YAML: the arithmetic is in comments. num_data_rows: of the training table,
    where it is known."""
    config = loaded.config
    rows = batch_lines(config, num_data_rows) + _mixture(config)
    width = max(len(what) for what, _ in rows)
    lines = [f"# {what:<{width}}  {how_much}" for what, how_much in rows]
    lines += [f"# note: {notice}" for notice in loaded.notices]
    return to_yaml(loaded) + "\n" + "\n".join(lines) + "\n"


def to_yaml(loaded: Loaded[RunConfig] | Loaded[SftRunConfig]) -> str:
    """The resolved config as a config file: loading it gives the same config. Keys without effect are commented out."""
    lines: list[str] = [f"# resolved from {loaded.path}"]
    silent = unused(loaded.config)
    _section(loaded.config.model_dump(mode="json"), "", loaded.origins, silent, lines)
    return "\n".join(lines) + "\n"


def _section(
    section: dict[str, Any], path: str, origins: dict[str, str], silent: dict[str, str], lines: list[str]
) -> None:
    indent = "  " * (path.count(".") + 1 if path else 0)
    for name, value in section.items():
        inner = dotted(path, name)
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{show(name)}:")
            _section(value, inner, origins, silent, lines)
            continue
        line, origin = f"{indent}{show(name)}: {show(value)}", origins[inner]
        if inner in silent:
            line, origin = f"{indent}# {name}: {show(value)}", f"unused: {silent[inner]}"
        lines.append(f"{line:<{ORIGIN_COLUMN}}  # {origin}")


def _mixture(config: RunConfig | SftRunConfig) -> list[tuple[str, str]]:
    sources = {} if isinstance(config, SftRunConfig) else config.data.sources
    total = sum(source.weight for source in sources.values())
    shares = ", ".join(f"{name} {source.weight / total:.1%}" for name, source in sources.items())
    return [("mixture of prompts", shares)] if shares else []

"""The resolved config as YAML with the origin of every value, and the sizes that follow from it."""

from __future__ import annotations

from math import ceil
from typing import Any

from meshrl.config.check import unused
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.source import dotted
from meshrl.config.values import show

ORIGIN_COLUMN = 48


def explain(loaded: Loaded[RunConfig] | Loaded[SftRunConfig], num_data_rows: int | None = None) -> str:
    """The output of `--explain`: the sizes of a step as comments, then every key as YAML. num_data_rows: rows of the
    training data, None = not known."""
    config = loaded.config
    rows = batch_lines(config, num_data_rows) + _mixture(config)
    width = max(len(what) for what, _ in rows)
    lines = [f"# {what:<{width}}  {how_much}" for what, how_much in rows]
    lines += [f"# note: {notice}" for notice in loaded.notices]
    return "\n".join(lines) + "\n\n" + to_yaml(loaded)


def to_yaml(loaded: Loaded[RunConfig] | Loaded[SftRunConfig]) -> str:
    """The resolved config as a config file: loading it gives the same config. Keys without effect are commented out."""
    lines: list[str] = [f"# resolved from {loaded.path}"]
    without_effect = unused(loaded.config)
    _section(loaded.config.model_dump(mode="json"), "", loaded.origins, without_effect, lines)
    return "\n".join(lines) + "\n"


def _section(
    section: dict[str, Any], path: str, origins: dict[str, str], without_effect: dict[str, str], lines: list[str]
) -> None:
    indent = "  " * (path.count(".") + 1 if path else 0)
    for name, value in section.items():
        inner = dotted(path, name)
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{show(name)}:")
            _section(value, inner, origins, without_effect, lines)
            continue
        line, origin = f"{indent}{show(name)}: {show(value)}", origins[inner]
        if inner in without_effect:
            line, origin = f"{indent}# {name}: {show(value)}", f"unused: {without_effect[inner]}"
        lines.append(f"{line:<{ORIGIN_COLUMN}}  # {origin}")


def batch_lines(config: RunConfig | SftRunConfig, num_data_rows: int | None) -> list[tuple[str, str]]:
    """(what, how much) of each line, derived from earlier lines. All numbers are upper bounds, not predictions."""
    lines = _sft_rows(config) if isinstance(config, SftRunConfig) else _rl_rows(config)
    ranks, mesh, rows = config.cluster.num_train_ranks, config.train.mesh, config.rows_per_update
    replicate, shard = config.train.data_ranks(ranks)
    lines += [
        ("train ranks", f"{ranks}, executor {config.cluster.executor}"),
        ("mesh", f"dp_replicate {replicate} x dp_shard {shard} x ulysses {mesh.ulysses} x tp {mesh.tp}"),
    ]
    longest, budget = config.longest_row_tokens, config.train.max_tokens_per_microbatch
    if longest is None:
        lines.append(("longest row", "the model's context (rollout.max_context_tokens is not set)"))
    else:
        most = ceil(ceil(rows / ranks) / max(1, budget // longest))
        lines += [
            ("longest row", _longest(config, longest)),
            ("tokens per optimizer step", f"at most {rows} x {longest:,} = {rows * longest:,}"),
            ("micro-batches per rank", f"at most {most} per optimizer step, of {budget:,} tokens each"),
        ]
    return lines + _totals(config, num_data_rows)


def _rl_rows(config: RunConfig) -> list[tuple[str, str]]:
    loop, updates = config.loop, config.train.updates_per_step
    rows = loop.prompts_per_step * loop.samples_per_prompt
    policy = "on-policy: ratio 1, no clipping" if updates == 1 else "only the first of each step is on-policy"
    samplers = config.cluster.num_rollout_ranks
    place = f"{samplers} separate ranks" if samplers else "colocated in the train ranks"
    return [
        ("rows per step", f"{loop.prompts_per_step} prompts x {loop.samples_per_prompt} samples = {rows:,}"),
        ("optimizer steps", f"{loop.num_steps} steps x {updates} = {loop.num_steps * updates:,} ({policy})"),
        ("rows per optimizer step", f"{rows:,} / {updates} = {rows // updates:,}"),
        ("samplers", f"{config.rollout.engine}, {place}"),
    ]


def _sft_rows(config: SftRunConfig) -> list[tuple[str, str]]:
    return [
        ("optimizer steps", f"{config.sft.num_steps:,}"),
        ("rows per optimizer step", f"{config.sft.rows_per_step:,}"),
    ]


def _longest(config: RunConfig | SftRunConfig, longest: int) -> str:
    if isinstance(config, SftRunConfig):
        return f"{longest:,} tokens (sft.max_row_tokens)"
    if config.agent.kind == "single_turn":
        sampling = config.rollout.sampling
        return f"{config.data.max_prompt_tokens:,} prompt + {sampling.max_new_tokens:,} answer = {longest:,} tokens"
    return f"{longest:,} tokens (rollout.max_context_tokens)"


def _totals(config: RunConfig | SftRunConfig, num_data_rows: int | None) -> list[tuple[str, str]]:
    if isinstance(config, SftRunConfig):
        drawn = config.sft.num_steps * config.sft.rows_per_step
        lines = [("rows of the run", f"{drawn:,}")]
    else:
        drawn = config.loop.num_steps * config.loop.prompts_per_step
        samples = drawn * config.loop.samples_per_prompt
        lines = [("samples of the run", f"{drawn:,} prompts x {config.loop.samples_per_prompt} = {samples:,}")]
    if num_data_rows:
        lines.append(
            ("passes over the data", f"{drawn / num_data_rows:.2f} of {num_data_rows:,} rows, before filtering")
        )
    return lines


def _mixture(config: RunConfig | SftRunConfig) -> list[tuple[str, str]]:
    sources = {} if isinstance(config, SftRunConfig) else config.data.sources
    total = sum(source.weight for source in sources.values())
    shares = ", ".join(f"{name} {source.weight / total:.1%}" for name, source in sources.items())
    return [("mixture of prompts", shares)] if shares else []

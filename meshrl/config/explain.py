"""The resolved config as YAML with the origin of every value, and the sizes that follow from it."""

from __future__ import annotations

from math import ceil
from typing import Any

from meshrl.config.check import unused
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.source import dotted
from meshrl.config.values import show
from meshrl.core.terminal import counted

ORIGIN_COLUMN = 48
Sizes = list[tuple[str, str]]  # (what, how much): upper bounds, not predictions


def explain(loaded: Loaded[RunConfig] | Loaded[SftRunConfig], num_data_rows: int | None = None) -> str:
    """The output of `--explain`: the sizes of a step as comments, then every key as YAML. num_data_rows: rows of the
    training data, None = not known."""
    config = loaded.config
    if isinstance(config, SftRunConfig):
        steps, rows_per_step = config.sft.num_steps, config.sft.rows_per_step
        drawn = steps * rows_per_step
        step = [("optimizer steps", f"{steps:,}"), ("rows per optimizer step", f"{rows_per_step:,}")]
        run = [("rows of the run", f"{drawn:,}")]
    else:
        step, run, drawn = _rl_sizes(config)
    rows = [*step, *_update_sizes(config), *run]
    if num_data_rows:
        passes = f"{drawn / num_data_rows:.2f} of {num_data_rows:,} rows, before filtering"
        rows.append(("passes over the data", passes))
    width = max(len(label) for label, _ in rows)
    lines = [f"# {label:<{width}}  {how_much}" for label, how_much in rows]
    lines += [f"# note: {notice}" for notice in loaded.notices]
    return "\n".join(lines) + "\n\n" + to_yaml(loaded)


def to_yaml(loaded: Loaded[RunConfig] | Loaded[SftRunConfig]) -> str:
    """The resolved config as a config file: loading it gives the same config. Keys without effect are commented out."""
    lines: list[str] = [f"# resolved from {loaded.path}"]
    without_effect = {key: reason for key, (reason, _) in unused(loaded.config).items()}
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


def _rl_sizes(config: RunConfig) -> tuple[Sizes, Sizes, int]:
    """The sizes of a step, those of the run, and the number of prompts that the run draws."""
    loop, updates, sources = config.loop, config.train.updates_per_step, config.data.sources
    prompts, samples = loop.prompts_per_step, loop.samples_per_prompt
    rows, drawn = prompts * samples, loop.num_steps * prompts
    policy = "on-policy: ratio 1, no clipping" if updates == 1 else "only the first of each step is on-policy"
    samplers = config.cluster.num_rollout_ranks
    place = counted(samplers, "separate rank") if samplers else "colocated in the train ranks"
    if not samplers and config.rollout.tp_size == 1 and config.rollout.engine != "endpoint":
        place += ", a full copy in each"
    step = [
        ("rows per step", f"{prompts} prompts x {samples} samples = {rows:,}"),
        ("optimizer steps", f"{loop.num_steps} steps x {updates} = {loop.num_steps * updates:,} ({policy})"),
        ("rows per optimizer step", f"{rows:,} / {updates} = {rows // updates:,}"),
        ("samplers", f"{config.rollout.engine}, {place}"),
    ]
    run = [("samples of the run", f"{drawn:,} prompts x {samples} = {drawn * samples:,}")]
    if sources:
        total = sum(source.weight for source in sources.values())
        shares = [f"{name} {source.weight / total:.1%}" for name, source in sources.items()]
        run.append(("mixture of prompts", ", ".join(shares)))
    return step, run, drawn


def _update_sizes(config: RunConfig | SftRunConfig) -> Sizes:
    """The sizes of an optimizer step on each rank."""
    ranks, rows = config.cluster.num_train_ranks, config.rows_per_update
    shape = config.train.mesh_shape(ranks)
    lines = [
        ("train ranks", f"{ranks}, executor {config.cluster.executor}"),
        ("mesh", " x ".join(f"{axis} {size}" for (axis, _), size in zip(config.train.mesh, shape, strict=True))),
    ]
    peers = shape[2] * shape[3]
    longest, budget = config.longest_row_tokens, config.train.max_tokens_per_microbatch
    if longest is None:
        return [*lines, ("longest row", "the model's context (rollout.max_context_tokens is not set)")]
    if budget is None:
        micro_batches = "by the size of the model (train.max_tokens_per_microbatch is not set)"
    else:
        budget *= config.train.mesh.ulysses
        most = ceil(ceil(rows / (ranks // peers)) / max(1, budget // longest))
        micro_batches = f"at most {most} per optimizer step, of {budget:,} tokens each"
        micro_batches += f", for {peers} ranks together" if peers > 1 else ""
    row = f"{longest:,} tokens (rollout.max_context_tokens)"
    if isinstance(config, SftRunConfig):
        row = f"{longest:,} tokens (sft.max_row_tokens)"
    elif config.agent.kind == "single_turn":
        answer = config.rollout.sampling.max_new_tokens
        row = f"{config.data.max_prompt_tokens:,} prompt + {answer:,} answer = {longest:,} tokens"
    return [
        *lines,
        ("longest row", row),
        ("tokens per optimizer step", f"at most {rows} x {longest:,} = {rows * longest:,}"),
        ("micro-batches per rank", micro_batches),
    ]

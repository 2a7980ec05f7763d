"""The output of `--explain`: the sizes that follow from a config, every key with its value and origin, also the values
that the run decides, and the bytes on a rank and on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

from meshrl.config.explain import to_yaml
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.terminal import counted
from meshrl.plan.disk_use import disk_use
from meshrl.plan.memory import PlannedRun, RankMemory
from meshrl.plan.ranks import RankPlan
from meshrl.plan.run_plan import RunPlan, make_plan
from meshrl.plan.sizes import micro_batches

Sizes = list[tuple[str, str]]  # (what, how much): upper bounds, not predictions
BY_RULE = "by rule"  # in place of a value that only the rank can decide


def explain(
    loaded: Loaded[RunConfig] | Loaded[SftRunConfig],
    num_data_rows: int | None = None,
    run_plan: RunPlan | None = None,
) -> str:
    """The sizes of a step as comments, then every key as YAML, which is a config of the same run. num_data_rows: rows
    of the training data, None = not known. run_plan: None = what follows from the config alone."""
    run_plan = run_plan or make_plan(loaded.config, None)
    config = run_plan.config
    if isinstance(config, SftRunConfig):
        steps, rows_per_step = config.sft.num_steps, config.sft.rows_per_step
        drawn = steps * rows_per_step
        step = [("optimizer steps", f"{steps:,}"), ("rows per optimizer step", f"{rows_per_step:,}")]
        run = [("rows of the run", f"{drawn:,}")]
    else:
        step, run, drawn = _rl_sizes(config)
    roles = ", ".join(f"{role.name} ({'trained' if role.trains else 'not trained'})" for role in run_plan.roles)
    rows = [*step, ("roles", roles), ("ranks", _ranks(run_plan.ranks)), *_update_sizes(config), *run]
    if num_data_rows:
        rows_of = config.sft if isinstance(config, SftRunConfig) else config.data
        num_trained = max(1, round(num_data_rows * (1 - (rows_of.eval_fraction or 0))))
        about = "about " * (num_trained < num_data_rows)
        passes = f"{drawn / num_trained:.2f} of {about}{num_trained:,} rows, before filtering"
        rows.append(("passes over the data", passes))
    width = max(len(label) for label, _ in rows)
    lines = [f"# {label:<{width}}  {how_much}" for label, how_much in rows]
    lines += [f"# note: {notice}" for notice in loaded.notices]
    return "\n".join(lines) + "\n\n" + _yaml(loaded, run_plan)


def _yaml(loaded: Loaded[RunConfig] | Loaded[SftRunConfig], run_plan: RunPlan) -> str:
    rules, origins, planned = dict[str, tuple[Any, str]](), dict(loaded.origins), cast(Any, run_plan.config)
    for key, each in run_plan.decisions.items():
        if each.value is None or each.is_of_machine:
            rules[key] = BY_RULE if each.value is None else each.value, f"here: {each.reason}"
        else:
            origins[key] = f"decided: {each.reason}"
    return to_yaml(replace(loaded, config=planned, origins=origins), rules)


def _ranks(ranks: Sequence[RankPlan]) -> str:
    """Such as `0 to 3 train, 4 to 7 sample (2 samplers)`, with the machine if there are several."""
    texts, is_colocated = [], any(own.trains and own.samples for own in ranks)
    for (machine, trains), same in groupby(ranks, lambda own: (own.machine, own.trains)):
        group = list(same)
        does = " and ".join(["train"] * trains + ["sample"] * (is_colocated or not trains))
        which = " to ".join(dict.fromkeys((str(group[0].rank), str(group[-1].rank))))
        samplers = sum(own.samples for own in group)
        shared = f" ({counted(samplers, 'sampler')})" if 0 < samplers < len(group) else ""
        texts.append(f"{which} {does}{shared}" + (f" on machine {machine}" if ranks[-1].machine else ""))
    return ", ".join(texts)


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
    ranks, rows, longest = config.cluster.num_train_ranks, config.rows_per_update, config.longest_row_tokens
    shape, (tokens, most) = config.train.mesh_shape(ranks), micro_batches(config, ranks)
    lines = [
        ("executor", config.cluster.executor),
        ("mesh", " x ".join(f"{axis} {size}" for (axis, _), size in zip(config.train.mesh, shape, strict=True))),
    ]
    peers = shape[2] * shape[3]
    if longest is None:
        return [*lines, ("longest row", "the model's context (rollout.max_context_tokens is not set)")]
    if tokens is None:
        each = "by the size of the model (train.max_tokens_per_microbatch is not set)"
    else:
        each = f"at most {most} per optimizer step, of {tokens:,} tokens each"
        each += f", for {peers} ranks together" if peers > 1 else ""
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
        ("micro-batches per rank", each),
    ]


def memory_lines(job: PlannedRun, ranks: Sequence[RankMemory]) -> str:
    """Comment lines: the bytes on each kind of rank in each phase, and on disk."""
    evaluates, memory = isinstance(job.config, RunConfig) and job.config.data.is_evaluated, job.memory
    disk = disk_use(job.config, 3 * memory.trained, memory.weights, evaluates)
    texts = [text.replace("\n", "\n# ") for text in (*(memory_table(rank) for rank in ranks), disk)]
    return "\n".join(f"# {text}" for text in texts)


def memory_table(rank: RankMemory) -> str:
    """A row for each part, a column for each phase."""
    unit, factor = ("GB", 1e9) if rank.total(rank.peak) >= 1e9 else ("MB", 1e6)

    def cells(sizes: Mapping[str, int]) -> str:
        return "".join(f"{sizes[phase] / factor:>10.2f}" if sizes.get(phase) else f"{'':>10}" for phase in rank.phases)

    lines = [f"memory of a {rank.what} in each phase of a step, at most, in {unit}:"]
    lines.append(f"  {'':<30}" + "".join(f"{phase:>10}" for phase in rank.phases))
    lines += [f"  {part:<30}{cells(sizes)}" for part, sizes in rank.device.items()]
    lines.append(f"  {'together':<30}{cells({phase: rank.total(phase) for phase in rank.phases})}")
    lines += [f"  {f'on the host: {part}':<30}{cells(sizes)}" for part, sizes in rank.host.items()]
    lines += [f"  {part}: {note}" for part, note in rank.notes.items() if note and part in rank.device]
    lines += [f"  {part}: unknown, not in the sum: {reason}" for part, reason in rank.unknown.items()]
    return "\n".join(lines)

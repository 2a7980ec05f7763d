"""What a configuration adds up to: rows, ranks, optimizer steps, token bounds. Upper bounds, never predictions."""

from __future__ import annotations

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.train import TrainConfig


def longest_row_tokens(config: RunConfig | SftRunConfig) -> int | None:
    """Tokens of the longest row that can be trained; None where only the model's context bounds it."""
    if isinstance(config, SftRunConfig):
        return config.sft.max_row_tokens
    if config.agent.kind == "single_turn":
        return config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    return config.rollout.max_context_tokens


def data_ranks(train: TrainConfig, num_train_ranks: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) with -1 written out; NO_SHARD makes every rank a replica. Their product may be wrong."""
    mesh = train.mesh
    if train.sharding_strategy == "NO_SHARD":
        replicas = num_train_ranks if mesh.dp_replicate == 1 else mesh.dp_replicate
        return replicas, 1 if mesh.dp_shard == -1 else mesh.dp_shard
    if mesh.dp_shard == -1:
        return mesh.dp_replicate, max(1, num_train_ranks // mesh.dp_replicate)
    return mesh.dp_replicate, mesh.dp_shard


def most_micro_batches(config: RunConfig | SftRunConfig, rows: int) -> int | None:
    """Micro-batches of one rank in an optimizer step of `rows` rows, if all rows were of the longest length."""
    longest = longest_row_tokens(config)
    if longest is None:
        return None
    rows_of_rank = -(-rows // config.cluster.num_train_ranks)
    rows_together = max(1, config.train.max_tokens_per_microbatch // longest)
    return -(-rows_of_rank // rows_together)


def ranks_in_turn(config: RunConfig) -> str | None:
    """What separate sampler ranks cost in a run whose schedule samples and trains in turn; None where both are the same
    ranks."""
    train, samplers, rollout = config.cluster.num_train_ranks, config.cluster.num_rollout_ranks, config.rollout
    if not samplers or config.loop.kind != "colocated":
        return None
    url = {"endpoint": "rollout.endpoint.url", "sglang": "rollout.sglang.url"}.get(rollout.engine)
    if url is not None and (rollout.engine == "endpoint" or rollout.sglang.url is not None):
        return (
            f"{_count(train, 'train')} and the server at {url} run in turn: each waits while the other works, because "
            "loop.kind=colocated samples with the newest weights only."
        )
    turns = f"{_count(train, 'train')} and {_count(samplers, 'sampler')} run in turn: each waits while the other works"
    total = train + samplers
    change = f"set cluster.num_train_ranks={total} and cluster.num_rollout_ranks=0 to use all {total} for both"
    if rollout.engine == "embedded":
        return f"{turns}; with loop.kind=colocated {change}."
    return (
        f"{turns}. Separate ranks are needed where the training state and the {rollout.engine} server do not fit on "
        f"one device together. Where they do (rollout.release_memory=true frees the server's memory while the trainer "
        f"works), {change}."
    )


def _count(num_ranks: int, kind: str) -> str:
    return f"{num_ranks} {kind} rank{'' if num_ranks == 1 else 's'}"


def batch_lines(config: RunConfig | SftRunConfig, num_data_rows: int | None) -> list[tuple[str, str]]:
    """(what, how much) in the order in which one follows from the other. num_data_rows: lines of the training file."""
    lines = _sft_rows(config) if isinstance(config, SftRunConfig) else _rl_rows(config)
    rows = _rows_per_update(config)
    replicate, shard = data_ranks(config.train, config.cluster.num_train_ranks)
    mesh = config.train.mesh
    lines += [
        ("train ranks", f"{config.cluster.num_train_ranks}, executor {config.cluster.executor}"),
        ("mesh", f"dp_replicate {replicate} x dp_shard {shard} x ulysses {mesh.ulysses} x tp {mesh.tp}"),
    ]
    longest, most = longest_row_tokens(config), most_micro_batches(config, rows)
    if longest is None:
        lines.append(("longest row", "the model's context (rollout.max_context_tokens is not set)"))
    else:
        lines.append(("longest row", _longest(config, longest)))
        lines.append(("tokens per optimizer step", f"at most {rows} x {longest:,} = {rows * longest:,}"))
        budget = config.train.max_tokens_per_microbatch
        lines.append(("micro-batches per rank", f"at most {most} an optimizer step, of {budget:,} tokens each"))
    return lines + _totals(config, num_data_rows)


def _rows_per_update(config: RunConfig | SftRunConfig) -> int:
    if isinstance(config, SftRunConfig):
        return config.sft.rows_per_step
    return config.loop.prompts_per_step * config.loop.samples_per_prompt // config.train.updates_per_step


def _rl_rows(config: RunConfig) -> list[tuple[str, str]]:
    loop, updates = config.loop, config.train.updates_per_step
    rows = loop.prompts_per_step * loop.samples_per_prompt
    policy = "on-policy: ratio 1, no clipping" if updates == 1 else "the ratio leaves 1 after the first"
    samplers = config.cluster.num_rollout_ranks
    place = f"{samplers} ranks of their own" if samplers else "colocated in the train ranks"
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

"""What of a rank's memory follows from the config and the model's config.json: part of `meshrl train --explain`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.model.costs import ModelMemory, model_memory
from meshrl.model.limits import limits_of
from meshrl.monitor.disk_use import size_text
from meshrl.plan.decisions import CACHE_SHARE
from meshrl.rollout.embedded.kv_cache import room_for


def describe_memory(config: RunConfig | SftRunConfig) -> str:
    """Comment lines."""
    train, num_rollout_ranks = config.train, config.cluster.num_rollout_ranks
    num_ranks = config.cluster.num_train_ranks
    memory = model_memory(config.model, train, num_ranks)
    _, num_shards, num_ulysses, num_tp = train.mesh_shape(num_ranks)
    shards = f"sharded over {num_shards * num_ulysses}" + (f" x tp {num_tp}" if num_tp > 1 else "")
    waits = ", in host memory except in the optimizer step" if train.optimizer_offload else ""
    leaves = ", in host memory while samplers work" if train.param_offload and not num_rollout_ranks else ""
    trainer = [
        ("weights", f"{size_text(memory.masters)}, {shards}{leaves}"),
        ("gradients", size_text(memory.gradients)),
        ("moments of AdamW", size_text(memory.moments) + waits),
    ]
    sampler: list[tuple[str, str]] = []
    if isinstance(config, RunConfig):
        if config.algo.kl.coef and memory.reference:
            trainer.append(("reference", size_text(memory.reference) + leaves))
        sampler = _sampler(config, memory)
    if not num_rollout_ranks:
        trainer, sampler = trainer + sampler, []
    texts = []
    for rank, lines in (("train rank", trainer), ("rank that samples", sampler)):
        if lines:
            texts.append(f"# memory of a {rank}, without activations, gathered or cast weights, logits and libraries:")
            texts += [f"#   {label:<17}  {size}" for label, size in lines]
    return "\n".join(texts)


def _sampler(config: RunConfig, memory: ModelMemory) -> list[tuple[str, str]]:
    """Of its device; nothing for a server that meshrl does not start."""
    rollout, is_colocated = config.rollout, not config.cluster.num_rollout_ranks
    if rollout.engine == "endpoint" or (rollout.engine == "sglang" and rollout.sglang.url is not None):
        return []
    releases = is_colocated and rollout.releases(on_accelerators=True)
    freed = f",{' on accelerators' if rollout.release_memory is None else ''} freed while the trainer works"
    weights = size_text(memory.weights // rollout.tp_size) + freed * releases
    if is_colocated and rollout.engine == "embedded":
        releases, freed = True, ", freed while the trainer works"  # it drops its cache in any case
    return [("sampler's weights", weights), ("sampler's cache", _cache(config, memory) + freed * releases)]


def _requests(config: RunConfig) -> tuple[int, int]:
    """The largest numbers of requests that a sampler runs at a time: in a step, and in an evaluation."""
    loop, data, most = config.loop, config.data, config.rollout.max_running_requests
    in_step = most if loop.kind == "fully_async" else min(most, loop.prompts_per_step * loop.samples_per_prompt)
    if data.eval_path is None:
        return in_step, 0
    path, rows = Path(data.eval_path), data.eval_limit or most
    if path.suffix == ".jsonl":
        with suppress(OSError), path.open("rb") as lines:
            rows = min(rows, sum(1 for _ in lines))
    return in_step, min(most, rows * loop.eval_samples)


def _cache(config: RunConfig, memory: ModelMemory) -> str:
    rollout, token = config.rollout, memory.token
    if token is None:
        return "unknown for this model"
    if rollout.engine == "embedded":
        longest, _ = limits_of(config.model.path, rollout.max_context_tokens)
        if config.agent.kind == "single_turn":
            answer = max(rollout.sampling.max_new_tokens, config.eval_sampling.max_new_tokens)
            longest = min(longest, config.data.max_prompt_tokens + answer)
        in_step, in_evaluation = _requests(config)
        rows, positions = room_for(in_step, longest)
        size = f"{rows} rows x {positions:,} tokens x {token:,} bytes"
        most, bound = rows * positions * token, rollout.embedded.kv_cache_bytes
        if bound is not None and bound < most:
            return f"at most {size_text(bound)}, {bound // (positions * token)} of {size}; the other rows wait"
        limit = f", or {CACHE_SHARE:.0%} of the free memory of an accelerator" if bound is None else ""
        if in_evaluation > in_step:
            rows, _ = room_for(in_evaluation, longest)
            needed = rows * positions * token
            held = needed if bound is None else min(needed, bound)
            limit += f"; in evaluations at most {size_text(held)} ({held // (positions * token)} rows)"
        return f"at most {size_text(most)} ({size}){limit}"
    token //= rollout.tp_size
    if rollout.engine == "vllm" and rollout.vllm.kv_cache_bytes is not None:
        return f"{size_text(rollout.vllm.kv_cache_bytes)}, {rollout.vllm.kv_cache_bytes // token:,} tokens"
    share = rollout.vllm.gpu_memory_utilization if rollout.engine == "vllm" else rollout.sglang.mem_fraction_static
    return f"what its weights leave of {share:.0%} of the device; {token:,} bytes for each token"

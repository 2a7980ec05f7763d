"""The sizes of a run: rows and tokens of a step, and bytes on a rank, by the config and the model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.plan.decisions import CHUNK_LOGITS, ModelNumbers, stored_numbers

PAGE_TOKENS = {"cpu": 64}  # of a page of the embedded engine's KV cache: narrower ones make more and smaller products
DEVICE_PAGE_TOKENS = 128  # the kernels of a device read as many positions at a time


def page_tokens(device_type: str) -> int:
    return PAGE_TOKENS.get(device_type, DEVICE_PAGE_TOKENS)


def pages_with_memory(num_pages: int) -> int:
    """Pages for which memory is allocated when num_pages are needed: at most a quarter more, so that it grows a few
    times only."""
    step = 1 << max(0, (num_pages - 1).bit_length() - 3)
    return -(-num_pages // step) * step


def room_for(num_rows: int, length: int, width: int = DEVICE_PAGE_TOKENS) -> int:
    """Tokens for which the embedded engine's cache has memory when it holds num_rows rows of this length, in pages of
    this width."""
    return pages_with_memory(num_rows * -(-length // width)) * width


def micro_batches(config: RunConfig | SftRunConfig, num_ranks: int) -> tuple[int | None, int | None]:
    """(tokens of a micro-batch, of the ranks of ulysses together; micro-batches of an optimizer step on each rank, at
    most), None where they follow from a model that is not known. num_ranks: that train."""
    longest, budget = config.longest_row_tokens, config.train.max_tokens_per_microbatch
    if budget is None:
        return None, None
    tokens, rows = budget * config.train.mesh.ulysses, rows_of_a_rank(config, num_ranks)
    return tokens, None if longest is None else ceil(rows / max(1, tokens // longest))


def rows_of_a_rank(config: RunConfig | SftRunConfig, num_ranks: int) -> int:
    """In an optimizer step, at most."""
    return ceil(config.rows_per_update / prod(config.train.mesh_shape(num_ranks)[:2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMemory:
    """Bytes of a model's tensors. weights: of the full model in its compute dtype. trained: of all trained parameters
    in the dtype of the masters. masters, gradients, reference: of the train rank with the largest shards. blocks,
    block, root: in the compute dtype, what a rank of tp has of all blocks, of the largest one, and of the embedding and
    the head. token: of the keys and values of a token; None if they are not those of softmax attention."""

    weights: int
    trained: int
    masters: int
    gradients: int
    reference: int
    blocks: int
    block: int
    root: int
    token: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerMemory:
    """Bytes on each device of a sampler. token: of the KV cache for a token; None = unknown. rows: that run in a step,
    at most. tokens, eval_tokens: for which the embedded engine's cache has memory in a step, and in an evaluation, if
    more; 0 = a server decides."""

    weights: int
    token: int | None
    rows: int = 0
    tokens: int = 0
    eval_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSizes:
    """micro_batch: tokens of the largest one, on each rank. train: bytes of a train rank's parts, at most, by name.
    sampler: None = meshrl does not start it. state, model: bytes of a checkpoint's state, and of an exported model."""

    micro_batch: int
    train: Mapping[str, int]
    sampler: SamplerMemory | None
    state: int
    model: int


def run_sizes(
    config: RunConfig | SftRunConfig, model: ModelNumbers, memory: ModelMemory, num_ranks: int, has_reference: bool
) -> RunSizes:
    """config: with the decided values. num_ranks: that train."""
    longest, (budget, _) = config.longest_row_tokens or 0, micro_batches(config, num_ranks)
    of_a_step = longest * rows_of_a_rank(config, num_ranks) or 1 << 62
    tokens = ceil(min(max(budget or 0, longest), of_a_step) / config.train.mesh.ulysses)
    return RunSizes(
        micro_batch=tokens,
        train=_train_memory(config, model, memory, num_ranks, tokens, has_reference),
        sampler=_sampler_memory(config, memory) if isinstance(config, RunConfig) else None,
        state=3 * memory.trained,
        model=memory.weights,
    )


def _train_memory(
    config: Any, model: ModelNumbers, memory: ModelMemory, num_ranks: int, tokens: int, has_reference: bool
) -> dict[str, int]:
    """Activations are the inputs of all blocks and of the head with activation checkpointing, else all that the
    backward pass reads again; within a block: that, of the block whose backward pass runs. Logits: that exist at one
    time on an accelerator without Triton. Blocks in use: gathered, or cast to the compute dtype, with the gradients of
    one; embedding and head, too."""
    train, lora, width = config.train, config.model.lora.enabled, 4 if config.model.dtype == "float32" else 2
    replicas, shards, ulysses, tp = train.mesh_shape(num_ranks)
    hidden = tokens * model.hidden_size * width // tp
    mode = train.activation_checkpointing
    block, stored = (
        stored_numbers(model, train.torch_compile, kind) * tokens * width // tp + 2 * (tp - 1) * hidden
        for kind in (False, mode)
    )
    num_inputs = model.num_layers + 3  # of blocks, of the last norm, also in fp32, and of the head
    logits = min(tokens, train.logprob_chunk_tokens or tokens) * ceil(model.vocab_size / tp)
    is_sharded = replicas * shards * ulysses > 1
    is_copied = is_sharded or not (lora or config.model.dtype == train.master_dtype)
    keeps_all = train.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")
    if not is_sharded:
        keeps_all = mode in (False, "submodule")  # selective computes the copies again
    copies = memory.blocks if keeps_all else memory.block * (2 if is_sharded else 1)
    gradients = 0 if lora else memory.block + (memory.block * 4 // width if is_sharded else 0)  # and reduced in fp32
    return {
        "weights": memory.masters,
        "gradients": memory.gradients,
        "moments": 2 * memory.gradients,
        "reference": memory.reference if has_reference else 0,
        "activations": num_inputs * hidden if mode in (True, "block") else model.num_layers * stored,
        "within a block": block,
        "logits": 3 * 4 * (logits if train.logprob_chunk_tokens else min(logits, CHUNK_LOGITS)),
        "blocks in use": (copies + gradients) * is_copied,
        "embedding, head": memory.root * (1 if lora else 2) * is_copied,
    }


def _sampler_memory(config: RunConfig, memory: ModelMemory) -> SamplerMemory | None:
    rollout, tp = config.rollout, config.rollout.tp_size
    if rollout.engine == "endpoint" or (rollout.engine == "sglang" and rollout.sglang.url is not None):
        return None
    weights, token = memory.weights // tp, None if memory.token is None else memory.token // tp
    longest = rollout.max_context_tokens
    if rollout.engine != "embedded" or longest is None:
        return SamplerMemory(weights=weights, token=token)
    if config.agent.kind == "single_turn":
        answer = max(rollout.sampling.max_new_tokens, config.eval_sampling.max_new_tokens)
        longest = min(longest, config.data.max_prompt_tokens + answer)
    in_step, in_evaluation = _requests(config)
    tokens, eval_tokens = (room_for(rows, longest) for rows in (in_step, in_evaluation))
    return SamplerMemory(
        weights=weights,
        token=token,
        rows=in_step,
        tokens=tokens,
        eval_tokens=eval_tokens if in_evaluation > in_step else 0,
    )


def _requests(config: RunConfig) -> tuple[int, int]:
    """The largest numbers of requests that a sampler runs at a time: in a step, and in an evaluation."""
    loop, data, most = config.loop, config.data, config.rollout.max_running_requests
    in_step = most if loop.kind == "fully_async" else min(most, loop.prompts_per_step * loop.samples_per_prompt)
    if not data.is_evaluated:
        return in_step, 0
    path, rows = Path(data.eval_path or ""), data.eval_limit or most
    if path.suffix == ".jsonl":
        with suppress(OSError), path.open("rb") as lines:
            rows = min(rows, sum(1 for _ in lines))
    samples = max(config.of_eval_set(name).loop.eval_samples for name in ("", *data.eval_sets))
    return in_step, min(most, rows * samples)

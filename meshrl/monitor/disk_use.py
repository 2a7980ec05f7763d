"""How much a run will write: a text for its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshrl.config.rollout import SamplingConfig
from meshrl.config.run import RunConfig, SftRunConfig

# Measured on runs of GSM8K with groups of 8: 30 bytes a sampled token (id, logprob, version, text) with a vocabulary of
# 2,000; the ids of large vocabularies and the versions of long runs have up to 10 more digits. The values of a token in
# columns (token_log) have 11 bytes, 16 with advantages of its own.
_TOKEN_BYTES, _PROMPT_TOKEN_BYTES, _ATTEMPT_BYTES = 56, 20, 1900


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenSizes:
    """Bytes of a state and of an exported model; the number of held-out prompts, and the limit of a row in tokens.
    on_disk_bytes: of the run's folder, if it continues."""

    state_bytes: int
    model_bytes: int
    num_eval_prompts: int = 0
    max_context_tokens: int = 0
    on_disk_bytes: int = 0


_Written = tuple[str, int, str]
"""Files of one kind: their name, their bytes at most at the same time, and a text that follows."""


def disk_use(
    config: RunConfig | SftRunConfig,
    every_steps: int | None,
    every_s: float,
    sizes: WrittenSizes,
    free_bytes: int,
) -> str:
    """What a run has on disk at its end or before, at most, and whether it fits.

    every_steps: steps between states, which in RL also have a model; 0 = not by steps; None = a state at each
    evaluation. every_s: seconds between states; 0 = not by time. free_bytes: on the disk of the run's folder.
    """
    if isinstance(config, RunConfig):
        num_steps, with_model = config.loop.num_steps, every_steps or 0
        evals = 1 + _times(num_steps, config.loop.eval_every_steps) if sizes.num_eval_prompts else 0
    else:
        num_steps, evals, with_model = config.sft.num_steps, 0, 0
    at_evals = config.loop.eval_every_steps if every_steps is None and isinstance(config, RunConfig) else 0
    when = [f"every {every_steps} steps"] if every_steps else []
    when += [f"at each evaluation (every {at_evals} steps)"] if at_evals else []
    when += [f"every {every_s:g} s"] if every_s else []
    saved, keep = num_steps if every_s else _times(num_steps, every_steps or at_evals), config.run.keep_checkpoints
    num_states = min(saved, keep + 1)  # an old state is removed when the new one is complete
    states = f"{num_states} x {size_text(sizes.state_bytes)}; written {', '.join([*when, 'at the end'])}"
    parts: list[_Written] = [
        ("states", num_states * sizes.state_bytes, f" ({states}, newest {keep} kept)"),
        _models(config, _times(num_steps, with_model), num_states, evals, sizes),
        *(_rollouts(config, evals, sizes) if isinstance(config, RunConfig) else ()),
        ("metrics", (num_steps + evals) * 3000, ""),  # a line of metrics.jsonl
    ]
    total = sum(num_bytes for _, num_bytes, _ in parts)
    listed = ", ".join(f"{name} {size_text(num_bytes)}{text}" for name, num_bytes, text in parts)
    written = f" ({size_text(sizes.on_disk_bytes)} of it exist)" if sizes.on_disk_bytes else ""
    text = f"disk: at most {size_text(total)}{written}, {size_text(free_bytes)} free: {listed}"
    if total <= free_bytes + sizes.on_disk_bytes:
        return text
    keys = ["run.keep_checkpoints", "run.keep_models"]
    if isinstance(config, RunConfig) and config.monitor.rollout_log_every_steps:
        keys.append("set monitor.rollout_log_every_steps to a higher value or 0")
    return (
        f"{text}\nwarning: the disk may become full, which ends the run. Make room, choose another run.folder, lower "
        f"{' or '.join(keys[:2])}{''.join(f', or {key}' for key in keys[2:])}"
    )


def _times(num_steps: int, every: int) -> int:
    """How often something is done that is done every `every` steps (0 = never) and after the last one."""
    return num_steps // every + (num_steps % every > 0) if every else 1


def _models(
    config: RunConfig | SftRunConfig, exports: int, num_states: int, evals: int, sizes: WrittenSizes
) -> _Written:
    keep = config.run.keep_models
    count = exports if keep is None else min(exports, keep + 1)  # as for states
    best = 0
    if evals and isinstance(config, RunConfig) and config.loop.save_best:
        best = min(evals - 1, num_states + 1)  # one for each state, and the newest; the first model is model.path
    each = sizes.model_bytes
    if config.model.lora.enabled:
        each += sizes.state_bytes // 3  # the adapters, without their moments
    of_best = f" + {best} that were the best," if best else ""
    text = f" ({count}{of_best} x {size_text(each)}; {'all' if keep is None else f'newest {keep}'} kept)"
    return "models", (count + best) * each, text


def _rollouts(config: RunConfig, evals: int, sizes: WrittenSizes) -> Iterator[_Written]:
    every, loop = config.monitor.rollout_log_every_steps, config.loop
    if not every:
        return
    prompt = config.data.max_prompt_tokens * _PROMPT_TOKEN_BYTES

    def group(num_attempts: int, sampling: SamplingConfig) -> int:
        answer = sampling.max_new_tokens if config.agent.kind == "single_turn" else sizes.max_context_tokens
        return prompt + num_attempts * (_ATTEMPT_BYTES + answer * _TOKEN_BYTES)

    step = loop.prompts_per_step * group(loop.samples_per_prompt, config.rollout.sampling)
    evaluation = sizes.num_eval_prompts * group(loop.eval_samples, config.eval_sampling)
    files = -(-loop.num_steps // every)
    text = f" ({files} step{'' if files == 1 else 's'} x {size_text(step)}" + (
        f", {evals} evaluations x {size_text(evaluation)})" if evals else ")"
    )
    yield "rollouts", files * step + evals * evaluation, text


def size_text(num_bytes: int) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"

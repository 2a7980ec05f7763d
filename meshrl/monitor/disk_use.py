"""How much a run will write besides its rollouts: a text for its start."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.config.run import RunConfig, SftRunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenSizes:
    """Bytes of a state and of an exported model. on_disk_bytes: of the run's folder, if it continues."""

    state_bytes: int
    model_bytes: int
    has_evaluations: bool = False
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
    """What a run has on disk at its end or before, at most, without its rollouts, and whether it fits.

    every_steps: steps between states, which in RL also have a model; 0 = not by steps; None = a state at each
    evaluation. every_s: seconds between states; 0 = not by time. free_bytes: on the disk of the run's folder.
    """
    if isinstance(config, RunConfig):
        num_steps, with_model = config.loop.num_steps, every_steps or 0
        evals = 1 + _times(num_steps, config.loop.eval_every_steps) if sizes.has_evaluations else 0
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
        ("metrics", (num_steps + evals) * 3000, ""),  # a line of metrics.jsonl
    ]
    total = sum(num_bytes for _, num_bytes, _ in parts)
    listed = ", ".join(f"{name} {size_text(num_bytes)}{text}" for name, num_bytes, text in parts)
    written = f" ({size_text(sizes.on_disk_bytes)} of it exist)" if sizes.on_disk_bytes else ""
    if isinstance(config, RunConfig) and config.monitor.rollout_log_every_steps:
        written += ", and rollouts"
    text = f"disk: at most {size_text(total)}{written}, {size_text(free_bytes)} free: {listed}"
    if total <= free_bytes + sizes.on_disk_bytes:
        return text
    return (
        f"{text}\nwarning: the disk may become full, which ends the run. Make room, choose another run.folder, or "
        "lower run.keep_checkpoints or run.keep_models"
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


def size_text(num_bytes: int) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"

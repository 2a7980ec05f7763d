"""How much a run will write besides its rollouts: a text for `--explain` and for its start."""

from __future__ import annotations

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.plan.decisions import AUTO_SAVE_S


def disk_use(
    config: RunConfig | SftRunConfig,
    state_bytes: int,
    model_bytes: int,
    has_evaluations: bool,
    on_disk_bytes: int = 0,
    free_bytes: int | None = None,
) -> str:
    """What a run has on disk at its end or before, at most, without its rollouts, and whether it fits.

    state_bytes, model_bytes: of a state and of an exported model. on_disk_bytes: of the run's folder, if it continues.
    free_bytes: on its disk; None = not known.
    """
    section = config.loop if isinstance(config, RunConfig) else config.sft
    num_steps, every, keep, models = section.num_steps, section.save_every_steps, config.run.keep_checkpoints, 1
    at_evals = evals = best = 0
    num_states = num_steps if every is None else _times(num_steps, every)
    num_states = min(num_states, keep + 1)  # an old state is removed when the new one is complete
    if isinstance(config, RunConfig):
        at_evals, models = config.loop.eval_every_steps, _times(num_steps, every or 0)
        evals = 1 + _times(num_steps, at_evals) if has_evaluations else 0
        if evals and config.loop.save_best:
            best = min(evals - 1, num_states + 1)  # one for each state, and the newest; the first model is model.path
    if every is None:
        when = f"at each evaluation (every {at_evals} steps), " * bool(at_evals) + f"every {AUTO_SAVE_S:g} s, "
    else:
        when = f"every {every} steps, " * bool(every)
    states = f"{num_states} x {size_text(state_bytes)}; written {when}at the end, newest {keep} kept"
    if (limit := config.run.keep_models) is not None:
        models = min(models, limit + 1)  # as for states
    if config.model.lora.enabled:
        model_bytes += state_bytes // 3  # the adapters, without their moments
    of_best = f" + {best} that were the best," if best else ""
    counts = f"{models}{of_best} x {size_text(model_bytes)}; {'all' if limit is None else f'newest {limit}'} kept"
    sizes = num_states * state_bytes, (models + best) * model_bytes, (num_steps + evals) * 3000
    listed = f"states {size_text(sizes[0])} ({states}), models {size_text(sizes[1])} ({counts})"
    written = f" ({size_text(on_disk_bytes)} of it exist)" if on_disk_bytes else ""
    if isinstance(config, RunConfig) and config.monitor.rollout_log_every_steps:
        written += ", and rollouts"
    free = "" if free_bytes is None else f", {size_text(free_bytes)} free"
    text = f"disk: at most {size_text(sum(sizes))}{written}{free}: {listed}, metrics {size_text(sizes[2])}"
    if free_bytes is None or sum(sizes) <= free_bytes + on_disk_bytes:
        return text
    return (
        f"{text}\nwarning: the disk may become full, which ends the run. Make room, choose another run.folder, or "
        "lower run.keep_checkpoints or run.keep_models"
    )


def _times(num_steps: int, every: int) -> int:
    """How often something is done that is done every `every` steps (0 = never) and after the last one."""
    return num_steps // every + (num_steps % every > 0) if every else 1


def size_text(num_bytes: int) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"

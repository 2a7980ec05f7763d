"""Notes about a step from which the model can learn little; each is printed once in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.agent.attempt import crash_note
from meshrl.config.algo import ADVANTAGE_NAMES
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Trajectory
from meshrl.loops.job import Job
from meshrl.monitor.sinks import read_metrics

NO_SIGNAL = "no group has answers with different rewards, so the rewards change no weight"


def note_what_is_wrong(
    job: Job, trajectories: Sequence[Trajectory], values: Mapping[str, float], rollouts: object
) -> None:
    """values: the metrics of the step. rollouts: the file of its answers, None if there is none."""
    step, cut = f"step {job.step + 1}", values.get("rollout/truncated_fraction", 0.0)
    notes: dict[str, str] = {}
    crashes = crash_note(trajectories, job.cfg.agent.kind)
    if crashes is not None:
        notes["crashes"] = crashes
    if _has_no_signal(job, values):
        place = f"are in {rollouts}" if rollouts else "have no file (monitor.rollout_log_every_steps)"
        notes["no signal"] = f"{NO_SIGNAL}. The answers and their rewards {place}"
    if cut > 0.5:  # of the answers
        notes["cut"] = (
            f"{cut:.0%} of the answers were cut off, at rollout.sampling.max_new_tokens = "
            f"{job.cfg.rollout.sampling.max_new_tokens} or at the end of the model's context, so the graders read "
            "incomplete answers. Raise this key, ask for shorter answers (data.system), or add a reward term for "
            "answers whose stop_reason is stop; see also algo.truncated"
        )
    for name, text in notes.items():
        if name not in job.noted:
            job.noted.add(name)
            for line in f"{step}: {text}".splitlines():
                job.run.note(line)


def run_without_signal(job: Job) -> str | None:
    """Why nothing was learned, if no step of the run has changed a weight by its rewards; else None. Steps before a
    resume count, too. None also if the metrics can't be read."""
    try:
        lines, _ = read_metrics(job.run.folder / "metrics.jsonl")
    except MeshrlError:
        return None
    steps = [line.metrics for line in lines if "train/num_tokens" in line.metrics]  # without evaluations
    of = f"all {len(steps)} steps" if len(steps) > 1 else "the step"
    if all(_has_no_signal(job, values) or not values["train/num_tokens"] for values in steps):
        rollouts = job.run.folder / "rollouts"
        place = f"in {rollouts}" if rollouts.exists() else "of a run with monitor.rollout_log_every_steps=1"
        cause = NO_SIGNAL if any(values["train/num_tokens"] for values in steps) else "no answer was trained"
        advice = f"Check the rewards {place}; change the reward function if it does not distinguish answers, or the "
        return f"{of}: {cause}. {advice}prompts if all are too hard or too easy" if steps else None
    for name, text in (("train/grad_norm", "every gradient is 0"), ("train/lr", "the learning rate is 0")):
        if not any(values.get(name) for values in steps):
            return f"{of}: {text}, so no weight has changed"
    return None


def _has_no_signal(job: Job, values: Mapping[str, float]) -> bool:
    """Whether every advantage of the step is 0. A user's own advantages may differ where the rewards do not."""
    return values.get("reward/groups_without_signal") == 1.0 and job.cfg.algo.advantage in ADVANTAGE_NAMES

"""The answers of one step or evaluation, with the names by which all views of a run show and accept them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from meshrl.config.reward import has_passed
from meshrl.core.errors import MeshrlError
from meshrl.monitor.rollout_log import LoggedTrajectory, answer_files, read_rollouts
from meshrl.tools.report.folder import criterion_of, judged_score, read_settings
from meshrl.tools.runs import require_run


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one step or evaluation, each group at one prompt. title: for a user. groups: by STEP/GROUP, the
    group by its number in the file from 1; an answer's name is that and its index from 0, such as 12/3/0, or
    eval_12/3/0 in the evaluation after step 12. num_groups: of the file. error: what can't be read, "" = none."""

    title: str
    groups: dict[str, list[LoggedTrajectory]]
    num_groups: int
    error: str


def require_rollouts(run: Path) -> None:
    """Raises: MeshrlError with the reason when this is no folder of a run with rollouts."""
    if answer_files(run, "step") or answer_files(run, "eval"):
        return
    require_run(run)
    if any(setting.key == "sft.path" for setting in read_settings(run / "config.yaml")):
        raise MeshrlError(f"{run} is a run of supervised fine-tuning, which samples no answers, so it has no rollouts")
    raise MeshrlError(f"{run} has no rollouts: no step has ended yet, or monitor.rollout_log_every_steps is 0")


def step_name(kind: str, step: int) -> str:
    """Of a file of rollouts: 12, or eval_12 for the evaluation after step 12."""
    return f"eval_{step}" if kind == "eval" else str(step)


def read_answers(run: Path, kind: str, step: int, wrong: bool = False) -> Answers:
    """kind: "step" or "eval". step: -1 = the last. wrong: only answers whose score is below loop.eval_pass_score."""
    require_rollouts(run)
    files = answer_files(run, kind)
    title, key = "rollouts of step", "monitor.rollout_log_every_steps"
    if kind == "eval":
        title, key = "evaluation after step", "loop.eval_every_steps"
    number = max(files, default=-1) if step == -1 else step
    if number not in files:
        steps = shorten(", ".join(map(str, files)), 200, placeholder=" ...") or "none"
        raise MeshrlError(f"{run} has no {title} {step} ({key}); there are: {steps}")
    term, pass_score = criterion_of(read_settings(run / "config.yaml"))
    names: dict[str, str] = {}
    groups: dict[str, list[LoggedTrajectory]] = {}
    notes: list[str] = []
    for logged in read_rollouts(files[number], notes):
        name = names.setdefault(logged.trajectory.group_id, f"{step_name(kind, number)}/{len(names) + 1}")
        answer = logged.trajectory
        if not (wrong and has_passed(judged_score(answer, term), answer.rewards, pass_score)):
            groups.setdefault(name, []).append(logged)
    return Answers(f"{run}, {title} {number}{', wrong answers only' * wrong}", groups, len(names), "".join(notes))

"""Reads a run's folder for its report; the run may have failed or still be running."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.config.loop import WEIGHTED_SUM
from meshrl.config.reward import PassScore, full_rewards, has_passed
from meshrl.config.values import scalar
from meshrl.core.best_models import read_best
from meshrl.core.errors import Failure, MeshrlError
from meshrl.core.files import Unreadable, is_there, read_text
from meshrl.core.types import Media, Trajectory
from meshrl.monitor.health import Health, HealthFinding
from meshrl.monitor.jsonl import data_errors
from meshrl.monitor.notes import NOTES_FILE
from meshrl.monitor.rollout_log import answer_files, read_rollouts
from meshrl.monitor.sinks import MetricsLine, mean_of_known, metrics_lines
from meshrl.run.verdict import HELD_OUT, Verdict, evaluations, verdict_of
from meshrl.tools.state import METRICS_FILE, State, read_part, read_state, require_run

PAUSE_S = 600.0  # if the time between two lines exceeds their phases by more than this, the run was resumed later


@dataclass(frozen=True, slots=True)
class Series:
    """One metric. steps: finished steps at each value, in rising order; an evaluation before the first step is at 0."""

    unit: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SavedSetting:
    """One line of config.yaml, such as train.optimizer.lr = 1e-06 from gsm8k.yaml:12."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """messages: (role, text) of the model and of its tools, in order. score: of loop.eval_term; None when its grading
    failed. is_right: whether it passed, as in pass@k. status: as in a Trajectory."""

    messages: Sequence[tuple[str, str]]
    score: float | None
    is_right: bool
    status: str


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """A held-out prompt and the answers to it in one evaluation. question: (role, text) of its messages. media: the
    images in them, by their ids."""

    question: list[tuple[str, str]]
    truth: str
    answers: list[LoggedAnswer] = field(default_factory=list)
    media: dict[str, Media] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether at least half of the answers are right."""
        return 2 * sum(answer.is_right for answer in self.answers) >= len(self.answers)

    @property
    def shown(self) -> LoggedAnswer:
        """An answer of the majority: right, or wrong."""
        return next((a for a in self.answers if a.is_right == self.is_right), self.answers[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """is_evaluation: `meshrl eval` wrote the folder. num_steps: finished steps; of an evaluation, scored answers.
    evals: the lines of evaluations with the identity of the last one. health: what the rules of health.json find, in
    the order of the steps. phases: seconds by phase and finished steps;
    "other" is the time between the phases. notes: the text of run_notes.txt. first_eval, last_eval: of evals, (finished
    steps, prompts by id), None if missing; without any evaluation, first_eval has the last logged step."""

    folder: Path
    is_evaluation: bool
    num_steps: int
    state: State
    verdict: Verdict | None
    lines: list[MetricsLine]
    evals: list[MetricsLine]
    series: dict[str, Series]
    health: list[HealthFinding]
    phases: dict[str, dict[int, float]]
    wall_s: float
    settings: list[SavedSetting]
    notes: str
    first_eval: tuple[int, dict[str, LoggedPrompt]] | None
    last_eval: tuple[int, dict[str, LoggedPrompt]] | None

    def finite_values(self, name: str) -> list[float]:
        """The finite values of a metric; empty if the run did not log it."""
        return [v for v in self.series[name].values if math.isfinite(v)] if name in self.series else []

    def ends(self, name: str) -> tuple[float, float, int] | None:
        """Means of the first and of the last tenth of a metric's values, and the number of values in each."""
        values = self.series[name].values if self.finite_values(name) else []
        tenth = max(1, len(values) // 10)
        return (mean_of_known(values[:tenth]), mean_of_known(values[-tenth:]), tenth) if values else None

    def tokens(self, phase: str) -> tuple[float, float] | None:
        """The number of tokens in a phase, and tokens per second of that phase."""
        tokens, seconds = sum(self.finite_values(f"{phase}/num_tokens")), sum(self.finite_values(f"time/{phase}_s"))
        return (tokens, tokens / seconds) if tokens and seconds else None

    def setting(self, key: str) -> str | None:
        return next((s.value for s in self.settings if s.key == key), None)


def read_run(folder: Path) -> RunFolder:
    """Read the files of a run, damaged ones as far as possible."""
    require_run(folder)
    state = read_state(folder)  # before the metrics, which may get further steps
    path, problems = folder / METRICS_FILE, state.problems
    lines, units = list[MetricsLine](), dict[str, str]()
    if is_there(path):
        read_part(problems, lines.extend, metrics_lines(path, units))  # the lines before a damaged one stay
    settings = read_part(problems, read_settings, folder / "config.yaml") or []
    criterion, is_evaluation = criterion_of(settings), any(setting.origin == "meshrl eval" for setting in settings)
    phases: dict[str, dict[int, float]] = {}
    for before, line in zip([None, *lines], lines):
        step = max(line.step, 1)  # an evaluation before the first step is shown with that step
        spent = seconds_by_phase(line)
        rest = line.time - before.time - sum(spent.values()) if before else 0.0
        spent["other"] = rest if 0 < rest < PAUSE_S else 0.0
        for phase, seconds in spent.items():
            phases.setdefault(phase, {}).setdefault(step, 0.0)
            phases[phase][step] += seconds
    series, comparable = dict[str, Series](), evaluations(lines)
    for line in lines:
        for name, value in line.metrics.items():
            if name.split("/")[0] != "eval" or HELD_OUT not in line.metrics or line in comparable:
                curve = series.setdefault(name, Series(units.get(name, "")))
                curve.steps.append(line.step)
                curve.values.append(value)
    newest = 0 if is_evaluation else max((line.step for line in lines), default=0)
    best = read_part(problems, read_best, folder)
    steps = {line.step for line in comparable}
    evals = [path for step, path in answer_files(folder, "eval").items() if step in steps or not steps]
    if not (evals or steps):
        evals = list(answer_files(folder, "step").values())[-1:]
    run = RunFolder(
        folder=folder,
        is_evaluation=is_evaluation,
        num_steps=max(newest, state.step),
        state=state,
        verdict=verdict_of(comparable, best),
        lines=lines,
        evals=comparable,
        series=series,
        health=[] if is_evaluation else Health(lines).findings,
        phases=phases,
        wall_s=state.result.get("wall_s") or (lines[-1].time - lines[0].time if lines else 0.0),
        settings=settings,
        notes=read_part(problems, text_of_file, folder / NOTES_FILE) or "",
        first_eval=read_part(problems, read_evaluation, evals[0], *criterion) if evals else None,
        last_eval=read_part(problems, read_evaluation, evals[-1], *criterion) if len(evals) > 1 else None,
    )
    has_all_steps = run.setting("run.resume") in (None, "auto", "never")  # not those before another run's checkpoint
    if newest < run.num_steps and has_all_steps and not run.is_evaluation:
        problems.append(f"{path} ends at step {newest}, but the run has finished step {run.num_steps}")
    return run


def seconds_by_phase(line: MetricsLine) -> dict[str, float]:
    return {n[5:-2]: s for n, s in line.metrics.items() if n.startswith("time/") and n.endswith("_s")}


def text_of_file(path: Path) -> str:
    """The content of a text file; empty when there is no such file."""
    try:
        return read_text(path) if path.exists() else ""
    except Unreadable as cause:
        raise MeshrlError(f"{path}: {cause}") from cause


def read_settings(path: Path) -> list[SavedSetting]:
    """The lines of a resolved config: `key: value   # origin`, indented by two spaces; "# key: value" is unused."""
    settings: list[SavedSetting] = []
    above: list[str] = []
    for line in text_of_file(path).splitlines():
        body, mark, origin = line.rpartition("  # ")
        text = body if mark else line
        level = (len(text) - len(text.lstrip())) // 2
        name, _, value = text.strip().removeprefix("# ").partition(":")
        if mark:
            settings.append(SavedSetting(".".join([*above[:level], name]), value.strip(), origin))
        else:
            above = [*above[:level], name]
    return settings


def criterion_of(settings: list[SavedSetting]) -> tuple[str, PassScore]:
    """The values of loop.eval_term and loop.eval_pass_score, or their defaults."""
    values = {setting.key: setting.value for setting in settings}
    terms = [key.removesuffix(".kind") for key in values if key.startswith("reward.terms.") and key.endswith(".kind")]
    term, pass_score = (scalar(values.get(key, "null")) for key in ("loop.eval_term", "loop.eval_pass_score"))
    name = WEIGHTED_SUM if term is None else str(term).strip('"')
    if pass_score is None and name == WEIGHTED_SUM and terms:
        names = [key.removeprefix("reward.terms.").strip('"') for key in terms]
        weights = [(values[f"{key}.kind"].strip('"'), scalar(values.get(f"{key}.weight", "1"))) for key in terms]
        return name, full_rewards((n, kind, w) for n, (kind, w) in zip(names, weights) if isinstance(w, int | float))
    return name, float(pass_score) if isinstance(pass_score, int | float) else 1.0  # a text if the file was changed


def judged_score(trajectory: Trajectory, term: str) -> float | None:
    """The score of a term. The name weighted_sum is that of no term, and means the reward."""
    score = trajectory.rewards.get(term, trajectory.reward)
    return None if isinstance(score, Failure) else score


def read_evaluation(path: Path, term: str, pass_score: PassScore) -> tuple[int, dict[str, LoggedPrompt]]:
    asked: dict[str, LoggedPrompt] = {}
    for number, logged in enumerate(read_rollouts(path), start=1):
        with data_errors(f"{path}:{number}", "a trajectory"):
            trajectory, prompt = logged.trajectory, logged.trajectory.prompt
            media = prompt.media
            if prompt.id not in asked:
                question = [_message(m, media) for m in prompt.messages or ()]
                asked[prompt.id] = LoggedPrompt(question, plain_text(prompt.answer), media=media)
            score = judged_score(trajectory, term)
            passed = has_passed(score, trajectory.rewards, pass_score)
            conversation = []  # what was sampled, as text with special tokens, and what tools answered
            for turn, text in zip(trajectory.turns, logged.texts, strict=True):
                conversation += [_message(m, media) for m in turn.messages if m.get("role") != "assistant"]
                conversation.append(("assistant", plain_text(text)))
            asked[prompt.id].answers.append(LoggedAnswer(conversation, score, passed, trajectory.status))
    with data_errors(str(path), "the rollouts of an evaluation"):
        return int(path.stem.rpartition("_")[2]), asked


def _message(message: dict[str, Any], media: Mapping[str, Media]) -> tuple[str, str]:
    return str(message.get("role", "")), text_with_images(message.get("content"), media)


def text_with_images(content: Any, media: Mapping[str, Media]) -> str:
    """The text of a message's content, with [image FILE] in the places of images."""
    if not (media and isinstance(content, list)):
        return plain_text(content)
    texts = []
    for part in content:
        known = isinstance(part, dict) and media.get(str(part.get("image")))
        text = part.get("text", part) if isinstance(part, dict) else part
        texts.append(f"[{known.kind} {known.source}]" if known else plain_text(text))
    return "".join(texts)


def plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

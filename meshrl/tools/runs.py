"""`meshrl runs`, `status` and `stop`: the runs in a folder, what is known about each without reading its rollouts, and
the end of one from another terminal, by its status.json."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.core.best_models import read_best
from meshrl.core.errors import MeshrlError
from meshrl.core.files import is_there, write_text
from meshrl.core.terminal import command
from meshrl.monitor.notes import NOTES_FILE, important
from meshrl.monitor.sinks import MetricsLine, duration, metrics_lines
from meshrl.monitor.status import STATUS_FILE, STOP_FILE, RankProcess, Status, read_status
from meshrl.process.diagnosis import FamilyMember, family
from meshrl.run.folder import holds_lease, is_running
from meshrl.run.verdict import HELD_OUT, evaluations, name_of, verdict_of
from meshrl.tools.report.folder import read_settings, text_of_file
from meshrl.tools.state import METRICS_FILE, State, is_run, read_part, read_state, require_run
from meshrl.train.checkpoint_files import states

_TRAINED = ("reward/mean", "loss/nll")  # the first that a run has


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run. counted: what step and num_steps count: step, or answer of an evaluation. started: seconds since 1970.
    evals: the lines of evaluations by its loop.eval_term. trained: name and last value of a metric, None before the
    first step. health: the rules of health.json that hold, or held at the end."""

    folder: Path
    state: State
    counted: str
    step: int
    num_steps: int | None
    started: float
    seconds: float
    model: str
    evals: list[MetricsLine]
    trained: tuple[str, float] | None
    health: Sequence[str] = ()

    @property
    def held_out(self) -> list[tuple[int, float]]:
        """(finished steps, score) of each evaluation."""
        return [(line.step, line.metrics[HELD_OUT]) for line in self.evals]

    @property
    def progress(self) -> str:
        return f"{self.step}{f' of {self.num_steps}' if self.num_steps else ''} {self.counted}s"

    @property
    def best(self) -> tuple[int, float]:
        """The first of the highest scores."""
        return max(self.held_out, key=lambda evaluation: -math.inf if math.isnan(evaluation[1]) else evaluation[1])

    def __str__(self) -> str:
        """Such as `done, 20 of 20 steps, held-out 0.225 -> 0.31`."""
        parts = [self.state.text, self.progress]
        if self.held_out:
            scores = dict.fromkeys(f"{score:.4g}" for _, score in (self.held_out[0], self.held_out[-1]))
            parts.append(f"{name_of(self.evals)} {' -> '.join(scores)}")
        elif self.trained:
            parts.append(f"{self.trained[0]} {self.trained[1]:.4g}")
        return ", ".join(parts)


def read_facts(folder: Path) -> RunFacts:
    """Read the files of a run, damaged ones as far as possible."""
    require_run(folder)
    state, evals = read_state(folder), list[MetricsLine]()
    settings = read_part(state.problems, read_settings, folder / "config.yaml") or []
    first = None  # the line of the first step: status.json has the start of the last part of a resumed run
    if is_there(folder / METRICS_FILE):
        read_part(state.problems, evals.extend, metrics_lines(folder / METRICS_FILE, {}, f'"{HELD_OUT}"'))
        first = read_part([], next, metrics_lines(folder / METRICS_FILE, {}), None)
    status, is_eval = state.status, any(setting.origin == "meshrl eval" for setting in settings)
    changed = max((p.stat().st_mtime for n in (METRICS_FILE, STATUS_FILE) if (p := folder / n).exists()), default=0.0)
    started = min(status.started if status else changed, first.time if first else math.inf)
    values = status.values if status else {}
    model = next((s.value.strip('"') for s in settings if s.key == "model.path"), "")
    return RunFacts(
        folder=folder,
        state=state,
        counted="answer" if is_eval else "step",
        step=state.step or (0 if is_eval else max((line.step for line in evals), default=0)),
        num_steps=status.num_steps if status else None,
        started=started,
        seconds=state.result.get("wall_s") or (time.time() if state.word == "running" else changed) - started,
        model="/".join(Path(model).parts[-2:]),  # enough to recognize it
        evals=evaluations(evals),
        trained=None if is_eval else next(((n, v) for n in _TRAINED if (v := values.get(n)) is not None), None),
        health=status.health if status else (),
    )


def list_runs(folder: Path) -> str:
    """The output of `meshrl runs`: a line for each run, the oldest first. Evaluations that `meshrl eval` wrote into the
    folder of their run belong to that run, and have no line."""
    inside = sorted(path for path in folder.glob("*") if path.is_dir())
    rows = [read_facts(path) for path in inside if is_run(path)]
    if not rows:
        raise MeshrlError(f"{folder} has no runs; give a folder such as runs, in which `meshrl train` writes")
    rows.sort(key=lambda row: row.started)
    head = ("run", "state", "progress", "started", "took", "model", "score", "held-out", "best", "last")
    lines = list(table([(*head, "training", "health"), *map(_cells, rows)]))
    lines += [f"{row.folder.name}: damaged: {problem}" for row in rows for problem in row.state.problems]
    if others := len(inside) - len(rows):
        lines.append(f"folders that are no runs: {others}")
    return "\n".join(lines)


def _cells(run: RunFacts) -> tuple[str, ...]:
    scores = ["", "", ""]
    if run.held_out:
        scores = [f"{score:.3f}" for score in (run.held_out[0][1], run.best[1], run.held_out[-1][1])]
    trained = f"{run.trained[1]:.3f}{' nll' * (run.trained[0] == 'loss/nll')}" if run.trained else ""
    started = time.strftime("%F %H:%M", time.localtime(run.started))
    about = run.folder.name, run.state.text, run.progress, started, duration(run.seconds), run.model
    return *about, name_of(run.evals).removeprefix("held-out").strip(), *scores, trained, ", ".join(run.health)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of equal length as lines with aligned columns; those that begin with a digit are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = [all(cell[:1] in "+-0123456789" for cell in column[1:]) for column in zip(*rows)]
    for row in rows:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right))
        yield "  ".join(cells).rstrip()


_STOP_S = 60.0
_NOTES_SHOWN = 8


def describe(folder: Path) -> str:
    """The output of `meshrl status`."""
    run = read_facts(folder)
    status, problems = run.state.status, run.state.problems
    lines = [f"{folder}: {_state_text(folder, run.state)}", run.progress]
    if status is not None:
        if run.state.word == "running" and status.phase:
            lines[-1] += f", in phase {status.phase} for {time.time() - status.since:.0f} s"
        lines += [f"{name} {value:.4g}" for name, value in status.values.items()]
        lines += [f"health: {', '.join(run.health)} (docs/health.md)"] if run.health else []
    best = read_part(problems, read_best, folder)
    verdict = verdict_of(run.evals, best)
    lines += verdict.lines if verdict is not None else []
    if best is None and len(run.held_out) > 2:
        lines.append(f"highest held-out score: {run.best[1]:.3f} at step {run.best[0]}")
    notes = important(read_part(problems, text_of_file, folder / NOTES_FILE) or "")
    lines += [f"damaged: {problem}" for problem in problems]
    if len(notes) > _NOTES_SHOWN:
        lines.append(f"... {len(notes) - _NOTES_SHOWN} more in {folder / NOTES_FILE}")
    lines += [f"{line:.400}" for line in notes[-_NOTES_SHOWN:]]
    if run.state.word != "running":
        saved = states(folder / "checkpoints")
        lines += [f"newest checkpoint: after step {saved[-1][0]}; run.resume=auto continues from it"] if saved else []
    elif status is not None and (status.host != socket.gethostname() or holds_lease(status.pid, folder)):
        lines += _processes(status)
    return "\n".join(lines)


def _processes(status: Status) -> Iterator[str]:
    """A line for each process of a run: those of this machine with their memory, then those of each other machine."""
    here = socket.gethostname()
    of_run = [RankProcess(status.host, status.pid, "controller", ""), *status.ranks]
    local = {process.pid: process for process in of_run if process.host == here}
    members = dict[int, FamilyMember]()
    for process in local.values():
        found = list(family(process.pid))
        if found and process.name in ("controller", found[0].name):  # else another program has got its pid
            members |= {member.pid: member for member in found}
    for pid, member in members.items():
        known = local.get(pid, RankProcess(here, pid, member.name, ""))
        yield f"{pid:>8}  {known.name:<12} {member.rss_bytes / 2**20:>8.0f} MiB  {known.role}".rstrip()
    for process in of_run:
        if process.host != here:
            place = f"on {process.host}, not checked from here"
            yield f"{process.pid:>8}  {process.name:<12} {place}  {process.role}".rstrip()
        elif process.pid not in members and process.name != "other":
            yield f"{process.pid:>8}  {process.name:<12} has ended"


def _state_text(folder: Path, state: State) -> str:
    status, word, result = state.status, state.word, state.result
    process = "its process" if status is None else f"process {status.pid} on {status.host}"
    if word == "running":
        since = "" if status is None else f", since {time.strftime('%F %T', time.localtime(status.started))}"
        return f"runs as {process}{since}"
    if word == "killed":
        text = f"{process} has ended without a result: it was killed, or the machine was switched off"
        if status is not None and status.host != socket.gethostname():
            there = f"use `{command('status', folder)}` on {status.host}"
            text += f". (If the file system does not share locks, it may run: {there})"
        return text
    after = f" after {result['wall_s']:.0f} s" if result.get("wall_s") is not None else ""
    return f"{state.text}{after}{': ' + result['error'].splitlines()[0] if result.get('error') else ''}"


def stop(folder: Path) -> str:
    """End a run with a checkpoint, and wait until it has ended. Returns a text that describes the end."""
    require_run(folder)
    status = read_status(folder)
    if not is_running(folder, status):
        raise MeshrlError(f"the run is not running; {describe(folder).splitlines()[0]}")
    if status.host != socket.gethostname():
        raise MeshrlError(f"the run runs on {status.host}, but this is {socket.gethostname()}; run the command there")
    if not holds_lease(status.pid, folder):  # so no other process gets the signal
        raise MeshrlError(
            f"{folder}: the run runs, but process {status.pid} of this machine does not hold its lease: it is in "
            "another container, or it belongs to another user. Run the command there, or send it SIGTERM"
        )
    write_text(folder / STOP_FILE, "")
    os.kill(status.pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_S
    while holds_lease(status.pid, folder):  # another start may take the lease as soon as this run has ended
        if time.monotonic() > until:
            raise MeshrlError(
                f"process {status.pid} got SIGTERM {_STOP_S:.0f} s ago and still runs, in phase "
                f"{read_status(folder).phase}. It finishes its step before it ends; see `{command('status', folder)}`"
            )
        time.sleep(0.1)
    return "; ".join(describe(folder).splitlines()[:2])

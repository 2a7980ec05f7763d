"""`meshrl compare`: what differs between runs (configuration, held-out scores, time), as text and as compare.html."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from textwrap import indent
from urllib.parse import quote

from meshrl.core.errors import ConfigError
from meshrl.core.terminal import counted
from meshrl.monitor.rollout_log import answer_files
from meshrl.monitor.sinks import duration
from meshrl.run.verdict import HELD_OUT, Z, outcome_of
from meshrl.tools.page.charts import Line, Style, figure, number
from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report.folder import LoggedPrompt, RunFolder, criterion_of, read_evaluation, read_run
from meshrl.tools.report.page import LEARNING, PHASES, SPEED, STABILITY, interval, sample_row
from meshrl.tools.runs import table
from meshrl.tools.state import read_part

MAX_RUNS = 12  # as many as the page has colours
_NOT_GIVEN = ("unused", "start of the run")
_OWN = ("run.name", "run.folder", "run.resume")  # keys that differ in every two runs
Asked = dict[tuple[str, str], LoggedPrompt]
Evaluation = tuple[int, float, str, Asked]
"""Finished steps, score, its interval, and the prompts by id and text; without prompts if no answers were logged."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the runs. evaluations: by "first", "best" and "last"; empty if there was none."""

    label: str
    run: RunFolder
    evaluations: dict[str, Evaluation]


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """rows: the first cell is the name of the row. notes: sentences below the table."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=list)


def read_runs(folders: Sequence[Path]) -> list[Compared]:
    """Raises: ConfigError when there are fewer than two folders, or too many; MeshrlError, as read_run."""
    different = list({folder.resolve(): folder for folder in folders})
    if not 2 <= len(different) <= MAX_RUNS:
        raise ConfigError(f"compare needs 2 to {MAX_RUNS} different runs; given: {', '.join(map(str, folders))}")
    names = [folder.name for folder in different]
    root = os.path.commonpath(different)
    return [_read(f, f.name if names.count(f.name) == 1 else os.path.relpath(f, root)) for f in different]


def _read(folder: Path, label: str) -> Compared:
    run, files = read_run(folder), answer_files(folder, "eval")
    scores = run.series.get(HELD_OUT)
    answers = dict(filter(None, (run.first_eval, run.last_eval)))
    evaluations = {}
    if scores is not None:
        ranked = [-math.inf if math.isnan(value) else value for value in scores.values]
        low, high = interval(run, HELD_OUT)
        for kind, at in (("first", 0), ("best", ranked.index(max(ranked))), ("last", -1)):
            step = scores.steps[at]
            if step in files and step not in answers:
                evaluation = read_part(run.state.problems, read_evaluation, files[step], *criterion_of(run.settings))
                answers[step] = evaluation[1] if evaluation else {}
            asked = {
                (name, f"{prompt.question} {prompt.truth}"): prompt for name, prompt in answers.get(step, {}).items()
            }
            evaluations[kind] = step, scores.values[at], f"[{low[at]:.3f}, {high[at]:.3f}]" if low else "", asked
    return Compared(label, run, evaluations)


def configuration(runs: Sequence[Compared]) -> ComparisonTable:
    """The keys with different values, the models of evaluations, and groups of runs that differ in the seed at most."""
    configs = [
        {s.key: s for s in one.run.settings if not s.origin.startswith(_NOT_GIVEN) and s.key not in _OWN}
        for one in runs
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        used = [config[key] for config in configs if key in config]
        is_only_default = len({s.value for s in used}) == 1 and all(s.origin.startswith("default") for s in used)
        values = [config[key].value if key in config else "not used" for config in configs]
        if len(set(values)) > 1 and not is_only_default:  # a default may have no effect because of another key
            rows.append([key, *values])
    which = f"only {rows[0][0]} differs" if len(rows) == 1 else f"{len(rows) or 'none'} differ"
    notes = [f"Of {len(keys)} keys, {which} (without {', '.join(_OWN)})."]
    notes += [f"{run.label}: damaged: {problem}" for run in runs for problem in dict.fromkeys(run.run.state.problems)]
    if any(run.run.is_evaluation for run in runs):
        rows.append(["evaluated model", *(str(run.run.state.result.get("model", "")) for run in runs)])
    groups: dict[str, list[Compared]] = {}
    for i, run in enumerate(runs, start=1):
        groups.setdefault(str([row[i] for row in rows if row[0] != "run.seed"]), []).append(run)
    notes += [_spread(group) for group in groups.values() if len(group) > 1]
    return ComparisonTable("Configuration", ["key", *(run.label for run in runs)], rows, notes)


def _spread(group: Sequence[Compared]) -> str:
    """A sentence about runs that differ in the seed at most."""
    has_seeds = len({run.run.setting("run.seed") for run in group}) > 1
    relation = "differ in run.seed only" if has_seeds else "have the same configuration"
    text = f"{', '.join(run.label for run in group)} {relation}"
    last = [run.evaluations["last"][1] for run in group if run.evaluations]
    if len(last) < 2:
        return f"{text}."
    scores = f"{mean(last):.3f} on average, standard deviation {stdev(last):.3f}, "
    return f"{text}: their last held-out scores are {scores}from {min(last):.3f} to {max(last):.3f}."


def held_out(runs: Sequence[Compared]) -> ComparisonTable:
    """Scores with intervals, and the differences from the first run."""
    head = ["", "run", "step", "score", "interval", f"difference from {runs[0].label}"]
    several = any(len({evaluation[0] for evaluation in run.evaluations.values()}) > 1 for run in runs)
    rows = []
    for kind in ("first", "best", "last") if several else ("last",):
        base = runs[0].evaluations.get(kind)
        for run in (run for run in runs if run.evaluations):
            step, score, between, asked = run.evaluations[kind]
            difference = ""
            if base is not None and run is not runs[0]:
                a, b = _means(base[-1]), _means(asked)
                if common := [b[key] - a[key] for key in a if key in b]:
                    low, high = difference_interval(common)
                    outcome, prompts = outcome_of(low, high), counted(len(common), "prompt")
                    difference = f"{mean(common):+.3f} [{low:.3f}, {high:.3f}] {outcome}, {prompts}"
                elif a and b:
                    difference = "no common prompts"
            mine, first = (each.run.evals[-1].evaluation for each in (run, runs[0])) if difference else ({}, {})
            other = [part for part in mine.keys() & first.keys() if mine[part] != first[part]]
            if criterion_of(run.run.settings)[0] != criterion_of(runs[0].run.settings)[0] or "term" in other:
                difference = difference and "scored by another term"
            elif "graders" in other:
                difference = "scored by other graders"
            elif "sampling" in other:
                difference += ", other sampling"
            rows.append([kind if several else "", run.label, str(step), f"{score:.3f}", between, difference])
    notes = [
        "Intervals are 95 % intervals over held-out prompts, not over seeds. A difference is the mean over the prompts "
        "that both runs answered; it is unchanged when its interval contains 0."
    ]
    return ComparisonTable("Held-out score", head, rows, notes if rows else [])


def _means(asked: Asked) -> dict[tuple[str, str], float]:
    """The mean score of each prompt's answers; a failed one counts 0, as in eval/mean_at_k."""
    return {key: sum(a.score or 0.0 for a in prompt.answers) / len(prompt.answers) for key, prompt in asked.items()}


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean difference between two runs, prompt by prompt. Half an answer is added to each of the
    four cells of a pair, so that equal answers have no interval of width 0; answers differ by 1, or by the largest
    difference if that is more. Source: Agresti and Min 2005."""
    largest = max(1.0, *map(abs, differences))
    count, squares = len(differences) + 2, sum(value**2 for value in differences) + largest**2
    center = sum(differences) / count
    half = Z * math.sqrt(max(squares / count - center**2, 0.0) / count)
    return max(center - half, -largest), min(center + half, largest)


def cost(runs: Sequence[Compared]) -> ComparisonTable:
    """Steps, time and speed."""
    rows = [
        ["state", *(run.run.state.word for run in runs)],
        ["steps", *("" if run.run.is_evaluation else str(run.run.num_steps) for run in runs)],
        ["wall time", *(duration(run.run.wall_s) for run in runs)],
    ]
    for phase, word in (("rollout", "sampled"), ("train", "trained")):
        speeds = [run.run.tokens(phase) for run in runs]
        rows.append([f"tokens {word} a second", *(number(speed[1]) if speed else "" for speed in speeds)])
    phases = dict.fromkeys([*PHASES, *(phase for run in runs for phase in run.run.phases)])
    totals = [{phase: sum(steps.values()) for phase, steps in run.run.phases.items()} for run in runs]
    rows += [[f"time of {p}", *(number(t[p], "s") if p in t else "" for t in totals)] for p in phases]
    return ComparisonTable("Time", ["", *(run.label for run in runs)], [row for row in rows if any(row[1:])])


def same_prompts(runs: Sequence[Compared]) -> Iterator[dict[str, LoggedPrompt]]:
    """The prompts that all runs answered in their last evaluation, by the label of the run. Those with right and wrong
    answers come first."""
    asked = [run.evaluations["last"][-1] if run.evaluations else {} for run in runs]
    common = [key for key in asked[0] if all(key in prompts for prompts in asked)]
    rows = [dict(zip((run.label for run in runs), (prompts[key] for prompts in asked))) for key in common]
    yield from sorted(rows, key=lambda row: len({prompt.is_right for prompt in row.values()}) == 1)


_SAMPLES, _SAMPLES_IN_TEXT = 6, 2
_CHARTS = (*LEARNING, *STABILITY, *SPEED[:1])


def compare(folders: Sequence[Path], out: Path | None) -> tuple[str, Path]:
    """Write compare.html into the first folder, or `out`. Returns the text for the terminal, and the page's path."""
    runs = read_runs(folders)
    tables = [each for each in (configuration(runs), held_out(runs), cost(runs)) if each.rows or each.notes]
    path = out or folders[0] / "compare.html"
    write_page(path, page(runs, tables, path.parent))
    texts = [*map(_text, tables), _samples_note(runs)]
    for row in islice(same_prompts(runs), _SAMPLES_IN_TEXT):
        first = next(iter(row.values()))
        lines = [*(text for _, text in first.question), "  expected answer:", indent(first.truth, "    ")]
        for label, prompt in row.items():
            score = "not graded" if prompt.shown.score is None else f"score {prompt.shown.score:.3g}"
            lines += [f"  {label}, {score}:", *(indent(text, "    ") for _, text in prompt.shown.messages)]
        texts.append("\n".join(lines))
    return "\n\n".join(texts), path


def _text(comparison: ComparisonTable) -> str:
    rows = table([comparison.head, *comparison.rows]) if comparison.rows else ()
    return "\n".join([comparison.title.upper(), *(f"  {line}" for line in rows), *comparison.notes])


def _samples_note(runs: Sequence[Compared]) -> str:
    """How many of the common prompts have answers of another verdict."""
    rows = list(same_prompts(runs))
    counts = [f"{run.label} {sum(row[run.label].is_right for row in rows)}" for run in runs]
    differ = sum(len({prompt.is_right for prompt in row.values()}) > 1 for row in rows)
    if not rows:
        return "No held-out prompt was answered by all runs."
    common, prompts = counted(len(rows), "common prompt"), counted(differ, "prompt")
    return f"Right answers to {common}: {', '.join(counts)}. Right in some runs only: {prompts}."


def page(runs: Sequence[Compared], tables: Sequence[ComparisonTable], place: Path) -> str:
    """The complete page. place: its folder."""
    names = [run.label for run in runs]
    reports = [(run.label, run.run.folder / "report.html") for run in runs]
    links = [
        f'<a href="{escape(quote(os.path.relpath(report, place)))}">{escape(label)}</a>'
        for label, report in reports
        if report.is_file()
    ]
    reports_line = f"<p>Reports: {' · '.join(links)}</p>" if links else ""
    header = f"<header><h1>{escape(' · '.join(names))}</h1>{reports_line}</header>"
    curves = "".join(
        _figure(runs, name, f"{chart.title}: {name}" if chart.names[1:] else chart.title)
        for chart in _CHARTS
        for name in chart.names
    )
    note = f'<p class="note">{escape(_samples_note(runs))}</p>'
    samples = "".join(sample_row(**row) for row in islice(same_prompts(runs), _SAMPLES))
    learned = f'<section><h2>Curves</h2><div class="grid2">{curves}</div></section>' if curves else ""
    answers = f"<section><h2>Samples</h2>{note}{samples}</section>" if samples else ""
    parts = [header, *map(_html, tables), learned, answers]
    return document(f"{' and '.join(names)}: compare", parts, style=[package_text(__package__, "compare.css")])


def _figure(runs: Sequence[Compared], name: str, title: str) -> str:
    """One metric of all runs that have it; the held-out score with its intervals."""
    lines, unit = [], ""
    style: Style = "dots" if name.startswith("eval/") else "noisy"
    for run in runs:
        if (series := run.run.series.get(name)) is None:
            continue
        lines.append(Line(run.label, series.steps, series.values, style, *interval(run.run, name)))
        unit = series.unit
    return figure(title, unit, lines) if any(len(line.values) > 1 for line in lines) else ""


def _html(comparison: ComparisonTable) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in comparison.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td data-of="{escape(of)}">{escape(cell)}</td>' for of, cell in zip(comparison.head[1:], cells))
        + "</tr>"
        for name, *cells in comparison.rows
    )
    shown = f'<div class="wide"><table class="compared"><tr>{head}</tr>{rows}</table></div>' if rows else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in comparison.notes)
    return f"<section><h2>{comparison.title}</h2>{shown}{notes}</section>"

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
from meshrl.run.verdict import HELD_OUT, Z, name_of, outcome_of
from meshrl.tools.page.charts import COLOURS, OTHER, Line, Style, figure, number
from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report.folder import LoggedPrompt, RunFolder, criterion_of, read_evaluation, read_run
from meshrl.tools.report.page import CHARTS, HEADLINE, SPEED, Chart, fold, interval, logged, sample_row
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
            asked = {(name, f"{p.question} {p.truth}"): p for name, p in answers.get(step, {}).items()}
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
        for run in (run for run in runs if run.evaluations):
            step, score, between, _ = run.evaluations[kind]
            measured, about = _difference(runs[0], run, kind) if run is not runs[0] else (None, "")
            parts = [about] if about else []
            if measured is not None:
                change, low, high, num = measured
                differs = f"{change:+.3f} [{low:.3f}, {high:.3f}] {outcome_of(low, high)}"
                parts = [differs, counted(num, "prompt"), *parts]
            rows.append([kind if several else "", run.label, str(step), f"{score:.3f}", between, ", ".join(parts)])
    notes = [
        "Intervals are 95 % intervals over held-out prompts, not over seeds. A difference is the mean over the prompts "
        "that both runs answered; it is unchanged when its interval contains 0."
    ]
    return ComparisonTable("Held-out score", head, rows, notes if rows else [])


def _difference(base: Compared, run: Compared, kind: str) -> tuple[tuple[float, float, float, int] | None, str]:
    """The mean difference, its interval and the number of common prompts if the scores are comparable, and what differs
    between the evaluations."""
    a, b = (_means(each.evaluations[kind][-1]) if each.evaluations else {} for each in (base, run))
    if not (a and b):
        return None, ""
    own, other = run.run.evals[-1].evaluation, base.run.evals[-1].evaluation
    differ = [part for part in own.keys() & other.keys() if own[part] != other[part]]
    if criterion_of(run.run.settings)[0] != criterion_of(base.run.settings)[0] or "term" in differ:
        return None, "scored by another term"
    if "graders" in differ:
        return None, "scored by other graders"
    common = [b[key] - a[key] for key in a if key in b]
    about = "other sampling" if "sampling" in differ else ""
    return ((mean(common), *difference_interval(common), len(common)), about) if common else (None, "no common prompts")


_WORDS = {"better": "higher", "worse": "lower", "unchanged": "neither clearly higher nor lower", "unknown": "not known"}


def sentence(runs: Sequence[Compared]) -> str:
    """The held-out score of the first run and the highest one of the others, and which of the two is higher."""
    base, *others = runs
    if not (base.evaluations and any(run.evaluations for run in others)):
        return "There are no held-out scores to compare."
    best = max((run for run in others if run.evaluations), key=lambda run: run.evaluations["last"][1])
    measured, about = _difference(base, best, "last")
    if measured is None:
        why = about or "their answers were not logged"
        return f"The held-out scores of {base.label} and {best.label} can't be compared: {why}."
    change, low, high, num = measured
    own, other = (run.evaluations["last"][1] for run in (best, base))
    name = name_of(best.run.evals).removesuffix("held-out") or "held-out score"
    ends = f"{change:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}, {counted(num, 'common prompt')}"
    which = "Best of the others: " if len(runs) > 2 else ""
    outcome, end = _WORDS[outcome_of(low, high)], f", {about}" if about else ""
    return f"{which}{best.label}'s {name} is {outcome}: {own:.3f} against {other:.3f} of {base.label} ({ends}{end})."


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
    phases = dict.fromkeys([*COLOURS, *(phase for run in runs for phase in run.run.phases)])
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
_FOLDED = (*(chart for charts in CHARTS.values() for chart in charts), SPEED[0])


def compare(folders: Sequence[Path], out: Path | None) -> tuple[str, Path]:
    """Write compare.html into the first folder, or `out`. Returns the text for the terminal, and the page's path."""
    runs = read_runs(folders)
    tables = [each for each in (configuration(runs), held_out(runs), cost(runs)) if each.rows or each.notes]
    path = out or folders[0] / "compare.html"
    write_page(path, page(runs, tables, path.parent))
    texts = [sentence(runs), *map(_text, tables), _samples_note(runs)]
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
    reports = [(run.label, path) for run in runs if (path := run.run.folder / "report.html").is_file()]
    links = [f'<a href="{escape(quote(os.path.relpath(at, place)))}">{escape(label)}</a>' for label, at in reports]
    shown = f"<p>Reports: {' · '.join(links)}</p>" if links else ""
    header = f"<header><h1>{escape(' · '.join(names))}</h1>{shown}</header>"
    drawn = set[str]()
    curves, folded = _figures(runs, [HEADLINE], drawn), _figures(runs, _FOLDED, drawn)
    note = f'<p class="note">{escape(_samples_note(runs))}</p>'
    samples = "".join(sample_row(row) for row in islice(same_prompts(runs), _SAMPLES))
    answers = f"<section><h2>Answers</h2>{note}{samples}</section>" if samples else ""
    summary = f'<section class="summary"><p>{escape(sentence(runs))}</p></section>'
    settings, *rest = map(_html, tables)
    parts = [header, summary, *rest[:1], curves, settings, *rest[1:], answers, fold("More curves", folded)]
    return document(f"{' and '.join(names)} · compare", parts, style=[package_text(__package__, "compare.css")])


def _figures(runs: Sequence[Compared], charts: Sequence[Chart], drawn: set[str]) -> str:
    """The metrics of these charts, each of all runs that have it, but constant ones and those with the values of one in
    `drawn`, to which the others are added."""
    figures = ""
    for name in dict.fromkeys(name for chart in charts for run in runs for name in logged(run.run, chart)):
        having = [run for run in runs if name in run.run.series]
        values = str([(run.label, run.run.series[name].steps, run.run.series[name].values) for run in having])
        if len({value for run in having for value in run.run.series[name].values}) > 1 and values not in drawn:
            drawn.add(values)
            style: Style = "dots" if name.startswith("eval/") else "noisy"
            of_runs = [(run.label, run.run.series[name], interval(run.run, name)) for run in having]
            lines = [Line(label, each.steps, each.values, style, *ends) for label, each, ends in of_runs]
            figures += figure(name, of_runs[0][1].unit, lines)
    return f'<div class="grid2">{figures}</div>' if figures else ""


def _swatch(name: str) -> str:
    """The colour of the phase in the name of a row, such as: time of train."""
    phase = name.removeprefix("time of ")
    return f'<i class="k{COLOURS.get(phase, OTHER)}"></i>' if phase != name else ""


def _html(comparison: ComparisonTable) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in comparison.head)
    rows = "".join(
        f'<tr><th scope="row">{_swatch(name)}{escape(name)}</th>'
        + "".join(f'<td data-of="{escape(of)}">{escape(cell)}</td>' for of, cell in zip(comparison.head[1:], cells))
        + "</tr>"
        for name, *cells in comparison.rows
    )
    shown = f'<div class="wide"><table class="compared"><tr>{head}</tr>{rows}</table></div>' if rows else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in comparison.notes)
    return f"<section><h2>{comparison.title}</h2>{shown}{notes}</section>"

"""`meshrl compare`: runs side by side, as text and as compare.html."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice
from pathlib import Path
from textwrap import indent

from meshrl.core.terminal import counted
from meshrl.tools.compare.tables import (
    Compared,
    ComparisonTable,
    configuration,
    cost,
    held_out,
    read_runs,
    same_prompts,
)
from meshrl.tools.page.charts import Line, Style, figure
from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report.folder import LoggedPrompt
from meshrl.tools.report.sections import LEARNING, SPEED, STABILITY, interval, sample_row
from meshrl.tools.runs import table

_SAMPLES, _SAMPLES_IN_TEXT = 6, 2
_CHARTS = (*LEARNING, *STABILITY, *SPEED[:1])


def compare(folders: Sequence[Path], out: Path | None) -> tuple[str, Path]:
    """Write compare.html into the first folder, or `out`. Returns the text for the terminal, and the page's path.

    Raises: ConfigError and MeshrlError, as read_runs; OutputError when the page can't be written.
    """
    runs = read_runs(folders)
    tables = [each for each in (configuration(runs), held_out(runs), cost(runs)) if each.rows or each.notes]
    path = write_page(out or folders[0] / "compare.html", page(runs, tables))
    shown = [_sample_text(row) for row in islice(same_prompts(runs), _SAMPLES_IN_TEXT)]
    return "\n\n".join([*map(_text, tables), _samples_note(runs), *shown]), path


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


def _sample_text(row: dict[str, LoggedPrompt]) -> str:
    """A prompt and an answer of each run."""
    first = next(iter(row.values()))
    lines = [*(text for _, text in first.question), "  expected answer:", indent(first.truth, "    ")]
    for label, prompt in row.items():
        answer = prompt.shown
        score = "not graded" if answer.score is None else f"score {answer.score:.3g}"
        lines += [f"  {label}, {score}:", *(indent(text, "    ") for _, text in answer.messages)]
    return "\n".join(lines)


def page(runs: Sequence[Compared], tables: Sequence[ComparisonTable]) -> str:
    """The complete page."""
    names = [run.label for run in runs]
    header = f"<header><h1>{escape(' · '.join(names))}</h1></header>"
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

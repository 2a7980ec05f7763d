"""report.html: a page about a run that needs no other file, written at the run's end and by `meshrl report`."""

from __future__ import annotations

from html import escape
from pathlib import Path

from meshrl.tools.page.document import document, write_page
from meshrl.tools.report.folder import RunFolder, read_run
from meshrl.tools.report.sections import (
    LEARNING,
    STABILITY,
    curves,
    every_number,
    headline,
    notes,
    proofs,
    samples,
    settings,
    timing,
)


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from the run's files so far.

    Raises: MeshrlError when it is not a run's folder; OutputError when the file can't be written.
    """
    return write_page(folder / "report.html", page(read_run(folder)))


def page(run: RunFolder) -> str:
    """The complete page."""
    name = escape(run.folder.resolve().name)
    parts = [headline(run), curves(run, "Learning", LEARNING), samples(run), curves(run, "Stability", STABILITY)]
    parts += [proofs(run), timing(run), notes(run), settings(run)]
    if not run.series:
        ended = (
            "The evaluation has not ended, so it has no means." if _is_evaluation(run) else "No step is finished yet."
        )
        parts.insert(1, f'<p class="note">{ended}</p>')
    footer = (
        "<footer>Pale curves show each step, the others the moving average. Made from the files in this folder; "
        f"<code>meshrl report {name}</code> writes it again.</footer>"
    )
    return document(run.folder.resolve().name, [_header(run, name), *parts, every_number(run), footer])


def _is_evaluation(run: RunFolder) -> bool:
    """Whether `meshrl eval` wrote the folder."""
    return "answers" in run.result


def _header(run: RunFolder, name: str) -> str:
    status = run.result.get("status")
    shown = status or "no result yet"
    error = run.result.get("error")
    about = {"model": ABOUT["model"]} if _is_evaluation(run) else ABOUT
    known = {name: run.setting(key) for name, key in about.items()}
    shown_settings = " · ".join(f"{name} {escape(value)}" for name, value in known.items() if value)
    badge = f'<span class="badge {escape(status or "")}">{escape(shown)}</span>'
    return f"<header><h1>{name}</h1>{badge}<p>{shown_settings}</p></header>" + (
        f'<div class="error">{escape(error)}</div>' if error else ""
    )


ABOUT = {
    "model": "model.path",
    "advantage": "algo.advantage",
    "loss": "algo.loss.kind",
    "train ranks": "cluster.num_train_ranks",
    "seed": "run.seed",
}

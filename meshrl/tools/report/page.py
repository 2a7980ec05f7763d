"""report.html: a page about a run that needs no other file, written at the run's end and by `meshrl report`."""

from __future__ import annotations

from html import escape
from pathlib import Path

from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report.folder import RunFolder, read_run
from meshrl.tools.report.sections import (
    LEARNING,
    STABILITY,
    curves,
    every_number,
    headline,
    proofs,
    samples,
    settings,
    timing,
)
from meshrl.tools.report.summary import all_notes, header, is_evaluation, summary, title


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from the run's files so far.

    Raises: MeshrlError when it is not a run's folder; OutputError when the file can't be written.
    """
    return write_page(folder / "report.html", page(read_run(folder)))


def page(run: RunFolder) -> str:
    """The complete page."""
    parts = [header(run), summary(run), headline(run), curves(run, "Learning", LEARNING), samples(run)]
    parts += [curves(run, "Stability", STABILITY), proofs(run), timing(run), all_notes(run), settings(run)]
    if not run.series:
        ended = "No step is finished yet."
        if is_evaluation(run):
            ended = "The evaluation has not ended, so it has no means."
        parts.insert(2, f'<p class="note">{ended}</p>')
    footer = (
        "<footer>Pale curves show each step, the others the moving average. Made from the files in this folder; "
        f"<code>meshrl report {escape(run.folder.resolve().name)}</code> writes it again.</footer>"
    )
    style = package_text("meshrl.tools.report", "report.css")
    return document(title(run), [*parts, every_number(run), footer], style=[style])

"""report.html: a page about a run that needs no other file, written at the run's end and by `meshrl report`."""

from __future__ import annotations

from html import escape
from pathlib import Path

from meshrl.core.terminal import command
from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report import sections
from meshrl.tools.report.folder import read_run
from meshrl.tools.report.summary import all_notes, header, summary, title


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write `folder`/report.html, or `out`, from the run's files so far.

    Raises: MeshrlError when it is not a run's folder; OutputError when the file can't be written.
    """
    run, path = read_run(folder), out or folder / "report.html"
    parts = [header(run), summary(run, path.parent), sections.headline(run)]
    parts += [sections.curves(run, "Learning", sections.LEARNING), sections.samples(run)]
    parts += [sections.curves(run, "Stability", sections.STABILITY), sections.proofs(run), sections.timing(run)]
    parts += [all_notes(run), sections.settings(run), sections.every_number(run)]
    if not run.series:
        of_eval = "The evaluation has not ended, so it has no means."
        parts.insert(2, f'<p class="note">{of_eval if run.is_evaluation else "No step is finished yet."}</p>')
    footer = (
        "<footer>Pale curves show each step, the others the moving average. Made from the files of the run; "
        f"<code>{escape(command('report', folder))}</code> writes the page again.</footer>"
    )
    style = package_text("meshrl.tools.report", "report.css")
    return write_page(path, document(title(run), [*parts, footer], style=[style]))

"""report.html: a page about a run that needs no other file, written at the run's end and by `meshrl report`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

from meshrl.core.terminal import command
from meshrl.monitor.glossary import unhealthy
from meshrl.monitor.notes import REWARDS_FILE, important
from meshrl.run.verdict import HELD_OUT
from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report import sections
from meshrl.tools.report.folder import RunFolder, read_run
from meshrl.tools.report.sections import prose, suspicious


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write `folder`/report.html, or `out`, from the run's files so far."""
    run, path = read_run(folder), out or folder / "report.html"
    summary = f'<section class="summary">{"".join(_summary(run, path.parent))}</section>'
    notes = f'<section><h2>Notes</h2><pre class="notes">{escape(run.notes)}</pre></section>' if run.notes else ""
    parts = [header(run), summary, sections.headline(run)]
    parts += [sections.curves(run, "Learning", sections.LEARNING), sections.samples(run)]
    parts += [sections.curves(run, "Stability", sections.STABILITY), sections.proofs(run), sections.timing(run)]
    parts += [notes, sections.settings(run), sections.every_number(run)]
    if not run.series:
        of_eval = "The evaluation has not ended, so it has no means."
        parts.insert(2, f'<p class="note">{of_eval if run.is_evaluation else "No step is finished yet."}</p>')
    footer = (
        "<footer>Pale curves show each step, the others the moving average. Made from the files of the run; "
        f"<code>{escape(command('report', folder))}</code> writes the page again.</footer>"
    )
    style = package_text("meshrl.tools.report", "report.css")
    return write_page(path, document(title(run), [*parts, footer], style=[style]))


OUTCOMES = {"better": "good", "worse": "bad"}  # the classes of the style sheet


def title(run: RunFolder) -> str:
    """The name of the folder; that of an evaluation also has the run whose model it evaluates."""
    folder, model = run.folder.resolve(), Path(str(run.state.result.get("model") or run.setting("model.path")))
    if not run.is_evaluation:
        return folder.name
    owner = model.parents[2] if model.parent.parent.name == "checkpoints" else folder.parent
    is_run = owner != folder.parent or (owner / "metrics.jsonl").is_file()
    return f"{folder.name}: evaluation of {owner.name if is_run else model}"


def header(run: RunFolder) -> str:
    word, error = run.state.word, run.state.result.get("error")
    about = {"model": ABOUT["model"]} if run.is_evaluation else ABOUT
    values = {name: run.setting(key) for name, key in about.items()}
    shown = " · ".join(f"{name} {escape(value)}" for name, value in values.items() if value)
    is_bad = run.verdict is not None and (run.verdict.outcome == "worse" or not math.isfinite(run.verdict.last[1]))
    is_good = run.lines and not (run.state.problems or suspicious(run) or is_bad)
    css = "unsure" if run.state.text != word else word if is_good or word != "done" else ""
    at = "" if word == "done" else f" at {'answer' if run.is_evaluation else 'step'} {run.num_steps}"
    badge = f'<span class="badge {escape(css)}">{escape(run.state.text)}{at}</span>'
    return f"<header><h1>{escape(title(run))}</h1>{badge}<p>{shown}</p></header>" + (
        f'<div class="error">{escape(error)}</div>' if error else ""
    )


def _summary(run: RunFolder, place: Path) -> Iterator[str]:
    """The verdict and all that needs attention. place: the folder of the page."""
    if run.verdict is not None and not run.is_evaluation:
        css, (text, *best) = OUTCOMES.get(run.verdict.outcome, ""), run.verdict.lines
        yield f'<p><b>Verdict</b>: <span class="{css}">{escape(text)}</span></p>'
        yield from (f"<p>{escape(line)}</p>" for line in best)
        own = run.evals[-1].evaluation
        if others := [line for line in run.lines if HELD_OUT in line.metrics and line.evaluation != own]:
            steps: dict[str, dict[int, None]] = {}  # by what differs
            for line in others:
                parts = ", ".join(part for part in own if line.evaluation.get(part) != own[part])
                steps.setdefault(parts, {})[line.step] = None
            listed = (f"with other {escape(p)}, after steps {', '.join(map(str, at))}" for p, at in steps.items())
            yield f"<p>Not in the curves: evaluations {'; '.join(listed)}</p>"
    for problem in run.state.problems:
        yield f'<p><span class="bad">Damaged</span>: {escape(problem)}</p>'
    rows = [
        f"<li><code>{escape(name)}</code>: {prose(unhealthy(reason, entry.otherwise))}</li>"
        for name, (reason, entry) in suspicious(run).items()
    ]
    if rows := _exploited(run) + rows:
        yield f'<p><span class="unsure"><b>Suspicious</b></span></p><ul>{"".join(rows)}</ul>'
    if lines := important(run.notes):
        text = escape("\n".join(lines))
        yield f'<p><b>Notes of the run</b></p><pre class="notes">{text}</pre>'
    rewards = run.folder / REWARDS_FILE
    if rewards.is_file() and rewards.stat().st_size:
        link = escape(quote(os.path.relpath(rewards, place)))
        yield f'<p>Output of the reward functions: <a href="{link}">{REWARDS_FILE}</a></p>'


def _exploited(run: RunFolder) -> list[str]:
    """A line if the training reward rose while the held-out score fell by more than chance explains."""
    ends = run.ends("reward/mean")
    if run.verdict is None or run.verdict.outcome != "worse" or ends is None or ends[1] <= ends[0]:
        return []
    return [
        f"<li><code>reward/mean</code>: rises from {ends[0]:.3g} to {ends[1]:.3g} while the held-out score falls. The "
        "reward may accept wrong answers, or the model overfits: read the answers with the highest reward "
        f"(<code>{escape(command('view', run.folder))}</code>)</li>"
    ]


ABOUT = {
    "model": "model.path",
    "advantage": "algo.advantage",
    "loss": "algo.loss.kind",
    "train ranks": "cluster.num_train_ranks",
    "seed": "run.seed",
}

"""The first part of report.html: title, verdict, what is suspicious, what happened, and links to other files."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from meshrl.monitor.notes import REWARDS_FILE, important
from meshrl.monitor.rules import unhealthy
from meshrl.tools.report.folder import RunFolder
from meshrl.tools.report.sections import prose, suspicious

OUTCOMES = {"better": "good", "worse": "bad"}  # the classes of the style sheet


def is_evaluation(run: RunFolder) -> bool:
    """Whether `meshrl eval` wrote the folder."""
    return "answers" in run.result


def title(run: RunFolder) -> str:
    """The name of the folder; that of an evaluation also has the run whose model it evaluates."""
    folder, model = run.folder.resolve(), Path(str(run.result.get("model")))
    if not is_evaluation(run):
        return folder.name
    owner = model.parents[2] if model.parent.parent.name == "checkpoints" else folder.parent
    is_run = owner != folder.parent or (owner / "metrics.jsonl").is_file()
    return f"{folder.name}: evaluation of {owner.name if is_run else model}"


def header(run: RunFolder) -> str:
    status, error = run.result.get("status"), run.result.get("error")
    about = {"model": ABOUT["model"]} if is_evaluation(run) else ABOUT
    known = {name: run.setting(key) for name, key in about.items()}
    shown = " · ".join(f"{name} {escape(value)}" for name, value in known.items() if value)
    is_good = status != "done" or not (suspicious(run) or (run.verdict and run.verdict.outcome == "worse"))
    badge = f'<span class="badge {escape(status or "") if is_good else ""}">{escape(status or "no result yet")}</span>'
    return f"<header><h1>{escape(title(run))}</h1>{badge}<p>{shown}</p></header>" + (
        f'<div class="error">{escape(error)}</div>' if error else ""
    )


def summary(run: RunFolder) -> str:
    """The verdict and all that needs attention."""
    return f'<section class="summary">{"".join(_lines(run))}</section>'


def _lines(run: RunFolder) -> Iterator[str]:
    if run.verdict is not None and not is_evaluation(run):
        css = OUTCOMES.get(run.verdict.outcome, "")
        yield f'<p><b>Verdict</b>: <span class="{css}">{escape(run.verdict.text)}</span></p>'
    for problem in run.problems:
        yield f'<p><span class="bad">Not readable</span>: {escape(problem)}</p>'
    rows = [
        f"<li><code>{escape(name)}</code>: {prose(unhealthy(reason, entry.otherwise))}</li>"
        for name, (reason, entry) in suspicious(run).items()
    ]
    if rows := _exploited(run) + rows:
        yield f'<p><span class="unsure"><b>Suspicious</b></span></p><ul>{"".join(rows)}</ul>'
    if lines := important(run.notes):
        text = escape("\n".join(lines))
        yield f'<p><b>Notes of the run</b></p><pre class="notes">{text}</pre>'
    if (run.folder / REWARDS_FILE).is_file() and (run.folder / REWARDS_FILE).stat().st_size:
        yield f'<p>Output of the reward functions: <a href="{REWARDS_FILE}">{REWARDS_FILE}</a></p>'


def _exploited(run: RunFolder) -> list[str]:
    """A line if the training reward rose while the held-out score fell by more than chance explains."""
    reward = run.known("reward/mean")
    tenth = max(1, len(reward) // 10)
    before, after = reward[:tenth], reward[-tenth:]
    if run.verdict is None or run.verdict.outcome != "worse" or sum(after) <= sum(before):
        return []
    return [
        f"<li><code>reward/mean</code>: rises from {sum(before) / tenth:.3g} to {sum(after) / tenth:.3g} while the "
        "held-out score falls. The reward may accept wrong answers, or the model overfits: read the answers with the "
        f"highest reward (<code>meshrl view {escape(run.folder.name)}</code>)</li>"
    ]


def all_notes(run: RunFolder) -> str:
    """All lines of text that the run printed."""
    if not run.notes:
        return ""
    return f'<section><h2>Notes</h2><pre class="notes">{escape(run.notes)}</pre></section>'


ABOUT = {
    "model": "model.path",
    "advantage": "algo.advantage",
    "loss": "algo.loss.kind",
    "train ranks": "cluster.num_train_ranks",
    "seed": "run.seed",
}

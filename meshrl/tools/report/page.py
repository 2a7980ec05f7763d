"""report.html: a page about a run that needs no other file, written at the run's end and by `meshrl report`.

Each section is a function of the run's files; one without data is empty."""

from __future__ import annotations

import base64
import fnmatch
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from meshrl.core.terminal import command, counted
from meshrl.core.types import Media
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.health import HealthFinding
from meshrl.monitor.notes import REWARDS_FILE, important
from meshrl.monitor.rollout_log import answer_files
from meshrl.monitor.sinks import duration
from meshrl.run.verdict import HELD_OUT, Z, limits_of
from meshrl.tools.page.charts import COLOURS, OTHER, Line, Style, figure, number, sparkline, stacked_chart
from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report.folder import LoggedPrompt, RunFolder, read_run


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write `folder`/report.html, or `out`, from the run's files so far."""
    run, path = read_run(folder), out or folder / "report.html"
    look = "".join(_look_at(run, path.parent)) or "<p>No rule finds anything, and no note needs attention.</p>"
    undrawn = without_curve(run)
    parts = [
        header(run),
        f'<section class="summary">{"".join(_verdict(run))}</section>',
        f'<section class="grid2">{_figure(run, HEADLINE, undrawn)}<div class="look"><b>What to look at</b>{look}</div>',
        "</section>",
        samples(run),
        *(fold(name, curves(run, charts, undrawn)) for name, charts in CHARTS.items()),
        fold("Time and memory", timing(run, undrawn)),
        fold("Proofs", proofs(run)),
        fold("All notes", f'<pre class="notes">{escape(run.notes)}</pre>' if run.notes else ""),
        fold("Configuration", settings(run)),
        fold(f"All {counted(len(run.series), 'metric')}", every_number(run)),
        f"<footer><code>{escape(command('report', folder))}</code> writes this page again.</footer>",
    ]
    style = package_text("meshrl.tools.report", "report.css")
    return write_page(path, document(f"{title(run)} · report", parts, style=[style]))


def fold(name: str, body: str) -> str:
    return f'<details class="fold"><summary>{name}</summary>{body}</details>' if body else ""


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
    shown = " · ".join([*(f"{name} {escape(value)}" for name, value in values.items() if value), *_progress(run)])
    is_bad = run.verdict is not None and (run.verdict.outcome == "worse" or not math.isfinite(run.verdict.last[1]))
    is_sick = any(finding.until is None for finding in run.health)
    is_good = run.lines and not (run.state.problems or is_sick or is_bad)
    css = "unsure" if run.state.text != word else word if is_good or word != "done" else ""
    at = "" if word == "done" else f" at {'answer' if run.is_evaluation else 'step'} {run.num_steps}"
    learned = f": {learned}" if (learned := _learned(run)) else ""
    badge = f'<span class="badge {escape(css)}">{escape(run.state.text + at + learned)}</span>'
    return f"<header><h1>{escape(title(run))}</h1>{badge}<p>{shown}</p></header>" + (
        f'<div class="error">{escape(error)}</div>' if error else ""
    )


def _learned(run: RunFolder) -> str:
    """Such as `held-out reward 0.22 → 0.98`; without evaluations, of the training reward or loss."""
    if run.verdict is not None:
        ends = run.verdict.first[1], run.verdict.last[1]
        return f"{run.verdict.name} {' → '.join(f'{score:.3g}' for score in ends[run.is_evaluation :])}"
    for name in ("eval/loss", "reward/mean", "loss/nll"):
        if found := run.ends(name):
            return f"{name} {found[0]:.3g} → {found[1]:.3g}"
    return ""


def _progress(run: RunFolder) -> Iterator[str]:
    """The steps and their time, and how the reward or the loss has changed."""
    planned = run.setting("loop.num_steps") or run.setting("sft.num_steps")
    steps = f"{run.num_steps} of {planned} steps" if planned else counted(run.num_steps, "step")
    is_all = run.wall_s == run.state.result.get("wall_s")  # else the run has not ended
    took = f"in {duration(run.wall_s)}" if is_all else f"{duration(run.wall_s)} from first to last line"
    yield f"{counted(run.num_steps, 'answer') if run.is_evaluation else steps} {took}"
    for name, words in (("reward/mean", "training reward"), ("loss/nll", "loss")):
        if ends := run.ends(name):
            begin, end, tenth = ends
            means = f" (means of the first and last {tenth} steps)" if tenth > 1 else ""
            yield (
                f"{words} {end:.3f}" if len(run.series[name].values) == 1 else f"{words} {begin:.3f} → {end:.3f}{means}"
            )


def _verdict(run: RunFolder) -> Iterator[str]:
    """The verdict, or why there is none, and what can't be read."""
    held_out = [run.setting(f"{of}.eval_{key}") for of in ("data", "sft") for key in ("path", "fraction")]
    held_out += [setting.value for setting in run.settings if setting.key.startswith("data.eval_sets.")]
    if run.verdict is not None and run.is_evaluation:
        yield f"<p><b>{escape(run.verdict.name)}</b> {escape(run.verdict.measured)} (95 %)</p>"
    elif run.verdict is not None:
        css, (text, *best) = OUTCOMES.get(run.verdict.outcome, ""), run.verdict.lines
        yield f'<p><b>Verdict</b>: <span class="{css}">{escape(text)}</span></p>'
        yield from (f"<p>{escape(line)}</p>" for line in best)
        own = run.evals[-1].evaluation
        if others := [line for line in run.lines if HELD_OUT in line.metrics and line.evaluation != own]:
            parts = ", ".join({part: None for line in others for part in own if line.evaluation.get(part) != own[part]})
            yield f"<p>Not in the curves: {counted(len(others), 'evaluation')} with other {escape(parts)}</p>"
    elif (loss := run.series.get("eval/loss")) is not None:
        yield f"<p><b>Held-out loss</b>: {loss.values[-1]:.4f} nats a token after {counted(loss.steps[-1], 'step')}</p>"
    elif run.is_evaluation or any(value not in (None, "null") for value in held_out):
        yield "<p><b>Verdict</b>: none yet, because no evaluation has ended.</p>"
    else:
        yield (
            "<p><b>Verdict</b>: none, because the run has no held-out rows. The training reward or loss alone does not "
            "show whether the model is better on other prompts (<code>data.eval_path</code>, <code>meshrl eval</code>)."
            "</p>"
        )
    for problem in run.state.problems:
        yield f'<p><span class="bad">Damaged</span>: {escape(problem)}</p>'


def _look_at(run: RunFolder, place: Path) -> Iterator[str]:
    """All that needs attention. place: the folder of the page."""
    if names := fnmatch.filter(run.series, "eval/by/*/mean_at_k"):
        by = next((by for by in [run.setting("data.eval_by")] if by not in (None, "null")), "set")
        values = [(name.split("/")[2], run.series[name].values) for name in names]
        cells = (f'<tr><td>{escape(of)}</td><td class="num">{v[0]:.3f} → {v[-1]:.3f}</td></tr>' for of, v in values)
        yield f"<p>Held-out score by {escape(by)}, first → last</p>"
        yield f"<table>{''.join(cells)}</table>"
    for title, has_ended in (("Health", False), ("Health, until it ended", True)):
        if rows := [_finding(run, each) for each in run.health if (each.until is not None) == has_ended]:
            yield f'<p class="{"" if has_ended else "unsure"}">{title}</p><ul>{"".join(rows)}</ul>'
    if lines := important(run.notes):
        text = escape("\n".join(lines))
        yield f'<p>Notes of the run</p><pre class="notes">{text}</pre>'
    rewards = run.folder / REWARDS_FILE
    if rewards.is_file() and rewards.stat().st_size:
        link = escape(quote(os.path.relpath(rewards, place)))
        yield f'<p>Output of the reward functions: <a href="{link}">{REWARDS_FILE}</a></p>'


ABOUT = {
    "model": "model.path",
    "advantage": "algo.advantage",
    "loss": "algo.loss.kind",
    "train ranks": "cluster.num_train_ranks",
    "seed": "run.seed",
}


SAMPLES = 3  # at once, and of each kind
MAX_LINES = 12  # of a chart; the style sheet has so many colours


@dataclass(frozen=True, slots=True)
class Chart:
    """names: metrics on the same axis, if the run logged them; "reward/term/*" stands for all that begin so."""

    title: str
    names: tuple[str, ...]


def curves(run: RunFolder, charts: Sequence[Chart], undrawn: dict[str, str], figures: str = "") -> str:
    """The curves of those metrics that the run logged; below them, those that are not drawn.

    undrawn: from without_curve. figures: before them."""
    figures += "".join(_figure(run, chart, undrawn) for chart in charts)
    names = {name for chart in charts for name in logged(run, chart)}
    rest = ", ".join(f"<code>{escape(name)}</code> {text}" for name, text in undrawn.items() if name in names)
    drawn = f'<div class="grid2">{figures}</div>' if figures else ""
    return drawn + (f'<p class="note">Constant, or equal to another curve: {rest}.</p>' if rest else "")


def logged(run: RunFolder, chart: Chart) -> list[str]:
    return [name for pattern in chart.names for name in fnmatch.filter(run.series, pattern)]


def without_curve(run: RunFolder) -> dict[str, str]:
    """Metrics of the charts with a single value, which is the text here, and those with the values of an earlier one,
    such as `= reward/mean`."""
    undrawn, curves = dict[str, str](), dict[tuple[tuple[int, ...], tuple[str, ...]], str]()
    for chart in (HEADLINE, *(chart for charts in CHARTS.values() for chart in charts), *SPEED):
        for name in logged(run, chart):
            series = run.series[name]
            values = tuple(f"{value:.6g}" for value in series.values)
            key = tuple(series.steps), values
            if len(set(values)) == 1:
                undrawn[name] = number(series.values[0], series.unit)
            elif (first := curves.setdefault(key, name)) != name:
                undrawn[name] = f"= <code>{escape(first)}</code>"
    return undrawn


def _figure(run: RunFolder, chart: Chart, undrawn: dict[str, str]) -> str:
    """Evaluations are drawn next to another curve, also if they are constant."""
    names = [name for name in logged(run, chart) if name not in undrawn or undrawn[name][0] != "="][:MAX_LINES]
    lines = []
    for name in names if any(name not in undrawn for name in names) else ():
        style: Style = "dots" if name.startswith("eval/") else "noisy"
        if name not in undrawn or style == "dots":
            series = run.series[name]
            lines.append(Line(name, series.steps, series.values, style, *interval(run, name)))
    return figure(chart.title, run.series[names[0]].unit, lines) if lines else ""


def interval(run: RunFolder, name: str) -> tuple[list[float], list[float]]:
    """The 95 % interval of each held-out score, within its limits; without values for other metrics."""
    if name != HELD_OUT or "eval/standard_error" not in run.series:
        return [], []
    low, high = limits_of(run.evals)
    ends = [(m[name], Z * m.get("eval/standard_error", math.nan)) for m in (line.metrics for line in run.evals)]
    return [max(v - margin, low) for v, margin in ends], [min(v + margin, high) for v, margin in ends]


def _finding(run: RunFolder, finding: HealthFinding) -> str:
    series = run.series.get(finding.metric)
    until = f" to {finding.until}" if finding.until is not None else ""
    at = f"step {finding.since}{until}: <code>{escape(finding.metric)}</code>: {escape(finding.reason)}"
    tried = finding.rule.advice.replace("meshrl view", command("view", run.folder))
    advice = f"<p>Try: {prose(tried)}</p>" if tried else ""
    return (
        f"<li><b>{escape(finding.rule.name)}</b> {at} {sparkline(series.values) if series else ''}"
        f"<p>{prose(finding.means)}</p>{advice}</li>"
    )


def prose(text: str) -> str:
    """The glossary's text as HTML: `code` in backquotes becomes <code>."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def proofs(run: RunFolder) -> str:
    """Proofs that the sampler had the trainer's weights: digests of each sync, and re-scored samples. One without a
    value is left out."""
    items = "".join(f'<li class="{mark}">{text}</li>' for mark, text in _proof_facts(run))
    return f'<ul class="proofs">{items}</ul>' if items else ""


def _proof_facts(run: RunFolder) -> Iterable[tuple[str, str]]:
    version = run.finite_values("sync/version")
    for name, proof, lacking in (
        ("wire", "the received bytes had the sender's digests", "no"),
        ("read_back", "the sampler's parameters, read back after loading, had the trainer's digests", ""),
    ):  # an engine that can't read back proves nothing, and a wrong digest ends the run
        if (shares := run.finite_values(f"sync/proven_{name}")) and version:
            worst = min(shares)
            samplers = "every sampler" if worst == 1 else f"only {worst:.0%} of the samplers in the worst sync"
            syncs = f"{counted(len(shares), 'weight sync')} up to version {version[-1]:.0f}"
            yield "yes" if worst == 1 else lacking, f"<b>{name}</b> {syncs}: {samplers} acknowledged that {proof}."
    metrics = [line.metrics for line in run.lines]
    pairs = [(m.get("proof/logprob_abs_diff_mean", math.nan), m.get("proof/limit", math.nan)) for m in metrics]
    measured = [(value, limit) for value, limit in pairs if not math.isnan(value + limit)]
    if measured:  # each with the limit of its step: a run that continues with another engine or dtype has another one
        worst, allowed = max([(value, limit) for value, limit in measured if value > limit] or measured)
        yield (
            "yes" if worst <= allowed else "no",
            f"<b>behaviour</b> the trainer re-scored the samples of {counted(len(measured), 'step')} before training "
            f"on them: the mean difference of logprobs was at most {number(worst)} nats per token; allowed: "
            f"{number(allowed)}.",
        )


def samples(run: RunFolder) -> str:
    """Answers to the same held-out prompts before and after training: learned, unlearned, still wrong. Of a single
    evaluation, or of the last step of a run without one, right and wrong answers."""
    evals = [evaluation for evaluation in (run.first_eval, run.last_eval) if evaluation is not None]
    if not evals:
        return ""
    when = ("before", "after") if len(evals) > 1 else ("answer",)
    kinds: dict[tuple[bool, ...], list[dict[str, LoggedPrompt]]] = {}
    for prompt in evals[0][1]:
        if all(prompt in asked for _, asked in evals):
            row = dict(zip(when, (asked[prompt] for _, asked in evals)))
            kinds.setdefault(tuple(each.is_right for each in row.values()), []).append(row)
    shown = {kind: title for kind, title in KINDS.items() if len(kind) == len(evals)}
    counts = " ".join(
        f'<span class="badge">{title.lower()} <b>{len(kinds.get(kind, []))}</b></span>' for kind, title in shown.items()
    )
    steps = " and ".join(f"after {counted(step, 'step')}" for step, _ in evals)
    prompts = f"Held-out prompts, {steps}" if answer_files(run.folder, "eval") else f"Prompts of step {evals[0][0]}"
    chosen = [(shown[k], kinds[k]) for k in shown if k in kinds and (k != (True, True) or len(kinds) == 1)]
    at_once = max(1, SAMPLES // max(len(chosen), 1))
    first = "".join(sample_row(row, title) for title, rows in chosen for row in rows[:at_once])
    more = "".join(sample_row(row, title) for title, rows in chosen for row in rows[at_once:SAMPLES])
    view = f'<p class="note">All answers: <code>{escape(command("view", run.folder))}</code></p>'
    about = f'<p class="note">{prompts}. {counts}</p>'
    return f"<section><h2>Answers</h2>{about}{first}{fold('More answers', more) + view}</section>"


def sample_row(asked: dict[str, LoggedPrompt], title: str = "") -> str:
    """A prompt without its system message, and its answer in each evaluation, by a word for that evaluation."""
    first, answers = next(iter(asked.values())), ""
    for when, prompt in asked.items():
        shown = prompt.shown
        score = "not graded" if shown.score is None else f"score {shown.score:.3g}"
        right = sum(answer.is_right for answer in prompt.answers)
        several = f", {right} of {len(prompt.answers)} right" if len(prompt.answers) > 1 else ""
        truncated = ", truncated" if shown.status == "truncated" else ""
        css = "yes" if prompt.is_right else "" if shown.score is None or math.isnan(shown.score) else "no"
        is_one = len(shown.messages) == 1  # a single answer is shown without its role
        texts = f"<pre>{escape(shown.messages[0][1])}</pre>" if is_one else _messages(shown.messages)
        answers += f'<div class="{css}"><small>{escape(when)}: {score}{several}{truncated}</small>{texts}</div>'
    question = _messages([m for m in first.question if m[0] != "system"] + [("expected answer", first.truth)])
    name = f"<b>{title}</b>" if title else ""
    images = f"<div>{''.join(map(_image, first.media.values()))}</div>" if first.media else ""
    return f'<div class="sample"><div>{name}{images}{question}</div>{answers}</div>'


def _image(media: Media) -> str:
    """The box of an image, whose tokens are context."""
    data = base64.b64encode(media.thumbnail).decode()
    shown = f'<img alt="" src="data:image/jpeg;base64,{data}">' if data else "no thumbnail "
    about = f"{escape(media.source)} · {counted(media.num_tokens, 'token')}"
    return f'<span class="image">{shown}<small>{about}</small></span>'


def _messages(messages: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<div><small>{escape(role)}</small><pre>{escape(text)}</pre></div>" for role, text in messages)


def timing(run: RunFolder, undrawn: dict[str, str]) -> str:
    """The time of each phase, with speeds and memory."""
    order = [*COLOURS, *(p for p in run.phases if p not in COLOURS and p != "other"), "other"]
    layers = {phase: run.phases[phase] for phase in order if sum(run.phases.get(phase, {}).values()) > 0}
    colours = [COLOURS.get(phase, OTHER) for phase in layers]
    drawing = stacked_chart(layers, colours)
    totals = {phase: sum(by_step.values()) for phase, by_step in layers.items()}
    total = sum(totals.values())
    bars = "".join(
        f'<tr><td><i class="k{colour}"></i>{escape(phase)}</td><td class="num">{number(seconds, "s")}</td>'
        f'<td class="num">{seconds / total:.1%}</td>'
        f'<td class="bar"><i class="b{colour}" style="width:{seconds / total:.1%}"></i></td></tr>'
        for colour, (phase, seconds) in zip(colours, totals.items())
    )
    phases = (
        f"<figure><figcaption><b>Time of a step<small>s</small></b></figcaption>{drawing}"
        f'<table class="phases">{bars}</table>'
        "<p>other: the time between the phases.</p></figure>"
    )
    facts = [
        f"{number(tokens[0])} tokens {word}, {number(tokens[1])} a second in that phase"
        for phase, word in (("rollout", "sampled"), ("train", "trained"))
        if (tokens := run.tokens(phase))
    ]
    about = f'<p class="note">{"; ".join(facts)}.</p>' if facts else ""
    return about + curves(run, SPEED, undrawn, (phases if drawing else "") + _memory_by_phase(run))


def _memory_by_phase(run: RunFolder) -> str:
    """The largest measured peak of each phase, and the planned one, if there is a plan."""
    of = "memory/phase_bytes/"
    rows = ""
    for phase in (name.removeprefix(of) for name in run.series if name.startswith(of)):
        measured, planned = (run.finite_values(f"memory/{kind}_bytes/{phase}") for kind in ("phase", "planned"))
        cells = [number(planned[-1], "bytes"), f"{max(measured) / planned[-1]:.0%}"] if planned else ["", ""]
        cells = [number(max(measured), "bytes"), *cells]
        rows += f"<tr><td>{escape(phase)}</td>" + "".join(f'<td class="num">{cell}</td>' for cell in cells) + "</tr>"
    head = "<tr><th>phase</th><th>measured peak</th><th>planned peak</th><th>of the plan</th></tr>"
    title = "<figcaption><b>Memory by phase<small>of the rank with the most</small></b></figcaption>"
    return f'<figure>{title}<table class="numbers">{head}{rows}</table></figure>' if rows else ""


def settings(run: RunFolder) -> str:
    """The values that were set for this run; the defaults are collapsed."""
    if not run.settings:
        return ""
    chosen = [s for s in run.settings if not s.origin.startswith(("default", "unused"))]
    rest = [s for s in run.settings if s not in chosen]

    def table(shown: list) -> str:
        rows = (
            f"<tr><td><code>{escape(s.key)}</code></td><td><code>{escape(s.value)}</code></td>"
            f'<td class="origin">{escape(s.origin)}</td></tr>'
            for s in shown
        )
        return f'<div class="wide"><table class="settings">{"".join(rows)}</table></div>'

    return f"{table(chosen)}<details><summary>{len(rest)} more with their defaults</summary>{table(rest)}</details>"


def every_number(run: RunFolder) -> str:
    """All metrics with their first, last and extreme values."""
    rows, marked = [], {each.metric: each for each in run.health if each.until is None}
    for name, series in sorted(run.series.items()):
        finite = run.finite_values(name) or [math.nan]
        cells = "".join(
            f'<td class="num">{number(v, series.unit)}</td>'
            for v in (series.values[0], series.values[-1], min(finite), max(finite))
        )
        meaning = meaning_of(name)
        healthy = prose(meaning.entry.healthy) if meaning else ""
        if name in marked:
            healthy += f' <span class="unsure">{escape(marked[name].rule.name)}: {escape(marked[name].reason)}.</span>'
        unit = escape(series.unit if series.unit not in ("bytes", "s") else "")
        rows.append(
            f"<tr><td><code>{escape(name)}</code></td>{cells}<td>{unit}</td><td>{sparkline(series.values)}</td>"
            f'<td class="healthy">{healthy}</td></tr>'
        )
    titles = ("metric", "first", "last", "lowest", "highest", "unit", "", "healthy")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f'<div class="wide"><table class="numbers"><tr>{head}</tr>{"".join(rows)}</table></div>' if rows else ""


KINDS = {
    (False, True): "Wrong, then right",
    (True, False): "Right, then wrong",
    (False, False): "Still wrong",
    (True, True): "Right before and after",
    (False,): "Wrong",
    (True,): "Right",
}

HEADLINE = Chart("Learning curve", ("eval/mean_at_k", "reward/mean", "eval/loss", "loss/nll"))

CHARTS = {
    "Rewards and answers": (
        Chart("Held-out scores", ("eval/pass_at_k", "eval/reward/mean", "eval/reward/term/*")),
        Chart("Terms of the training reward, before their weights", ("reward/term/*", "reward/turns")),
        Chart("Answer length", ("rollout/length_mean_tokens", "rollout/length_tokens/p95", "eval/length_mean_tokens")),
        Chart(
            "Shares of answers and groups",
            (
                "rollout/truncated_fraction",
                "reward/groups_without_signal",
                "rollout/duplicate_fraction",
                "eval/most_frequent_fraction",
                "reward/failed",
            ),
        ),
        Chart("Entropy", ("loss/entropy",)),
    ),
    "Stability": (
        Chart("Gradient norm", ("train/grad_norm",)),
        Chart("Learning rate", ("train/lr",)),
        Chart("KL", ("loss/approx_kl", "loss/kl", "reward/kl")),
        Chart("Clipped ratios", ("loss/clip_fraction_low", "loss/clip_fraction_high")),
        Chart("Effective sample size", ("correction/effective_sample_size",)),
        Chart("Age of samples", ("rollout/staleness_versions/p50", "rollout/staleness_versions/p95")),
    ),
}

SPEED = (
    Chart("Speed", ("rollout/tokens_per_s", "train/tokens_per_s", "perf/throughput")),
    Chart("Use of the ranks", ("perf/mfu", "run/train_idle", "run/rollout_idle", "perf/exposed_comm_fraction")),
    Chart("Memory", ("memory/rss_bytes", "memory/device_peak_bytes")),
    Chart("Weight sync", ("sync/latency_s", "sync/wait_s", "sync/verify_s")),
)

"""report.html: a page about a run that needs no other file, written at the run's end and by `meshrl report`.

Each section is a function of the run's files; one without data is empty."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from urllib.parse import quote

from meshrl.core.terminal import command, counted
from meshrl.monitor.glossary import Entry, judge, meaning_of, rule_text, unhealthy
from meshrl.monitor.notes import REWARDS_FILE, important
from meshrl.monitor.sinks import duration
from meshrl.run.verdict import HELD_OUT, Z, limits_of
from meshrl.tools.page.charts import Line, Style, figure, number, sparkline, stacked_chart, values_table
from meshrl.tools.page.document import document, package_text, write_page
from meshrl.tools.report.folder import LoggedPrompt, RunFolder, read_run


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write `folder`/report.html, or `out`, from the run's files so far."""
    run, path = read_run(folder), out or folder / "report.html"
    summary = f'<section class="summary">{"".join(_summary(run, path.parent))}</section>'
    notes = f'<section><h2>Notes</h2><pre class="notes">{escape(run.notes)}</pre></section>' if run.notes else ""
    parts = [header(run), summary, headline(run)]
    parts += [curves(run, "Learning", LEARNING), samples(run)]
    parts += [curves(run, "Stability", STABILITY), proofs(run), timing(run)]
    parts += [notes, settings(run), every_number(run)]
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


SAMPLES_OF_A_KIND = 3
MAX_LINES = 12  # of a chart; the style sheet has so many colours
OTHER = 6  # the grey among the colours
PHASES = ("rollout", "reward", "train", "sync", "eval", "export")  # in the order of a step; others follow


@dataclass(frozen=True, slots=True)
class Chart:
    """names: metrics on the same axis, if the run logged them; "reward/term/*" stands for all that begin so. style: of
    those that are no evaluation and no limit."""

    title: str
    names: tuple[str, ...]
    style: Style = "noisy"
    log: bool = False


def headline(run: RunFolder) -> str:
    """The most important numbers of the run."""
    cells = (
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>'
        for name, value, more in _tiles(run)
    )
    return f'<section class="tiles">{"".join(cells)}</section>'


def _tiles(run: RunFolder) -> Iterable[tuple[str, str, str]]:
    if (verdict := run.verdict) is not None:
        (before, first), (after, last) = verdict.first, verdict.last
        more = f"{verdict.measured} (95 %)" if math.isfinite(verdict.margin) else "interval unknown"
        if verdict.best:
            more += f"; best {verdict.best.score:.3f} "
            more += f"after step {verdict.best.step}" if verdict.best.step else "before training"
        yield verdict.name, f"{first:.3f} → {last:.3f}" if before != after else f"{first:.3f}", more
    for name, title in (("reward/mean", "training reward"), ("loss/nll", "loss")):
        if ends := run.ends(name):
            begin, end, tenth = ends
            means = f"means of the first and last {tenth} steps" if tenth > 1 else "first and last step"
            is_one = len(run.series[name].values) == 1
            yield title, f"{begin:.3f}" if is_one else f"{begin:.3f} → {end:.3f}", "one step" if is_one else means
    planned = run.setting("loop.num_steps") or run.setting("sft.num_steps")
    is_all = run.wall_s == run.state.result.get("wall_s")  # else the run has not ended
    took = f"{duration(run.wall_s)} {'in all' if is_all else 'from first to last line'}"
    if run.is_evaluation:
        yield "answers", str(run.num_steps), took
    else:
        yield "steps", f"{run.num_steps} of {planned}" if planned else str(run.num_steps), took
    for name, title in (("memory/rss_bytes", "all processes"), ("memory/device_peak_bytes", "highest of a device")):
        if values := run.finite_values(name):
            yield "peak memory", number(max(values), "bytes"), title
    for phase, title in (("rollout", "sampled"), ("train", "trained")):
        if tokens := run.tokens(phase):
            yield f"tokens {title}", number(tokens[0]), f"{number(tokens[1])} a second in that phase"


def curves(run: RunFolder, title: str, charts: Sequence[Chart]) -> str:
    """The curves of those metrics that the run logged."""
    figures = "".join(_figure(run, chart) for chart in charts)
    return f'<section><h2>{title}</h2><div class="grid2">{figures}</div></section>' if figures else ""


def _figure(run: RunFolder, chart: Chart) -> str:
    names = [name for pattern in chart.names for name in fnmatch.filter(run.series, pattern)][:MAX_LINES]
    if max((len(run.series[name].values) for name in names), default=0) < 2:
        return ""
    lines: list[Line] = []
    for name in names:
        steps, values = run.series[name].steps, run.series[name].values
        style: Style = "dots" if name.startswith("eval/") else "limit" if name == "proof/limit" else chart.style
        same = next((i for i, line in enumerate(lines) if (line.steps, line.values) == (steps, values)), None)
        if same is None:
            lines.append(Line(name, steps, values, style, *interval(run, name)))
        else:  # it would cover the other curve
            lines[same] = replace(lines[same], label=f"{lines[same].label} = {name}")
    return figure(chart.title, run.series[names[0]].unit, lines, log=chart.log, below=_meanings(run, names))


def interval(run: RunFolder, name: str) -> tuple[list[float], list[float]]:
    """The 95 % interval of each held-out score, within its limits; without values for other metrics."""
    if name != HELD_OUT or "eval/standard_error" not in run.series:
        return [], []
    low, high = limits_of(run.evals)
    ends = [(m[name], Z * m.get("eval/standard_error", math.nan)) for m in (line.metrics for line in run.evals)]
    return [max(v - margin, low) for v, margin in ends], [min(v + margin, high) for v, margin in ends]


def suspicious(run: RunFolder) -> dict[str, tuple[str, Entry]]:
    """What makes the curves of metrics suspicious, and their entries in the glossary."""
    marked = {}
    for name, series in sorted(run.series.items()):
        meaning = meaning_of(name)
        if meaning is not None and meaning.entry.rule and (reason := judge(meaning.entry.rule, series.values)):
            marked[name] = reason, meaning.entry
    return marked


def _meanings(run: RunFolder, names: Sequence[str]) -> str:
    """The texts of the glossary; a mark stands only at a metric whose curve is suspicious."""
    entries: dict[Entry, list[str]] = {}
    for name in names:
        if (meaning := meaning_of(name)) is not None:
            entries.setdefault(meaning.entry, []).append(name)
    texts, marked = [], suspicious(run)
    for entry, of_entry in entries.items():
        which = f"<code>{escape(of_entry[0])}</code> " if len(entries) > 1 else ""
        texts.append(f"<p>{which}healthy: {prose(entry.healthy)}</p>")
        if reasons := "; ".join(f"`{name}`, {marked[name][0]}" for name in of_entry if name in marked):
            texts.append(f'<p class="else"><b>suspicious</b>: {prose(unhealthy(reasons, entry.otherwise))}</p>')
        elif text := unhealthy(rule_text(entry.rule), entry.otherwise):
            texts.append(f"<p>suspicious: {prose(text)}</p>")
    return "".join(texts)


def prose(text: str) -> str:
    """The glossary's text as HTML: `code` in backquotes becomes <code>."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def proofs(run: RunFolder) -> str:
    """Proofs that the sampler had the trainer's weights: digests of each sync, and re-scored samples. One without a
    value is left out."""
    results = list(_proof_facts(run))
    if not results:
        return ""
    items = "".join(f'<li class="{mark}">{text}</li>' for mark, text in results)
    chart = _figure(run, Chart("Sampler against trainer", PROOF, log=True))
    return f'<section><h2>Proofs</h2><div class="grid2"><ul class="proofs">{items}</ul>{chart}</div></section>'


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
    pairs = [(line.metrics.get(PROOF[0], math.nan), line.metrics.get(PROOF[2], math.nan)) for line in run.lines]
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
    evaluation, right and wrong answers."""
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
    parts = [f'<p class="note">Held-out prompts, {steps}.</p><p>{counts}</p>']
    for kind, title in shown.items():
        rows = "".join(sample_row(**row) for row in kinds.get(kind, [])[:SAMPLES_OF_A_KIND])
        if rows and kind != (True, True):
            parts.append(f"<h3>{title}</h3>{rows}")
    parts.append('<p class="note">All answers: <code>rollouts/eval_*.jsonl</code>.</p>')
    return f"<section><h2>Samples</h2>{''.join(parts)}</section>"


def sample_row(**asked: LoggedPrompt) -> str:
    """A prompt, and its answer in each evaluation, by a word for that evaluation."""
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
    question = _messages([*first.question, ("expected answer", first.truth)])
    return f'<div class="sample"><div>{question}</div>{answers}</div>'


def _messages(messages: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<div><small>{escape(role)}</small><pre>{escape(text)}</pre></div>" for role, text in messages)


def timing(run: RunFolder) -> str:
    """The time of each phase, with speeds and memory."""
    order = [*PHASES, *(p for p in run.phases if p not in PHASES and p != "other"), "other"]
    layers = {phase: run.phases[phase] for phase in order if sum(run.phases.get(phase, {}).values()) > 0}
    colours = [OTHER if phase == "other" else i % OTHER for i, phase in enumerate(layers)]
    drawing = stacked_chart(layers, colours)
    totals = {phase: sum(by_step.values()) for phase, by_step in layers.items()}
    total = sum(totals.values())
    lines = [Line(phase, list(by_step), list(by_step.values())) for phase, by_step in layers.items()]
    bars = "".join(
        f'<tr><td><i class="k{colour}"></i>{escape(phase)}</td><td class="num">{number(seconds, "s")}</td>'
        f'<td class="num">{seconds / total:.1%}</td>'
        f'<td class="bar"><i class="b{colour}" style="width:{seconds / total:.1%}"></i></td></tr>'
        for colour, (phase, seconds) in zip(colours, totals.items())
    )
    phases = (
        f"<figure><figcaption><b>Time of a step<small>s</small></b></figcaption>{drawing}"
        f'<table class="phases">{bars}</table>{values_table(lines, "s")}'
        f"{_meanings(run, ['time/rollout_s'] if 'rollout' in layers else [])}"
        "<p>other: the time between the phases, such as logging.</p></figure>"
    )
    figures = (phases if drawing else "") + "".join(_figure(run, chart) for chart in SPEED)
    return f'<section><h2>Time and memory</h2><div class="grid2">{figures}</div></section>' if figures else ""


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

    return (
        f"<section><h2>Configuration</h2>{table(chosen)}"
        f"<details><summary>{len(rest)} more with their defaults</summary>{table(rest)}</details></section>"
    )


def every_number(run: RunFolder) -> str:
    """All metrics with their first, last and extreme values."""
    rows, marked = [], suspicious(run)
    for name, series in sorted(run.series.items()):
        finite = run.finite_values(name) or [math.nan]
        cells = "".join(
            f'<td class="num">{number(v, series.unit)}</td>'
            for v in (series.values[0], series.values[-1], min(finite), max(finite))
        )
        meaning = meaning_of(name)
        healthy = prose(meaning.entry.healthy) if meaning else ""
        if name in marked:
            healthy += f' <span class="unsure">Suspicious: {escape(marked[name][0])}.</span>'
        unit = escape(series.unit if series.unit not in ("bytes", "s") else "")
        rows.append(
            f"<tr><td><code>{escape(name)}</code></td>{cells}<td>{unit}</td><td>{sparkline(series.values)}</td>"
            f'<td class="healthy">{healthy}</td></tr>'
        )
    titles = ("metric", "first", "last", "lowest", "highest", "unit", "", "healthy")
    head = "".join(f"<th>{title}</th>" for title in titles)
    table = f'<div class="wide"><table class="numbers"><tr>{head}</tr>{"".join(rows)}</table></div>'
    number_of = counted(len(rows), "metric")
    return f"<section><h2>Every number</h2><details><summary>{number_of}</summary>{table}</details></section>"


KINDS = {
    (False, True): "Wrong, then right",
    (True, False): "Right, then wrong",
    (False, False): "Still wrong",
    (True, True): "Right before and after",
    (False,): "Wrong",
    (True,): "Right",
}

LEARNING = (
    Chart("Training reward", ("reward/mean",)),
    Chart("Held-out score, with its 95 % interval", ("eval/mean_at_k", "eval/pass_at_k")),
    Chart("Terms of the training reward, before their weights", ("reward/term/*", "reward/turns")),
    Chart("Held-out reward and its terms", ("eval/reward/mean", "eval/reward/term/*")),
    Chart("Loss", ("loss/nll",)),
    Chart("Groups without signal", ("reward/groups_without_signal",)),
    Chart("Answer length", ("rollout/length_mean_tokens", "rollout/length_tokens/p95")),
    Chart("Truncated answers", ("rollout/truncated_fraction",)),
    Chart("Entropy", ("loss/entropy",)),
)

STABILITY = (
    Chart("Gradient norm", ("train/grad_norm",)),
    Chart("KL to the policy at the start of the step", ("loss/approx_kl",)),
    Chart("Effective sample size", ("correction/effective_sample_size",)),
    Chart("Distance from the reference", ("loss/kl", "reward/kl")),
    Chart("Clipped ratios", ("loss/clip_fraction_low", "loss/clip_fraction_high")),
    Chart("Equal answers in a group", ("rollout/duplicate_fraction",)),
    Chart("Failed gradings", ("reward/failed",)),
    Chart("Learning rate", ("train/lr",), "plain"),
)

SPEED = (
    Chart("Speed", ("rollout/tokens_per_s", "train/tokens_per_s")),
    Chart("Trained tokens per second and device", ("perf/throughput",)),
    Chart("Model FLOPs utilization (MFU)", ("perf/mfu",)),
    Chart("Time to the first token", ("rollout/first_token_s/p50", "rollout/first_token_s/p95", "rollout/queue_s/p95")),
    Chart("Memory of a rank by phase", ("memory/phase_bytes/*",), "plain"),
    Chart("Memory", ("memory/rss_bytes", "memory/rss_bytes/controller", "memory/device_peak_bytes"), "plain"),
    Chart("Idle ranks", ("run/train_idle", "run/rollout_idle", "perf/exposed_comm_fraction")),
    Chart("Computation divided by communication", ("perf/compute_comm_ratio",)),
    Chart("Age of samples", ("rollout/staleness_versions/p50", "rollout/staleness_versions/p95")),
    Chart("Groups that are not trained yet", ("rollout/groups_scored", "rollout/groups_running")),
    Chart("Weight sync", ("sync/latency_s", "sync/wait_s", "sync/verify_s")),
)

PROOF = ("proof/logprob_abs_diff_mean", "proof/logprob_abs_diff_max", "proof/limit")

"""`meshrl diagnose`: profile some steps of a config, or read traces; print a summary, and write the files, among them
diagnose.html, one page without other files."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

from meshrl.config.load import is_sft
from meshrl.core.errors import ConfigError
from meshrl.core.files import is_there, output_errors, write_text
from meshrl.core.terminal import print_message
from meshrl.monitor.recorder import FOLDER
from meshrl.tools.diagnose.diagnosis import SYNC_STAGES, Diagnosis, as_record, diagnose, perfetto
from meshrl.tools.diagnose.read import CONFIG, read_trace
from meshrl.tools.page.charts import COLOURS, Line, figure, number
from meshrl.tools.page.document import data_block, document, package_text, write_page
from meshrl.tools.runs import table


def run(target: Path, overrides: Sequence[str], num_steps: int, out: Path | None) -> str:
    """Diagnose a config (a YAML file), a run's folder or a trace; returns the summary.

    out: folder of the files; by default the run's, or that of the trace.
    """
    if not is_there(target):
        raise ConfigError(f"{target}: no such file or folder; give a config, the folder of a run, or a trace")
    if not target.is_dir() and not target.name.endswith((".json", ".json.gz")):
        target = _profile(target, overrides, num_steps)
    elif overrides:
        raise ConfigError(f"{overrides[0]}: values override those of a config, but {target} is a trace; remove them")
    diagnosis = diagnose(read_trace(target))
    source = diagnosis.trace.source
    at = out or (source.parent if source.is_file() or source.name == FOLDER else source)
    numbers, events, html = (at / f"diagnose.{end}" for end in ("json", "perfetto.json.gz", "html"))
    with output_errors(at, "Make room, or give another folder by --out"):
        at.mkdir(parents=True, exist_ok=True)
        write_text(numbers, json.dumps(as_record(diagnosis), indent=1) + "\n")
        events.write_bytes(perfetto(diagnosis.trace))
    write_page(html, page(diagnosis))
    return "\n".join([*summary(diagnosis), "", f"wrote {numbers}, {events}, {html}"])


def _profile(config: Path, overrides: Sequence[str], num_steps: int) -> Path:
    """Run the first steps of a config in a folder of its own, which has only the traces afterwards, and with them its
    config.yaml; returns the folder. There are no evaluations and no checkpoints. Two steps come before those with the
    profiler, and give its slow-down. If the run fails, its folder stays as it is."""
    from meshrl.run import start
    from meshrl.run.inputs import Objects, load_run, load_sft

    count = num_steps + 2
    name = f"run.name={config.stem}-diagnose-{time.strftime('%Y%m%d-%H%M%S')}"  # one in the overrides comes first
    common = [name, *overrides, f"monitor.trace_steps={num_steps}", "monitor.sinks=[]", "run.resume=never"]
    if is_sft(config):
        sft = load_sft(config, [*common, f"sft.num_steps={count}", "sft.eval_path=null", "sft.eval_fraction=null"])
        settings, begin = sft.config.run, partial(start.sft, sft)
    else:
        no_rows = [f"data.eval_{key}=null" for key in ("path", "sets", "fraction")]
        no_evaluation = ["loop.eval_every_steps=0", *no_rows]
        loaded = load_run(config, [*common, f"loop.num_steps={count}", *no_evaluation])
        settings, begin = loaded.config.run, partial(start.train, loaded)
    if is_there(folder := Path(settings.folder) / settings.name):
        raise ConfigError(f"{folder} exists, but the steps run in a new folder; choose another run.name")
    print_message(f"{config}: runs {count} steps; torch.profiler records the last {num_steps} of them")
    quiet = Objects(quiet=True, saves=False, on_step=lambda step, _: print_message(f"step {step} of {count}"))
    folder = begin(lambda _: None, quiet)
    for path in folder.iterdir() if is_there(folder / FOLDER) else ():
        if path.name == CONFIG:
            path.rename(folder / FOLDER / CONFIG)  # what to change depends on it
        elif path.name != FOLDER:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


KINDS = ("wall", "compute", "exposed", "overlapped", "copy", "host", "idle")
NUM_ROWS = 16  # of a table
_s = partial(number, unit="s")


def summary(diagnosis: Diagnosis) -> Iterator[str]:
    """The lines: all tables, what is missing, and what to change."""
    first, last = diagnosis.trace.steps[0].step, diagnosis.trace.steps[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"{diagnosis.trace.source}: {steps}, {_s(diagnosis.step_s)} each"
    yield f"phases: {diagnosis.trace.named_share:.1%} of a step is in one of them; the rest has no name"
    if diagnosis.slow_down is not None:
        yield f"profiler: a step takes {diagnosis.slow_down:.2f} times as long as one without it in the same run"
    yield diagnosis.trace.clock
    if diagnosis.ratio is not None:
        yield f"computation / communication in phase train: {diagnosis.ratio:.2f}"
    yield from _table(
        "Time of a step by phase and rank (wall = compute + exposed + copy + host + idle)",
        ("phase", "rank", *KINDS),
        [(t.phase, str(t.rank), *(_s(getattr(t, kind)) for kind in KINDS)) for t in diagnosis.phases],
    )
    yield from _table(
        "Collectives of a rank in a step (wait: for the last rank)",
        ("name", "number", "bytes", "time", "wait", "GB/s"),
        [
            (c.name, f"{c.num:g}", number(c.bytes, "bytes"), _s(c.seconds), _s(c.wait_s), number(c.gb_per_s or 0.0))
            for c in diagnosis.collectives
        ],
    )
    if diagnosis.sync:
        sync = diagnosis.sync
        stages = ", ".join(f"{stage} {_s(sync.get(f'{stage}_s', 0.0))}" for stage in (*SYNC_STAGES, "latency"))
        yield f"\nWeight sync: {number(sync.get('num_bytes', 0.0), 'bytes')}; {stages}"
    for peak in sorted(diagnosis.memory, key=lambda memory: -memory.peak)[:1]:
        parts = ", ".join(f"{part} {number(size, 'bytes')}" for part, size in peak.parts.items())
        yield f"\nMemory: highest {number(peak.peak, 'bytes')} in rank {peak.rank}, phase {peak.phase}: {parts}"
    for straggler in diagnosis.stragglers:
        late = f"rank {straggler.rank} arrives {_s(straggler.late_s)} later than the others in a step"
        yield f"Phase {straggler.phase}: {late}" + (
            "" if straggler.is_named else ", which is too little or too rare to name it slow"
        )
    yield from (f"note: {note}" for note in diagnosis.trace.notes)
    yield "\nThe three largest costs and what to change"
    for place, cost in enumerate(diagnosis.costs[:3], start=1):
        yield f"{place}. {cost.share:.0%} of a step ({_s(cost.seconds)}): {cost.title}"
        if cost.detail:
            yield f"   {cost.detail}"
        yield f"   {cost.change}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"\n{title}"
    yield from table([head, *rows[:NUM_ROWS]])
    if len(rows) > NUM_ROWS:
        yield f"... {len(rows) - NUM_ROWS} more in diagnose.json"


def page(diagnosis: Diagnosis) -> str:
    """The complete page. Its script draws everything but memory from the numbers of diagnose.json."""
    trace, source = diagnosis.trace, diagnosis.trace.source.resolve()
    start = min(step.start_ns for step in trace.steps)
    name = source.parent.name if source.name == FOLDER else source.name
    lines = []
    for index, rank in trace.ranks.items():
        for kind in ("allocated_bytes", "resident_bytes"):
            samples = [m for m in rank.memory if kind in m.parts]
            times = [round((m.at_ns - start) / 1e9, 3) for m in samples]
            lines.append(Line(f"rank {index} {kind[:-6]}", times, [m.parts[kind] for m in samples]))
    lines = [line for line in lines if line.values][:12]
    drawing = figure("Memory at the end of each phase", "bytes", lines, across="s") if lines else ""
    parts = [
        f"<header><h1>{escape(name)}</h1><p>{escape(trace.clock)}</p></header>",
        '<main id="diagnose"><noscript>This page needs JavaScript; see diagnose.json.</noscript></main>',
        f'<section><h2>Memory over time</h2><div class="grid2">{drawing}</div></section>' if drawing else "",
    ]
    package = "meshrl.tools.diagnose"
    return document(
        f"{name} · diagnose",
        parts,
        style=[package_text(package, "diagnose.css")],
        scripts=[package_text(package, "diagnose.js")],
        data=data_block("diagnosis", as_record(diagnosis)) + data_block("colours", COLOURS),
    )

"""diagnose.html: costs of a step, phases, collectives and memory, on one self-contained page."""

from __future__ import annotations

from html import escape

from meshrl.monitor.trace import FOLDER
from meshrl.tools.diagnose.diagnosis import Diagnosis, as_record
from meshrl.tools.diagnose.read import Trace
from meshrl.tools.page.charts import Line, figure
from meshrl.tools.page.document import data_block, document, package_text


def page(diagnosis: Diagnosis) -> str:
    """The complete page. Its script draws everything but memory from the numbers of diagnose.json."""
    trace, source = diagnosis.trace, diagnosis.trace.source.resolve()
    start = min(step.start_ns for step in trace.steps)
    name = source.parent.name if source.name == FOLDER else source.name
    parts = [
        f"<header><h1>Where the time goes: {escape(name)}</h1><p>{escape(trace.clock)}</p></header>",
        '<main id="diagnose"><noscript>This page needs JavaScript; see diagnose.json.</noscript></main>',
        _memory(trace, start),
    ]
    package = "meshrl.tools.diagnose"
    return document(
        f"Trace of {name}",
        parts,
        style=[package_text(package, "diagnose.css")],
        scripts=[package_text(package, "diagnose.js")],
        data=data_block("diagnosis", as_record(diagnosis)),
    )


def _memory(trace: Trace, start: int) -> str:
    """Memory at the ends of phases, of each rank."""
    lines = []
    for number, rank in trace.ranks.items():
        for kind in ("allocated_bytes", "resident_bytes"):
            samples = [m for m in rank.memory if kind in m.parts]
            times = [round((m.at_ns - start) / 1e9, 3) for m in samples]
            lines.append(Line(f"rank {number} {kind[:-6]}", times, [m.parts[kind] for m in samples]))
    lines = [line for line in lines if line.values]
    drawing = figure("Memory at the end of each phase", "bytes", lines[:12], across="s") if lines else ""
    return f'<section><h2>Memory over time</h2><div class="grid2">{drawing}</div></section>' if drawing else ""

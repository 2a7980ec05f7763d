"""The terminal's summary of a diagnosis; it ends with the three largest costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from meshrl.tools.diagnose.causes import SYNC_STAGES
from meshrl.tools.diagnose.diagnosis import Diagnosis
from meshrl.tools.page.charts import number
from meshrl.tools.runs import table

KINDS = ("wall", "compute", "exposed", "overlapped", "copy", "host", "idle")
NUM_COSTS = 3
NUM_ROWS = 16  # of a table
_s = partial(number, unit="s")


def summary(diagnosis: Diagnosis) -> Iterator[str]:
    """The lines: all tables, what is missing, and what to change."""
    first, last = diagnosis.trace.steps[0].step, diagnosis.trace.steps[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"{diagnosis.trace.source}: {steps}, {_s(diagnosis.step_s)} each"
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
    for place, cost in enumerate(diagnosis.costs[:NUM_COSTS], start=1):
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

"""What costs time, and what to change: the table of causes, and their order in a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from meshrl.tools.diagnose.intervals import Intervals, overlap, total
from meshrl.tools.diagnose.measure import Gap, Straggler
from meshrl.tools.diagnose.read import Trace
from meshrl.tools.page.charts import number
from meshrl.tools.page.document import package_text

CAUSES: dict[str, dict[str, str]] = json.loads(package_text("meshrl.tools.diagnose", "causes.json"))
"""By cause: its title, and what to change in each program: train and sft are commands of meshrl. The only place of
these texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """seconds: of a step, the mean over ranks. share: of the step. detail: what was measured about it. change: what to
    change in the program that made the trace. A slow rank or a slow link of one has its number in rank."""

    cause: str
    title: str
    seconds: float
    share: float
    change: str
    detail: str = ""
    rank: int | None = None


def costs(
    trace: Trace, times: dict[int, dict[str, Intervals]], late: Sequence[Straggler], details: dict[str, str]
) -> list[Cost]:
    """All costs, the largest first. They add up to the time of a step.

    Of a named straggler, its own longer time and the time in which the others wait for it are one cost: that of a slow
    link if its collectives take longer than those of the others, else that of a slow rank.
    """
    scale = 1e9 * len(trace.steps) * len(trace.ranks)
    wall = total(trace.windows()) / 1e9 / len(trace.steps)
    program = str(trace.facts.get("kind"))

    def cost(cause: str, took: float, detail: str, rank: int | None = None) -> Cost:
        texts = CAUSES[cause]
        title, change = texts["title"], texts.get(program) or texts["train"]
        if rank is not None:
            title = f"{'a slow rank' if cause == 'slow_rank' else 'a slow link'}: the others wait for rank {rank}"
        share = took / wall
        return Cost(cause=cause, title=title, seconds=took, share=share, change=change, detail=detail, rank=rank)

    seconds = {c: sum(total(rank[c]) for rank in times.values() if c in rank) / scale for c in CAUSES}
    blamed = []
    for straggler in late:
        late_rank, phase = straggler.rank, straggler.phase
        trains = trace.ranks[late_rank].facts.trains
        others = [times[n] for n, rank in trace.ranks.items() if n != late_rank and rank.facts.trains == trains]
        if not straggler.is_named or not others:
            continue
        extra = {
            cause: total(times[late_rank][cause]) - median(total(rank[cause]) for rank in others)
            for cause in (("sampling",) if phase == "rollout" else ("compute", "communication", "copy", "host"))
        }
        kind = max(extra, key=lambda cause: extra[cause])
        waiting = "imbalance" if phase == "rollout" else "wait"
        longer = {kind: max(0.0, extra[kind]) / scale, waiting: straggler.late_s * len(others) / len(trace.ranks)}
        moved = {cause: min(part, seconds[cause]) for cause, part in longer.items()}
        for cause, part in moved.items():
            seconds[cause] -= part
        detail = f"in phase {phase} it arrives {number(straggler.late_s, 's')} later than the others in a step"
        detail += f"; most of it is {CAUSES[kind]['of_rank']}"
        cause = "communication" if kind == "communication" else "slow_rank"
        blamed.append(cost(cause, sum(moved.values()), detail, late_rank))
    if not any(straggler.is_named and straggler.phase != "rollout" for straggler in late):
        is_unknown, none = math.isinf(trace.clock_error_ns), "no rank is the late one in nearly all steps"
        details = {**details, "wait": "the machines' clocks were not compared" if is_unknown else none}
    divided = [cost(cause, took, details.get(cause, "")) for cause, took in seconds.items() if took > 0]
    return sorted([*divided, *blamed], key=lambda each: -each.seconds)


SYNC_STAGES = ("cast", "load", "verify", "wait")  # of the metrics sync/<stage>_s


def details(trace: Trace, gaps: Sequence[Gap], sync: Mapping[str, float]) -> dict[str, str]:
    """What was measured about some of the causes."""
    texts = {}
    if sync:
        took, longest = max((sync.get(f"{stage}_s", 0.0), stage) for stage in SYNC_STAGES)
        size = number(sync.get("num_bytes", 0.0), "bytes")
        texts["sync"] = f"{size}; longest stage: {longest} {number(took, 's')}"
        inside = trace.windows("sync")
        copies = [
            (total(overlap(inside, rank.of("copy", (name,)))), name, index)
            for index, rank in trace.ranks.items()
            for name in {span.name for span in rank.spans if span.category == "copy"}
        ]
        if copies:
            took, name, index = max(copies)
            texts["sync"] += f"; longest copies: {name} {number(took / 1e9 / len(trace.steps), 's')} in rank {index}"
    if gaps:
        of_all = sum(gap.end_ns - gap.start_ns for gap in gaps) / 1e9 / len(trace.steps) / len(trace.ranks)
        first = gaps[0]
        longest_s = (first.end_ns - first.start_ns) / 1e9
        texts["host"] = f"{number(of_all, 's')} of it in gaps above 1 ms"
        texts["host"] += f"; the longest is {number(longest_s, 's')} in rank {first.rank}, {first.where}"
    return texts

"""What costs time, and what to change: the table of causes, and their order in a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from meshrl.tools.diagnose.intervals import Intervals, overlap, total
from meshrl.tools.diagnose.measure import Gap, Straggler
from meshrl.tools.diagnose.read import Trace
from meshrl.tools.page.charts import number
from meshrl.tools.page.document import package_text

CAUSES: dict[str, dict[str, str]] = json.loads(package_text("meshrl.tools.diagnose", "causes.json"))
"""By cause: its title, and what to change. The only place of these texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """seconds: of a step, the mean over ranks. share: of the step. detail: what was measured about it. A slow rank or
    a slow link of one has its number in rank."""

    cause: str
    seconds: float
    share: float
    detail: str = ""
    rank: int | None = None

    @property
    def title(self) -> str:
        title = CAUSES[self.cause]["title"]
        if self.rank is None:
            return title
        kind = "a slow rank" if self.cause == "slow_rank" else "a slow link"
        return f"{kind}: the others wait for rank {self.rank}"

    @property
    def change(self) -> str:
        return CAUSES[self.cause]["change"]


def costs(
    trace: Trace, times: dict[int, dict[str, Intervals]], late: Sequence[Straggler], gaps: Sequence[Gap]
) -> list[Cost]:
    """All costs, the largest first. They add up to the time of a step.

    Of a named straggler, its own longer time and the time in which the others wait for it are one cost: that of a slow
    link if its collectives take longer than those of the others, else that of a slow rank.
    """
    scale = 1e9 * len(trace.steps) * len(trace.ranks)
    wall = total(trace.windows()) / 1e9 / len(trace.steps)
    seconds = {c: sum(total(rank[c]) for rank in times.values() if c in rank) / scale for c in CAUSES}
    details, blamed = _details(trace, gaps), []
    for one in late:
        if not one.is_named:
            continue
        trains = trace.ranks[one.rank].facts.trains
        others = [times[n] for n, rank in trace.ranks.items() if n != one.rank and rank.facts.trains == trains]
        extra = {
            cause: total(times[one.rank][cause]) - median(total(rank[cause]) for rank in others)
            for cause in (("sampling",) if one.phase == "rollout" else ("compute", "communication", "copy", "host"))
        }
        kind = max(extra, key=lambda cause: extra[cause])
        waiting = "imbalance" if one.phase == "rollout" else "wait"
        moved = {kind: max(0.0, extra[kind]) / scale}
        moved[waiting] = min(seconds[waiting], one.late_s * len(others) / len(trace.ranks))
        for cause, part in moved.items():
            seconds[cause] = max(0.0, seconds[cause] - part)
        detail = f"in phase {one.phase} it arrives {number(one.late_s, 's')} later than the others in a step"
        detail += f"; most of it is {_KINDS[kind]}"
        cause = "communication" if kind == "communication" else "slow_rank"
        took = sum(moved.values())
        blamed.append(Cost(cause=cause, seconds=took, share=took / wall, detail=detail, rank=one.rank))
    found = [Cost(cause=c, seconds=s, share=s / wall, detail=details.get(c, "")) for c, s in seconds.items() if s > 0]
    return sorted([*found, *blamed], key=lambda cost: -cost.seconds)


SYNC_STAGES = ("cast", "load", "verify", "wait")  # of the metrics sync/<stage>_s
_KINDS = {
    "sampling": "the sampling of its answers",
    "compute": "computation",
    "communication": "its collectives, which take longer after all ranks have arrived",
    "copy": "copies",
    "host": "time in which it runs no operation",
}


def _details(trace: Trace, gaps: Sequence[Gap]) -> dict[str, str]:
    details = {}
    syncs = [step.sync for step in trace.steps if step.sync]
    if stages := {stage: mean(sync.get(f"{stage}_s", 0.0) for sync in syncs) for stage in SYNC_STAGES if syncs}:
        size, longest = mean(sync.get("num_bytes", 0.0) for sync in syncs), max(stages, key=lambda stage: stages[stage])
        details["sync"] = f"{number(size, 'bytes')}; longest stage: {longest} {number(stages[longest], 's')}"
        inside = trace.windows("sync")
        copies = [
            (total(overlap(inside, rank.of("copy", (name,)))), name, index)
            for index, rank in trace.ranks.items()
            for name in {span.name for span in rank.spans if span.category == "copy"}
        ]
        if copies:
            took, name, index = max(copies)
            details["sync"] += f"; longest copies: {name} {number(took / 1e9 / len(trace.steps), 's')} in rank {index}"
    if gaps:
        of_all = sum(gap.end_ns - gap.start_ns for gap in gaps) / 1e9 / len(trace.steps) / len(trace.ranks)
        first = gaps[0]
        longest_s = (first.end_ns - first.start_ns) / 1e9
        details["host"] = f"{number(of_all, 's')} of it in gaps above 1 ms"
        details["host"] += f"; the longest is {number(longest_s, 's')} in rank {first.rank}, {first.where}"
    return details

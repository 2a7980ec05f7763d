"""Traces that are made by hand, in the format of a run: what each rank does in each millisecond of a step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.monitor.recorder import (
    FOLDER,
    PROFILE_FILE,
    ClockReading,
    ControllerTrace,
    MemorySample,
    Phase,
    RankFacts,
    RankTrace,
    Span,
    Step,
    write_controller,
    write_rank,
)

MS = 1_000_000
EPOCH = 1_700_000_000_000 * MS
Piece = tuple[
    str, str, float, float
]  # category, name, start and end in milliseconds of the step; category op = profiler


def healthy(rank: int = 0, wait_ms: float = 0.0) -> list[Piece]:
    """A step of 100 ms: 30 ms of sampling, 40 ms of training with two collectives of 2 ms, 10 ms of sync."""
    return [
        ("phase", "rollout", 0, 30),
        ("phase", "train", 40, 80),
        ("compute", "forward", 40, 60),
        ("compute", "backward", 60, 79),
        ("op", "aten::mm", 40, 58),
        ("collective", "all_gather", 58, 60),
        ("op", "aten::mm_backward", 60, 77),
        ("collective", "reduce_scatter", 77, 79),
        ("op", "aten::add_", 79, 80),
        ("phase", "sync", 84, 94),
        ("copy", "send", 85, 90),
    ]


PHASES: list[Piece] = [
    ("controller", "rollout", 0, 31),
    ("controller", "reward", 31, 36),
    ("controller", "train", 38, 82),
    ("controller", "sync", 83, 95),
]


def write_trace(
    run: Path,
    steps: Sequence[Mapping[int, Sequence[Piece]]],
    *,
    phases: Sequence[Piece] = PHASES,
    length_ms: float = 100.0,
    profiled: bool = True,
    offsets_ms: Mapping[int, float] = {},
    facts: Mapping[str, Any] = {"schedule": "colocated"},
    roles: Mapping[int, tuple[bool, bool]] = {},
    untraced_ms: Sequence[float] = (),
) -> Path:
    """Write RUN/traces with these steps: for each step the pieces of each rank. roles: (trains, samples) of a rank.
    untraced_ms: lengths of steps before them, which have no spans."""
    folder = run / FOLDER
    folder.mkdir(parents=True)
    begin, made, at = EPOCH, [], []
    for length in untraced_ms:
        made.append(Step(len(made) + 1, begin, begin := begin + round(length * MS)))
    for _ in steps:
        at.append(begin)
        sync = {"num_bytes": 8e6, "cast_s": 0.001, "load_s": 0.004, "latency_s": 0.01, "version": 3}
        made.append(Step(len(made) + 1, begin, begin := begin + round(length_ms * MS), profiled, sync))
    listed = [Phase(name, start + round(a * MS), start + round(b * MS)) for start in at for _, name, a, b in phases]
    ranks = sorted({rank for step in steps for rank in step})
    for rank in ranks:
        shift = round(offsets_ms.get(rank, 0.0) * MS)
        spans, events = [], []
        for start, step in zip(at, steps):
            for category, name, a, b in step.get(rank, ()):
                begins, ends = start + shift + round(a * MS), start + shift + round(b * MS)
                if category == "op":
                    events.append(event("cpu_op", name, begins, ends))
                else:
                    commands = [n for c, n, x, y in step.get(rank, ()) if c == "phase" and x <= a < y]
                    of_collective = {"bytes": 4_000_000, "group": len(ranks), "phase": (commands or ["train"])[0]}
                    args = of_collective if category == "collective" else {}
                    spans.append(Span(name, category, begins, ends, args))
        parts = {
            "params": 100,
            "grads": 50,
            "optimizer": 200,
            "buffers": 1,
            "resident_bytes": 900,
            "peak_resident_bytes": 1000,
        }
        memory = [MemorySample(start + shift + 80 * MS, "train", parts) for start in at]
        write_rank(folder, RankTrace(rank=rank, spans=spans, memory=memory))
        if profiled:
            write_profile(folder / PROFILE_FILE.format(rank), events)
    clock = {rank: [ClockReading(EPOCH, round(offsets_ms.get(rank, 0.0) * MS), 20_000)] for rank in ranks}
    known = {
        rank: RankFacts(host="h", device="cpu", trains=trains, samples=samples, clock=clock[rank])
        for rank in ranks
        for trains, samples in [roles.get(rank, (True, True))]
    }
    write_controller(folder, ControllerTrace(phases=listed, steps=made, ranks=known, facts=dict(facts)))
    return run


def event(category: str, name: str, start_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
    """An event of torch.profiler's Chrome trace, whose ts counts from EPOCH."""
    at = {"ts": (start_ns - EPOCH) / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": args.get("stream", 1), **at, "args": args}


def write_profile(path: Path, events: Sequence[dict[str, Any]], **head: Any) -> Path:
    """A trace in the form in which torch.profiler writes it, each event over several lines."""
    record = {"schemaVersion": 1, "baseTimeNanoseconds": EPOCH, **head}
    texts = [json.dumps(one, indent=2).replace("\n", "\n  ") for one in events]
    text = json.dumps(record)[:-1] + ', "traceEvents": [\n  ' + ",\n  ".join(texts) + '\n  ], "traceName": "t"}'
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path

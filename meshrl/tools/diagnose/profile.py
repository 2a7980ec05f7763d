"""Reads a Chrome trace of torch.profiler, of this program or of another one."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, open_plain
from meshrl.monitor.jsonl import data_errors
from meshrl.monitor.trace import Category, Span

MAX_BYTES = 2 << 30  # of the JSON; a larger one would need more memory than it is worth
_COPIES = ("gpu_memcpy", "gpu_memset")
_COMMUNICATION = re.compile(r"nccl|rccl|c10d::|gloo:|record_param_comms", re.IGNORECASE)
_DTYPE_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the device: a kernel, or on a CPU an operator of torch."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """rank: None if the trace does not state it. operations: computation, in the order of their starts. spans:
    collectives and copies. steps: (number, start_ns, end_ns) of ProfilerStep. is_cut: the file's end is missing."""

    rank: int | None
    host: str
    device: str
    operations: list[Operation]
    spans: list[Span]
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    is_cut: bool = False

    def around(self, time_ns: int) -> str:
        """The operations before and after a time, for a text."""
        at = bisect_left(self.operations, time_ns, key=lambda operation: operation.start_ns)
        before, after = self.operations[max(0, at - 1)].name, self.operations[min(at, len(self.operations) - 1)].name
        return f"between {before:.60} and {after:.60}"


def read_profile(path: Path) -> Profile:
    """Read a trace, compressed or not. If its end is missing, the events before it are used.

    Raises: DataError, which names the file, if it is no such trace.
    """
    data, is_cut = _content(path)
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as cause:
        record, is_cut = _salvaged(data), True
        if record is None:
            raise DataError(f"{path}: not a trace of torch.profiler: {cause}") from cause
    if not isinstance(record, dict) or not isinstance(record.get("traceEvents"), list):
        raise DataError(f"{path}: not a trace of torch.profiler: it has no list traceEvents")
    with data_errors(str(path), "a trace of torch.profiler"):
        return _profile(record, is_cut)


def _content(path: Path) -> tuple[bytes, bool]:
    parts, size = [], 0
    try:
        with open_plain(path) as plain:
            is_packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            file: Any = gzip.GzipFile(fileobj=plain) if is_packed else plain
            try:
                while part := file.read1(1 << 20):
                    parts.append(part)
                    if (size := size + len(part)) > MAX_BYTES:
                        raise Unreadable(f"more than {MAX_BYTES:,} bytes of JSON; record fewer steps")
            except (EOFError, zlib.error, gzip.BadGzipFile):
                return b"".join(parts), True
    except (OSError, Unreadable) as cause:
        raise DataError(f"{path}: {cause}") from cause
    return b"".join(parts), False


def _salvaged(data: bytes) -> Any:
    """The record without its last, incomplete event; None if there is no complete event."""
    end = data.rfind(b"\n  },")
    try:
        return json.loads(data[:end] + b"\n  }]}") if end > 0 else None
    except (ValueError, RecursionError):
        return None


def _profile(record: dict[str, Any], is_cut: bool) -> Profile:
    base, inner = int(record.get("baseTimeNanoseconds") or 0), record.get("distributedInfo") or {}
    events, steps = [], []
    for event in record["traceEvents"]:
        if event.get("ph") == "X" and isinstance(event.get("dur"), (int, float)):
            start = base + round(float(event["ts"]) * 1000)
            events.append((start, start + round(event["dur"] * 1000), str(event["name"]), event))
    events.sort(key=lambda one: (str(one[3].get("tid")), one[0], -one[1]))
    for start, end, name, event in events:
        if event.get("cat") == "user_annotation" and name.startswith("ProfilerStep#"):
            steps.append((int(name.partition("#")[2]), start, end))
    on_device = [one for one in events if one[3].get("cat") in ("kernel", *_COPIES)]
    operations, spans = [], []
    for start, end, name, event in on_device or _operators([one for one in events if one[3].get("cat") == "cpu_op"]):
        if event["cat"] in _COPIES:
            spans.append(_span(name, "copy", start, end, event))
        elif _COMMUNICATION.search(name):
            spans.append(_span(name, "collective", start, end, event))
        else:
            operations.append(Operation(name, start, end))
    operations.sort(key=lambda operation: operation.start_ns)
    devices = record.get("deviceProperties") or [{}]
    return Profile(
        rank=int(inner["rank"]) if "rank" in inner else None,
        host=str(record.get("host_name", "")),
        device=str(devices[0].get("name", "an accelerator" if on_device else "cpu")),
        operations=operations,
        spans=spans,
        steps=sorted(steps),
        is_cut=is_cut,
    )


def _operators(events: list[Any]) -> list[Any]:
    """The operators that compute: those with a namespace, such as aten::mm. Nodes of autograd have none; they contain
    operators, and may wait for a collective. events: by thread and start."""
    following = [*events[1:], (0, 0, "", {"tid": None})]
    is_inner = [a[3].get("tid") != b[3].get("tid") or b[0] >= a[1] for a, b in zip(events, following)]
    return [
        one for one, inner in zip(events, is_inner) if inner or ("::" in one[2] and not one[2].startswith("autograd::"))
    ]


def _span(name: str, category: Category, start: int, end: int, event: dict[str, Any]) -> Span:
    """A collective with its bytes, which NCCL's kernels state as numbers of elements, or a copy."""
    given = event.get("args") or {}
    label = str(given.get("Collective name") or name)
    if "Out msg nelems" in given:
        elements = max(int(given["Out msg nelems"]), int(given.get("In msg nelems", 0)))
        size = elements * _DTYPE_BYTES.get(str(given.get("dtype")), 1)
        return Span(label, category, start, end, {"bytes": size, "group": int(given.get("Group size", 0))})
    return Span(label, category, start, end, {"bytes": int(given["bytes"])} if "bytes" in given else {})

"""Reads a Chrome trace of torch.profiler, of this program or of another one."""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, open_plain
from meshrl.monitor.jsonl import data_errors, parse_large
from meshrl.monitor.trace import Category, Span

MAX_BYTES = 2 << 30  # of the JSON; a larger one would need more memory than it is worth
_COPIES = ("gpu_memcpy", "gpu_memset")
_CATEGORIES = ("cpu_op", "user_annotation", "kernel", *_COPIES)
_COMMUNICATION = re.compile(r"nccl|rccl|c10d::|gloo:|record_param_comms", re.IGNORECASE)
_DTYPE_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}
_Event = tuple[int, int, str, dict[str, Any]]  # start and end in nanoseconds, name, and the event itself


Operation = tuple[int, int, str]
"""Start and end in nanoseconds, and name, of a kernel, or on a CPU of an operator of torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """All times are of the rank's clock. rank: None if the trace does not state it. operations: computation, in the
    order of their starts. spans: collectives and copies. steps: (number, start_ns, end_ns) of ProfilerStep. is_cut: the
    file's end is missing."""

    rank: int | None
    host: str
    device: str
    operations: list[Operation]
    spans: list[Span]
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    is_cut: bool = False

    def around(self, time_ns: int) -> str:
        """The operations before and after a time, for a text."""
        at = bisect_left(self.operations, time_ns, key=lambda operation: operation[0])
        before = self.operations[at - 1][2] if at else "the start"
        after = self.operations[at][2] if at < len(self.operations) else "the end"
        return f"between {before:.60} and {after:.60}"


def read_profile(path: Path) -> Profile:
    """Read a trace, compressed or not. If its end is missing, the events before it are used.

    Raises: DataError, which names the file, if it is no such trace.
    """
    data, is_cut = _content(path), False
    try:
        record = parse_large(data)
    except ValueError as cause:
        end, is_cut = data.rfind(b"\n  },"), True  # of the last complete event
        try:
            record = parse_large(data[: max(0, end)] + b"\n  }]}")
        except ValueError:
            raise DataError(f"{path}: not a trace of torch.profiler: {cause}") from cause
    if not isinstance(record, dict) or not isinstance(record.get("traceEvents"), list):
        raise DataError(f"{path}: not a trace of torch.profiler: it has no list traceEvents")
    with data_errors(str(path), "a trace of torch.profiler"):
        return _profile(record, is_cut)


def _content(path: Path) -> bytes:
    """The JSON; if the end of a compressed file is missing, what is before it."""
    try:
        with open_plain(path) as file:
            data = file.read(MAX_BYTES + 1)
        if data.startswith(b"\x1f\x8b"):
            data = zlib.decompressobj(wbits=31).decompress(data, MAX_BYTES + 1)
    except (OSError, Unreadable, zlib.error) as cause:
        raise DataError(f"{path}: not a trace of torch.profiler: {cause}") from cause
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: more than {MAX_BYTES:,} bytes of JSON; record fewer steps")
    return data


def _profile(record: dict[str, Any], is_cut: bool) -> Profile:
    base, inner = int(record.get("baseTimeNanoseconds") or 0), record.get("distributedInfo") or {}
    by_category: dict[str, list[_Event]] = {category: [] for category in _CATEGORIES}
    for event in record["traceEvents"]:
        if event.get("cat") in by_category and event.get("ph") == "X":
            start = base + round(float(event["ts"]) * 1000)
            by_category[event["cat"]].append((start, start + round(event["dur"] * 1000), str(event["name"]), event))
    copies = [_span("copy", *event) for category in _COPIES for event in by_category[category]]
    kernels, operators = by_category["kernel"], by_category["cpu_op"]
    on_device = bool(kernels or copies)
    operations, spans = [], copies
    for start, end, name, event in kernels if on_device else _operators(operators):
        if _COMMUNICATION.search(name):
            spans.append(_span("collective", start, end, name, event))
        else:
            operations.append((start, end, name))
    if not operations and not spans:
        raise ValueError("it has no operation of a device")
    annotations = [event for event in by_category["user_annotation"] if event[2].startswith("ProfilerStep#")]
    devices = record.get("deviceProperties") or [{}]
    return Profile(
        rank=int(inner["rank"]) if "rank" in inner else None,
        host=str(record.get("host_name", "")),
        device=str(devices[0].get("name", "an accelerator" if on_device else "cpu")),
        operations=sorted(operations),
        spans=spans,
        steps=sorted((int(name.partition("#")[2]), start, end) for start, end, name, _ in annotations),
        is_cut=is_cut,
    )


def _operators(events: list[_Event]) -> Iterator[_Event]:
    """The operators that compute: those with a namespace, such as aten::mm. Nodes of autograd have none; they contain
    operators, and may wait for a collective."""
    ordered = sorted(events, key=lambda event: (str(event[3].get("tid")), event[0], -event[1]))
    for event, following in zip(ordered, [*ordered[1:], None]):
        is_outer = following is not None and following[3].get("tid") == event[3].get("tid") and following[0] < event[1]
        if not is_outer or ("::" in event[2] and not event[2].startswith("autograd::")):
            yield event


def _span(category: Category, start: int, end: int, name: str, event: dict[str, Any]) -> Span:
    """A collective with its bytes, which NCCL's kernels state as numbers of elements, or a copy."""
    args = event.get("args") or {}
    label = str(args.get("Collective name") or name)
    if "Out msg nelems" in args:
        elements = max(int(args["Out msg nelems"]), int(args.get("In msg nelems", 0)))
        size = elements * _DTYPE_BYTES.get(str(args.get("dtype")), 1)
        return Span(label, category, start, end, {"bytes": size, "group": int(args.get("Group size", 0))})
    return Span(label, category, start, end, {"bytes": int(args["bytes"])} if "bytes" in args else {})

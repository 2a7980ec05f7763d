"""The sending half of a sync: the header, the stream cut into buckets, and the transaction over all receivers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

import torch

from meshrl.core.errors import RankFailure, SyncError
from meshrl.sync.digest import as_bytes, digest
from meshrl.sync.manifest import Ack, Entry, Layout, SyncHeader, SyncMode
from meshrl.sync.receive import Bucket, WeightReceiver, describe
from meshrl.sync.shards import SendReport

T = TypeVar("T")


def make_header(
    layout: Layout,
    version: int,
    digests: dict[str, int] | None = None,
    base_version: int | None = None,
    mode: SyncMode = "full",
) -> SyncHeader:
    """The header of one sync. digests: of each tensor in its wire dtype, summed over the ranks that hold its shards;
    None where a ShardSender sends them with its buckets.

    Raises: ValueError when digests and layout name different tensors, or mode and base_version contradict.
    """
    names = {entry.name for entry in layout.entries}
    if digests is not None and digests.keys() != names:
        odd = ", ".join(sorted(digests.keys() ^ names)[:8])
        raise ValueError(f"the layout sends {len(names)} tensors, there are {len(digests)} digests; different: {odd}")
    if version < 0 or (mode != "full") != (base_version is not None):
        raise ValueError(
            f"version {version}, mode {mode!r}, base_version {base_version}: a version is 0 or more, and base_version "
            "goes with every mode but 'full'"
        )
    return SyncHeader(version=version, base_version=base_version, mode=mode, layout_hash=layout.hash, digests=digests)


def iter_buckets(
    layout: Layout,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    reuse: bool = False,
    staging: Sequence[torch.Tensor] | None = None,
) -> Iterator[Bucket]:
    """Cut (wire name, full tensor in the wire dtype), in the layout's order, into buckets.

    Each tensor is asked for when its first byte is due and let go before the next one is asked for, so a caller that
    gathers lazily holds one full tensor and one bucket at a time (P19).
    reuse: fill one buffer again and again; a bucket must be consumed before the next is asked for.
    staging: the caller's own buffers, uint8[layout.staging_bytes] or longer, taken in turn (bucket b goes into
    staging[b % len]); bucket b must be consumed before bucket b + len is asked for. Neither: a new buffer each.
    Raises: SyncError for a tensor that is missing, extra, out of order, of another shape or dtype, not contiguous.
    """
    source = _in_order(layout, iter(tensors))
    entry: Entry | None = None
    raw: torch.Tensor | None = None
    buffers = list(staging or ())
    for index in range(layout.num_buckets):
        start, stop = layout.bucket_range(index)
        payload = buffers[index % len(buffers)][: stop - start] if buffers else None
        end = 0
        for piece in layout.pieces(index):
            while raw is None or entry is not piece.entry:
                raw = None
                entry, raw = next(source)
            if payload is None:
                buffer = torch.empty(layout.staging_bytes, dtype=torch.uint8, device=raw.device)
                buffers = [buffer] if reuse else []
                payload = buffer[: stop - start]
            payload[end : piece.at].zero_()
            end = piece.at + piece.stop - piece.start
            payload[piece.at : end].copy_(raw[piece.start : piece.stop])
        assert payload is not None  # a bucket is longer than any gap
        payload[end:].zero_()
        yield Bucket(index=index, payload=payload, digest=digest(payload, start))
    raw = None
    for _ in source:  # empty tensors at the end, and the check that nothing is left over
        pass


def _in_order(layout: Layout, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Each entry with its tensor's bytes, holding on to none of them."""
    for entry in layout.entries:
        got = next(tensors, None)
        if got is None:
            raise SyncError(f"the trainer's tensors ended before {entry.name}; the layout sends {len(layout.entries)}")
        name, tensor = got
        held = describe({name: tensor})[name]
        if name != entry.name or held != (entry.shape, entry.dtype):
            raise SyncError(
                f"the trainer yielded {name} {list(held[0])} {held[1]} where the layout has {entry.name} "
                f"{list(entry.shape)} {entry.dtype}; names come in the layout's order, in the sampler's dtype"
            )
        if not tensor.is_contiguous():
            raise SyncError(f"the trainer yielded {name} with strides {tensor.stride()}; make it contiguous first")
        raw = as_bytes(tensor)
        del got, tensor
        yield entry, raw
        del raw
    extra = next(tensors, None)
    if extra is not None:
        raise SyncError(f"the trainer yielded {extra[0]} after the last tensor of the layout")


async def send_weights(
    header: SyncHeader,
    buckets: Iterable[Bucket] | AsyncIterable[Bucket],
    receivers: Sequence[WeightReceiver],
) -> list[Ack]:
    """One sync as a transaction: begin at all receivers, each bucket to all of them, commit at all.

    Consumes: `buckets`, one at a time; the next one is asked for when every receiver has taken the last.
    Waits for: the slowest receiver at each bucket. Unblocked by: an error of any of them, or being cancelled.
    Raises: SyncError, with the first failure as its cause, after cancelling every receiver, also those that have
    committed: one sampler on other weights than the rest is what a sync must never leave behind.
    """
    if not receivers:
        raise SyncError("there is no receiver to send weights to")
    began, gathered = time.perf_counter(), 0.0
    try:
        await _each(receivers, "begin", lambda receiver: receiver.begin(header))
        asked = time.perf_counter()
        async with aclosing(_one_by_one(buckets)) as stream:
            async for bucket in stream:
                gathered += time.perf_counter() - asked
                await _deliver(receivers, bucket)
                asked = time.perf_counter()
        gathered += time.perf_counter() - asked
        acks = await _each(receivers, "commit", lambda receiver: receiver.commit())
        for ack in acks:
            _check(header, ack)
    except BaseException as error:
        outcomes = await asyncio.gather(*(receiver.cancel() for receiver in receivers), return_exceptions=True)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                error.add_note(f"receiver {index} could not be cancelled either: {outcome!r}")
        if isinstance(error, SyncError) or not isinstance(error, Exception):
            raise
        raise SyncError(f"version {header.version} was not sent: {type(error).__name__}: {error}") from error
    wall = time.perf_counter() - began
    return [replace(ack, seconds=_split(ack.seconds, gathered, wall)) for ack in acks]


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """Items of several streams, each in its own order, as they come. The next item of a stream is asked for while the
    last one is worked on, and the one after it only when that is done: two slots a stream are enough.

    Unblocked by: an error of any stream, which is raised; the requests under way are waited for first, so that no
    sender is still writing when the next sync begins.
    """
    asked = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while asked:
            ready, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for done in ready:
                stream = asked.pop(done)
                item = done.result()
                if item is not None:
                    asked[asyncio.ensure_future(anext(stream, None))] = stream
                    yield item
    finally:
        await asyncio.gather(*asked, return_exceptions=True)


async def _one_by_one(buckets: Iterable[Bucket] | AsyncIterable[Bucket]) -> AsyncGenerator[Bucket, None]:
    """Both kinds of stream as one: buckets cut in this process, or arriving from another. A generator is closed at the
    end, also of a failed sync, so that nothing it has begun goes on behind it."""
    if isinstance(buckets, AsyncGenerator):
        async with aclosing(buckets):
            async for bucket in buckets:
                yield bucket
    elif isinstance(buckets, AsyncIterable):
        async for bucket in buckets:
            yield bucket
    else:
        for bucket in buckets:
            yield bucket


async def _deliver(receivers: Sequence[WeightReceiver], bucket: Bucket) -> None:
    await _each(receivers, f"bucket {bucket.index}", lambda receiver: receiver.receive(bucket))


async def _each(
    receivers: Sequence[WeightReceiver], stage: str, call: Callable[[WeightReceiver], Awaitable[T]]
) -> list[T]:
    """Run one stage at all receivers, and let all of them finish it before the first failure is raised."""
    results = await asyncio.gather(*(call(receiver) for receiver in receivers), return_exceptions=True)
    failures = [(index, result) for index, result in enumerate(results) if isinstance(result, BaseException)]
    if failures:  # a lost rank may be why others fail
        index, first = next((each for each in failures if isinstance(each[1], RankFailure)), failures[0])
        raise SyncError(f"receiver {index} failed at {stage}: {type(first).__name__}: {first}") from first
    return [result for result in results if not isinstance(result, BaseException)]


def with_reports(acks: Sequence[Ack], reports: Sequence[SendReport]) -> list[Ack]:
    """The acknowledgements, with what the senders say of the same sync: each stage of the slowest of them."""
    stages: dict[str, float] = {}
    for report in reports:
        for stage, seconds in report.seconds.items():
            stages[stage] = max(stages.get(stage, 0.0), seconds)
    known = [report.num_changed for report in reports if report.num_changed is not None]
    changed = sum(known) if reports and len(known) == len(reports) else None
    extra = sum(report.extra_bytes for report in reports)
    return [
        replace(ack, seconds=_joined(ack.seconds, stages), num_changed_elements=changed, extra_bytes=extra)
        for ack in acks
    ]


def _joined(received: dict[str, float], sent: dict[str, float]) -> dict[str, float]:
    """Both sides' seconds by stage. What the receiver's side calls gathering is the time in which nothing came, and
    what the senders did in it is known."""
    waited = {"send": max(0.0, received["send"] + received["gather"] - sum(sent.values()))}
    both = {stage: received.get(stage, 0.0) + sent.get(stage, 0.0) for stage in ("cast", "load", "verify")}
    return {"gather": sent.get("gather", 0.0)} | both | waited


def _check(header: SyncHeader, ack: Ack) -> None:
    if ack.version != header.version or ack.wire is not True or ack.resident is False:
        raise SyncError(
            f"{ack.receiver} acknowledged version {ack.version}, wire {ack.wire}, resident {ack.resident}; expected "
            f"version {header.version}, wire True, resident True (or None from an engine that can't read back)"
        )
    if header.digests is not None and ack.num_tensors != len(header.digests):
        raise SyncError(f"{ack.receiver} acknowledged {ack.num_tensors} tensors of {len(header.digests)}")


def _split(seconds: dict[str, float], gathered: float, wall: float) -> dict[str, float]:
    """The receiver's own seconds, and what is left of the wall time once gathering is taken out: transport."""
    return {**seconds, "gather": gathered, "send": max(0.0, wall - gathered - sum(seconds.values()))}

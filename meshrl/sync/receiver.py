"""The receiving half of a sync, for an engine whose tensors are in this process: the comparison of names, shapes and
dtypes before anything is sent, and the proof, before the new version becomes visible, that the engine's own tensors
equal the trainer's. Plain synchronous code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from meshrl.core.errors import SyncError
from meshrl.core.unloaded import ParamFault, unloaded_params
from meshrl.sync.delivery import ALL, Delivery, Progress, write_changes
from meshrl.sync.digest import (
    BlockDigests,
    RunningDigest,
    as_bytes,
    digests_in_threads,
    lap,
    require_in_place,
    running_digest,
    values,
)
from meshrl.sync.layout import Ack, Layout, Part, SyncHeader
from meshrl.sync.transaction import WeightState

_CHUNK_BYTES = 1 << 20  # digested, then copied while it is still in a core's cache

Targets = Mapping[str, torch.Tensor]
"""{name: tensor of the sent shape and dtype}, to be written in place. An alias with memory of its own is written, too;
an alias that is left out shares its source's memory."""

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields (name, parameter) for every sent name and every alias, from the tensors that the engine computes with. It may
yield one object under several names. All tensors are held until the comparison ends, so they should be views, and none
may be changed before."""


class Receiver:
    """Only a commit that verified everything makes the weights usable (`state`); else an engine raises
    StaleWeightsError.

    Consumes: transfers in order, each valid during the call. Waits for nothing, has no thread. References targets only
    while a sync is open: between syncs an engine may release or move its weights.
    """

    def __init__(
        self, find_targets: Callable[[], Targets], name: str = "receiver", shared: frozenset[str] = frozenset()
    ):
        """find_targets: returns the tensors, which may be other ones in each sync. shared: names of those that are the
        sender's own; they are never written, and read back like all others."""
        self.state, self._shared_names = WeightState(name), shared
        self._find_targets = find_targets
        self._incoming: Incoming | None = None  # of the open sync
        self._committed: BlockDigests | None = None

    def reconcile(self, layout: Layout) -> None:
        """Set the layout of later syncs."""
        _bind(layout, self._find_targets(), self.state.name)
        self.state.reconcile(layout)
        self._incoming = self._committed = None

    def targets(self) -> dict[str, torch.Tensor]:
        """By sent name, the tensors that a sender in this process may write into. Empty unless a sync is open."""
        return {} if self._incoming is None else self._incoming.targets()

    def begin(self, header: SyncHeader) -> None:
        """Open a sync."""
        with self.state.begin(header) as layout:
            self._incoming = Incoming(layout, header, self._find_targets(), self.state.name, self._shared_names)

    def receive(self, delivery: Delivery) -> None:
        """Check one transfer's order, length and digests, and write it into the targets."""
        with self.state.step(delivery.transfer):
            assert self._incoming is not None
            self._incoming.take(delivery)

    def commit(self, read_back: ReadBack | None = None) -> Ack:
        """Prove that everything was received and is in the right tensors, then raise the version (`Incoming.prove`)."""
        with self.state.step("commit", then="valid"):
            assert self._incoming is not None
            ack = self._incoming.prove(read_back, self._committed)
        self._committed, self._incoming = self._incoming.expected, None
        return ack

    def cancel(self) -> None:
        """Make the weights unusable until the next full sync. May be called at any time, and repeatedly."""
        self.state.end("invalid")
        self._incoming = None


class Incoming(Progress):
    """The transfers of one sync, written into tensors of this process. expected: the trainer's digests of each part."""

    def __init__(
        self, layout: Layout, header: SyncHeader, targets: Targets, name: str, shared: frozenset[str] = frozenset()
    ):
        """Raises: UnloadedParamsError when the targets don't fit the layout; SyncError when one has no memory."""
        super().__init__(layout, header, name, shared)
        self._writes = {own: each for own, each in _bind(layout, targets, name).items() if own not in shared}
        self.expected = BlockDigests(header.version)
        self._parts: dict[str, list[Part]] = {name: [] for name in layout.by_name}

    def targets(self) -> dict[str, torch.Tensor]:
        """By sent name, the tensors to be written."""
        return {name: tensors[0] for name, tensors in self._writes.items()}

    def take(self, delivery: Delivery) -> None:
        """Check one transfer, and write it into the targets."""
        self.check(delivery)
        if delivery.payload is None:
            for part in delivery.transfer.parts:
                views = self._views(part)
                for view in views[1:]:
                    view.copy_(views[0])
        else:
            self._load(delivery)
        for part, digest in zip(delivery.transfer.parts, delivery.digests, strict=True):
            self._parts[part.tensor.name].append(part)
            self.expected.add(part.tensor.name, part, digest)

    def _load(self, delivery: Delivery) -> None:
        """Write the transfer into the targets; compare the digests of parts that were sent in full."""
        seconds, sent = self.seconds, []
        running: list[RunningDigest] = []
        for digest, (part, count, section) in zip(delivery.digests, delivery.sections(), strict=True):
            views = self._views(part)
            if count == ALL:
                running.append(self._write(section, views, part))
                sent.append((digest, part))
                continue
            started_at = time.perf_counter()
            for view in views:
                write_changes(part, section, count, view)
            lap(seconds, "load", started_at)
        started_at = time.perf_counter()
        for (digest, part), arrived in zip(sent, values(running), strict=True):
            self.require(digest, arrived, delivery.transfer, part)
        lap(seconds, "verify", started_at)

    def _views(self, part: Part) -> list[torch.Tensor]:
        """Of the tensors to be written; none if the sender's tensor is shared."""
        return [part.of(target) for target in self._writes.get(part.tensor.name, ())]

    def _write(self, section: torch.Tensor, views: list[torch.Tensor], part: Part) -> RunningDigest:
        """Copy a part into its views. Returns the digest of the received bytes, computed while they are in a core's
        cache."""
        running, seconds = RunningDigest(self.layout.digest), self.seconds
        readable, since = running.readable(section), time.perf_counter()
        in_chunks = section.device.type == "cpu" and all(view.is_contiguous() for view in views)
        raws = [as_bytes(view) for view in views] if in_chunks else []
        step = _CHUNK_BYTES if in_chunks else max(section.numel(), 1)
        for low in range(0, section.numel(), step):
            running.update(readable[low : low + step])
            since = lap(seconds, "verify", since)
            for raw in raws:
                raw[low : low + step].copy_(section[low : low + step])
            since = lap(seconds, "load", since)
        if not in_chunks:
            for view in views:
                view.copy_(section.view(view.dtype).view(part.shape))
            lap(seconds, "load", since)
        return running

    def prove(self, read_back: ReadBack | None, before: BlockDigests | None) -> Ack:
        """Prove that everything was received and is in the right tensors.

        read_back: for the read-back proof. None = the engine can't read back; then the targets are compared with
        the trainer's digests, which still verifies cutting and joining, and the Ack has read_back None. before: digests
        of the last committed sync.
        """
        self.check_complete()
        started_at = time.perf_counter()
        names = {name: name for name in self.layout.by_name} | ({} if read_back is None else self.layout.tied)
        tensors = self.targets().items() if read_back is None else read_back()
        faults = self._differing(tensors, names, before)
        lap(self.seconds, "verify", started_at)
        require_in_place(self.name, self.header.version, faults, len(names))
        return Ack(
            version=self.header.version,
            receiver=self.name,
            wire=True,
            read_back=None if read_back is None else True,
            num_bytes=self.num_bytes,
            num_tensors=len(self.layout.tensors),
            num_shared=len(self.shared & self.layout.by_name.keys()),
            num_changed=None if before is None else self.expected.num_changed(before),
            seconds=self.seconds,
        )

    def _differing(
        self, tensors: Iterable[tuple[str, torch.Tensor]], names: Mapping[str, str], before: BlockDigests | None
    ) -> list[str]:
        """An error text for each tensor that differs. names: {name to be read back: name sent for it}."""
        left, faults, fitting = dict(names), [], {}
        for name, tensor in tensors:
            source = left.pop(name, None)
            if source is None:
                problem = "twice" if name in names else "though nothing of that name was sent"
                faults.append(f"{name} was read back {problem}")
                continue
            sent = self.layout.by_name[source]
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if (shape, dtype) != (sent.shape, sent.dtype):
                faults.append(f"{name} is {list(shape)} {dtype}, sent as {list(sent.shape)} {sent.dtype}")
            else:
                fitting[name] = source, tensor
        # One object under two names (tied) is digested once.
        work = {(source, id(tensor)): (tensor, self._parts[source]) for source, tensor in fitting.values()}
        digests = self._part_digests(work)
        for name, (source, tensor) in fitting.items():
            fault = self.expected.fault(source, dict(enumerate(digests[source, id(tensor)])), before)
            if fault is not None:
                tie = "" if name == source else f" (tied to {source})"
                faults.append(f"{name}{tie} {fault}")
        return faults + [f"{name} was not read back" for name in left]

    def _part_digests(
        self, work: Mapping[tuple[str, int], tuple[torch.Tensor, Sequence[Part]]]
    ) -> dict[tuple[str, int], list[int]]:
        """The digest of each part of each tensor."""
        flat = [part.of(tensor) for tensor, parts in work.values() for part in parts]
        kind, sizes = self.layout.digest, [view.nbytes for view in flat]
        computed = iter(digests_in_threads(kind, partial(running_digest, kind), flat, sizes))
        return {key: [next(computed) for _ in parts] for key, (_, parts) in work.items()}


def _bind(layout: Layout, targets: Targets, receiver: str) -> dict[str, list[torch.Tensor]]:
    """The target tensors of each sent tensor."""
    described = describe(targets)
    reconcile(layout, described, {a: source for a, source in layout.tied.items() if a not in described})
    writes = {name: [targets[name]] for name in layout.by_name}
    for alias, source in layout.tied.items():
        if alias in described and targets[alias].data_ptr() != targets[source].data_ptr():
            writes[source].append(targets[alias])
    for name, target in targets.items():
        last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride()))
        end = (target.storage_offset() + last + 1) * target.element_size() if target.numel() else 0
        if target.untyped_storage().nbytes() < end:
            raise SyncError(f"{receiver}: the tensor to write {name} into has no memory (released?)")
    return writes


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype name)}: what `reconcile` compares, and what `make_layout` takes."""
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def reconcile(
    layout: Layout, params: Mapping[str, tuple[tuple[int, ...], str]], tied: Mapping[str, str] | None = None
) -> None:
    """Compare what will be sent with what the receiver has, in both directions, before anything runs.

    params: {wire name: (shape, dtype)} of the receiver's parameters. tied: its aliases -> the parameter whose memory
    they share; an alias may be in `params`, too.
    """
    tied = tied or {}
    sent = layout.by_name
    wire = {name: name for name in sent} | layout.tied  # every name that the sync covers -> the name sent for it
    unsent, misfits, bound = list[ParamFault](), list[ParamFault](), list[ParamFault]()
    for name in [*params, *(alias for alias in tied if alias not in params)]:
        shape_dtype = params.get(name) or params.get(tied.get(name, ""))
        entry = sent.get(wire.get(name, ""))
        if entry is None and wire.get(tied.get(name, "")) is None:
            unsent.append(ParamFault(name, _spec(shape_dtype), wire))
        elif entry is not None and shape_dtype is not None and shape_dtype != (entry.shape, entry.dtype):
            both = f": sent{_spec((entry.shape, entry.dtype))}, the receiver has{_spec(shape_dtype)}"
            misfits.append(ParamFault(name, both))
        if name in tied and wire.get(name) and wire.get(tied[name]) and wire[name] != wire[tied[name]]:
            bound.append(ParamFault(name, f", which shares the memory of {tied[name]}"))
    unknown = [
        ParamFault(name, _spec((sent[source].shape, sent[source].dtype)), params)
        for name, source in wire.items()
        if name not in params and name not in tied
    ]
    faults = [
        ("never sent; the receiver would keep its own values", unsent),
        ("sent, but the receiver has no such parameter", unknown),
        ("sent with another shape or dtype", misfits),
        ("tied in the receiver, but sent as two tensors", bound),
    ]
    if count := sum(len(of_kind) for _, of_kind in faults):
        raise unloaded_params(
            f"trainer and receiver disagree on {count} of their parameters, so nothing was sent:",
            faults,
            "Both sides must be built from the same model folder. If they are, this rollout engine loads other names "
            "or dtypes for this model: try another release of it, or another rollout.engine.",
        )


def _spec(shape_dtype: tuple[tuple[int, ...], str] | None) -> str:
    return "" if shape_dtype is None else f" {list(shape_dtype[0])} {shape_dtype[1]}"

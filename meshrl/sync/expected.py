"""What the receiver's tensors must be after a sync, by the trainer's digests, and the comparison with what they are."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import DigestKind, as_bytes, digest, digest_range
from meshrl.sync.manifest import Layout, Piece, SyncHeader
from meshrl.sync.threads import cores

_AHEAD_BYTES = 256 << 20  # of tensors read back beyond the one that is waited for


class Run(NamedTuple):
    """Bytes [start, stop) of a tensor, and the digest that they must have."""

    start: int
    stop: int
    digest: int


class Expected:
    """The digests of one version: the header's, one a tensor, or those that came with the buckets, one a piece."""

    def __init__(self, layout: Layout, header: SyncHeader):
        self.header, self.version = header, header.version
        self._kind = layout.digest if header.digests is None else "sum64"
        self._entries = {entry.name: entry for entry in layout.entries}
        given = header.digests
        self._runs: dict[str, list[Run]] = {
            entry.name: [] if given is None else [Run(0, entry.num_bytes, given[entry.name])]
            for entry in layout.entries
        }

    def add(self, pieces: Iterable[Piece], digests: Iterable[int]) -> None:
        """What a bucket says of its pieces."""
        for piece, value in zip(pieces, digests, strict=True):
            self._runs[piece.entry.name].append(Run(piece.start, piece.stop, value))

    def num_changed(self, before: Expected) -> int:
        """Tensors that are not as they were."""
        return sum(self._of(name) != before._of(name) for name in self._runs)

    def compare(
        self, found: Iterable[tuple[str, torch.Tensor]], names: dict[str, str], receiver: str, before: Expected | None
    ) -> None:
        """Compare everything read back with what the trainer has. names: {name to be read back: name sent for it}.

        Raises: SyncError naming all that differ, and whose values they have where that is known.
        """
        faults, left = [], dict(names)
        for name, tensor, held in self._digested(found, names):
            source = left.pop(name, None)
            if source is None:
                why = "twice" if name in names else "though nothing of that name was sent"
                faults.append(f"{name} was read back {why}")
                continue
            entry = self._entries[source]
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if (shape, dtype) != (entry.shape, entry.dtype):
                faults.append(f"{name} is {list(shape)} {dtype}, sent as {list(entry.shape)} {entry.dtype}")
            elif held != self._of(source):
                tie = "" if name == source else f" (tied to {source})"
                faults.append(f"{name}{tie} {self._explain(source, held, before)}")
        faults += [f"{name} was not read back" for name in left]
        if faults:
            lines = "\n".join(f"    {fault}" for fault in faults)
            raise SyncError(
                f"{receiver}: version {self.version} is not in place; {len(faults)} of {len(names)} tensors differ "
                f"from the trainer's:\n{lines}\nThis receiver stays unusable until the next full sync"
            )

    def _digested(
        self, found: Iterable[tuple[str, torch.Tensor]], names: dict[str, str]
    ) -> Iterator[tuple[str, torch.Tensor, list[Run]]]:
        """Each tensor with the digests that it has, cut into runs, for one tensor may be a third of a model. A tensor
        read back may be a copy, so few are held at once. The same object under two names, tied, is read once."""
        read: dict[str, tuple[weakref.ref[torch.Tensor], list[Future[Run]]]] = {}  # by the name that was sent
        ahead: deque[tuple[str, torch.Tensor, list[Future[Run]]]] = deque()
        held = 0
        with cores(sum(entry.num_bytes for entry in self._entries.values())) as pool:
            for name, tensor in found:
                source = names.get(name, name)
                if source not in read or read[source][0]() is not tensor:
                    read[source] = weakref.ref(tensor), [pool.submit(task) for task in self._work_of(source, tensor)]
                ahead.append((name, tensor, read[source][1]))
                held += _num_bytes(tensor)
                del tensor
                while held > _AHEAD_BYTES:
                    held -= _num_bytes(ahead[0][1])
                    yield _result(*ahead.popleft())
            while ahead:
                yield _result(*ahead.popleft())

    def _work_of(self, name: str, tensor: torch.Tensor) -> list[Callable[[], Run]]:
        """What gives the tensor's own digests over the runs of what was sent under this name; nothing if its size is
        another."""
        entry = self._entries.get(name)
        if entry is None or _num_bytes(tensor) != entry.num_bytes:
            return []
        if self._kind == "sum64" and len(self._runs[name]) == 1:
            return [lambda: Run(0, entry.num_bytes, digest(tensor))]  # also of a strided view, without a copy
        raw = as_bytes(tensor if tensor.is_contiguous() else tensor.contiguous())
        return [partial(_run, self._kind, raw[a:b], a, b) for a, b, _ in self._of(name)]

    def _of(self, name: str) -> list[Run]:
        return sorted(self._runs[name])

    def _explain(self, name: str, held: list[Run], before: Expected | None) -> str:
        """What the wrong values are, where their digests are known."""
        if before is not None and before._of(name) == held:
            return f"still has the values of version {before.version}"
        others = [other for other in self._runs if self._of(other) == held]
        if others:
            return f"has the values of {others[0]}"
        wrong = [(a, b) for a, b in zip(held, self._of(name)) if a != b]
        if not wrong:
            return "was not sent whole"
        (is_, should), more = wrong[0], f", and {len(wrong) - 1} more runs" if len(wrong) > 1 else ""
        where = "" if len(held) == 1 else f" in bytes {is_.start} to {is_.stop}{more}"
        return f"has digest {is_.digest:016x}, the trainer's is {should.digest:016x}{where}"


def _run(kind: DigestKind, raw: torch.Tensor, start: int, stop: int) -> Run:
    return Run(start, stop, digest_range(kind, raw, start))


def _result(name: str, tensor: torch.Tensor, work: list[Future[Run]]) -> tuple[str, torch.Tensor, list[Run]]:
    return name, tensor, [each.result() for each in work]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

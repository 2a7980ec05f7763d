"""The digests that the receiver's tensors must have after a sync, and the comparison with the tensors read back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import DigestKind, RunningDigest, as_bytes, values
from meshrl.sync.layout import Layout, Part
from meshrl.sync.threads import submit, thread_pool

_AHEAD_BYTES = 256 << 20  # of tensors that are read back while earlier ones are still digested


class ExpectedDigests:
    """The trainer's digests of one version, for each part of each tensor."""

    def __init__(self, layout: Layout, version: int):
        self.version = version
        self._layout = layout
        self._parts: dict[str, list[Part]] = {name: [] for name in layout.by_name}
        self._digests: dict[str, list[int]] = {name: [] for name in layout.by_name}

    def add(self, parts: Iterable[Part], digests: Iterable[int]) -> None:
        """Add the digests of a transfer's parts."""
        for part, digest in zip(parts, digests, strict=True):
            self._parts[part.tensor.name].append(part)
            self._digests[part.tensor.name].append(digest)

    def num_changed(self, before: ExpectedDigests) -> int:
        """The number of tensors whose digests differ from `before`."""
        return sum(digests != before._digests[name] for name, digests in self._digests.items())

    def compare(
        self,
        found: Iterable[tuple[str, torch.Tensor]],
        names: dict[str, str],
        receiver: str,
        before: ExpectedDigests | None,
    ) -> None:
        """Compare everything read back with the trainer's digests. names: {name to be read back: name sent for it}.

        Raises: SyncError naming all tensors that differ and, if known, the tensor or version whose values they have.
        """
        faults, left = [], dict(names)
        for name, tensor, held in self._digested(found, names):
            source = left.pop(name, None)
            if source is None:
                why = "twice" if name in names else "though nothing of that name was sent"
                faults.append(f"{name} was read back {why}")
                continue
            sent = self._layout.by_name[source]
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if (shape, dtype) != (sent.shape, sent.dtype):
                faults.append(f"{name} is {list(shape)} {dtype}, sent as {list(sent.shape)} {sent.dtype}")
            elif held != self._digests[source]:
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
    ) -> Iterator[tuple[str, torch.Tensor, list[int]]]:
        """Each tensor with the digests of its parts. A tensor read back may be a copy, so only few are in memory at
        once. The same object under two names (tied) is digested once."""
        read: dict[str, tuple[weakref.ref[torch.Tensor], list[Future[RunningDigest]]]] = {}  # by the sent name
        ahead: deque[tuple[str, torch.Tensor, list[Future[RunningDigest]]]] = deque()
        held = 0
        kind = self._layout.digest
        with thread_pool(self._layout.num_bytes if kind == "xxh3" else 0) as pool:
            for name, tensor in found:
                source = names.get(name, name)
                if source not in read or read[source][0]() is not tensor:
                    parts = self._fitting(source, tensor)
                    work = [submit(pool, part.num_bytes, part_digest, kind, tensor, part) for part in parts]
                    read[source] = weakref.ref(tensor), work
                ahead.append((name, tensor, read[source][1]))
                held += tensor.nbytes
                del tensor
                while held > _AHEAD_BYTES:
                    held -= ahead[0][1].nbytes
                    yield _result([ahead.popleft()])[0]
            yield from _result(list(ahead))

    def _fitting(self, name: str, tensor: torch.Tensor) -> Sequence[Part]:
        """The sent parts of the tensor with this name; none if its shape or element size differs."""
        sent = self._layout.by_name.get(name)
        if sent is None or tuple(tensor.shape) != sent.shape or tensor.element_size() != sent.torch_dtype.itemsize:
            return []
        return self._parts[name]

    def _explain(self, name: str, held: list[int], before: ExpectedDigests | None) -> str:
        """A description of the wrong values, for the error."""
        if before is not None and before._digests[name] == held:
            return f"still has the values of version {before.version}"
        should = self._digests[name]
        others = [other for other, digests in self._digests.items() if digests == held and digests]
        if others:
            return f"has the values of {others[0]}"
        wrong = [number for number, (a, b) in enumerate(zip(held, should)) if a != b]
        if not wrong:
            return "was not sent in full"
        more = f", and {len(wrong) - 1} more parts" if len(wrong) > 1 else ""
        where = "" if len(held) == 1 else f" in {self._parts[name][wrong[0]]}{more}"
        return f"has digest {held[wrong[0]]:016x}, the trainer's is {should[wrong[0]]:016x}{where}"


def part_digest(kind: DigestKind, full: torch.Tensor, part: Part) -> RunningDigest:
    """The digest of a part's bytes in the full tensor."""
    running = RunningDigest(kind)
    running.update(running.readable(as_bytes(part.of(full).contiguous())))
    return running


def _result(
    read: list[tuple[str, torch.Tensor, list[Future[RunningDigest]]]],
) -> list[tuple[str, torch.Tensor, list[int]]]:
    found = iter(values([work.result() for _, _, parts in read for work in parts]))
    return [(name, tensor, [next(found) for _ in parts]) for name, tensor, parts in read]

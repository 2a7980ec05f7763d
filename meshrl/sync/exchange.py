"""Shards of one group of train ranks, each given to all of them, bucket by bucket: what samplers beside them load.

One small collective a bucket carries the digests, and says that every rank has filled its slot. The bytes go through
shared memory where the ranks are on one machine, and by one all-gather a bucket where they are not, or where they lie
in the memory of accelerators. Digests are those that each rank took of its own shard, so they vouch for the way here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from meshrl.sync.manifest import Layout
from meshrl.sync.receive import Bucket, Place
from meshrl.sync.transport import SharedRing, SharedRingView

NUM_SLOTS = 2  # a slot is filled again only after the collective that follows its reading
_FACTS = 3  # before each bucket's pieces: bytes of the payload, its digest, whether it is a delta


class Exchange:
    """One rank's end. shared: through shared memory. Slots are `staging`; close frees them.

    seconds: spent waiting for the other ranks and their bytes, since the last `buckets`.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device, shared: bool):
        self.layout, self.group, self.device, self.seconds = layout, group, device, 0.0
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        size = layout.staging_bytes
        self._ring = SharedRing(NUM_SLOTS, size) if shared else None
        self._views: list[SharedRingView] = []
        if self._ring is not None:
            names: list[str] = [""] * self._world
            dist.all_gather_object(names, self._ring.name, group)
            self._views = [SharedRingView(name, NUM_SLOTS, size) for name in names]
            self.staging: Sequence[torch.Tensor] = self._ring.slots
        else:
            self.staging = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
            self._arrived = torch.empty((self._world, size), dtype=torch.uint8, device=device)

    def buckets(self, own: Iterator[Bucket]) -> Iterator[Bucket]:
        """The buckets of all ranks (a collective); each is valid until the next one is asked for."""
        self.seconds = 0.0
        for index in range(max(stream.num_buckets for stream in self.layout.streams)):
            mine = next(own, None)
            began = time.perf_counter()
            facts = self._facts(index, mine)
            payloads = self._payloads(index, mine)
            self.seconds += time.perf_counter() - began
            for stream, payload in enumerate(payloads):
                if index < self.layout.streams[stream].num_buckets:
                    yield self._bucket(stream, index, payload, facts[stream])
        for _ in own:  # it notes what it has sent at its end
            pass

    def _facts(self, index: int, mine: Bucket | None) -> list[list[int]]:
        """What each rank says of its bucket: `_FACTS`, then a digest and a count for each piece."""
        sizes = [len(list(s.pieces(index))) if index < s.num_buckets else 0 for s in self.layout.streams]
        said = torch.zeros(_FACTS + 2 * max(sizes), dtype=torch.int64)
        if mine is not None and mine.pieces is not None:
            counts = mine.changes or (0,) * len(mine.pieces)
            numbers = [mine.payload.numel(), _signed(mine.digest), int(mine.changes is not None)]
            numbers += [_signed(value) for value in mine.pieces] + list(counts)
            said[: len(numbers)] = torch.tensor(numbers)
        everybody = [torch.empty_like(said, device=self.device) for _ in range(self._world)]
        dist.all_gather(everybody, said.to(self.device), group=self.group)
        return [each.tolist() for each in everybody]

    def _payloads(self, index: int, mine: Bucket | None) -> list[torch.Tensor]:
        slot = index % NUM_SLOTS
        if self._ring is not None:
            return [view.slot(slot) for view in self._views]
        dist.all_gather_into_tensor(self._arrived.view(-1), self.staging[slot], group=self.group)
        return list(self._arrived)

    def _bucket(self, stream: int, index: int, payload: torch.Tensor, facts: list[int]) -> Bucket:
        count = len(list(self.layout.streams[stream].pieces(index)))
        numbers = facts[_FACTS : _FACTS + 2 * count]
        return Bucket(
            index=index,
            payload=payload[: facts[0]],
            digest=facts[1] % (1 << 64),
            stream=stream,
            pieces=tuple(value % (1 << 64) for value in numbers[:count]),
            changes=tuple(numbers[count:]) if facts[2] else None,
            place=self._place(stream, index),
        )

    def _place(self, stream: int, index: int) -> Place | None:
        if not self._views:
            return None
        view = self._views[stream]
        return Place(ring=view.name, num_slots=view.num_slots, slot_bytes=view.slot_bytes, slot=index % NUM_SLOTS)

    def close(self) -> None:
        for view in self._views:
            view.close()
        if self._ring is not None:
            self._ring.close()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value

"""Weight syncs of small tensors: boxes of any partition, senders of train ranks, and samplers that receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshrl.parallel.boxes import held_ranges
from meshrl.sync.delivery import Delivery, Transport
from meshrl.sync.digest import DigestKind
from meshrl.sync.layout import Ack, Box, Layout, SyncHeader, SyncMode, make_layout
from meshrl.sync.receiver import Receiver
from meshrl.sync.sender import Elements, SendReport, SourceBox, WeightSender
from meshrl.sync.transaction import SyncOrder, SyncState, make_header, sync_rank, with_reports

Tensors = Mapping[str, torch.Tensor]
SHAPES: dict[str, tuple[int, ...]] = {  # odd sizes, no elements in the middle and at the end, equal shapes, a scalar
    "embed.weight": (37, 6),
    "q_proj.weight": (12, 4),
    "k_proj.weight": (12, 4),
    "empty": (0, 4),
    "experts": (3, 8, 6),
    "scale": (),
    "big.weight": (150, 33),
    "norm.weight": (7,),
    "last.empty": (3, 0),
}
TIED = {"lm_head.weight": "embed.weight"}
MESHES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {  # sizes of the mesh, a placement for each axis
    "one rank": ((1,), [Shard(0)]),
    "rows": ((3,), [Shard(0)]),
    "columns": ((2,), [Shard(1)]),
    "2 x 2": ((2, 2), [Shard(0), Shard(1)]),
    "3 x 2": ((3, 2), [Shard(0), Shard(1)]),
    "4 x 2": ((4, 2), [Shard(1), Shard(0)]),
    "fused": ((2,), [_StridedShard(0, split_factor=2)]),
    "fused, by columns too": ((3, 2), [Shard(1), _StridedShard(0, split_factor=2)]),
    "replicas": ((2, 2), [Replicate(), Shard(0)]),
}


def weights_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 masters."""
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def trained(weights: Tensors, seed: int, share: float = 0.05) -> dict[str, torch.Tensor]:
    """The weights with a share of their elements changed by more than bf16 rounding."""
    numbers = torch.Generator().manual_seed(seed)
    moved = {name: torch.rand(t.shape, generator=numbers) < share for name, t in weights.items()}
    return {name: torch.where(moved[name], t + 0.5, t) for name, t in weights.items()}


def boxes_on(mesh: str, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[list[Box]]:
    """The boxes of each rank of a mesh of MESHES. A tensor without the dim that an axis shards is replicated there."""
    sizes, placements = MESHES[mesh]
    ranks = []
    for coordinate in product(*map(range, sizes)):
        own = []
        for name, shape in shapes.items():
            fitting = [p if p.is_replicate() or p.dim < len(shape) else Replicate() for p in placements]  # type: ignore[attr-defined]
            for ranges in product(*held_ranges(shape, fitting, sizes, coordinate)):
                own.append(Box(name, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)))
        ranks.append(own)
    return ranks


def layout_on(
    mesh: str = "one rank", transfer_bytes: int = 4096, digest: DigestKind = "xxh3", dtype: str = "bfloat16"
) -> Layout:
    specs = {name: (shape, dtype) for name, shape in SHAPES.items()}
    return make_layout(specs, boxes_on(mesh), TIED, transfer_bytes, digest)


def held_of(weights: Tensors, boxes: Iterable[Box]) -> dict[str, list[SourceBox]]:
    """Views of the full tensors."""
    held: dict[str, list[SourceBox]] = {name: [] for name in weights}
    for box in boxes:
        view = weights[box.name]
        for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
            view = view.narrow(dim, start, size)
        held[box.name].append(SourceBox(box.offsets, box.shape, Elements(view)))
    return held


class Trainer:
    """The senders of a layout."""

    def __init__(self, layout: Layout, keep_base: bool = True, frozen: frozenset[str] = frozenset()):
        self.layout = layout
        self.senders = [WeightSender(layout, s, keep_base, frozen) for s in range(len(layout.senders))]

    def deliveries(self, weights: Tensors, version: int = 0, changes: bool = False) -> Iterator[Delivery]:
        """All transfers in order, each in its own buffer, which had other contents before."""
        for sender, boxes in zip(self.senders, self.layout.senders, strict=True):
            sender.begin(held_of(weights, boxes), changes)
        for transfer in self.layout.transfers:
            buffer = torch.full((self.layout.slot_bytes,), 99, dtype=torch.uint8)
            yield self.senders[transfer.sender].fill(transfer, buffer)
        for sender in self.senders:
            sender.finish(version)

    @property
    def reports(self) -> list[SendReport]:
        return [sender.report for sender in self.senders]


def receiver_of(layout: Layout, find_targets: Callable[[], Tensors], name: str = "receiver") -> Receiver:
    """A receiver of this layout."""
    receiver = Receiver(find_targets, name)
    receiver.reconcile(layout)
    return receiver


class Sampler:
    """A receiver with its own parameters, which are read back by name; the tied head shares the embedding's memory."""

    def __init__(self, layout: Layout, name: str = "sampler", reads_back: bool = True):
        self.params = {t.name: torch.full(t.shape, 3, dtype=t.torch_dtype) for t in layout.tensors}
        self.head = self.params["embed.weight"]
        self.receiver = receiver_of(layout, lambda: self.params, name)
        self.reads_back = reads_back

    def read_back(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.params.items()
        yield "lm_head.weight", self.head

    async def reconcile(self, layout: Layout) -> None:
        raise NotImplementedError

    async def begin(self, header: SyncHeader) -> None:
        self.receiver.begin(header)

    async def receive(self, *deliveries: Delivery) -> None:
        for delivery in deliveries:
            self.receiver.receive(delivery)

    async def commit(self) -> Ack:
        return self.receiver.commit(self.read_back if self.reads_back else None)

    async def cancel(self) -> None:
        self.receiver.cancel()

    def stats(self) -> SyncState:
        """As a rollout engine states it: with the version that it has."""
        return SyncState(version=self.receiver.state.version)

    def holds(self, weights: Tensors) -> bool:
        return all(torch.equal(self.params[name], t.to(self.params[name].dtype)) for name, t in weights.items())


def header_of(layout: Layout, version: int, base: int | None = None, mode: SyncMode = "delta") -> SyncHeader:
    """mode: used if there is a base version."""
    return SyncHeader(
        version=version, base_version=base, mode="full" if base is None else mode, layout_hash=layout.hash
    )


Mangle = Callable[[Iterator[Delivery]], Iterable[Delivery]]


def sync(
    trainer: Trainer,
    sampler: Any,
    weights: Tensors,
    version: int = 0,
    base: int | None = None,
    mangle: Mangle = lambda deliveries: deliveries,
) -> Ack:
    """A full sync or, with a base version, one of the changes; `mangle` may alter the deliveries on their way."""

    async def run() -> Ack:
        await sampler.begin(header_of(trainer.layout, version, base))
        for delivery in mangle(trainer.deliveries(weights, version, base is not None)):
            await sampler.receive(delivery)
        ack: Ack = await sampler.commit()
        return ack

    return asyncio.run(run())


def trainer_and_sampler(
    mesh: str = "rows", transfer_bytes: int = 4096, digest: DigestKind = "xxh3", **changes: Any
) -> tuple[Trainer, Sampler]:
    """A trainer and a sampler of the same layout."""
    layout = layout_on(mesh, transfer_bytes, digest)
    return Trainer(layout, **changes), Sampler(layout)


# ---- several ranks


class Rank:
    """One rank of a sync: it sends, receives, or both. engine: a Sampler or a rollout engine."""

    def __init__(self, layout: Layout, transport: Transport, sender: WeightSender | None = None, engine: Any = None):
        self.layout, self.transport, self.sender, self.engine = layout, transport, sender, engine

    def state(self, connection_id: str) -> SyncState:
        version = None if self.engine is None else self.engine.stats().version
        if self.sender is None:
            return SyncState(version=version)
        address = self.transport.prepare(connection_id)
        base = self.sender.base_version
        return SyncState(sender=self.sender.sender, address=address, base_version=base, version=version)

    async def sync(self, order: SyncOrder, weights: Tensors) -> Ack | None:
        """As `RankSync.sync`: after a failure no peer waits, and the engine has no version."""
        try:
            if self.sender is not None:
                held = held_of(weights, self.layout.senders[self.sender.sender])
                self.sender.begin(held, changes=order.header.mode != "full")
            return await sync_rank(order, self.layout, self.transport, self.sender, self.engine)
        except BaseException:
            self.transport.disconnect()
            if self.engine is not None:
                await self.engine.cancel()
            raise


async def sync_ranks(ranks: Sequence[Rank], weights: Tensors, version: int, connection_id: str = "first") -> list[Ack]:
    """A sync of all ranks, of changes only if all have the same version. The first failure cancels all other ranks, as
    in `cluster.train_group`."""
    states = [rank.state(connection_id) for rank in ranks]
    header = make_header(ranks[0].layout, version, states, "delta")
    samplers = [rank for rank in ranks if rank.engine is not None]
    tasks, failures = [], list[Exception]()

    async def run(rank: Rank, order: SyncOrder) -> Ack | None:
        try:
            return await rank.sync(order, weights)
        except Exception as error:
            failures.append(error)
            raise

    for rank in ranks:
        peers = {s.sender: s.address for other, s in zip(ranks, states) if other is not rank and s.sender is not None}
        order = SyncOrder(
            header=header,
            connection_id=connection_id,
            senders={sender: at for sender, at in peers.items() if at and (rank in samplers or at.for_groups)},
            number=samplers.index(rank) if rank in samplers else 0,
            num_receivers=len(samplers) - (rank.sender is not None and rank in samplers),
        )
        tasks.append(asyncio.ensure_future(run(rank, order)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        for rank in ranks:
            rank.transport.disconnect()
            if rank.engine is not None:
                await rank.engine.cancel()
        raise failures[0]
    acks = [ack for task in tasks if (ack := task.result()) is not None]
    return with_reports(acks, [rank.sender.report for rank in ranks if rank.sender is not None], header)

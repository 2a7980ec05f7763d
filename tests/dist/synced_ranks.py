"""Weight syncs between the ranks of a pool. Each rank has a train engine and a sampler, and does the controller's part:
all ranks exchange their states and compute the same orders."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tiny_specs import worker_spec

from meshrl.cluster.rank_sync import RankSync
from meshrl.cluster.weight_sync import sync_order
from meshrl.config.rollout import RolloutConfig
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.layout import Ack, Layout, make_layout
from meshrl.sync.transaction import SyncState, make_header, with_reports
from meshrl.train.engine import TrainEngine

WAYS: dict[str, dict[str, Any]] = {
    "shared memory": {},  # the sampler is in the train rank's process and gets the other ranks' boxes
    "collective": {"nodes": 2},
    "sockets": {"apart": True},  # the sampler is a separate rank and gets everything from the train ranks
    "other machine": {"apart": True, "nodes": 2},
    "broadcast": {"apart": True, "transport": "broadcast"},
}
CPU = torch.device("cpu")


class SyncedRank:
    """One process of the pool. Each method is called on all ranks at the same time."""

    def __init__(
        self,
        trainer: TrainEngine,
        sampler: EmbeddedEngine,
        way: str = "shared memory",
        mode: str = "delta",
        transfer_bytes: int = 4096,
    ):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.trainer, self.sampler = trainer, sampler
        self.layout = layout_over_ranks(trainer, transfer_bytes)
        apart, transport, nodes = (WAYS[way].get(fact, other) for fact, other in _USUAL.items())
        self._num_failed = 0
        self._mode: Any = "adapter" if trainer.lora and not _on_experts(trainer) else "delta"
        cfg = RolloutConfig(sync_mode=mode, sync_transport=transport)
        spec = worker_spec(
            rank=rank,
            num_train_ranks=world,
            num_rollout_ranks=world if apart else 0,
            rollout=cfg,
            nodes=nodes,
            address="127.0.0.1",
        )
        if trainer.lora is not None:
            spec = replace(spec, model=spec.model.model_copy(update={"lora": trainer.lora}))
        self.own = {rank: RankSync(spec, CPU, self.layout, trainer, None if apart else sampler)}
        if apart:
            self.own[world + rank] = RankSync(replace(spec, rank=world + rank), CPU, self.layout, None, sampler)
        self._samplers = range(world, 2 * world) if apart else range(world)

    async def reconcile(self) -> None:
        await self.sampler.reconcile(self.layout)

    async def sync(self, version: int) -> Ack:
        """Returns the Ack of this process's sampler. Raises: SyncError."""
        connection_id = str(self._num_failed)
        states: dict[int, SyncState] = _gathered({rank: sync.state(connection_id) for rank, sync in self.own.items()})
        header = make_header(self.layout, version, list(states.values()), self._mode)
        active = {
            rank: sync for rank, sync in self.own.items() if states[rank].sender is not None or rank in self._samplers
        }
        calls = [
            sync.sync(sync_order(header, connection_id, rank, states, self._samplers)) for rank, sync in active.items()
        ]
        try:
            parts = dict(zip(active, await asyncio.gather(*calls), strict=True))
        except BaseException:
            self._num_failed += 1
            raise
        reports = [report for _, report in _gathered(parts).values() if report is not None]
        return with_reports([ack for ack, _ in parts.values() if ack is not None], reports, header)[0]

    def close(self) -> None:
        dist.barrier()
        for sync in self.own.values():
            sync.close()


_USUAL: dict[str, Any] = {"apart": False, "transport": "auto", "nodes": 1}


def _on_experts(trainer: TrainEngine) -> bool:
    """Whether samplers get merged weights."""
    return trainer.lora is not None and trainer.lora.on_experts


def layout_over_ranks(trainer: TrainEngine, transfer_bytes: int) -> Layout:
    """The layout of what all ranks of the first replica hold."""
    held, at = trainer.weights(merged=_on_experts(trainer)), trainer.coordinates
    found = _gathered({(at.replica, at.sender): held.boxes()})
    senders = [boxes for (replica, _), boxes in sorted(found.items()) if replica == 0]
    return make_layout(held.tensors, senders, held.tied, transfer_bytes)


def _gathered(own: dict[Any, Any]) -> dict[Any, Any]:
    """The entries of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {key: value for each in found for key, value in each.items()}

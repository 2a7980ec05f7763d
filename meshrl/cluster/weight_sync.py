"""One weight sync from the trainer to the samplers, as the controller sees it: one call for each rank, and what happens
when one of them fails."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.cluster.train_group import TrainGroup
from meshrl.core.errors import RankFailure, SyncError, SyncInterrupted
from meshrl.sync.layout import Ack, Layout, SyncHeader
from meshrl.sync.transaction import SyncOrder, SyncState, make_header, with_reports


async def sync_weights(trainer: TrainGroup, rollouts: RolloutGroup, layout: Layout) -> list[Ack]:
    """Send every sampler the trainer's weights as version + 1, which rises when all samplers have verified them."""
    async with rollouts.drained():
        version = trainer.version + 1
        async with rollouts.replacement.lock:
            acks = await _send_to(rollouts.routes.ranks, trainer, rollouts, layout, version)

        async def send_weights(rank: int) -> bool:
            return bool(await _send_to([rank], trainer, rollouts, layout, version, lambda: trainer.is_synced))

        trainer.version, trainer.is_synced = version, True
        rollouts.replacement.synced(send_weights)
        return acks


async def _send_to(
    ranks: Sequence[int],
    trainer: TrainGroup,
    rollouts: RolloutGroup,
    layout: Layout,
    version: int,
    is_current: Callable[[], bool] = lambda: True,
) -> list[Ack]:
    """Sync these ranks. If a sampler is lost meanwhile and can be replaced, or after one failure without a lost rank,
    such as a damaged transfer, the sync starts again for all of them, with all weights. The caller holds the lock of
    replacements.

    is_current: whether the trainer still has this version; called under command_lock. If it has not, nothing is sent
    and the result is empty.
    """
    repeated, replacement = False, rollouts.replacement
    while True:
        connection_id = f"{[*ranks]}, {replacement.num_restarts} replaced, {rollouts.num_failed_syncs} syncs cancelled"
        try:
            async with trainer.command_lock:
                if not is_current():
                    return []
                return await _sync(
                    trainer,
                    ranks,
                    layout,
                    version,
                    hashlib.sha256(connection_id.encode()).hexdigest()[:16],
                    rollouts.shares_devices,
                )
        except BaseException as error:
            rollouts.num_failed_syncs += 1
            lost = error if isinstance(error, RankFailure) else error.__cause__
            if isinstance(lost, RankFailure):
                await replacement.restart(lost)
            elif isinstance(error, SyncError) and not repeated:
                repeated = True
                replacement.note(f"{str(error).splitlines()[0].removesuffix(':')}; sending the weights again")
            else:
                raise


async def _sync(
    trainer: TrainGroup,
    samplers: Sequence[int],
    layout: Layout,
    version: int,
    connection_id: str,
    shares_devices: bool,
) -> list[Ack]:
    """One call for each rank that sends, receives or both. When one fails, all others are cancelled. shares_devices:
    each side frees memory in all ranks before the other one allocates it in any rank."""
    executor = trainer.executor
    ranks = sorted({*range(trainer.num_ranks), *samplers})

    async def hand_over(part: str) -> None:
        if shares_devices:
            await asyncio.gather(*(executor.call(rank, RankWorker.make_room, part) for rank in ranks))
            await asyncio.gather(*(executor.call(rank, RankWorker.restore_sampler, part) for rank in ranks))

    await hand_over("weights")
    answers = await asyncio.gather(*(executor.call(rank, RankWorker.sync_state, connection_id) for rank in ranks))
    states: dict[int, SyncState] = dict(zip(ranks, answers, strict=True))
    header = make_header(layout, version, list(states.values()), trainer.changes_mode)
    orders = {
        rank: sync_order(header, connection_id, rank, states, samplers)
        for rank, state in states.items()
        if state.sender is not None or rank in samplers
    }
    calls = {rank: asyncio.ensure_future(executor.call(rank, RankWorker.sync, order)) for rank, order in orders.items()}
    try:
        await asyncio.wait(calls.values(), return_when=asyncio.FIRST_EXCEPTION)
        outcomes = [call.result() for call in calls.values()]
        await hand_over("kv_cache")
        acks, reports = ([part for part in parts if part is not None] for parts in zip(*outcomes, strict=True))
        return with_reports(acks, reports, header)
    except BaseException as error:
        cancelling = (executor.call(rank, RankWorker.cancel_sync) for rank in calls)
        ended = await asyncio.gather(*cancelling, return_exceptions=True)
        failures = await asyncio.gather(*calls.values(), return_exceptions=True)
        if not isinstance(error, Exception):  # this task was cancelled; the ranks' errors only follow from it
            raise
        # The failure that caused the others: a lost rank, else one that is not a SyncInterrupted.
        raised = [failure for failure in failures if isinstance(failure, Exception)]
        raised.sort(key=lambda failure: (not isinstance(failure, RankFailure), isinstance(failure, SyncInterrupted)))
        cause = raised[0] if raised else error
        for rank, outcome in zip(calls, ended, strict=True):
            if isinstance(outcome, BaseException):
                cause.add_note(f"rank {rank} could not be cancelled either: {outcome!r}")
        if isinstance(cause, SyncError):
            raise cause from cause.__cause__
        raise SyncError(f"the sync of version {version} failed: {type(cause).__name__}: {cause}") from cause


def sync_order(
    header: SyncHeader, connection_id: str, rank: int, states: Mapping[int, SyncState], samplers: Sequence[int]
) -> SyncOrder:
    """The SyncOrder of this rank. Train ranks that sample receive from the senders of their own replica."""
    own = states[rank]
    peers = {
        other: state
        for other, state in states.items()
        if state.sender is not None and other != rank and (own.sender is None or state.replica == own.replica)
    }
    receivers = [other for other in samplers if other != rank and (states[other].sender is None or other in peers)]
    receives = rank in samplers
    addresses = {s.sender: s.address for s in peers.values() if s.address and s.sender is not None}
    return SyncOrder(
        header=header,
        connection_id=connection_id,
        senders={sender: at for sender, at in addresses.items() if receives or at.for_groups},
        number=samplers.index(rank) if receives else 0,
        num_receivers=len(receivers) if own.sender is not None else len(samplers),
    )

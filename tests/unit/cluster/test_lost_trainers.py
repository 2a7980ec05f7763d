"""Lost train ranks are replaced while samplers keep running; a loss is noticed before the next command."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engines import ask
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import sft_loss
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.launch import Groups, launched
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.cluster.train_group import TrainGroup
from meshrl.cluster.weight_sync import sync_weights
from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.config.data import DataConfig
from meshrl.config.loop import LoopConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import RunConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import RankFailure, StaleWeightsError
from meshrl.rollout.base import EngineStats
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.run.keeper import Checkpoints
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Layout
from meshrl.train.checkpoint_files import states

pytestmark = pytest.mark.timeout(300)  # ranks start slowly on a machine that does much else


@asynccontextmanager
async def running(
    folder: Path,
    num_train_ranks: int,
    max_restarts: int = 3,
    num_rollout_ranks: int = 1,
    sync_deadline_s: float | None = None,
    **rollout: Any,
) -> AsyncIterator[Groups]:
    """Train ranks of a tiny model; after them, ranks that only sample."""
    tiny_qwen2(max_position_embeddings=32_768).save_pretrained(folder / "model")
    cfg = RunConfig(
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        train=TrainConfig(activation_checkpointing=False, max_tokens_per_microbatch=40),
        rollout=RolloutConfig(sync_bucket_bytes=20_000, **rollout),
        data=DataConfig(),
        loop=LoopConfig(num_steps=1),
        cluster=ClusterConfig(
            num_train_ranks=num_train_ranks,
            num_rollout_ranks=num_rollout_ranks,
            max_restarts=max_restarts,
            timeout_s=200.0,
            deadlines=Deadlines(sync=sync_deadline_s),
        ),
    )
    async with launched(cfg, num_train_ranks, num_rollout_ranks) as groups:
        yield groups


async def synced(groups: Groups) -> tuple[TrainGroup, RolloutGroup, Layout]:
    """Both groups, with the trainer's first version in the samplers, and the layout of their syncs."""
    trainer, rollouts = groups.trainer, groups.rollouts
    assert trainer is not None and rollouts is not None
    layout = await trainer.layout(20_000)
    await rollouts.reconcile(layout)
    await sync_weights(trainer, rollouts, layout)
    return trainer, rollouts, layout


def pid(worker: RankWorker) -> int:
    return os.getpid()


def stats(worker: RankWorker) -> EngineStats:
    """Of its sampler."""
    assert worker.sampler is not None
    return worker.sampler.stats()


def engines_of(worker: RankWorker) -> tuple[list[str], bool]:
    """The roles of its train engines, and whether it has a sampler."""
    return [*worker.engines], worker.sampler is not None


async def _pids(groups: Groups) -> list[int]:
    return await asyncio.gather(*(groups.executor.call(spec.rank, pid) for spec in groups.executor.specs))


async def step(trainer: TrainGroup) -> float:
    """One optimizer step; its gradient's norm."""
    samples = weigh(random_samples(0, [9, 12, 5, 7]))
    await trainer.forward_backward(trainer.plan_rows(samples), "policy", sft_loss)
    return (await trainer.optim_step("policy", 1e-2)).grad_norm


def kill_at_the_first_transfer(worker: RankWorker, process: int) -> None:
    """Kill another rank's process when this rank receives the first transfer of the next sync."""
    receive = EmbeddedEngine.receive

    async def received(self: EmbeddedEngine, *deliveries: Delivery) -> None:
        EmbeddedEngine.receive = receive  # type: ignore[method-assign]
        os.kill(process, signal.SIGKILL)
        await receive(self, *deliveries)

    EmbeddedEngine.receive = received  # type: ignore[method-assign]


def _when(groups: Groups, awaited: Any, action: Callable[[], Any]) -> None:
    """Call `action` once, when a rank has answered the next call of this method."""
    call, todo = groups.executor.call, [action]

    async def observed(rank: int, method: Any, *args: Any) -> Any:
        answer = await call(rank, method, *args)
        if method is awaited and todo:
            todo.pop()()
        return answer

    groups.executor.call = observed  # type: ignore[method-assign]


def _run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 250))


def test_a_train_rank_that_dies_while_it_is_idle_ends_the_wait_and_is_replaced(tmp_path):
    """For example during a grading. The other train rank is ended too, the sampler keeps running. The new ranks
    have another rendezvous than the old ones."""

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=2) as groups:
            trainer, rollouts, layout = await synced(groups)
            before, norm = await _pids(groups), await step(trainer)
            restart, at_restart = groups.executor.restart, list[tuple[int, int]]()

            async def observed(ranks: Sequence[int]) -> None:
                now = await groups.executor.call(2, stats)
                at_restart.append((now.running, now.version))
                await restart(ranks)

            groups.executor.restart = observed
            endless = asyncio.ensure_future(rollouts.generate(ask("a", [5, 3], max_new_tokens=30_000)))
            asyncio.get_running_loop().call_later(0.1, os.kill, before[1], signal.SIGKILL)
            killed = r"^rank 1 failed in phase .* killed by SIGKILL"
            with pytest.raises(RankFailure, match=killed) as failure:
                await groups.until_failure(asyncio.sleep(600))
            with pytest.raises(RankFailure) as later:
                await groups.executor.call(0, pid)
            assert later.value is failure.value, "all train ranks are lost with it"
            assert groups.can_restart_after(failure.value)
            endless.cancel()  # as the loop does with all its requests
            assert (await groups.executor.call(2, stats)).running == 1
            await groups.restart_trainers(layout)
            assert at_restart == [(0, -1)], "the sampler has no requests and no valid weights"
            after = await _pids(groups)
            assert after[2] == before[2] and not {*after[:2]} & {*before[:2]}
            assert await step(trainer) == norm, "they have the folder's model again, and a process group"
            await sync_weights(trainer, rollouts, layout)
            turn = await rollouts.generate(ask("a", [5, 3]))
            assert len(turn.output_ids) == 16

    _run(body)


def test_after_a_sync_that_a_lost_rank_interrupted_the_next_full_sync_makes_samplers_usable(tmp_path):
    """With the checkpoint's version, which is lower than the sampler's; and earlier requests are dropped, so
    that the same requests can be sent again."""
    context = [5, 3, 9, 4]

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=1) as groups:
            trainer, rollouts, layout = await synced(groups)
            async with Checkpoints(tmp_path, trainer, 1, print) as checkpoints:
                first = await rollouts.generate(ask("a", context, seed=7))
                await checkpoints.save(1, {})
            for _ in range(2):
                await step(trainer)
                await sync_weights(trainer, rollouts, layout)
            endless = asyncio.ensure_future(rollouts.generate(ask("b", context, max_new_tokens=20_000)))
            await asyncio.sleep(0.3)
            endless.cancel()
            before = await _pids(groups)
            await groups.executor.call(1, kill_at_the_first_transfer, before[0])
            with pytest.raises(RankFailure, match="rank 0 failed in phase 'sync'"):
                await sync_weights(trainer, rollouts, layout)
            with pytest.raises(StaleWeightsError):
                await rollouts.generate(ask("c", context))
            await groups.restart_trainers(layout)
            ((_, folder),) = states(tmp_path / "checkpoints")
            await trainer.load(str(folder), version=0)
            await sync_weights(trainer, rollouts, layout)
            again = await rollouts.generate(ask("b", context, seed=7))
            assert again.output_ids.tolist() == first.output_ids.tolist()
            assert np.array_equal(again.logprobs, first.logprobs) and set(again.versions) == {0}
            assert (await _pids(groups))[1] == before[1]

    _run(body)


@pytest.mark.slow
def test_ranks_that_are_lost_while_they_start_can_be_started_again(tmp_path):
    """The rank that had started is ended with the other."""

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=2) as groups:
            assert groups.trainer is not None
            before = await _pids(groups)
            os.kill(before[0], signal.SIGKILL)
            with pytest.raises(RankFailure):
                await groups.trainer.memory()
            spawn, left = groups.executor._spawn, itertools.count()

            async def failing(spec: Any) -> Any:
                if next(left) == 1:
                    raise RankFailure(spec.rank, "start", "its machine is gone")
                return await spawn(spec)

            groups.executor._spawn = failing
            with pytest.raises(RankFailure, match="its machine is gone"):
                await groups.restart_trainers(None)
            with pytest.raises(RankFailure, match="its machine is gone"):
                await groups.executor.call(0, pid)
            await groups.restart_trainers(None)
            assert await step(groups.trainer) > 0

    _run(body)


def test_a_sampler_that_dies_while_it_is_idle_is_replaced_at_once(tmp_path):
    """And gets its weights before its first request, without a sync of the others. If it may not be replaced, the
    wait ends."""

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=1, max_restarts=1) as groups:
            _, rollouts, _ = await synced(groups)
            assert await groups.executor.call(0, engines_of) == (["policy"], False)
            assert await groups.executor.call(1, engines_of) == ([], True)
            back, notes = asyncio.Event(), list[str]()

            def note(text: str) -> None:
                notes.append(text)
                if "was replaced" in text:
                    back.set()

            rollouts.replacement.note = note
            before = await _pids(groups)
            os.kill(before[1], signal.SIGKILL)
            await groups.until_failure(back.wait())
            turn = await rollouts.generate(ask("a", [5, 3, 9]))
            assert {*turn.versions} == {0} and rollouts.num_redone == 0
            after = await _pids(groups)
            assert after[0] == before[0] and after[1] != before[1]
            os.kill(after[1], signal.SIGKILL)
            with pytest.raises(RankFailure, match="rank 1 failed") as failure:
                await groups.until_failure(asyncio.sleep(600))
            assert "ranks replaced so far 1, cluster.max_restarts 1" in "".join(failure.value.__notes__)
            assert not groups.can_restart_after(failure.value)

    _run(body)


@pytest.mark.slow
def test_a_new_process_gets_no_command_before_it_has_started_also_after_an_interrupted_restart(tmp_path):
    """Such as the abort of a request to its former process: it has no sampler yet."""

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=1) as groups:
            executor = groups.executor
            executor._on_lost = lambda failure: None  # no replacement but the ones below
            os.kill((await _pids(groups))[1], signal.SIGKILL)
            with pytest.raises(RankFailure, match="killed by SIGKILL"):
                await executor.call(1, RankWorker.abort, [])
            former = executor._ranks[1]
            for interrupted in (True, False):
                restart = asyncio.create_task(executor.restart([1]))
                while executor._ranks[1] is former:
                    await asyncio.sleep(0.01)
                former = executor._ranks[1]
                with pytest.raises(RankFailure, match="killed by SIGKILL"):
                    await executor.call(1, RankWorker.abort, [])
                if interrupted:
                    restart.cancel()
                    await asyncio.gather(restart, return_exceptions=True)
                    assert executor.failure_of(1) is not None, "it has to be restarted"
            await restart
            assert executor.failure_of(1) is None
            assert await executor.call(1, RankWorker.abort, []) == 0

    _run(body)


def raise_in_generate(worker: RankWorker) -> None:
    async def generate(self: RankWorker, request: Any) -> None:
        raise KeyError("no such layer")

    RankWorker.generate = generate  # type: ignore[method-assign, assignment]


def test_an_exception_in_a_sampler_ends_the_run_and_nothing_is_replaced(tmp_path):
    """It would be raised again in a new rank."""
    notes: list[str] = []

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=1) as groups:
            _, rollouts, _ = await synced(groups)
            rollouts.replacement.note = notes.append
            await groups.executor.call(1, raise_in_generate)
            await rollouts.generate(ask("a", [5, 3, 9]))

    with pytest.raises(RankFailure, match="rank 1 failed in phase 'rollout': raised KeyError"):
        _run(body)
    assert notes == [], "a note that the rank is replaced would be wrong"


@pytest.mark.slow
def test_a_new_sampler_waits_for_the_sync_while_the_trainer_is_between_two_versions(tmp_path):
    """After an optimizer step the trainer's weights are no longer those of its version."""

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=1) as groups:
            trainer, rollouts, layout = await synced(groups)
            await step(trainer)
            os.kill((await _pids(groups))[1], signal.SIGKILL)
            asked = asyncio.ensure_future(rollouts.generate(ask("a", [5, 3, 9])))
            while rollouts.replacement.num_restarts == 0 or rollouts.replacement.lock.locked():
                await asyncio.sleep(0.05)
            assert not asked.done()
            await sync_weights(trainer, rollouts, layout)
            assert {*(await asked).versions} == {1}

    _run(body)


@pytest.mark.slow
def test_a_sampler_that_is_lost_twice_gets_no_weights_of_an_unfinished_version(tmp_path):
    """The trainer makes a step between the two replacements, so its weights are not those of its version."""

    async def body() -> None:
        async with running(tmp_path, num_train_ranks=1) as groups:
            trainer, rollouts, layout = await synced(groups)
            moving: list[asyncio.Future[float]] = []

            def lose_it_again() -> None:
                groups.executor._ranks[1].process.kill()
                moving.append(asyncio.ensure_future(step(trainer)))

            _when(groups, RankWorker.sync_state, lose_it_again)
            os.kill((await _pids(groups))[1], signal.SIGKILL)
            asked = asyncio.ensure_future(rollouts.generate(ask("a", [5, 3, 9])))
            while rollouts.replacement.num_restarts < 2 or rollouts.replacement.lock.locked():
                await asyncio.sleep(0.05)
            await moving[0]
            await asyncio.sleep(0.5)
            assert not asked.done()
            await sync_weights(trainer, rollouts, layout)
            assert {*(await asked).versions} == {1}

    _run(body)


def die_when_a_sync_begins(worker: RankWorker) -> None:
    """Before it has joined the broadcast group; the other ranks wait for it."""

    async def sync(self: RankWorker, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    RankWorker.sync = sync  # type: ignore[method-assign, assignment]


@pytest.mark.slow
def test_a_sampler_that_dies_while_a_broadcast_group_forms_is_replaced_and_a_new_group_forms(tmp_path):
    """The ranks that wait for it fail first; they are not the cause and are not replaced. The new group has
    another address."""

    async def body() -> None:
        more = {"sync_transport": "broadcast", "sync_deadline_s": 16.0}
        async with running(tmp_path, num_train_ranks=1, num_rollout_ranks=2, **more) as groups:
            trainer, rollouts, call = groups.trainer, groups.rollouts, groups.executor.call
            assert trainer is not None and rollouts is not None
            layout = await trainer.layout(20_000)
            await rollouts.reconcile(layout)
            before, connection_ids = await _pids(groups), list[tuple[int, str]]()

            async def observed(rank: int, method: Any, *args: Any) -> Any:
                if method is RankWorker.sync:
                    connection_ids.append((rank, args[0].connection_id))
                return await call(rank, method, *args)

            await call(2, die_when_a_sync_begins)
            groups.executor.call = observed  # type: ignore[method-assign]
            acks = await sync_weights(trainer, rollouts, layout)
            assert [(ack.version, ack.wire, ack.read_back) for ack in acks] == [(0, True, True)] * 2
            assert (rollouts.replacement.num_restarts, rollouts.num_failed_syncs) == (1, 1)
            after = await _pids(groups)
            assert after[:2] == before[:2] and after[2] != before[2]
            assert [rank for rank, _ in connection_ids] == [0, 1, 2] * 2
            first, second = ({found for _, found in part} for part in (connection_ids[:3], connection_ids[3:]))
            assert len(first) == len(second) == 1 and first != second
            turns = [await call(rank, RankWorker.generate, ask("a", [5, 3, 9, 4], seed=7)) for rank in (1, 2)]
            assert turns[0].output_ids.tolist() == turns[1].output_ids.tolist()
            assert np.array_equal(turns[0].logprobs, turns[1].logprobs) and set(turns[1].versions) == {0}
            await step(trainer)
            await sync_weights(trainer, rollouts, layout)
            assert {found for _, found in connection_ids[6:]} == second, "the new group is reused"

    _run(body)

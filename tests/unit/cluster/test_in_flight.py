"""What happens to running turns when new weights arrive, by policy; each token has its version."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_lost_trainers import running, stats, step, synced
from tiny_engines import ask

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.weight_sync import sync_weights

pytestmark = pytest.mark.timeout(300)  # ranks start slowly on a machine that does much else
CONTEXT, LENGTH = [5, 3, 9, 4], 240


@pytest.mark.parametrize("policy", ["keep", "abort", "restart"])
def test_running_turns_are_kept_aborted_or_restarted_at_a_sync(tmp_path, policy):
    async def body() -> None:
        async with running(tmp_path, num_train_ranks=1) as groups:
            trainer, rollouts, layout = await synced(groups)
            rollouts.in_flight = policy
            call, aborts = groups.executor.call, []

            async def counting(rank, method, *args):
                aborts.extend([method] * (method is RankWorker.abort))
                return await call(rank, method, *args)

            groups.executor.call = counting
            for attempt in range(20):  # on a busy machine the turn may be over before the sync begins
                await step(trainer)
                asked = ask(f"turn {attempt}", CONTEXT, max_new_tokens=LENGTH, ignore_eos=True, seed=attempt)
                before = (await call(1, stats)).decode_tokens
                turn = asyncio.ensure_future(rollouts.generate(asked))
                while (await call(1, stats)).decode_tokens < before + 3:
                    await asyncio.sleep(0)
                old, under_way = trainer.version, not turn.done()
                await sync_weights(trainer, rollouts, layout)
                after = await rollouts.generate(ask(f"after {attempt}", CONTEXT))
                versions = (await turn).versions
                assert len(versions) == LENGTH and (np.diff(versions) >= 0).all() and set(after.versions) == {old + 1}
                if under_way and set(versions) != {old}:
                    break
            assert bool(aborts) == (policy != "keep")
            expected = {old + 1} if policy == "restart" else {old, old + 1}
            assert set(versions) == expected

    asyncio.run(asyncio.wait_for(body(), 250))

"""The devices that ranks see under a real Ray on this machine, which believes that it has GPUs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_specs import worker_spec

from meshrl.cluster.actors import RankWorker
from meshrl.core.errors import RankFailure


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = pytest.importorskip("ray", reason="ray is not installed: pip install 'meshrl[ray]'")
    monkeypatch.delenv("MESHRL_DEVICE", raising=False)
    module.init(address="local", num_cpus=2, num_gpus=3, include_dashboard=False, object_store_memory=80 << 20)
    yield module
    module.shutdown()


def devices(worker: RankWorker) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def sleep(worker: RankWorker) -> None:
    time.sleep(60)


@pytest.mark.slow
def test_each_rank_sees_the_devices_of_all_ranks_of_its_machine(ray: Any):
    """A server of two ranks needs the devices of both. Ray would let each rank see one, and the server could not start.
    The third GPU, which this run has not reserved, belongs to others. The same holds for a replaced rank."""
    from meshrl.cluster.ray import RayExecutor

    specs = [worker_spec(rank=rank, num_train_ranks=0, num_rollout_ranks=2) for rank in range(2)]

    async def main() -> list[str]:
        executor = RayExecutor(specs, None)
        try:
            await executor.start()
            seen = [await executor.call(rank, devices) for rank in range(2)]
            ray.kill(executor._actors[1])
            with pytest.raises(RankFailure):
                await executor.call(1, sleep)
            await executor.restart([1])
            return [*seen, await executor.call(1, devices)]
        finally:
            await executor.close()

    assert asyncio.run(main()) == ["0,1"] * 3

"""What becomes of a start while Ray does not grant the machines.

Ray is played by a stand-in that says of a cluster what a real one says: a machine that has gone stays in the list and
is no longer alive, its placement group stays pending, and whoever waits for one that is removed gets an error.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from tiny_specs import worker_spec

from meshrl.core.errors import ConfigError, RankFailure

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'meshrl[ray]'")


class Cluster:
    """Two machines of one core each, which another run holds."""

    def __init__(self) -> None:
        self.alive = {"10.0.0.1": True, "10.0.0.2": True}
        self.asked: list[list[dict[str, float]]] = []
        self.granted: Future[None] = Future()
        self.given_back: list[Cluster] = []

    def nodes(self) -> list[dict[str, Any]]:
        facts = {"Resources": {"CPU": 1.0, "memory": 1e9}}
        return [{"NodeManagerAddress": ip, "Alive": alive, **facts} for ip, alive in self.alive.items()]

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Cluster:
        self.asked.append(bundles)
        return self

    def ready(self) -> Cluster:
        return self

    def future(self) -> Future[None]:
        return self.granted

    def remove_placement_group(self, group: Cluster) -> None:
        self.given_back.append(group)
        granted, self.granted = self.granted, Future()  # nobody but who waits has it
        granted.set_exception(ray.exceptions.TaskPlacementGroupRemoved())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The stand-in in Ray's place, joined already; and an executor with less patience."""
    from meshrl.cluster import ray as executor

    cluster = Cluster()
    monkeypatch.setattr(executor, "_JOINING_S", 0.3)
    monkeypatch.setattr(executor, "_POLL_S", 0.05)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "nodes", cluster.nodes)
    for name in ("placement_group", "remove_placement_group"):
        monkeypatch.setattr(executor, name, getattr(cluster, name))
    return cluster


def start(cluster: Cluster, start_deadline_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Start a rank on each machine, as a run does; `meanwhile` comes once the machines are asked for."""
    from meshrl.cluster.ray import RayExecutor

    deadlines = {"start": start_deadline_s}
    specs = [worker_spec(rank=rank, num_train_ranks=2, nodes=2, deadlines=deadlines) for rank in range(2)]

    async def main() -> None:
        executor = RayExecutor(specs, "10.0.0.1:6379")
        starting = asyncio.ensure_future(executor.start())
        try:
            while not cluster.asked and not starting.done():
                await asyncio.sleep(0.01)
            meanwhile()
            await asyncio.wait_for(starting, 30)
        finally:
            await executor.close()
            await asyncio.sleep(0)  # what the removal says arrives

    asyncio.run(main())


def test_a_machine_that_goes_while_ray_grants_them_ends_the_start_long_before_its_deadline(cluster, caplog):
    """P26: who waits for a machine that has gone would wait for an hour. What was asked for is given back, in peace."""

    def lose_one() -> None:
        cluster.alive["10.0.0.2"] = False

    with pytest.raises(ConfigError, match=r"needs 2 machines with 1 CPU each .* 1 such: 10\.0\.0\.1 has 1 CPU$"):
        start(cluster, 3600.0, meanwhile=lose_one)
    assert cluster.asked == [[{"CPU": 1}] * 2] and cluster.given_back == [cluster]
    gc.collect()  # a future that nobody heard says so when it goes
    assert caplog.messages == [], "an error that nobody asked for is told"


def test_machines_that_others_hold_are_waited_for_until_the_deadline_of_the_start(cluster):
    with pytest.raises(RankFailure, match=r"not granted 2 machines with 1 CPU within 0\.6 s; other runs have them"):
        start(cluster, 0.6)
    assert cluster.given_back == [cluster]

"""What happens to a start while Ray does not grant the machines.

A fake Ray behaves like a real cluster: a lost machine remains in the list and is no longer alive, its placement group
remains pending, and a wait for a placement group that is removed raises an error.
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
    """Two machines with one core each; another run uses them."""

    def __init__(self) -> None:
        self.alive = {"10.0.0.1": True, "10.0.0.2": True}
        self.asked: list[list[dict[str, float]]] = []
        self.granted: Future[None] = Future()
        self.given_back: list[Cluster] = []
        self.num_left = 0  # how often the connection to the cluster was closed

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

    def shutdown(self) -> None:
        self.num_left += 1

    def remove_placement_group(self, group: Cluster) -> None:
        self.given_back.append(group)
        granted, self.granted = self.granted, Future()  # only the waiting task refers to the old one
        granted.set_exception(ray.exceptions.TaskPlacementGroupRemoved())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The fake cluster in place of Ray, already joined; and an executor with shorter time limits."""
    from meshrl.cluster import ray as executor

    cluster = Cluster()
    monkeypatch.setattr(executor, "_JOINING_S", 0.3)
    monkeypatch.setattr(executor, "_POLL_S", 0.05)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "nodes", cluster.nodes)
    monkeypatch.setattr(ray, "shutdown", cluster.shutdown)
    for name in ("placement_group", "remove_placement_group"):
        monkeypatch.setattr(executor, name, getattr(cluster, name))
    return cluster


def start(cluster: Cluster, start_deadline_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Start a rank on each machine, like a run; `meanwhile` is called when the machines have been requested."""
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
            await asyncio.sleep(0)  # the error of the removal arrives

    asyncio.run(main())


def test_a_machine_that_is_lost_while_ray_grants_machines_ends_the_start_long_before_its_deadline(cluster, caplog):
    """Else the run would wait for a lost machine for an hour. The placement group is removed without errors."""

    def lose_one() -> None:
        cluster.alive["10.0.0.2"] = False

    with pytest.raises(
        ConfigError, match=r"needs 2 machines with 1 CPU each.* of them: 10\.0\.0\.1 has 1 CPU\. Add machines"
    ):
        start(cluster, 3600.0, meanwhile=lose_one)
    assert cluster.asked == [[{"CPU": 1}] * 2] and cluster.given_back == [cluster]
    gc.collect()  # a future whose exception was never retrieved logs that when it is collected
    assert caplog.messages == [], "an exception was never retrieved"


def test_a_run_waits_for_machines_of_other_runs_until_the_deadline_of_the_start(cluster):
    with pytest.raises(RankFailure, match=r"not granted 2 machines with 1 CPU .*other work probably uses them"):
        start(cluster, 0.6)
    assert cluster.given_back == [cluster]


@pytest.mark.parametrize(("is_joined", "num_left"), [(True, 0), (False, 1)])
def test_a_run_leaves_the_cluster_only_if_it_has_joined_it_itself(is_joined, num_left, cluster, monkeypatch):
    """Else the caller's own tasks and actors would lose their connection at the end of the run."""
    joined = [is_joined]
    monkeypatch.setattr(ray, "is_initialized", lambda: joined[0])
    monkeypatch.setattr(ray, "init", lambda **options: joined.__setitem__(0, True))
    with pytest.raises(RankFailure, match="not granted"):
        start(cluster, 0.2)
    assert cluster.num_left == num_left


def test_the_ranks_have_the_order_of_their_machines_addresses_after_those_of_the_controllers_machine(monkeypatch):
    """A bundle is known by its index, in whatever order Ray lists the bundles."""
    from meshrl.cluster import ray as executor

    addresses = {"a": "10.0.0.3", "b": "10.0.0.2", "c": "10.0.0.1"}
    nodes = [{"NodeID": name, "NodeManagerAddress": address} for name, address in addresses.items()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    table = {"bundles_to_node_id": {2: "a", 0: "b", 1: "c"}}
    monkeypatch.setattr(executor, "placement_group_table", lambda group: table)
    group: Any = None
    assert executor._in_order(group, "10.0.0.2") == [0, 1, 2]
    assert executor._in_order(group, "10.0.0.3") == [2, 1, 0]

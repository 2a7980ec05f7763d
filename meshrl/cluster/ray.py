"""Executor `ray`: Ray finds the machines and starts a node agent for each rank there; the rest is in cluster/remote.py.

One placement group reserves all resources of a run, or none: one bundle for each machine, on different machines
(STRICT_SPREAD), with an accelerator or else a CPU core for each of its ranks. No data goes through Ray's object store:
samples go from the controller to the rank over its channel, gradients and weights from rank to rank.

Only this file imports ray, and it is imported only when `cluster.executor` is `ray`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.node_agent import NodeAgent, variables
from meshrl.cluster.remote import AgentConnection, RemoteExecutor
from meshrl.core.device import VISIBLE_DEVICES, cluster_resources
from meshrl.core.errors import ConfigError, RankFailure

_JOINING_S = 15.0  # a new machine may need this long to join the cluster
_POLL_S = 5.0  # while Ray has not granted the machines
_STORE_BYTES = 80 << 20  # close to Ray's minimum: the object store stays empty


class RayExecutor(RemoteExecutor):
    """Ranks on the machines of a Ray cluster."""

    def __init__(self, specs: Sequence[WorkerSpec], address: str | None):
        """address: host:port of the cluster; `local`: a cluster for this run alone; None: RAY_ADDRESS, else the cluster
        that runs on this machine, else (for a run on one machine) `local`."""
        super().__init__(specs)
        self._address = address
        self._joined = False
        self._group: PlacementGroup | None = None
        self._bundles: list[int] = []  # of the machines, in the order of the ranks
        self._actors: dict[int, Any] = {}  # by rank
        self._served: dict[int, asyncio.Future[int]] = {}
        self._controller = ("", 0)
        self._need: dict[str, float] = {}  # of one rank
        self._devices: dict[int, dict[str, str]] = {}  # by bundle: variables by which its ranks see its devices

    async def find_machines(self) -> str:
        """Join the cluster and wait until Ray has granted the placement group."""
        await asyncio.to_thread(self._join)  # in a thread, Ray leaves this process's signal handlers alone
        spec = self.specs[0]
        has = ray.cluster_resources()  # a CPU core, and an accelerator if the cluster has one that this run can use
        accelerator = next((name for name in cluster_resources() if has.get(name, 0) > 0), None)
        self._need = {"CPU": 1, **({accelerator: 1} if accelerator else {})}
        bundle = {name: count * spec.num_local_ranks for name, count in self._need.items()}
        await self._wait_for_machines(bundle)
        strategy = "STRICT_SPREAD" if spec.nodes > 1 else "STRICT_PACK"
        self._group = placement_group([bundle] * spec.nodes, strategy=strategy)
        limit = spec.deadline_s("start")
        granted, until = asyncio.wrap_future(self._group.ready().future()), time.monotonic() + limit
        granted.add_done_callback(lambda end: end.cancelled() or end.exception())  # a removed group sets an exception
        while not (await asyncio.wait([granted], timeout=_POLL_S))[0]:
            await self._wait_for_machines(bundle)  # Ray notices a dead machine only after some time
            if time.monotonic() > until:
                cause = f"Ray has not granted {spec.nodes} machines with {_listed(bundle)} within {limit:g} s"
                raise RankFailure(0, "start", f"{cause}: the cluster has them, but other work probably uses them")
        await granted
        here = ray.util.get_node_ip_address()
        self._bundles = _in_order(self._group, here)
        return here

    def _join(self) -> None:
        if ray.is_initialized():  # by the caller, which also ends it
            return
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._joined = True
        if self._address != "local":
            try:
                ray.init(address=self._address or "auto", logging_level=logging.ERROR)
                return
            except ConnectionError as error:
                if self._address is not None or self.specs[0].nodes > 1 or "RAY_ADDRESS" in os.environ:
                    address = self._address or os.environ.get("RAY_ADDRESS") or "null, and no Ray runs on this machine"
                    raise ConfigError(
                        f"cluster.address is {address}: no Ray cluster answers there ({error}). Start one with "
                        "`ray start --head`, and join it on every other machine with `ray start --address HOST:6379`"
                    ) from error
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, self.specs[0].num_ranks),
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            logging_level=logging.ERROR,
        )

    async def _wait_for_machines(self, bundle: dict[str, float]) -> None:
        """Wait until enough machines have joined."""
        until, nodes = time.monotonic() + _JOINING_S, self.specs[0].nodes
        while True:
            alive = [node for node in ray.nodes() if node["Alive"]]
            fit = [n for n in alive if all(n["Resources"].get(name, 0) >= count for name, count in bundle.items())]
            if len(fit) >= nodes:
                return
            if time.monotonic() > until or self._address == "local":
                has = "; ".join(f"{n['NodeManagerAddress']} has {_listed(n['Resources'])}" for n in alive)
                raise ConfigError(
                    f"the run needs {nodes} machines with {_listed(bundle)} each (cluster.nodes, "
                    f"cluster.num_train_ranks, cluster.num_rollout_ranks), but Ray has {len(fit)} of them: {has}. "
                    "Add machines, or lower these keys"
                )
            await asyncio.sleep(0.5)

    async def start_agents(self, address: tuple[str, int]) -> set[int]:
        """An actor for each rank, in the bundle of its machine."""
        self._controller = address
        for spec in self.specs:
            self._start_agent(spec)
        return {spec.rank for spec in self.specs}

    async def await_agents(self, ranks: Sequence[int]) -> None:
        await super().await_agents(ranks)
        for bundle in {self._bundle_of(self.specs[rank]) for rank in ranks}:
            self._devices[bundle] = await self._devices_in(bundle)

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        return super().environment(spec) | self._devices[self._bundle_of(spec)]

    async def _devices_in(self, bundle: int) -> dict[str, str]:
        """The variables by which a process sees all devices of a bundle. A server uses the devices of several ranks,
        so the ranks of a machine see all of them, as under the other executors; no agent reserves one for its rank."""
        need = {name: count * self.specs[0].num_local_ranks for name, count in self._need.items() if name != "CPU"}
        if not need:
            return {}
        task: Any = ray.remote(variables).options(max_retries=0, **self._options(bundle, {"CPU": 0, **need}))
        devices: dict[str, str] = await asyncio.wrap_future(task.remote(VISIBLE_DEVICES).future())
        return devices

    def _options(self, bundle: int, need: dict[str, float]) -> dict[str, Any]:
        """Options of an actor or a task that takes these resources of a bundle."""
        assert self._group is not None, "find_machines comes first"
        return {
            "num_cpus": need["CPU"],
            "num_gpus": need.get("GPU", 0),
            "resources": {name: count for name, count in need.items() if name not in ("CPU", "GPU")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        }

    def _bundle_of(self, spec: WorkerSpec) -> int:
        return self._bundles[spec.rank // spec.num_local_ranks]

    def _start_agent(self, spec: WorkerSpec) -> None:
        options = self._options(self._bundle_of(spec), {"CPU": self._need["CPU"]})
        actor: Any = ray.remote(NodeAgent).options(max_restarts=0, **options)
        actor = self._actors[spec.rank] = actor.remote(self._controller, self.token, spec.rank)
        served = self._served[spec.rank] = asyncio.wrap_future(actor.serve.remote().future())
        served.add_done_callback(partial(self._agent_ended, spec.rank))

    async def replace_agent(self, rank: int, lost: AgentConnection) -> None:
        """Start another actor in the bundle of the lost one; Ray moves the bundle when its machine is lost."""
        self._served[rank].cancel()  # the end of the old actor does not concern the new one
        ray.kill(self._actors[rank])
        lost.end(1)
        self._expect("control", rank)
        self._start_agent(self.specs[rank])
        await self.await_agents([rank])

    def _agent_ended(self, rank: int, served: asyncio.Future[int]) -> None:
        """Report an actor that fails before its node agent connects. A later failure closes the agent's connection."""
        if self._served.get(rank) is not served:
            return  # another actor has taken its place
        if not served.cancelled() and (error := served.exception()) is not None:
            awaited = self._awaited["control", rank]  # by the controller, which waits for a connection
            if not awaited.done():
                awaited.set_exception(RankFailure(rank, "start", f"its actor has failed: {error}"))

    async def close(self) -> None:
        """End all ranks and release the machines."""
        await super().close()
        for served in self._served.values():
            served.cancel()
        if ray.is_initialized():
            await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        if self._joined:
            ray.shutdown()


def _in_order(group: PlacementGroup, here: str) -> list[int]:
    """The bundles in the order of their machines' addresses, the controller's machine first: a restarted run has its
    ranks on the same machines, and rank 0 is close to the controller."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    machines = placement_group_table(group)["bundles_to_node_id"]
    return sorted(machines, key=lambda bundle: (addresses[machines[bundle]] != here, addresses[machines[bundle]]))


def _listed(resources: dict[str, float]) -> str:
    """Text for messages, without memory and without the resource names that Ray gives to nodes."""
    counts = {name: n for name, n in resources.items() if ":" not in name and "memory" not in name}
    return " and ".join(f"{n:g} {name}" for name, n in sorted(counts.items()))

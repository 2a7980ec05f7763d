"""Executors for several machines: the ranks of `processes`, each started and monitored by a node agent on its machine.

A launcher (Ray, torchrun) starts a NodeAgent for each rank, with the controller's address and the run's token.
Everything else is as on one machine: the same rank process, the same channel (over TCP, directly to the rank), the same
diagnosis of failures. The ranks' collectives go from rank to rank.

Torchrun, or srun with the same environment variables, has started every process of the run at once. Rank 0's process is
the controller, and starts rank 0 as its child. The other processes are the node agents of their ranks: they read the
controller's address from torchrun's own store, connect, and serve until the controller ends them. Every process that
reaches the store can read and write it, so the run's token is not in it, and the address has a proof
(process/run_token.py). They read and check their config, but the ranks get the controller's config.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from meshrl.cluster.executor import WorkerSpec, ignored
from meshrl.cluster.node_agent import AgentConnection, Hello, NodeAgent, RemoteProcess
from meshrl.cluster.processes import ProcessExecutor, RankConnection
from meshrl.cluster.worker import RANK, common_environment
from meshrl.config.rollout import split_replica
from meshrl.core.device import SETTINGS, VISIBLE_DEVICES
from meshrl.core.errors import ConfigError, RankFailure
from meshrl.parallel.exchange import listening_store
from meshrl.process.connect import LOOPBACK, Listener, interface_of
from meshrl.process.run_token import VARIABLE, RunToken, read_announcement
from meshrl.process.spawn import ignore_interrupts

PASSED = (
    *("GLOO_", "HF_", "MESHRL_", "NCCL_", "OMP_", "PYTORCH_", "SGLANG_", "TOKENIZERS_", "TORCH_", "TRITON_", "VLLM_"),
    *SETTINGS,
)
"""Environment variables of the controller with these prefixes are set in every rank, unless its machine sets them."""
_NOT_PASSED = (VARIABLE, *VISIBLE_DEVICES)  # the connection is not encrypted; devices belong to one machine
_POLL_S = 1.0
_OTHER_FILES = 512  # that this process opens, in addition to the two sockets of each rank


class RemoteExecutor(ProcessExecutor, ABC):
    """The common part of `ray` and `torchrun`. These find the controller's address and start the node agents."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        super().__init__(specs)
        self.token = secrets.token_bytes(32)
        self._agents: dict[int, AgentConnection] = {}
        self._listener: Listener | None = None
        self._host = ""  # address of this machine for the machines of the ranks
        self._awaited: dict[tuple[str, int], asyncio.Future[tuple[socket.socket, Hello]]] = {}

    @abstractmethod
    async def find_machines(self) -> str:
        """Reserve the ranks' resources. Returns the address at which their machines reach this one."""

    @abstractmethod
    async def start_agents(self, address: tuple[str, int]) -> set[int]:
        """Start `NodeAgent(address, self.token, rank).serve()` for each rank that is returned."""

    async def replace_agent(self, rank: int, lost: AgentConnection) -> None:
        """Start another node agent for a lost one."""
        raise RankFailure(rank, "start", f"{lost.lost}, on {lost.node}")

    async def start(
        self, on_lost: Callable[[RankFailure], None] = ignored, on_batches: Callable[[int], None] = ignored
    ) -> None:
        """Find the machines, start a node agent for each rank, then the ranks."""
        loop = asyncio.get_running_loop()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < (needed := 2 * len(self.specs) + _OTHER_FILES):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
        self._host = await self.find_machines()
        for spec in self.specs:
            self._expect("control", spec.rank)
        self._listener = Listener(
            self._host, self.token, lambda *agent: loop.call_soon_threadsafe(self._connected, *agent)
        )
        await self.await_agents(sorted(await self.start_agents(self._listener.address)))
        await super().start(on_lost, on_batches)

    def _new_store(self) -> None:
        self._store = listening_store(self._host)
        self._rendezvous = self._host, self._store.port

    async def await_agents(self, ranks: Sequence[int]) -> None:
        """Wait until the node agents of these ranks have connected."""
        for rank in ranks:
            self._agents[rank] = AgentConnection(*await self._connection("control", rank))

    def _expect(self, kind: str, rank: int) -> None:
        self._awaited[kind, rank] = asyncio.get_running_loop().create_future()

    async def _connection(
        self, kind: str, rank: int, agent: AgentConnection | None = None
    ) -> tuple[socket.socket, Hello]:
        """Wait for a connection from a rank's machine. agent: raise a failure if this agent is lost meanwhile."""
        awaited, limit = self._awaited[kind, rank], self.specs[rank].deadline_s("start")
        until = time.monotonic() + limit
        while not (await asyncio.wait([awaited], timeout=_POLL_S))[0]:
            if agent is not None and agent.lost is not None:
                raise RankFailure(rank, "start", f"{agent.lost}, on {agent.node}")
            if time.monotonic() > until:
                cause = f"its machine has not connected within {limit:g} s"
                raise RankFailure(rank, "start", f"{cause}; is the controller's address reachable from there?")
        return awaited.result()

    def _connected(self, sock: socket.socket, hello: Hello) -> None:
        awaited = self._awaited.get((hello.kind, hello.rank))
        if awaited is None or awaited.done():
            sock.close()  # a second node agent of one rank
        else:
            awaited.set_result((sock, hello))

    async def _spawn(self, spec: WorkerSpec) -> RankConnection:
        if spec.rank not in self._agents:
            return await super()._spawn(spec)
        if self._agents[spec.rank].lost is not None:
            await self.replace_agent(spec.rank, self._agents[spec.rank])
        agent = self._agents[spec.rank]
        number = next(agent.numbers)
        self._expect("channel", spec.rank)
        variables = os.environ.items()
        passed = {name: value for name, value in variables if name.startswith(PASSED) and name not in _NOT_PASSED}
        agent.send(NodeAgent.spawn, number, RANK, self.environment(spec), passed)
        sock, _ = await self._connection("channel", spec.rank, agent)
        return self._attach(spec, RemoteProcess(agent, number), sock, agent.ip)

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """Environment variables of a rank's process, with torchrun's names."""
        return {
            **common_environment(),
            "RANK": str(spec.rank),
            "WORLD_SIZE": str(spec.num_ranks),
            "LOCAL_RANK": str(spec.local_rank),
            "LOCAL_WORLD_SIZE": str(spec.num_local_ranks),
            "MASTER_ADDR": self._host,
            "MASTER_PORT": str(self._store.port),
        }

    async def close(self) -> None:
        """End all ranks and node agents, and close the listener and the store."""
        failed = any(rank.lost is not None and self.specs[i].trains for i, rank in self._ranks.items())
        failed = failed or self._failure is not None
        await super().close()
        for agent in self._agents.values():
            agent.end(1 if failed else 0)
        if self._listener is not None:
            self._listener.close()


_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether torchrun started this process as one of several of a run."""
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def is_restarted() -> bool:
    """Whether torchrun (--max-restarts) or Slurm (a requeue) has started this run again, and not its user."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def is_follower() -> bool:
    """Whether this process is the node agent of a rank, and another process is the controller."""
    return is_launched() and int(os.environ["RANK"]) > 0


def follow(folder: Path) -> int:
    """Be the node agent of this process's rank until the run ends. Returns the exit code. folder: run.folder.

    Waits for: the controller, which publishes its address when it has loaded its config. Ctrl-C, SIGTERM and SIGHUP
    reach all processes of a run and the controller handles them, so this process ignores them once it has the address.
    """
    address, token = read_announcement(_launch_store().get(_key()), _key(), folder)
    ignore_interrupts()
    return NodeAgent(address, token, int(os.environ["RANK"])).serve()


class TorchrunExecutor(RemoteExecutor):
    """The controller's side, in the process of rank 0."""

    def __init__(self, specs: Sequence[WorkerSpec], folder: Path):
        """folder: run.folder, in which the run's token is made."""
        started, asked = int(os.environ["WORLD_SIZE"]), specs[0].num_ranks
        if started != asked:
            raise ConfigError(
                f"torchrun started {started} processes, but cluster.num_train_ranks + cluster.num_rollout_ranks = "
                f"{asked}. Make them equal: nnodes x nproc-per-node is the number of ranks"
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        rollout, num_train = specs[0].rollout, specs[0].num_train_ranks
        if rollout is not None and (text := split_replica(rollout, num_train, asked, local)):
            raise ConfigError(f"torchrun started {local} processes on this machine, but {text}")
        super().__init__([dataclasses.replace(spec, nodes=started // local) for spec in specs])
        self._launch_store: dist.Store | None = None
        self.can_restart_trainers = False  # torchrun does this with its --max-restarts
        self._run_token = RunToken(folder)  # last: from now on `close` has to remove its file
        self.token = self._run_token.key

    async def find_machines(self) -> str:
        """There is nothing to find: torchrun runs on the machines, and rank 0 is on the machine with the address
        MASTER_ADDR."""
        return LOOPBACK if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] else os.environ["MASTER_ADDR"]

    async def start_agents(self, address: tuple[str, int]) -> set[int]:
        """Publish the address: the agents run already, and wait for it."""
        self._launch_store = _launch_store()  # a reference: without torchrun's agent, the store is in this process
        self._launch_store.set(_key(), self._run_token.announcement(_key(), address))
        return {spec.rank for spec in self.specs if spec.rank > 0}

    async def await_agents(self, ranks: Sequence[int]) -> None:
        """Wait for the agents; rank 0 then uses the network interface on which the last of them has connected."""
        await super().await_agents(ranks)
        self._run_token.remove()
        self.address = self._agents[max(ranks)].reached_at
        self.interface = interface_of(self.address) or self.interface

    async def close(self) -> None:
        """End all ranks and node agents, and remove the file with the token if an error left it."""
        self._run_token.remove()
        await super().close()


def _launch_store() -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT: in torchrun's agent under torchrun, else in rank 0's process."""
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _key() -> str:
    """The store's key; each restart by torchrun has its own."""
    return f"meshrl/controller/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

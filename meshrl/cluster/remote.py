"""Executors for several machines: the ranks of `processes`, each started and monitored by a node agent on its machine.

A launcher (Ray, torchrun) starts a NodeAgent for each rank, with the controller's address and the run's token.
Everything else is as on one machine: the same rank process, the same channel (over TCP, directly to the rank), the same
diagnosis of failures. The ranks' collectives go from rank to rank.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from meshrl.cluster.executor import WorkerSpec, ignored
from meshrl.cluster.node_agent import AgentConnection, Hello, NodeAgent, RemoteProcess
from meshrl.cluster.processes import ProcessExecutor, RankConnection
from meshrl.cluster.rank_program import RANK, common_environment
from meshrl.core.device import SETTINGS, VISIBLE_DEVICES
from meshrl.core.errors import RankFailure
from meshrl.parallel.store import listening_store
from meshrl.process.connect import Listener
from meshrl.process.run_token import VARIABLE

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
        """Start another node agent for a lost one. Raises: RankFailure if the launcher can't do it."""
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

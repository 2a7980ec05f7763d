"""Executors over several machines: the ranks of `processes`, each started and watched by a host on its machine.

Whoever finds the machines (Ray, torchrun) starts a `host.serve` there for each rank, with the controller's address and
the run's token. From then on everything is as on one machine: the same rank process, the same channel (over TCP, so
what a rank is sent goes straight to it), the same inquiry into failures. The ranks' collectives go from rank to rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import queue
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.host import Hello, Spawn
from meshrl.cluster.processes import Connected, ProcessExecutor
from meshrl.cluster.rank_process import python_path
from meshrl.cluster.rendezvous import host_store, master
from meshrl.core.errors import RankFailure
from meshrl.process import frames
from meshrl.process.connect import LOST_AFTER_S, Listener

PASSED = ("HF_", "MESHRL_", "TORCH_", "NCCL_", "GLOO_", "TOKENIZERS_")
"""Variables of the controller whose names start so reach every rank, where its machine has not set its own."""
_NEWS_S = 2.0  # the end of a process and the end of its channel come by two connections
_LOOK_S = 1.0


class Host:
    """The controller's end of a rank's host. Commands return at once; a thread takes in what the host says."""

    def __init__(self, sock: socket.socket, hello: Hello):
        self.ip, self.node = hello.ip, f"{hello.ip} ({hello.machine})"
        self.reached_at = sock.getsockname()[0].removeprefix("::ffff:")  # this machine's address on the way there
        self._sock, self._sending = sock, threading.Lock()
        self._said = threading.Condition()
        self._endings: dict[int, str] = {}  # by the number of the spawn
        self._looks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.stacks = ""
        self.gone: str | None = None  # why it can't be reached any more
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, command: str, argument: Any = None) -> None:
        with contextlib.suppress(OSError), self._sending:  # the listening thread learns that the host is gone
            frames.send(self._sock, (command, argument))

    def is_stopped(self) -> bool:
        """Ask whether a signal holds the rank's process; False when no answer comes."""
        self.tell("look")
        try:
            return self._looks.get(timeout=0.0 if self.gone else _LOOK_S)
        except queue.Empty:
            return False

    def ending(self, number: int, timeout_s: float) -> str | None:
        """How a spawned process ended, waiting for the news; None while it lives."""
        with self._said:
            self._said.wait_for(lambda: number in self._endings or self.gone is not None, timeout_s)
            return self._endings.get(number, self.gone)

    def _listen(self) -> None:
        try:
            while True:
                self._take(*frames.receive(self._sock))
        except EOFError:
            gone = "its host process there has ended"
        except TimeoutError:
            gone = f"no sign of life from its machine for {LOST_AFTER_S} s"
        except OSError as error:
            gone = f"its machine can't be reached: {error.strerror or error}"
        with self._said:
            self.gone = gone
            self._said.notify_all()

    def _take(self, what: str, value: Any) -> None:
        if what == "ended":
            with self._said:
                self._endings.update([value])
                self._said.notify_all()
        elif what == "stopped":
            self._looks.put(value)
        elif what == "stacks":
            self.stacks = value

    def goodbye(self, code: int) -> None:
        """The host kills what it still has and ends with this exit code."""
        self.tell("goodbye", code)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # what was sent still arrives
        self._sock.close()


class RemoteProcess:
    """A rank's process on the machine of its host."""

    def __init__(self, host: Host, number: int):
        self._host, self._number = host, number
        self.place = f", on {host.node}"

    def has_ended(self) -> bool:
        return self._host.ending(self._number, 0.0) is not None

    def how_it_ended(self) -> str:
        ended = self._host.ending(self._number, _NEWS_S)
        return ended or "its channel has closed, and its machine does not say why"

    def is_stopped(self) -> bool:
        return self._host.is_stopped()

    def ask_stacks(self) -> bool:
        self._host.stacks = ""
        self._host.tell("stacks")
        return True

    def num_stack_bytes(self) -> int:
        return len(self._host.stacks)

    def stacks(self) -> str:
        return self._host.stacks

    def kill(self) -> None:
        self._host.tell("kill")

    def end(self, grace_s: float) -> None:
        if self._host.ending(self._number, grace_s) is None:
            self.kill()
            self._host.ending(self._number, LOST_AFTER_S)

    def close(self) -> None:
        """Nothing is held here: the host holds it."""


class RemoteExecutor(ProcessExecutor, ABC):
    """What `ray` and `torchrun` share. They say where the controller is reached, and start the hosts."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        super().__init__(specs)
        self.token = secrets.token_bytes(32)
        self._hosts: dict[int, Host] = {}
        self._listener: Listener | None = None
        self._store: Any = None
        self._reached_at = ""
        self._arrivals: dict[tuple[str, int], asyncio.Future[tuple[socket.socket, Hello]]] = {}
        self._numbers = itertools.count()

    @abstractmethod
    async def find_machines(self) -> str:
        """Reserve what the ranks need; the address under which their machines reach this one."""

    @abstractmethod
    async def start_hosts(self, address: tuple[str, int]) -> set[int]:
        """Have `host.serve(address, self.token, rank)` run for each rank of the answer."""

    async def replace_host(self, rank: int, lost: Host) -> None:
        """Have another host where one has ended. Raises: RankFailure when whoever started it can't do it again."""
        raise RankFailure(rank, "start", f"{lost.gone}, on {lost.node}")

    async def start(self) -> None:
        """Find the machines, bring up a host for each rank, then the ranks."""
        self._loop = asyncio.get_running_loop()
        self._reached_at = await self.find_machines()
        rendezvous = self._new_rendezvous()
        self.specs = [dataclasses.replace(spec, rendezvous=rendezvous) for spec in self.specs]
        for spec in self.specs:
            self._expect("control", spec.rank)
        self._listener = Listener(self._reached_at, self.token, self._connected)
        await self.meet_hosts(sorted(await self.start_hosts(self._listener.address)))
        await super().start()

    def _new_rendezvous(self) -> str:
        self._store, rendezvous = host_store(self._reached_at)
        return rendezvous

    async def meet_hosts(self, ranks: Sequence[int]) -> None:
        """Wait until the hosts of these ranks have called."""
        for rank in ranks:
            host = self._hosts[rank] = Host(*await self._arrived("control", rank))
            self.specs = [dataclasses.replace(s, address=host.ip) if s.rank == rank else s for s in self.specs]

    def _expect(self, kind: str, rank: int) -> None:
        assert self._loop is not None
        self._arrivals[kind, rank] = self._loop.create_future()

    async def _arrived(self, kind: str, rank: int, host: Host | None = None) -> tuple[socket.socket, Hello]:
        """What a rank's machine connects with. host: gives up with it, when it is gone meanwhile."""
        limit = self.specs[rank].deadline_s("start")
        until = time.monotonic() + limit
        while True:
            try:
                return await asyncio.wait_for(asyncio.shield(self._arrivals[kind, rank]), _LOOK_S)
            except TimeoutError:
                if host is not None and host.gone is not None:
                    raise RankFailure(rank, "start", f"{host.gone}, on {host.node}") from None
                if time.monotonic() > until:
                    cause = (
                        f"its machine has not called within {limit:g} s; is the controller's address reachable from "
                        "there?"
                    )
                    raise RankFailure(rank, "start", cause) from None

    def _connected(self, sock: socket.socket, hello: Hello) -> None:
        """In a thread of the listener."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, sock, hello)

    def _take(self, sock: socket.socket, hello: Hello) -> None:
        awaited = self._arrivals.get((hello.kind, hello.rank))
        if awaited is None or awaited.done():
            sock.close()  # a second host of one rank
        else:
            awaited.set_result((sock, hello))

    def _refuse_start(self, rank: int, cause: str) -> None:
        """A host that will not come: whoever waits for it gets the failure."""
        awaited = self._arrivals["control", rank]
        if not awaited.done():
            awaited.set_exception(RankFailure(rank, "start", cause))

    async def _bring_up(self, spec: WorkerSpec) -> Connected:
        if spec.rank not in self._hosts:
            return await super()._bring_up(spec)
        if self._hosts[spec.rank].gone is not None:
            await self.replace_host(spec.rank, self._hosts[spec.rank])
            spec = self.specs[spec.rank]
        host, number = self._hosts[spec.rank], next(self._numbers)
        self._expect("channel", spec.rank)
        host.tell("spawn", Spawn(number=number, fixed=self.environment(spec), passed=_passed()))
        sock, _ = await self._arrived("channel", spec.rank, host)
        return self._attach(spec, RemoteProcess(host, number), sock)

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """What every rank's process finds in its environment, by the names that torchrun gives."""
        host, port = master(spec.rendezvous)
        return {
            "PYTHONPATH": python_path(),
            "TOKENIZERS_PARALLELISM": "false",
            "RANK": str(spec.rank),
            "WORLD_SIZE": str(spec.num_ranks),
            "LOCAL_RANK": str(spec.rank % spec.num_local_ranks),
            "LOCAL_WORLD_SIZE": str(spec.num_local_ranks),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }

    async def close(self) -> None:
        """End all ranks, their hosts, and what was opened for them here."""
        failed = any(rank.lost is not None and self.specs[i].trains for i, rank in enumerate(self._ranks))
        failed = failed or self._failure is not None
        await super().close()
        for host in self._hosts.values():
            host.goodbye(1 if failed else 0)
        if self._listener is not None:
            self._listener.close()
        self._store = None


def _passed() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}

"""The rank's host: a small process on the rank's machine that starts the rank's process and speaks for it.

An executor that reaches over machines can't signal, watch or wait for a process there; the host does, by commands over
a control connection to the controller. The rank's own commands don't pass through here: the rank's process inherits a
second connection. When the controller is gone, or silent for connect.LOST_AFTER_S, the host kills the rank.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from meshrl.cluster import forked_process
from meshrl.cluster.rank_process import LocalProcess
from meshrl.process import frames
from meshrl.process.connect import connect
from meshrl.process.leases import sweep

_DUMP_S = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message of a connection. control: commands to the rank's host; channel: the rank's own."""

    rank: int
    kind: Literal["control", "channel"]
    ip: str  # of its machine, on the way to the controller
    machine: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawn:
    """The command to start the rank's process. fixed: its environment; passed: only what the machine has not set."""

    number: int
    fixed: dict[str, str]
    passed: dict[str, str]


def serve(address: tuple[str, int], token: bytes, rank: int) -> int:
    """Host a rank until the controller says goodbye. Returns the exit code: 0 when the run ended well. What dead runs
    have left on this machine goes first.

    Raises: ConnectionError when the controller can't be reached.
    """
    sweep()
    return _Host(address, token, rank).serve()


class _Host:
    def __init__(self, address: tuple[str, int], token: bytes, rank: int):
        self.address, self.token, self.rank = address, token, rank
        self.interface: str | None = None
        self.child: LocalProcess | None = None
        self.sending = threading.Lock()  # the thread that waits for the child sends, too
        self.control = self.dial("control")

    def dial(self, kind: Literal["control", "channel"]) -> socket.socket:
        def hello(ip: str) -> Hello:
            self.interface = interface_of(ip)
            return Hello(rank=self.rank, kind=kind, ip=ip)

        return connect(self.address, self.token, hello)

    def serve(self) -> int:
        try:
            while True:
                command, argument = frames.receive(self.control)
                if command == "goodbye":
                    return argument
                if command == "spawn":
                    self.spawn(argument)
                elif command == "kill" and self.child is not None:
                    self.child.kill()
                elif command == "look":
                    self.tell("stopped", self.child is not None and self.child.is_stopped())
                elif command == "stacks":
                    self.tell("stacks", self.stacks())
        except (EOFError, OSError):  # the controller is gone
            return 1
        finally:
            if self.child is not None:
                self.child.kill()
                self.child.end(0.0)
            forked_process.retire()  # this process may live on, as Ray's workers do
            self.control.close()

    def spawn(self, asked: Spawn) -> None:
        """Start the rank's process, with a connection of its own to the controller."""
        if self.child is not None:
            self.child.kill()
            self.child.end(0.0)
        sock = self.dial("channel")
        nearest = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        unset = {name: value for name, value in (nearest | asked.passed).items() if name not in os.environ}
        self.child = LocalProcess(sock, f"rank_{self.rank}", unset | asked.fixed)
        threading.Thread(target=self.watch, args=(self.child, asked.number), daemon=True).start()

    def watch(self, child: LocalProcess, number: int) -> None:
        """Say how the rank's process ended, as soon as it has."""
        child.wait()
        self.tell("ended", (number, child.how_it_ended()))

    def stacks(self) -> str:
        if self.child is None or not self.child.ask_stacks():
            return ""
        size, until = 0, time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            time.sleep(0.1)
            before, size = size, self.child.num_stack_bytes()
            if size and size == before:
                break
        return self.child.stacks()

    def tell(self, what: str, value: Any) -> None:
        try:
            with self.sending:
                frames.send(self.control, (what, value))
        except OSError:  # the controller is gone; the main thread sees it, too
            return


def interface_of(ip: str) -> str | None:
    """Name of the network interface that has an address: gloo would choose one by the machine's name."""
    found = (name for name, all_of in psutil.net_if_addrs().items() for one in all_of if one.address == ip)
    return next(found, None)

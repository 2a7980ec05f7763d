"""The node agent of a rank: a small process on the rank's machine that starts the rank's process and reports on it.
NodeAgent runs there, AgentConnection and RemoteProcess in the controller.

An executor for several machines can't signal, observe or wait for a process on another machine. The agent does this for
it, by commands over a control connection to the controller. The rank's own commands don't pass through the agent: the
rank's process inherits a second connection. When the controller has ended, or sends nothing for connect.LOST_AFTER_S,
the agent kills the rank. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshrl.process import frames, spawn
from meshrl.process.connect import LOST_AFTER_S, connect, interface_of
from meshrl.process.diagnosis import Snapshot
from meshrl.process.leases import sweep
from meshrl.process.spawn import Program, SpawnedProcess, use_private_caches


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message of a connection. control: commands to the node agent; channel: the rank's own."""

    rank: int
    kind: Literal["control", "channel"]
    ip: str  # of the machine's interface to the controller
    machine: str = field(default_factory=socket.gethostname)


class NodeAgent:
    """The controller calls `spawn`, `kill`, `snapshot` and `end`. A report to it is a number that it has chosen, and a
    value."""

    def __init__(self, address: tuple[str, int], token: bytes, rank: int):
        """address: of the controller."""
        self.address, self.token, self.rank = address, token, rank
        self.child: SpawnedProcess | None = None
        self.exit_code: int | None = None
        self.control: socket.socket
        self.sending = threading.Lock()  # the thread that waits for the child sends, too

    def serve(self) -> int:
        """Remove temporary resources that killed runs have left on this machine, then be a rank's node agent until the
        controller ends it. Returns the exit code: 0 when the run ended without a failure."""
        sweep()
        use_private_caches()
        self.control = self.connect("control")
        try:
            while self.exit_code is None:
                method, arguments = frames.receive(self.control)
                method(self, *arguments)
            return self.exit_code
        except (EOFError, OSError):  # the controller has ended
            return 1
        finally:
            self.end_child()
            spawn.retire()  # this process may live on, as Ray's workers do
            self.control.close()

    def connect(self, kind: Literal["control", "channel"]) -> socket.socket:
        return connect(self.address, self.token, lambda ip: Hello(rank=self.rank, kind=kind, ip=ip))

    def spawn(self, number: int, program: Program, fixed: dict[str, str], passed: dict[str, str]) -> None:
        """Start the rank's process, with its own connection to the controller; report when it has ended. fixed:
        environment variables; passed: variables that are set only where the machine has not set them."""
        self.end_child()
        sock = self.connect("channel")
        interface = interface_of(sock.getsockname()[0])
        nearest = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        unset = {name: value for name, value in (nearest | passed).items() if name not in os.environ}
        self.child = SpawnedProcess(program, f"rank_{self.rank}", unset | fixed, sock)
        ending = self.child.ending
        threading.Thread(target=lambda: self.report(number, ending(None)), daemon=True).start()

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def snapshot(self, number: int, recorder: str) -> None:
        """Report a snapshot of the rank's process."""
        self.report(number, Snapshot() if self.child is None else self.child.snapshot(recorder))

    def end(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def end_child(self) -> None:
        if self.child is not None:
            self.child.end(0.0)

    def report(self, number: int, value: Any) -> None:
        with contextlib.suppress(OSError), self.sending:  # the controller has ended; the main thread sees it, too
            frames.send(self.control, (number, value))


def variables(names: Sequence[str]) -> dict[str, str]:
    """Those of these environment variables that are set in this process."""
    return {name: os.environ[name] for name in names if name in os.environ}


class AgentConnection:
    """The controller's end of a node agent. Commands return at once; a thread receives the agent's reports."""

    def __init__(self, sock: socket.socket, hello: Hello):
        self.ip, self.node = hello.ip, f"{hello.ip} ({hello.machine})"
        self.reached_at = sock.getsockname()[0].removeprefix("::ffff:")  # this machine's address in that network
        self.numbers = itertools.count()  # numbers of the commands that are answered by a report
        self._sock, self._sending = sock, threading.Lock()
        self._reported = threading.Condition()
        self._reports: dict[int, Any] = {}
        self.lost: str | None = None  # the reason, when the agent can't be reached any more
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the NodeAgent."""
        with contextlib.suppress(OSError), self._sending:  # the receiving thread notices that the agent is lost
            frames.send(self._sock, (method, arguments))

    def report(self, number: int, timeout_s: float) -> Any:
        """The report with this number; waits for it at most timeout_s. None if the agent has not sent it."""
        with self._reported:
            self._reported.wait_for(lambda: number in self._reports or self.lost is not None, timeout_s)
            return self._reports.get(number)

    def _receive(self) -> None:
        try:
            while True:
                number, value = frames.receive(self._sock)
                with self._reported:
                    self._reports[number] = value
                    self._reported.notify_all()
        except EOFError:
            lost = "its node agent has ended"
        except TimeoutError:
            lost = f"no message from its machine for {LOST_AFTER_S} s"
        except OSError as error:
            lost = f"its machine can't be reached: {error.strerror or error}"
        with self._reported:
            self.lost = lost
            self._reported.notify_all()

    def end(self, code: int) -> None:
        """Make the agent kill the rank's process, if it still runs, and end with this exit code."""
        self.send(NodeAgent.end, code)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # messages already sent still arrive
        self._sock.close()


class RemoteProcess:
    """A rank's process on the machine of its node agent, with the methods of SpawnedProcess. number: of the report of
    its end."""

    def __init__(self, agent: AgentConnection, number: int):
        self._agent, self._number = agent, number
        self.place = f", on {agent.node}"

    def ending(self, timeout_s: float = 0.0) -> str | None:
        return self._agent.report(self._number, timeout_s) or self._agent.lost

    def snapshot(self, recorder: str = "") -> Snapshot:
        number = next(self._agent.numbers)
        self._agent.send(NodeAgent.snapshot, number, recorder)
        return self._agent.report(number, 5.0) or Snapshot()  # the agent itself needs at most 4 s

    def kill(self) -> None:
        self._agent.send(NodeAgent.kill)

    def end(self, grace_s: float) -> None:
        if self.ending(grace_s) is None:
            self.kill()
            self.ending(LOST_AFTER_S)

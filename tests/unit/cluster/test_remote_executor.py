"""Ranks with node agents: the same answers and failures as on one machine, and no process is left.

These tests start the agents themselves, in place of Ray or torchrun.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from running_processes import is_running_process, running_descendants
from tiny_models import tiny_qwen2
from tiny_specs import worker_spec

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.remote import RemoteExecutor
from meshrl.config.model import ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import RankFailure
from meshrl.monitor.status import RankProcess

pytestmark = pytest.mark.timeout(300)  # ranks start slowly on a machine that does much else

AGENT = """
import sys
from meshrl.cluster.node_agent import NodeAgent
host, port, token, rank = sys.argv[1:]
sys.exit(NodeAgent((host, int(port)), bytes.fromhex(token), int(rank)).serve())
"""


HAS_NAMES = (
    shutil.which("unshare") and not subprocess.run(["unshare", "-u", "hostname", "x"], capture_output=True).returncode
)
"""Whether processes can have a machine name of their own here."""

OF_THE_CONTROLLER = ("MESHRL_TOKEN", "VLLM_USE_DEEP_GEMM", "CUDA_VISIBLE_DEVICES")  # not set on the rank's machine


class ByHand(RemoteExecutor):
    """One machine for each rank. Starts the node agents of `present` ranks on this machine, as its own children."""

    def __init__(
        self,
        model: str,
        num_train: int,
        num_rollout: int = 0,
        present: tuple[int, ...] = (0, 1),
        timeout_s: float = 200.0,
    ):
        specs = [
            worker_spec(
                rank=rank,
                num_train_ranks=num_train,
                num_rollout_ranks=num_rollout,
                model=ModelConfig(path=model, dtype="float32"),
                train=TrainConfig(activation_checkpointing=False),
                timeout_s=timeout_s,
                nodes=num_train + num_rollout,
            )
            for rank in range(num_train + num_rollout)
        ]
        super().__init__(specs)
        self.present, self.started = present, {}

    async def find_machines(self) -> str:
        return "127.0.0.1"

    async def start_agents(self, address: tuple[str, int]) -> set[int]:
        for rank in self.present:
            arguments = [address[0], str(address[1]), self.token.hex(), str(rank)]
            command = [sys.executable, "-c", AGENT, *arguments]
            own = {name: value for name, value in os.environ.items() if name not in OF_THE_CONTROLLER}
            if HAS_NAMES:
                command = ["unshare", "--uts", "sh", "-c", f'hostname machine{rank}; exec "$@"', "sh", *command]
            self.started[rank] = subprocess.Popen(command, env={**own, "HF_OWN": "of the machine"})
        return {spec.rank for spec in self.specs}


def _below() -> list[psutil.Process]:
    """Node agents and ranks."""
    return running_descendants(r"meshrl\.cluster\.(node_agent|worker)")


def _agent() -> psutil.Process:
    """The node agent of this rank."""
    return next(p for p in psutil.Process().parents() if "meshrl.process.fork_server" not in p.cmdline())


def _with(executor: ByHand, body: Callable[[ByHand], Awaitable[None]]) -> list[int]:
    """Start, run the body, close; no process may be left. Returns the agents' exit codes."""

    async def main() -> None:
        try:
            await executor.start()
            await body(executor)
        finally:
            await executor.close()

    try:
        asyncio.run(main())
    finally:
        codes = [process.wait(60) for process in executor.started.values()]
        assert not _below()
    return codes


# ---- functions that run in the ranks


def variables(worker: RankWorker) -> dict[str, str]:
    return dict(os.environ)


def facts(worker: RankWorker) -> tuple[int, int, str, str | tuple[str, int]]:
    return os.getpid(), _agent().pid, worker.spec.address, worker.spec.rendezvous


def misbehave(worker: RankWorker, how: str) -> None:
    if how == "raise":
        raise KeyError("no such row")
    culprit = _agent().pid if how == "agent" else os.getpid()
    os.kill(culprit, signal.SIGSTOP if how == "SIGSTOP" else signal.SIGKILL)
    time.sleep(600)


def wait(worker: RankWorker, begun: str) -> None:
    Path(begun).touch()
    time.sleep(600)


class Unreachable(ByHand):
    async def find_machines(self) -> str:
        raise ConnectionError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen2().save_pretrained(folder)
    return str(folder)


# ---- tests


FAULTS = {
    "raise": r"raised KeyError: 'no such row'",
    "SIGKILL": r"its process was killed by SIGKILL.*",
    "agent": r"its node agent has ended",
    "SIGSTOP": r"no answer within cluster\.timeout_s = 3 s; its process is stopped \(SIGSTOP, or a debugger\)",
}


def _assert_named(failure: BaseException | None, how: str) -> None:
    """Rank 1, the phase, the cause and the machine."""
    assert isinstance(failure, RankFailure) and (failure.rank, failure.phase) == (1, "misbehave")
    assert re.fullmatch(FAULTS[how] + r", on 127\.0\.0\.1 \(.+\)", failure.cause), failure.cause


def test_a_rank_has_its_environment_and_a_sampler_that_died_is_replaced_by_its_node_agent(model, monkeypatch):
    """The machine's own variables win over the controller's, the rank's own over both; for a replaced rank, too. The
    controller knows machine, process id and role of each."""
    monkeypatch.setenv("HF_OWN", "of the controller")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setenv("MESHRL_TOKEN", "a secret, and the connection is not encrypted")
    monkeypatch.setenv("RANK", "77")

    async def pid_of(executor: ByHand, rank: int) -> int:
        found = await executor.call(rank, variables)
        assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
            *(str(rank), "2", "0", "1")
        ]
        assert found["HF_OWN"] == "of the machine" and found["NCCL_DEBUG"] == "WARN"
        assert found["VLLM_USE_DEEP_GEMM"] == "0"
        assert "MESHRL_TOKEN" not in found and "CUDA_VISIBLE_DEVICES" not in found
        assert found["GLOO_SOCKET_IFNAME"].startswith("lo"), "the interface by which it reached the controller"
        pid, parent, address, store = await executor.call(rank, facts)
        assert parent == executor.started[rank].pid != pid
        assert address == "127.0.0.1"
        assert store == (found["MASTER_ADDR"], int(found["MASTER_PORT"]))
        return pid

    async def body(executor: ByHand) -> None:
        trainer, sampler = await pid_of(executor, 0), await pid_of(executor, 1)
        machines = [f"machine{rank}" if HAS_NAMES else socket.gethostname() for rank in (0, 1)]
        first = RankProcess(machines[0], trainer, "rank_0", "trains")
        assert executor.processes() == [first, RankProcess(machines[1], sampler, "rank_1", "")]
        with pytest.raises(RankFailure) as failure:
            await executor.call(1, misbehave, "SIGKILL")
        _assert_named(failure.value, "SIGKILL")
        await executor.restart([1])
        assert (another := await pid_of(executor, 1)) != sampler
        assert await pid_of(executor, 0) == trainer
        assert executor.processes() == [first, RankProcess(machines[1], another, "rank_1", "")]

    assert _with(ByHand(model, 1, 1), body) == [0, 0]


@pytest.mark.parametrize(
    "how", [how if how == "agent" else pytest.param(how, marks=pytest.mark.slow) for how in FAULTS]
)
def test_a_failure_is_named_with_its_machine_and_ends_all_ranks(model, tmp_path, how):
    """For every kind of failure, and although the other rank is busy for ten minutes."""
    executor = ByHand(model, 2)

    async def body(executor: ByHand) -> None:
        if how == "SIGSTOP":
            executor.specs = [executor.specs[0], dataclasses.replace(executor.specs[1], timeout_s=3.0)]
        calls = [asyncio.ensure_future(executor.call(0, wait, str(tmp_path / "begun")))]
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.05)
        calls.append(asyncio.ensure_future(executor.call(1, misbehave, how)))
        _, waiting = await asyncio.wait(calls, timeout=60)
        assert not waiting
        failures = await asyncio.gather(*calls, return_exceptions=True)
        assert failures[0] is failures[1]
        _assert_named(failures[0], how)
        assert "in wait" in failures[0].stacks, "the stack of the other rank"

    codes = _with(executor, body)
    assert codes == [1, -signal.SIGKILL if how == "agent" else 1]


def test_a_machine_that_never_connects_is_named(model):
    async def body(executor: ByHand) -> None:
        raise AssertionError("it can't have started")

    with pytest.raises(RankFailure, match="rank 1 failed in phase 'start': its machine has not connected within 8 s"):
        _with(ByHand(model, 2, present=(0,), timeout_s=8.0), body)


@pytest.mark.slow
def test_node_agents_and_ranks_end_when_the_controller_is_killed(model: str):
    """SIGKILL leaves it no time to end them."""
    script = """
        import asyncio, sys
        sys.path[:0] = {path!r}
        import test_remote_executor as here

        async def main():
            executor = here.ByHand({folder!r}, 1, present=(0,))
            await executor.start()
            print(*[p.pid for p in here._below()], flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script).format(path=sys.path, folder=model)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 2, "a node agent and its rank"
    processes = [psutil.Process(pid) for pid in pids]
    controller.kill()
    controller.wait()
    controller.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [p for p in alive if is_running_process(p.pid)]


def test_the_controller_may_open_two_sockets_for_each_rank():
    """The usual limit of 1,024 files is too low for 600 ranks. A limit that suffices stays."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for soft, expected in ((1024, 2 * 600 + 512), (4096, 4096)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            with pytest.raises(ConnectionError):
                asyncio.run(Unreachable("unused", num_train=600).start())
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

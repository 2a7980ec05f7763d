"""Two machines for real: two network namespaces joined by a cable that can be cut, with a core of their own each.

Each run is `meshrl train` in a process of its own, as on a cluster. What it prints and leaves is what a user sees.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import steps_of, train, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
ADDRESSES = ("10.213.7.1", "10.213.7.2")
ENDS_WITHIN_S = 30.0


class Machine:
    """A network namespace, its address, and the core that its processes may use."""

    def __init__(self, number: int):
        cores = sorted(os.sched_getaffinity(0))
        self.name, self.address = f"mx{os.getpid()}_{number}", ADDRESSES[number]
        self.cable, self.core = f"mx{os.getpid() % 100000}v{number}", cores[number % len(cores)]

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Run a command on this machine."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {self.core}),
        )

    def processes(self, word: str = "") -> list[psutil.Process]:
        """What runs on it, with this word in the command line."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split()
        found = []
        for pid in map(int, pids):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def switch_off(self) -> None:
        """Kill all that runs on it, and wait until it is gone: what is dying still looks alive."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)

    def cut(self) -> None:
        """Pull its cable."""
        _ip("-n", self.name, "link", "set", self.cable, "down")

    def join(self) -> None:
        """Plug its cable in. What ran while it was cut off is not wanted any more."""
        link = subprocess.run(["ip", "-n", self.name, "link", "show", self.cable], capture_output=True, text=True)
        if "state UP" not in link.stdout:
            self.switch_off()
            _ip("-n", self.name, "link", "set", self.cable, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and `ip` of iproute2")
    both = (Machine(0), Machine(1))
    try:
        try:
            for machine in both:
                _ip("netns", "add", machine.name)
            _ip("link", "add", both[0].cable, "type", "veth", "peer", "name", both[1].cable)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system forbids network namespaces: {error.stderr.strip()}")
        for machine in both:
            _ip("link", "set", machine.cable, "netns", machine.name)
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
            for name in ("lo", machine.cable):
                _ip("-n", machine.name, "link", "set", name, "up")
        yield both
    finally:
        for machine in both:
            machine.switch_off()
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def on_one_machine(config: Path) -> dict[str, Path]:
    """Folders of the same runs under executor processes, by layout; filled as tests need them."""
    return {}


LAYOUTS = {
    "colocated": ("cluster.num_train_ranks=2",),
    "split": ("cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1"),
}


@pytest.fixture(scope="module")
def ray_head(machines: tuple[Machine, Machine]) -> Iterator[dict[str, str]]:
    """Ray's head on the first machine; the environment of all that joins it."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'meshrl[ray]'")
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_MODE": "token"}
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # Ray's sockets allow only a short path
    _start_ray(machines[0], token, "--head", "--port=6379", f"--temp-dir={folder}", "--include-dashboard=false")
    yield token
    machines[0].switch_off()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ray_cluster(machines: tuple[Machine, Machine], ray_head: dict[str, str]) -> dict[str, str]:
    """A cluster of both machines, whatever a test did to the second."""
    machines[1].join()
    if not machines[1].processes("raylet/raylet"):
        _start_ray(machines[1], ray_head, f"--address={ADDRESSES[0]}:6379")
    return ray_head


def _start_ray(machine: Machine, token: dict[str, str], *arguments: str) -> None:
    """Ray gives itself 30 s to start, which a busy machine may need."""
    command = [str(Path(sys.executable).with_name("ray")), "start", *arguments, "--block", "--num-cpus=1"]
    command += [f"--node-ip-address={machine.address}", "--object-store-memory=100000000", "--disable-usage-stats"]
    texts = []
    for _ in range(3):
        started = machine.start(*command, **token)
        assert started.stdout is not None
        texts.append("")
        for line in started.stdout:
            texts[-1] += line
            if "Ray runtime started" in line:
                threading.Thread(target=started.stdout.read, daemon=True).start()  # so that it never waits to write
                return
        machine.switch_off()
    pytest.fail("Ray does not start:\n" + texts[-1])


def _meshrl(config: Path, name: str, *overrides: str) -> list[str]:
    return ["-m", "meshrl", "train", str(config), f"run.name={name}", *overrides]


def _start_ray_run(
    machines: tuple[Machine, Machine], token: dict[str, str], config: Path, name: str, *overrides: str
) -> subprocess.Popen[str]:
    ray = ("cluster.executor=ray", f"cluster.address={ADDRESSES[0]}:6379", "cluster.nodes=2")
    return machines[0].start(sys.executable, *_meshrl(config, name, *overrides, *ray), **token)


def _start_torchrun(
    machines: tuple[Machine, Machine], config: Path, name: str, *overrides: str
) -> list[subprocess.Popen[str]]:
    where = [f"--master-addr={ADDRESSES[0]}", "--master-port=29511", "--nnodes=2", "--nproc-per-node=1"]
    return [
        machine.start(
            *(sys.executable, "-m", "torch.distributed.run", *where, f"--node-rank={number}"),
            *_meshrl(config, name, *overrides),
        )
        for number, machine in enumerate(machines)
    ]


def _assert_same(config: Path, known: dict[str, Path], layout: str, name: str) -> None:
    """The run's numbers are, to the bit, those of the same run by processes on one machine."""
    if layout not in known:
        known[layout] = train(config, f"processes_{layout}", *LAYOUTS[layout])
    ours, theirs = config.parent / "runs" / name, known[layout]
    assert steps_of(ours) == steps_of(theirs) and len(steps_of(ours)) == 2
    mine, other = (load_file(next(run.glob("checkpoints/*2/model/model.safetensors"))) for run in (ours, theirs))
    assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ray_over_two_machines_gives_the_numbers_of_one(machines, ray_cluster, config, on_one_machine, layout):
    """Split: rank 0's weights reach the sampler on the other machine."""
    run = _start_ray_run(machines, ray_cluster, config, f"ray_{layout}", *LAYOUTS[layout])
    text = run.communicate()[0]
    assert run.returncode == 0, text[-6000:]
    _assert_same(config, on_one_machine, layout, f"ray_{layout}")
    assert [p.cmdline() for machine in machines for p in machine.processes("meshrl")] == []


def test_torchrun_over_two_machines_gives_the_numbers_of_one(machines, config, on_one_machine):
    runs = _start_torchrun(machines, config, "torchrun", *LAYOUTS["colocated"])
    texts = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(texts)[-6000:]
    _assert_same(config, on_one_machine, "colocated", "torchrun")
    assert [p.cmdline() for machine in machines for p in machine.processes("meshrl")] == []


@pytest.mark.parametrize("fault", ["cut", "switch_off"])
def test_a_machine_that_is_gone_is_named_and_nothing_is_left(machines, ray_cluster, config, fault):
    """No end of a connection comes from a machine that can't be reached; silence has to do."""
    run = _start_ray_run(
        *(machines, ray_cluster, config, fault, *LAYOUTS["colocated"]),
        *("loop.num_steps=100000", "run.keep_checkpoints=1", "cluster.max_restarts=0"),
    )
    assert run.stdout is not None
    lines: list[str] = []
    while not any(re.match(r"step +1/", line) for line in lines):
        lines.append(run.stdout.readline())
        assert lines[-1], "".join(lines)[-6000:]
    getattr(machines[1], fault)()
    text = run.communicate(timeout=ENDS_WITHIN_S)[0]
    assert run.returncode == 1
    assert re.search(rf"RankFailure: rank 1 failed in phase .*, on {ADDRESSES[1]} ", text), text[-6000:]
    until = time.monotonic() + ENDS_WITHIN_S
    while left := [p for machine in machines for p in machine.processes("meshrl")]:
        assert time.monotonic() < until, [p.cmdline() for p in left]
        time.sleep(0.5)


def test_too_few_machines_are_reported_before_anything_starts(machines, ray_cluster, config):
    run = _start_ray_run(machines, ray_cluster, config, "many", "cluster.num_train_ranks=4")
    text = run.communicate()[0]
    assert run.returncode == 2
    assert "needs 2 machines with 2 CPU each" in text and f"{ADDRESSES[1]} has 1 CPU" in text, text[-3000:]

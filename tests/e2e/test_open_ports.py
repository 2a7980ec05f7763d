"""What a run opens to other users and machines, compared with docs/security.md; and a process of another user, which
tries to run code in a run under torchrun."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from open_ports import listed, listening, table
from run_contents import assert_equal_tensors, sampled_turns, weights
from tiny_run import steps_of, train, write_run
from torchrun_runs import PYTHONPATH

from meshrl.process.spawn import CACHES

pytestmark = [
    pytest.mark.slow,  # tests/contract/test_executors.py looks at the runs of two executors
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm"),
]

TESTS = Path(__file__).parents[1]
SPLIT = ("cluster.num_train_ranks=2", "cluster.num_rollout_ranks=1")
LAYOUTS = {
    "inline": ("cluster.executor=inline",),
    "inline, endpoint": (
        "cluster.executor=inline",
        "agent.kind=endpoint",
        "agent.args={function: endpoint_programs:chat}",
    ),
    "processes": SPLIT,
    "processes, broadcast": (*SPLIT, "rollout.sync_transport=broadcast"),
    "torchrun": ("cluster.num_train_ranks=2",),
    "ray": (*SPLIT, "cluster.executor=ray", "cluster.address=local"),
}
ON_ACCELERATORS = {"processes, colocated on GPUs"}  # its all-gather needs a device for each rank


@dataclass
class Observed:
    """What was seen after the first step. listening: (kind of process, where). files: (place, name, mode). tokens:
    files with the run's token. outsider: the output of outsider.py, which ran while the run started."""

    listening: set[tuple[str, str]] = field(default_factory=set)
    files: set[tuple[str, str, str]] = field(default_factory=set)
    tokens: list[str] = field(default_factory=list)
    outsider: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    mark: Path = Path()


Observe = Callable[[str], Observed]


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observe]:
    """Runs each layout once."""
    seen: dict[str, Observed] = {}
    home = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))  # Ray's sockets allow only a short path
    home.chmod(0o755)  # only the mode of the file protects the token, not that of a folder above it

    def get(layout: str) -> Observed:
        if layout == "ray":
            pytest.importorskip("ray", reason="ray is not installed: pip install 'meshrl[ray]'")
        if layout not in seen:
            folder = home / str(len(seen))
            folder.mkdir(mode=0o755)
            seen[layout] = _run(layout, folder)
        return seen[layout]

    yield get
    shutil.rmtree(home)


def _run(layout: str, folder: Path) -> Observed:
    """Run to the end; look at it, and let another user attack it under torchrun, on the way."""
    gate, temporary = folder / "gate", folder / "t"
    gate.mkdir()
    temporary.mkdir()
    config = write_run(folder)
    arguments = [str(TESTS / "gated_run.py"), str(config), str(gate), "run.name=run", *LAYOUTS[layout]]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if layout == "torchrun" else []
    environment = {name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", *CACHES)}
    seen = Observed(folder=folder / "runs", mark=gate / "touched")
    with open(folder / "output.txt", "w+") as output:
        run = subprocess.Popen(
            [*_other_host_name(), sys.executable, *launcher, *arguments],
            env={**environment, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            if layout == "torchrun":
                _wait_for(gate / "store", run, output)
                if os.geteuid() == 0:
                    seen.outsider = _attack(gate, seen)
                (gate / "follow").touch()
            _wait_for(gate / "reached", run, output)
            processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
            seen.listening = {place for process in processes for place in listening(process, layout)}
            seen.files = set(_files(processes, temporary))
            seen.tokens = [path.name for path in seen.folder.glob(".meshrl-token-*")]
            (gate / "open").touch()
            assert run.wait(120) == 0, _text(output)
        finally:
            for process in psutil.Process(run.pid).children(recursive=True) if run.poll() is None else ():
                process.kill()
            run.kill()
            run.wait()
    return seen


def _other_host_name() -> list[str]:
    """A command that gives its child a host name that is the address of an interface, if this is possible: on many
    machines the host's name does not lead to the loopback interface."""
    interfaces = psutil.net_if_addrs().values()
    addresses = [one.address for all_of in interfaces for one in all_of if one.family == socket.AF_INET]
    outside = [address for address in addresses if not address.startswith("127.")]
    if os.geteuid() != 0 or not outside or shutil.which("unshare") is None:
        return []
    return ["unshare", "--uts", "sh", "-c", f'hostname {outside[0]} && exec "$@"', "sh"]


def _text(output: Any) -> str:
    output.seek(0)
    return str(output.read()[-6000:])


def _wait_for(path: Path, run: subprocess.Popen[bytes], output: Any) -> None:
    until = time.monotonic() + 200
    while not path.exists():
        assert run.poll() is None and time.monotonic() < until, f"{path.name}: {_text(output)}"
        time.sleep(0.02)


def _attack(gate: Path, seen: Observed) -> dict[str, Any]:
    host, port = (gate / "store").read_text().split()
    arguments = [host, port, str(seen.folder), str(seen.mark)]
    outsider = subprocess.run(
        [*_other_host_name(), sys.executable, str(TESTS / "outsider.py"), *arguments],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert outsider.returncode == 0, outsider.stderr[-4000:]
    return dict(json.loads(outsider.stdout))


def _files(processes: list[psutil.Process], temporary: Path) -> Iterator[tuple[str, str, str]]:
    """Named files of the processes in /dev/shm, and all entries of their temporary folder."""
    mapped = set()
    for process in processes:
        try:
            mapped |= {each.path for each in process.memory_maps(grouped=True)}
        except psutil.NoSuchProcess:
            continue
    shared = [path for name in mapped if name.startswith("/dev/shm/") and (path := Path(name)).exists()]
    for place, paths in (("/dev/shm", shared), ("temporary folder", list(temporary.iterdir()))):
        for path in paths:
            yield place, path.name, f"{stat.S_IMODE(path.stat().st_mode):o}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_listens_is_what_the_page_about_security_lists(observe: Observe, layout: str):
    assert observe(layout).listening == listed(layout)


def test_each_row_of_the_page_is_of_an_executor_that_is_run_here():
    assert {row[0] for row in table("executor")} - ON_ACCELERATORS == set(LAYOUTS)


def _unlisted(files: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    rows = table("place")
    return {f for f in files if not any((f[0], f[2]) == (r[0], r[2]) and fnmatch.fnmatch(f[1], r[1]) for r in rows)}


def test_files_in_shared_places_have_the_modes_that_the_page_lists(observe: Observe):
    files = {file for layout in LAYOUTS if layout != "ray" for file in observe(layout).files}
    assert _unlisted(files) == set()
    for place, name, mode, _ in table("place"):
        assert name == "ray" or any((f[0], f[2]) == (place, mode) and fnmatch.fnmatch(f[1], name) for f in files), name


def test_rays_files_are_those_that_the_page_lists(observe: Observe):
    files = observe("ray").files
    assert _unlisted(files) == set() and ("temporary folder", "ray", "777") in files


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_can_read_the_store_of_torchrun_but_can_not_run_code_in_the_run(observe: Observe):
    """The controller reads no pickle of it, and the run ends as if it had not been there."""
    seen = observe("torchrun")
    assert any("meshrl/controller" in key for key in seen.outsider["store"])
    assert list(seen.outsider["refused"].values()) == ["PermissionError"], "it saw the file, and can't read it"
    assert seen.outsider["tried"] > 5 and seen.outsider["accepted"] == 0
    assert not seen.mark.exists()
    assert (seen.folder / "run" / "checkpoints" / "step_000002").is_dir()
    assert seen.tokens == [], "the file is removed when all processes have read it"


def test_the_run_under_torchrun_has_the_numbers_of_the_same_ranks_without_it(observe: Observe, tmp_path: Path):
    """To the bit; it waited after its first step."""
    launched = observe("torchrun").folder / "run"
    other = train(write_run(tmp_path), "run", "cluster.num_train_ranks=2")
    assert steps_of(launched) == steps_of(other) and len(steps_of(other)) == 2
    assert sampled_turns(launched) == sampled_turns(other) and len(sampled_turns(other)) == 2 * 4 * 4
    assert_equal_tensors(weights(launched, 2), weights(other, 2))

"""The error names a rank that the kernel kills for lack of memory, and this cause. The run is in its own cgroup.

The kernel chooses the rank among the processes of the cgroup, and counts the kills.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_cases import Case, cases
from tiny_run import steps_of, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CASES = [case for case in cases() if case.needs_cgroup]
LIMIT_BYTES = 4 << 30  # the run itself takes about 1 GiB
MOUNT = Path("/sys/fs/cgroup")
ENTER = 'echo $$ > "$0" && exec "$@"'  # of a shell, given cgroup.procs and a command


@dataclass(frozen=True)
class MemoryCgroup:
    folder: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the cgroup until it ends, with all module paths of this process."""
        paths = os.pathsep.join(path for path in sys.path if path)
        enter = ["sh", "-c", ENTER, str(self.folder / "cgroup.procs"), *command]
        return subprocess.run(enter, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})

    def processes(self) -> list[int]:
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]

    def num_kills(self) -> int:
        """Number of processes that the kernel has killed for lack of memory."""
        text = "".join((self.folder / name).read_text() for name in os.listdir(self.folder) if name in COUNTS)
        return int(re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)[0])


COUNTS = ("memory.events", "memory.oom_control")  # of cgroups v2 and v1


@pytest.fixture
def cgroup(planted) -> Iterator[MemoryCgroup]:
    """A memory cgroup without swap, below this process's cgroup, or, in v2, below the nearest that delegates memory."""
    folder = _parent() / f"meshrl_{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    made = MemoryCgroup(folder)
    try:
        limits = {"memory.limit_in_bytes": LIMIT_BYTES, "memory.swappiness": 0}  # v1
        if (folder / "memory.max").exists():
            limits = {"memory.max": LIMIT_BYTES, "memory.swap.max": 0}
        for name, value in limits.items():
            if (folder / name).exists():
                (folder / name).write_text(str(value))
        if (entered := made.run("true")).returncode:
            pytest.skip(f"no process can be put into a memory cgroup: {entered.stderr.strip()}")
        yield made
    finally:
        _remove(made)


def _parent() -> Path:
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in own:
        inside = MOUNT / "memory" / own["memory"].lstrip("/")
        return inside if inside.is_dir() else MOUNT / "memory"
    inside = MOUNT / own.get("", "").lstrip("/")
    for folder in (inside, *inside.parents):
        delegated = folder / "cgroup.subtree_control"
        if folder.is_relative_to(MOUNT) and delegated.is_file() and "memory" in delegated.read_text().split():
            return folder
    pytest.skip("no cgroup of this system delegates its memory controller")


def _remove(cgroup: MemoryCgroup) -> None:
    """Remove the cgroup and kill processes that a failed test has left in it."""
    end = time.monotonic() + 20
    while True:
        for pid in cgroup.processes():
            os.kill(pid, signal.SIGKILL)
        try:
            return cgroup.folder.rmdir()
        except OSError:  # busy until the kernel has removed the last process
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("kernel_kills"))
    sections = json.loads(path.read_text())
    sections["loop"] |= {"num_steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2}
    path.write_text(json.dumps(sections))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="memory cgroups are Linux's")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_a_rank_that_the_kernel_kills_for_memory_is_named_with_this_cause(case: Case, config: Path, planted, cgroup):
    """If it trains, the run ends; if it only samples, it is replaced and the run continues."""
    place = case.place
    planted({"rank": place.rank, "method": place.method, "call": place.call, "how": case.fault.how})
    layout = ("cluster.num_rollout_ranks=1",) if place.split else ("cluster.num_train_ranks=2",)
    restarts = () if case.is_replaced else ("cluster.max_restarts=0",)
    ran = cgroup.run(*(sys.executable, "-m", "meshrl", "train", str(config)), *layout, *restarts, f"run.name={case.id}")
    folder = config.parent / "runs" / case.id
    assert cgroup.num_kills() == 1, ran.stdout + ran.stderr
    assert cgroup.processes() == []
    if case.is_replaced:
        assert ran.returncode == 0, ran.stderr
        assert case.first_line in ran.stdout + ran.stderr and "rank 1 was replaced in" in ran.stdout + ran.stderr
        assert [step["rollout/ranks_replaced"] for step in steps_of(folder)] == [1]
        return
    assert ran.returncode == 1
    ours = ran.stderr[ran.stderr.index("meshrl: ") :].splitlines()
    assert ours[0].startswith(f"meshrl: RankFailure: {case.first_line}"), ours[0]
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed" and result["error"].startswith(f"RankFailure: {case.first_line}")

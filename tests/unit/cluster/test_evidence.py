"""What is found out about a rank that failed: where it stands, how it ended, which phase it was in (P26)."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from meshrl.cluster import evidence
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.evidence import StackFile, handles, how_it_ended, oom_kills, shortened, waits_for_others
from meshrl.cluster.phases import PHASE_OF, phase_of
from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.monitor.processes import is_stopped
from meshrl.monitor.spans import Spans

IN_A_COLLECTIVE = """Thread 0x00007f01 (most recent call first):
  File "/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "/site-packages/torch/_ops.py", line 1158 in __call__
  File "/site-packages/torch/distributed/_functional_collectives.py", line 143 in wait_tensor
  File "/home/meshrl/train/engine.py", line 200 in digests
"""
AT_WORK = """Thread 0x00007f01 (most recent call first):
  File "/site-packages/torch/distributed/elastic.py", line 12 in watch

Thread 0x00007f02 (most recent call first):
  File "/home/reward.py", line 3 in slow
  File "/home/a.py", line 1 in a
  File "/home/a.py", line 2 in b
  File "/home/a.py", line 3 in c
  File "/site-packages/torch/distributed/fsdp/api.py", line 9 in outermost
"""


def test_a_wait_in_a_collective_is_told_from_work():
    """By the innermost frames of the main thread, which comes last."""
    assert waits_for_others(IN_A_COLLECTIVE)
    assert not waits_for_others(AT_WORK)
    assert not waits_for_others("")
    wrapped = IN_A_COLLECTIVE.replace("distributed/_functional", "distributed/algorithms/_checkpoint/wrapper")
    assert not waits_for_others(wrapped), "activation checkpointing lives there, too, and waits for nobody"
    assert shortened(AT_WORK).splitlines()[0].endswith("in slow") and "threading" not in shortened(IN_A_COLLECTIVE)


def test_long_stacks_are_cut_and_say_so():
    frames = "".join(f'  File "a.py", line {i} in f\n' for i in range(20))
    lines = shortened(f"Current thread 0x01 (most recent call first):\n{frames}").splitlines()
    assert len(lines) == 9 and lines[-1] == "  ... 12 more"


def test_every_command_of_a_rank_has_a_phase_and_every_phase_a_deadline():
    commands = {name for name, _ in inspect.getmembers(RankWorker, inspect.isfunction) if not name.startswith("_")}
    assert commands == PHASE_OF.keys() - {"came_up"}
    assert set(PHASE_OF.values()) | {"eval", "reward"} == Deadlines.model_fields.keys()


def test_what_is_sampled_for_an_evaluation_is_in_its_phase():
    spans = Spans()
    assert phase_of(RankWorker.generate) == "rollout"
    with spans("eval"):
        assert phase_of(RankWorker.generate) == "eval" and phase_of(RankWorker.forward) == "annotate"


def test_a_phase_has_its_own_deadline_or_the_common_one():
    cluster = ClusterConfig(timeout_s=50, deadlines=Deadlines(rollout=7.5))
    assert (cluster.deadline_s("rollout"), cluster.deadline_s("train")) == (7.5, 50)


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        ((3, 3), "not by its cgroup's memory limit"),
        ((3, 4), r"by the kernel for lack of memory \(its cgroup counts 1 such"),
        ((None, None), "often the kernel"),
    ],
)
def test_a_kill_for_lack_of_memory_is_told_by_the_cgroups_count(kills, words, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    monkeypatch.setattr(evidence, "oom_kills", lambda: kills[1])
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(how_it_ended(process, kills[0]))
    process.communicate()


def test_the_kernels_count_is_read_in_both_versions_of_cgroups(tmp_path):
    assert oom_kills(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/\n4:memory:/run\n0::/\n")
    (tmp_path / "sys/fs/cgroup/memory/run").mkdir(parents=True)
    assert oom_kills(tmp_path) is None
    (tmp_path / "sys/fs/cgroup/memory/run/memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
    (tmp_path / "proc/self/cgroup").write_text("0::/outside/the/container\n")
    (tmp_path / "sys/fs/cgroup/memory.events").write_text("low 0\noom 7\noom_kill 5\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == 5


SLEEPER = """
import faulthandler, os, signal, sys, time
if sys.argv[2] == "handles":
    faulthandler.register(signal.SIGUSR1, file=int(sys.argv[1]), all_threads=True)
def here():
    print("up", flush=True)
    time.sleep(600)
here()
"""


def test_a_process_is_asked_for_its_stacks_only_when_it_can_answer():
    """SIGUSR1 ends a process that has no handler for it."""
    file = StackFile(tempfile.TemporaryFile())  # noqa: SIM115, closed at the end
    started = []
    for how in ("handles", "does not"):
        process = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, str(file.fd), how], stdout=subprocess.PIPE, pass_fds=[file.fd]
        )
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        started.append(process)
    able, unable = started
    assert handles(able, signal.SIGUSR1) and not handles(unable, signal.SIGUSR1)
    for _ in range(2):  # the second time, what was written before is no news
        file.forget()
        able.send_signal(signal.SIGUSR1)
        while not file.read().endswith("in <module>"):
            time.sleep(0.01)
        assert file.read().count("in here") == 1 and file.size() > 0
    assert not is_stopped(able.pid)
    os.kill(able.pid, signal.SIGSTOP)
    while not is_stopped(able.pid):
        time.sleep(0.01)
    for process in started:
        process.kill()
        process.communicate()
    file.close()
    assert "SIGKILL" in how_it_ended(able, None) and not handles(able, signal.SIGUSR1)

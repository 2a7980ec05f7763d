"""The diagnosis of a process that failed: how it ended, its output, and its threads' stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshrl.process import diagnosis
from meshrl.process.diagnosis import (
    Snapshot,
    collective_text,
    handles,
    how_it_ended,
    innermost_frames,
    is_stopped,
    last_collective,
    oom_kills,
    output_tail,
    rank_at_fault,
    snapshot,
    waits_for_others,
)

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


def test_a_wait_in_a_collective_is_distinguished_from_work():
    """By the innermost frames of the main thread, which is listed last."""
    assert waits_for_others(IN_A_COLLECTIVE)
    assert not waits_for_others(AT_WORK)
    assert not waits_for_others("")
    wrapped = IN_A_COLLECTIVE.replace("distributed/_functional", "distributed/algorithms/_checkpoint/wrapper")
    assert not waits_for_others(wrapped), "activation checkpointing is in that folder, too, and is not a wait"
    assert innermost_frames(AT_WORK).splitlines()[0].endswith("in slow") and "threading" not in innermost_frames(
        IN_A_COLLECTIVE
    )


def test_long_stacks_are_shortened_with_a_note():
    frames = "".join(f'  File "a.py", line {i} in f\n' for i in range(20))
    lines = innermost_frames(f"Current thread 0x01 (most recent call first):\n{frames}").splitlines()
    assert len(lines) == 9 and lines[-1] == "  ... 12 more"


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        ((3, 3), "not by its cgroup's memory limit"),
        ((3, 4), r"by the kernel for lack of memory \(its cgroup counts 1 such"),
        ((None, None), "often the kernel"),
    ],
)
def test_a_kill_for_lack_of_memory_is_detected_by_the_cgroups_count(kills, words, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    process.communicate()
    monkeypatch.setattr(diagnosis, "oom_kills", lambda: kills[1])
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(how_it_ended(process.returncode, kills[0]))


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


def test_a_process_writes_its_stacks_only_when_it_has_a_handler_and_runs(tmp_path):
    """SIGUSR1 ends a process that has no handler for it."""
    with open(tmp_path / "stacks", "w+b") as file:
        started = []
        for how in ("handles", "does not"):
            process = subprocess.Popen(
                [sys.executable, "-c", SLEEPER, str(file.fileno()), how],
                stdout=subprocess.PIPE,
                pass_fds=[file.fileno()],
            )
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            started.append(process)
        able, unable = started
        assert handles(able.pid, signal.SIGUSR1) and not handles(unable.pid, signal.SIGUSR1)
        for _ in range(2):  # the second snapshot does not contain the stacks of the first
            assert snapshot(able.pid, able.send_signal, file).stacks.count("in here") == 1
        assert snapshot(unable.pid, unable.send_signal, file) == diagnosis.Snapshot() and unable.poll() is None
        os.kill(able.pid, signal.SIGSTOP)
        while not is_stopped(able.pid):
            time.sleep(0.01)
        assert snapshot(able.pid, able.send_signal, file) == diagnosis.Snapshot(is_stopped=True)
        for process in started:
            process.kill()
            process.communicate()
        assert "SIGKILL" in how_it_ended(able.returncode, None) and not handles(able.pid, signal.SIGUSR1)


def test_the_end_of_a_long_output_is_shown(tmp_path):
    with open(tmp_path / "log", "w+b") as file:
        file.write(b"first line\n" + b"x" * 100 + b"\nlast line\n")
        file.flush()
        assert output_tail(file, 10) == "last line"
        assert output_tail(file, 1000).startswith("first line")


def taken(stacks: str, collective: str | None = None, is_stopped: bool = False) -> Snapshot:
    return Snapshot(stacks=stacks, collective=collective, is_stopped=is_stopped)


def test_the_rank_at_fault_is_the_one_for_which_the_others_wait():
    waits, works = taken(IN_A_COLLECTIVE), taken(AT_WORK)
    assert rank_at_fault(0, {0: waits, 1: works, 2: works}) == (1, ", and rank 0 waits for it")
    assert rank_at_fault(2, {0: waits, 1: works, 2: works}) == (2, "")
    assert rank_at_fault(0, {0: waits, 1: waits}) == (0, "")
    assert rank_at_fault(0, {0: waits, 1: taken("", is_stopped=True), 2: works})[0] == 1


def test_without_a_frame_that_shows_a_wait_no_rank_is_blamed_on_an_accelerator():
    """Under NCCL, a rank that waits for others shows the frame of the Python code that reads a number from the device,
    as a rank that computes does. Then the rank whose deadline ended first is the cause or not."""
    computes, waits = taken(AT_WORK, "nccl:x"), taken(IN_A_COLLECTIVE, "nccl:x")
    rank, note = rank_at_fault(1, {0: computes, 1: computes})
    assert rank == 1 and "can't be determined" in note and "ranks 0, 1 do not show" in note
    assert "can't be determined" in rank_at_fault(0, {0: waits, 1: computes, 2: computes})[1]
    assert rank_at_fault(0, {0: waits, 1: computes}) == (1, ", and rank 0 waits for it")
    assert rank_at_fault(0, {0: computes}) == (0, ""), "a single rank waits for no other"
    assert rank_at_fault(0, {0: computes, 1: taken("", is_stopped=True)})[0] == 1


def record(number: int, state: str, retired: bool = False, **changes: Any) -> dict[str, Any]:
    """A record of NCCL's flight recorder, in the format of torch 2.13."""
    own = {"record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number}
    own |= {"p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:_all_gather_base", "is_p2p": False}
    own |= {"input_sizes": [[1024]], "input_dtypes": ["BFloat16"], "output_sizes": [[8192]], "timeout_ms": 600000}
    return own | {"state": state, "retired": retired} | changes


def test_the_oldest_collective_that_has_not_ended_is_the_one_that_waits():
    """Many are enqueued after it, all of which wait for it on the device."""
    done, stuck = [record(i, "completed", True) for i in (7, 8)], [record(9, "started"), record(10, "scheduled")]
    text = "nccl:_all_gather_base, number 9 of group default_pg, of [[1024]], started"
    assert collective_text({"entries": [*reversed(stuck), *done]}) == f"{text}; 1 later ones wait"
    assert collective_text({"entries": [*done, stuck[0]]}) == text
    assert collective_text({"entries": done}) == text.replace("9", "8").replace("started", "has ended")
    sends = record(9, "scheduled", is_p2p=True, p2p_seq_id=3, profiling_name="nccl:send 0->1")
    assert collective_text({"entries": [sends]}).startswith("nccl:send 0->1, number 3 of")
    assert collective_text({"version": "2.10"}) == "none is recorded"


def test_a_recorder_that_does_not_answer_is_reported(tmp_path: Path):
    assert "not known: no records of the flight recorder ([Errno 2]" in last_collective(str(tmp_path / "none"))

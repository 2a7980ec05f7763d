"""SIGKILL at random moments while checkpoints are written: a folder `state` is always complete."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshrl.train.checkpoint import SavedTensors, stage, write_in_background
from meshrl.train.checkpoint_files import (
    CONTROLLER,
    Manifest,
    commit,
    faults,
    make_temporary_folder,
    prune,
    read_controller,
    read_manifest,
    remove_leftovers,
    state_folder,
    states,
    write_json,
)

KEEP = 2
NAMES = [f"layer.{i}" for i in range(4)]


def save_for_ever(checkpoints: Path) -> None:
    """Write small checkpoints without end, each filled with the number of its step."""
    first = max((step for step, _ in states(checkpoints)), default=0) + 1
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        for step in range(first, first + 10_000):
            final = state_folder(checkpoints, step)
            temporary = make_temporary_folder(final)
            slices = stage({name: torch.full((60, 1000), float(step)) for name in NAMES})
            write = write_in_background(temporary, "policy", slices)
            files = dict([write.result()])
            files[CONTROLLER] = write_json(temporary / CONTROLLER, {"step": step})
            commit(final, Manifest(step=step, num_ranks=1, files=files))
            prune(checkpoints, KEEP)


def kill_and_look(checkpoints: Path, rounds: int, seed: int) -> None:
    """In a process that has imported torch: forked children save until they are killed; prints what each left."""
    moments, newest = random.Random(seed), 0
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            save_for_ever(checkpoints)
        time.sleep(0.1)
        deadline = time.monotonic() + 30
        while max((step for step, _ in states(checkpoints)), default=0) <= newest and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.random() * 0.03)  # a save takes about as long
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = states(checkpoints)
        for step, folder in found:
            manifest = read_manifest(folder)
            assert faults(folder, manifest) == [] and manifest.step == step == read_controller(folder)["step"]
            tensors = {name: torch.zeros(60, 1000) for name in NAMES}
            SavedTensors(folder, "policy").load(tensors)
            assert all(bool((t == step).all()) for t in tensors.values())
        rest = sum(1 for _ in checkpoints.glob("step_*/state.aside"))
        remove_leftovers(checkpoints)
        assert sorted(p.name for p in checkpoints.iterdir()) == [folder.parent.name for _, folder in found]
        print(json.dumps({"steps": [step for step, _ in found], "half_written": rest}), flush=True)
        newest = found[-1][0]


def test_a_kill_at_any_moment_leaves_earlier_checkpoints_valid(tmp_path):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom test_checkpoint_kill import kill_and_look\n"
        f"kill_and_look(Path({str(tmp_path)!r}), 12, 3)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == 12
    newest = [r["steps"][-1] for r in rounds]
    assert newest == sorted(set(newest)), "every round continues after the previous one"
    counts = [0, *(len(r["steps"]) for r in rounds)]
    assert all(1 <= after <= max(KEEP, before) + 1 for before, after in pairwise(counts)), (
        f"a kill between commit and prune leaves one more than before, and the next prune removes it: {counts}"
    )
    assert any(r["half_written"] for r in rounds), "no kill interrupted a save, so the test shows nothing"


def _checkpoint(checkpoints: Path, step: int) -> Path:
    """A checkpoint without tensors."""
    final = state_folder(checkpoints, step)
    temporary = make_temporary_folder(final)
    files = {CONTROLLER: write_json(temporary / CONTROLLER, {"step": step})}
    commit(final, Manifest(step=step, num_ranks=1, files=files))
    return final


def test_pruning_counts_only_valid_checkpoints_and_leaves_models(tmp_path):
    """Damaged newer states do not cause the removal of the last valid one; a model folder does not count."""
    folders = {step: _checkpoint(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    (folders[1].with_name("model")).mkdir()
    (folders[5] / CONTROLLER).unlink()
    (folders[4] / CONTROLLER).write_text("{")
    assert prune(tmp_path, 1) == [folders[2], folders[1]]
    assert [step for step, _ in states(tmp_path)] == [3, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_00000{i}" for i in (1, 3, 4, 5)]
    assert prune(tmp_path, 1) == []


def test_a_removal_that_was_interrupted_is_finished(tmp_path):
    """A state without a manifest stays: another program may be copying it."""
    complete, half, copied = (_checkpoint(tmp_path, step) for step in (1, 2, 3))
    (copied / "manifest.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", _killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 1)
    assert [step for step, _ in states(tmp_path)] == [2]
    remove_leftovers(tmp_path)
    assert [step for step, _ in states(tmp_path)] == [2] and half.is_dir()
    assert not complete.parent.exists() and copied.is_dir()


def _killed(path: Path, ignore_errors: bool = False) -> None:
    """In place of rmtree: the process is killed when it removes something that exists."""
    if path.exists():
        raise KeyboardInterrupt

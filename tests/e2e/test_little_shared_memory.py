"""Runs with a /dev/shm of 64 KB: containers have little by default (Docker: 64 MB)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import steps_of, write_run

SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
RUNS = """
import os, sys
from meshrl.cli import main
config, *common = sys.argv[1:]
refused = main(["train", config, *common, "run.name=refused", "rollout.sync_bucket_bytes=1000000"])
done = main(["train", config, *common, "run.name=done", "rollout.sync_bucket_bytes=20000"])
print("codes", refused, done, "left", os.listdir("/dev/shm"))
"""


def _can_mount() -> bool:
    try:
        return subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _can_mount(), reason="needs the right to mount a file system")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_dev_shm_ends_no_process_by_a_signal(tmp_path: Path):
    """The samples of a step are larger than /dev/shm, so they are sent over the sockets. A ring for weights that does
    not fit ends the run with an error that names the sizes, the key and the remedy."""
    config = write_run(tmp_path)
    overrides = [
        *("loop.num_steps=1", "loop.prompts_per_step=8", "loop.samples_per_prompt=64"),
        *("rollout.sampling.max_new_tokens=40", "rollout.max_running_requests=512"),
        *("train.max_tokens_per_microbatch=4096", "cluster.num_rollout_ranks=1"),
    ]
    command = [*SMALL_SHM, sys.executable, "-c", RUNS, str(config), *overrides]
    path = os.pathsep.join(entry for entry in sys.path if entry)  # the reward is a function of a test module
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "codes 1 0 left []" in ran.stdout, ran.stdout + ran.stderr
    error = next(line for line in ran.stderr.splitlines() if line.startswith("meshrl: SyncError: "))
    assert "/dev/shm has 65,536 bytes, 65,536 of them free" in error
    assert all(word in error for word in ("rollout.sync_bucket_bytes", "--shm-size", "emptyDir", "No space left"))
    assert "resource_tracker" not in ran.stderr
    (step,) = steps_of(tmp_path / "runs" / "done")
    assert step["train/num_tokens"] * 4 > 65536

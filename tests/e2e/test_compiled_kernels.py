"""The Triton kernels are compiled to machine code of GPUs, on a machine without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which `make test-vllm` has")
def test_each_kernel_is_compiled_and_fits_into_a_device(tmp_path):
    """For sm_80 and sm_90; products use tensor cores; also for sizes that Triton takes for constants."""
    command = [sys.executable, str(BENCHMARKS / "kernel_resources.py"), "--smoke", "--results", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert [bar["holds"] for bar in line["bars"]] == [True, True]
    (path,) = tmp_path.glob("kernel_resources_*.json")
    rows = json.loads(path.read_text())["raw"]["kernels"]
    kernels = {"forward_kernel", "backward_kernel", "sum64_kernel", "count_kernel", "compact_kernel"}
    kernels |= {f"{name}_kernel" for name in ("attend", "merge", "norm", "rotate", "gate")}
    assert {(row["kernel"], row["arch"]) for row in rows} == {(k, a) for k in kernels for a in ("sm_80", "sm_90")}
    assert max(row["spilled_bytes"] for row in rows) <= 64

"""The GPU benchmark h200.sh runs on a machine without a GPU, reports its tests as skipped, and sums up its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_h200_sh_runs_in_smoke_mode(tmp_path: Path) -> None:
    command = ["bash", str(BENCHMARKS / "h200.sh"), "--smoke", "--results", str(tmp_path)]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["benchmark"] == "h200"
    figures = line["figures"]
    assert all(isinstance(value, float) for value in figures.values())
    assert figures["tests_failed"] == figures["tests_passed"] == 0 < figures["tests_skipped"]
    assert figures["parts_missing"] == 0
    assert {
        "gemm_tflop_per_s",
        "mfu_row_256_ckpt",
        "mfu_rows_64",
        "attention_ms_family_256_buckets",
        "ratio_mixed_16_embedded_over_generate",
        "step_s",
        "step_proof_logprob_abs_diff_mean",
        "sync_gb_per_s",
    } <= figures.keys()
    assert f"| step_s | {figures['step_s']:.4g} |" in done.stdout
    (record,) = tmp_path.glob("h200_*.json")
    written = json.loads(record.read_text())
    assert written["figures"] == figures
    assert written["raw"]["gpu_step"]["raw"]["steps"] and written["raw"]["device"]["type"] == "cpu"


def test_a_part_without_a_record_is_named(tmp_path: Path) -> None:
    """A part that was ended early and a failed test are both named, and the command fails."""
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="3" time="1.5"><testcase classname="a" name="good"/><testcase classname="a" '
        'name="bad"><failure message="off by one"/></testcase><testcase classname="a" name="no"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    paths = ["--parts", str(tmp_path), "--tests", str(tmp_path / "tests.xml"), "--results", str(tmp_path / "out")]
    command = [sys.executable, str(BENCHMARKS / "gpu_table.py"), *paths]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert (figures["tests_passed"], figures["tests_failed"], figures["tests_skipped"]) == (1, 1, 1)
    assert figures["parts_missing"] == 3
    assert "FAILED a::bad: off by one" in done.stdout and "MISSING gpu_step" in done.stdout


def test_step_flop_equals_the_flop_that_pytorch_counts() -> None:
    """PyTorch counts while a model runs forward and backward. Matrix products agree exactly; attention counts half of
    PyTorch's number, because it is causal."""
    code = """
import torch, gpu_workload
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2ForCausalLM
config = gpu_workload.config_of("smoke")
lm = Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
rows = torch.arange(60).reshape(2, 30)
with FlopCounterMode(display=False) as counter:
    lm(rows).logits.sum().backward()
print(counter.get_total_flops(), gpu_workload.step_flop(config, [30, 30], 60))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
    counted, ours = map(float, done.stdout.split())
    layers, width = 2, 64
    assert ours + 6 * layers * width * 2 * 30**2 == pytest.approx(counted, rel=1e-9)

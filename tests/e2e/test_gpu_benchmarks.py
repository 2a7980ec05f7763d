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
        "mfu_smoke_row_256_ckpt",
        "mfu_sheet_smoke_rows_64",
        "attention_ms_family_256_buckets",
        "decode_step_ms_smoke_16",
        "ratio_mixed_16_embedded_over_generate",
        "step_s",
        "step_proof_logprob_abs_diff_mean",
        "sync_gb_per_s",
    } <= figures.keys()
    assert f"| step_s | {figures['step_s']:.4g} |" in done.stdout
    assert "predictions: by the data sheet of H200\n" in done.stdout
    (record,) = tmp_path.glob("h200_*.json")
    written = json.loads(record.read_text())
    predictions = written["raw"]["predictions"]
    kinds = ("mfu", "ratio", "attention_ms", "decode_step_ms")
    measured = {name for name in figures if "_per_s" in name or name.startswith(kinds)}
    measured = {name for name in measured if not name.endswith(("_low", "_high"))}
    assert predictions.keys() == measured | {f"step_{part}s" for part in ("", "wall_", "rollout_", "train_", "sync_")}
    for name, bound in predictions.items():
        reached = figures[name] / bound if "_per_s" in name or name.startswith("mfu") else bound / figures[name]
        assert 0 < reached < 1 or name.startswith("ratio"), f"a CPU is faster than an H200: {name}"
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


def test_the_page_of_a_step_has_the_shares_of_its_raw_results() -> None:
    """Each row of docs/perf/gpu.md with a step is one of a raw file, with the columns that gpu_table.py prints."""
    page = (BENCHMARKS.parent / "docs" / "perf" / "gpu.md").read_text().partition("## A GRPO step")[2]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")][
        2:11
    ]
    file, found = "", 0
    for run, released, *_, sheet, over in table:
        day = "20261126" if "143614" in run else "20261127" if "031753" in run else file[9:17]
        file = f"gpu_step_{day}-{run.strip('`').removesuffix('.json')[-6:]}" if run else file
        record = json.loads((BENCHMARKS / "results" / f"{file}.json").read_text())
        end = "_released" if released else ""
        code = f"import json, gpu_table; d = json.load(open('results/{file}.json')); print('\\n'.join(gpu_table.rows("
        done = subprocess.run(
            [sys.executable, "-c", f"{code}d['figures'], d['raw']['predictions'])))"],
            capture_output=True, text=True, cwd=BENCHMARKS,
        )  # fmt: skip
        printed = {row.split(" | ")[0][2:]: row.rstrip(" |").split(" | ")[-2:] for row in done.stdout.splitlines()}
        assert sheet == printed[f"step_train_s{end}"][0].replace("%", " %"), (file, record["figures"])
        assert over == printed[f"step_s{end}"][1], file
        found += 1
    assert found == 9


def test_bounds_of_a_step_are_those_of_its_raw_results() -> None:
    """Except for the sync, which moved more bytes then. The rate of a product in place of the data sheet's changes what
    is bound by FLOP: training, not the sync."""
    code = """
import json, pathlib, types
from dataclasses import replace
import gpu_step, gpu_table
from gpu_predict import roofline_of
from gpu_workload import config_of
from workload import gsm8k_groups
for path in sorted(pathlib.Path("results").glob("gpu_step_*.json")):
    record = json.loads(path.read_text())
    raw, made = record["raw"], [gsm8k_groups(32, 8, ordinal, 1.0) for ordinal in range(6)]
    by_tokens = {sum(sum(group.answers) for group in groups): groups for groups in made}
    sheet = roofline_of(types.SimpleNamespace(raw=raw))
    work = [by_tokens[step["sampled_tokens"]] for step in raw["steps"][1:]], raw["sync_bytes"]
    bounds = gpu_step.step_bounds(config_of("0.5B"), sheet, *work)
    known = [name for name in bounds if name.startswith(("step_rollout", "step_train", "step_sampled"))]
    print(len(known), max(abs(bounds[name] / raw["predictions"][name] - 1) for name in known))
    of_gemm = gpu_step.step_bounds(config_of("0.5B"), replace(sheet, flop_per_s=sheet.flop_per_s / 2), *work)
    print(of_gemm["step_train_s"] / bounds["step_train_s"], of_gemm["step_sync_s"] / bounds["step_sync_s"])
    figures = {**record["figures"], "step_wall_s": 10 * bounds["step_s"]}
    lines = {line.split(" | ")[0]: line.split(" | ")[3:] for line in gpu_table.rows(figures, bounds, of_gemm)}
    train, wall = lines["| step_train_s"], lines["| step_wall_s"]
    print(*(text.strip(" %|") for text in (*train, *wall)))
"""
    numbers = _in_benchmarks(code)
    assert len(numbers) == 5 * 10
    for known, error, training, sync, *shares in zip(*[iter(numbers)] * 10):
        assert known == 4 and error < 1e-4 and 1.8 < training < 2 and sync == 1
        of_gemm, of_sheet, over, wall_of_gemm, wall_of_sheet, wall_over = shares
        assert of_gemm / of_sheet == pytest.approx(training, rel=0.01) and over == pytest.approx(100 / of_sheet, 0.01)
        assert (wall_of_sheet, wall_over) == (10.0, 10.0) and 10 < wall_of_gemm < 20


def _in_benchmarks(code: str) -> list[float]:
    """The numbers that this code prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in done.stdout.split()]


@pytest.mark.slow
def test_predictions_follow_from_shapes_and_data_sheets() -> None:
    """Of an H100, by hand: a large product and a training step are bound by FLOP, decode by the bytes of its memory."""
    code = """
import types
import torch, gpu_predict, gpu_workload
from transformers import Qwen2ForCausalLM
config = gpu_workload.config_of("smoke")
shape = gpu_predict.shape_of(config)
lm = Qwen2ForCausalLM(config)
print(shape.total, sum(p.numel() for p in lm.parameters()), shape.head, lm.lm_head.weight.numel(), shape.block)
sheet = gpu_predict.roofline_of(types.SimpleNamespace(raw={"device": {"name": "NVIDIA H100 80GB HBM3"}}))
print(gpu_predict.product(sheet, 8192), gpu_predict.product(sheet, 16))
print(gpu_predict.rollout(sheet, shape, [5], [(5, 3), (5, 1)], 8))
print(gpu_predict.rollout(sheet, shape, [5], [(5, 3), (5, 3)], 1))
print(gpu_predict.pairs_of_segments([0, 3, 5, 6], [-1, 0, 1]))
big = gpu_predict.shape_of(gpu_workload.config_of("0.5B"))
print(big.total, gpu_predict.train_step(sheet, big, 4096, 0, 4096, False), gpu_predict.sync_in_place(sheet, big))
"""
    total, counted, head, head_counted, block, large, small, *others = _in_benchmarks(code)
    assert (total, head) == (counted, head_counted) and block == total - head - 2 * (64 + 64 + 2 * 64) - 64
    assert large == pytest.approx(2 * 8192**3 / 989e12) and small == pytest.approx(3 * 256 * 2 / 3.35e12)
    decode, one_by_one, pairs, big, step, sync = others
    token = 2 * 2 * 32 * 2  # bytes: layers, keys and values, 2 heads of 16, bf16
    prefill, steps = 2 * total + 5 * token, (2 * total + 6 * token) + (2 * total + 7 * token)
    assert decode * 3.35e12 == pytest.approx(prefill + steps)
    assert one_by_one * 3.35e12 == pytest.approx(prefill + 2 * steps)
    assert pairs == 6 + (2 * 3 + 3) + (5 + 1)
    assert big == 494_032_768  # of Qwen2.5-0.5B
    products = 6 * 4096 * (big - 24 * (3 * 896 + 2 * 128) - 896)
    assert step == pytest.approx(products / 989e12 + 30 * big / 3.35e12)
    assert sync == pytest.approx(8 * big / 3.35e12)


@pytest.mark.slow
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
    counted, ours = _in_benchmarks(code)
    layers, width = 2, 64
    assert ours + 6 * layers * width * 2 * 30**2 == pytest.approx(counted, rel=1e-9)

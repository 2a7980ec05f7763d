"""Every benchmark runs in its smoke mode, and its last line is machine-readable."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import chromium
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRL = BENCHMARKS.parent / ".venv-trl" / "bin" / "python"
VLLM = BENCHMARKS.parent / ".venv-vllm" / "bin" / "python"


def smoke(name: str, results: Path, *arguments: str) -> dict[str, Any]:
    """Run one benchmark at tiny sizes and check the raw samples that it writes. Returns its last line."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke", "--threads", "1", "--results", str(results)]
    done = subprocess.run([*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["benchmark"] == name
    figures = line["figures"].values()
    assert figures and all(isinstance(value, float) or value == "not measured" for value in figures)
    for bar in line["bars"]:
        assert bar.keys() == {"name", "value", "need", "holds"}
        if bar["value"] == "not measured":  # other work on the machine
            assert bar["holds"] is None
            continue
        relation, _, limit = bar["need"].partition(" ")
        reached = {">=": bar["value"] >= float(limit), "<=": bar["value"] <= float(limit)}[relation]
        assert bar["holds"] is reached
    (path,) = results.glob(f"{name}_*.json")
    written = json.loads(path.read_text())
    assert written["figures"] == line["figures"]
    assert {"cpu", "cores", "threads", "torch", "transformers", "load_average_before"} <= written["machine"].keys()
    assert written["raw"]
    return line


@contextlib.contextmanager
def arguments(name: str, *given: str) -> Iterator[None]:
    """Context in which a benchmark, or one of its modules, is imported in this process, with these arguments."""
    before = set(sys.modules)
    with (
        mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]),
        mock.patch.object(sys, "argv", [name, *given]),
    ):
        yield
    for module in set(sys.modules) - before:
        if (getattr(sys.modules[module], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[module]  # names such as `runs` could hide other modules


def refusal(name: str, *given: str) -> str:
    """The error text of a benchmark with wrong arguments. It runs in this process, where its imports are loaded."""
    printed = io.StringIO()
    with arguments(name, *given), contextlib.redirect_stderr(printed), pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def bars(line: dict[str, Any]) -> set[str]:
    return {bar["name"] for bar in line["bars"]}


FILTERS = " ".join(f"filter_{name}_s" for name in ("word", "letters", "missing", "reward", "tokens", "sorted"))
CELLS = "smoke_float32_16_mixed smoke_float32_16_equal"
ANY = -math.inf, math.inf
# benchmark with its arguments -> its bars ("" = any), figures that it has with their least and most
SMOKE: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    "packing --dtype float32": (
        "ratio_packed_over_padded_float32 balance_alone balance_shared",
        {"ratio_shared_over_packed_float32": ANY},
    ),
    "cpu_dtype": ("", {"ratio_train_smoke": ANY, "ratio_sample_smoke": ANY}),
    "engine_overhead --only engine": (
        "engine_overhead",
        {"engine_overhead_low": ANY, "engine_overhead_high": ANY, "entropy_cost": ANY},
    ),
    "engine_overhead --only controller": ("controller_share", {"controller_share": (0, 1)}),
    "optimizer_step": (
        "first_dp_shard first_dp_shard_tp later_dp_shard later_dp_shard_tp",
        {"first_s_dp_shard_engine": (0, math.inf)},
    ),
    "mesh_loss": ("off_tp_2", {"loss_one_rank": (1, math.inf)}),
    "trace_overhead": (
        "spans_overhead",
        {"recorded_overhead": ANY, "profiled_overhead": ANY, "spans_of_a_step": (20, math.inf)},
    ),
    "batch_plan": (
        "worst_rank mean_over_greedy slowest_cpu_s",
        {"rank_equal_16_16384": (0.999, math.inf), "equal_16_16384_over_greedy": (0, 1)},
    ),
    "viewer": (f"first_paint_s list_s {FILTERS}", {"write_s": (0, math.inf)}),
    # a tiny model needs hardly more than the libraries, so its bars are not those of the published runs
    "plan_accuracy": ("", {"planned over measured, parameters": (0.8, 1.25)}),
    "rollout --no-generate-batch": (
        " ".join(f"{cell}_over_generate" for cell in CELLS.split()),
        {f"share_of_bound_{cell}": ANY for cell in CELLS.split()},
    ),
    "rollout": ("", {f"ratio_{cell}_over_generate_batch": ANY for cell in CELLS.split()}),
    "weight_sync": (
        "delta_fewer_bytes_sockets_2_1 delta_over_scan_sockets_2_1 "
        "share_proven_colocated_1 share_proven_sockets_2_1 share_wire_colocated_1 share_wire_sockets_2_1 "
        "extra_buckets_colocated_1 extra_buckets_sockets_2_1",
        {"delta_fewer_bytes_sockets_2_1": (5, math.inf)},  # even with small tensors
    ),
    # the model repeats its own inputs
    "schedule_prediction": ("error_one_step_off_smoke error_fully_async_smoke", {"colocated_smoke": (0.5, 2)}),
    "overlap": ("phases_equal over_longer_phase over_in_turn", {"over_both_cores": ANY}),
    "async_rl": (
        "speed_up reward_below_colocated length_of_fully_async_to_colocated",
        {"fully_async_run/rollout_idle": ANY},
    ),
    "schedule_learning": ("accuracy_below_colocated_fully_async_1", {"accuracy_fully_async_1_uncorrected": ANY}),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", SMOKE)
def test_a_benchmark_has_its_bars_and_figures(command: str, tmp_path: Path) -> None:
    if command == "viewer" and not chromium.PROGRAM:
        pytest.skip("Chromium is not installed")
    name, *given = command.split()
    line, (wanted, figures) = smoke(name, tmp_path, *given), SMOKE[command]
    assert not wanted or bars(line) == {*wanted.split()}
    for figure, (least, most) in figures.items():
        assert figure in line["figures"]
        assert (least, most) == ANY or least < line["figures"][figure] < most, figure


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_is_replayed_to_the_bit(tmp_path: Path) -> None:
    line = smoke("replay", tmp_path)
    assert next(bar for bar in line["bars"] if bar["name"] == "replays that differ")["holds"]
    assert line["figures"]["time of a replay, GRPO"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_mode_of_checkpointing_saves_what_it_promises(tmp_path: Path) -> None:
    line = smoke("activation_memory", tmp_path)
    assert len(bars(line)) == 2 * 5 and all(bar["holds"] for bar in line["bars"])


def test_the_table_of_the_mesh_is_what_its_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with arguments("mesh_bytes"):
        runpy.run_path(str(BENCHMARKS / "mesh_bytes.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("|") > 80
    assert printed in (BENCHMARKS.parent / "docs" / "perf" / "device_mesh.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_overhead_and_bytes_of_the_axes(tmp_path: Path) -> None:
    line = smoke("engine_overhead", tmp_path, "--only", "axes")
    axes = ("dp_shard", "ulysses", "tp")
    off = {f"bytes_off_{axis}{recomputed}" for axis in axes for recomputed in ("", "_recomputed")}
    assert bars(line) == {f"overhead_{axis}" for axis in axes} | off
    assert {bar["value"] for bar in line["bars"] if bar["name"] in off} == {0}
    assert all(line["figures"][f"bytes_{axis}"] > 1e5 for axis in axes)


@pytest.mark.slow
def test_controller_scale(tmp_path: Path) -> None:
    line = smoke("controller_scale", tmp_path)
    totals = {"cpu_s_step", "cpu_s_step_and_turns", "ratio_step", "ratio_step_and_turns"}
    assert bars(line) == totals | {"bytes_ratio_64", "bytes_ratio_256"}
    parts = (
        "buffer",
        "flatten",
        "planning",
        "advantages",
        "loss_weights",
        "dispatch",
        "metrics",
        "log",
        "turns",
        "decode",
    )
    assert all(line["figures"][f"cpu_s_{part}_256"] > 0 for part in (*parts, "log_thread"))
    assert line["figures"]["log_us_loop_thread_256"] < line["figures"]["log_us_loop_inline_256"]


@pytest.mark.slow
def test_pages(tmp_path: Path) -> None:
    """Against this checkout itself."""
    line = smoke("pages", tmp_path, "--base", str(BENCHMARKS.parent))
    counted = {"allocated_over_needed", "admitted_rows", "prompt_reads", "cached_of_context"}
    assert bars(line) == counted | {"host"}
    assert all(bar["holds"] for bar in line["bars"] if bar["name"] in counted - {"admitted_rows"})


def test_rollout_measures_the_published_rows_at_their_lengths() -> None:
    """Without options: the rows of NOTES.md, with the lengths of the results that it names."""
    page = (BENCHMARKS / "NOTES.md").read_text()
    rows = re.findall(r"^\| ([0-9.]+) M, (fp32|bf16), (\d+) \| mixed", page, re.MULTILINE)
    types = {"fp32": "float32", "bf16": "bfloat16"}
    published = {(f"{millions}M", types[dtype], int(requests)) for millions, dtype, requests in rows}
    with arguments("rollout"):
        rollout = runpy.run_path(str(BENCHMARKS / "rollout.py"), run_name="rollout")
        args = rollout["arguments"]()
    assert set(rollout["cells"](args)) == published and len(published) == 8
    for name in re.findall(r"rollout_2026\d{4}-\d{6}", page.partition("## Rollouts")[2].partition("## Training")[0]):
        settings = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["settings"]
        for size, requests in itertools.product(settings["sizes"], settings["requests"]):
            assert rollout["length_scale"](args, size, requests) == settings["scale"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VLLM.exists(), reason="there is no .venv-vllm: make setup-vllm")
def test_rollout_against_vllm(tmp_path: Path) -> None:
    line = smoke("rollout", tmp_path, "--rivals", "vllm", "--vllm-python", str(VLLM))
    figures, rows = line["figures"], [f"ratio_0.9M_float32_16_{kind}_over_vllm" for kind in ("mixed", "equal")]
    assert {bar["name"]: (bar["value"], bar["need"]) for bar in line["bars"]} == {
        "vllm_geometric_mean": (pytest.approx((figures[rows[0]] * figures[rows[1]]) ** 0.5, rel=1e-3), ">= 1"),
        "vllm_lowest_row": (min(figures[row] for row in rows), ">= 0.85"),
    }
    assert figures["vllm_startup_s"] > 0 and figures["embedded_startup_s"] > 0
    assert not any("generate" in name for name in figures)


@pytest.mark.parametrize("arguments", [("--rivals", "vllm"), ("--vllm-python", "no/python")])
def test_without_vllm_the_error_names_the_command_that_installs_it(arguments: tuple[str, ...]) -> None:
    assert "make setup-vllm" in refusal("rollout", *arguments)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TRL.exists(), reason="there is no .venv-trl: see benchmarks/README.md")
def test_grpo_vs_trl(tmp_path: Path) -> None:
    line = smoke("grpo_vs_trl", tmp_path)
    compared = {"ratio_samples_per_s", "ratio_peak_memory", "length_difference", "first_step_difference", "reward_gap"}
    assert bars(line) == compared
    assert line["figures"]["first_step_share_moved_trl"] > 0.5  # its weights are not rounded to bfloat16
    for name in ("ratio_samples_per_s", "ratio_peak_memory", "reward_gap"):
        assert line[name] == line["figures"][name]


def test_the_first_step_of_weights_in_bfloat16_does_not_count_as_a_step_of_the_learning_rate() -> None:
    with arguments("first_step"):
        share_moved = runpy.run_path(str(BENCHMARKS / "first_step.py"))["share_moved"]
    weights = 0.02 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert share_moved([weights], [weights - 3e-5], 3e-5) == 1
    rounded = weights.bfloat16()
    assert share_moved([rounded], [rounded - 3e-5], 3e-5) < 0.5
    assert share_moved([weights], [weights], 3e-5) == share_moved([weights], [weights - 6e-5], 3e-5) == 0


def test_the_stand_in_is_rewarded_independently_of_the_length_of_its_answers() -> None:
    with arguments("runs"):
        stand_in = runpy.run_path(str(BENCHMARKS / "runs.py"))["objective"](None)
        (term,) = stand_in["rewards"].values()
        module, _, function = term["kind"].partition(":")
        grade = runpy.run_path(str(BENCHMARKS / f"{module}.py"))[function]
    for first in "ab":
        assert len({grade(first * length, None) for length in (1, 10, 1000)}) == 1
    assert grade("a", None) != grade("b", None)  # a signal
    assert stand_in["optimizer"]["lr"] < 1e-8


def test_without_trl_the_error_names_the_page_that_explains_its_installation(tmp_path: Path) -> None:
    assert "benchmarks/README.md" in refusal("grpo_vs_trl", "--trl-python", str(tmp_path / "python"))


@pytest.mark.parametrize(("axis", "most"), [("fsdp2", 60), ("ulysses", 70), ("tp", 105)])
def test_the_bare_loops_are_short(axis: str, most: int) -> None:
    """The engine is compared with simple loops, as users would write them."""
    assert len((BENCHMARKS / f"bare_{axis}.py").read_text().splitlines()) <= most


def test_the_endpoint_loses_nothing_under_an_attack(tmp_path: Path):
    line = smoke("endpoint", tmp_path)
    assert [bar["holds"] for bar in line["bars"][1:]] == [True] * 4

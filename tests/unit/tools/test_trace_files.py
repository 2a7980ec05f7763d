"""Reading the traces of a run; and the files that `meshrl diagnose` writes."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest
import torch
from golden import check_golden
from torch.profiler import ProfilerActivity, profile, schedule

from meshrl.cli import main
from meshrl.core.errors import DataError
from meshrl.monitor.recorder import (
    FOLDER,
    PROFILE_FILE,
    ControllerTrace,
    Phase,
    RankFacts,
    RankTrace,
    Span,
    Step,
    write_controller,
    write_rank,
)
from meshrl.tools.diagnose.command import run
from meshrl.tools.diagnose.diagnosis import diagnose
from meshrl.tools.diagnose.read import read_profile, read_trace
from tests.traces import EPOCH, healthy, write_trace

CUDA = Path(__file__).with_name("cuda_trace.json")
HOSTILE = "</script><img src=x onerror=alert(1)>\u202egnp\x1b[2J"


@pytest.fixture
def traced(tmp_path) -> Path:
    return write_trace(tmp_path / "run", [{0: healthy(), 1: healthy()}] * 2, offsets_ms={1: 5000})


def write_profiles(run: Path, profiles: dict[int, dict], hosts: dict[int, str] | None = None, device="H100") -> Path:
    """A run whose ranks have these profiles and train in their steps. Its steps are those of the first rank."""
    steps = list[Step]()
    for rank, content in profiles.items():
        base, spans = content["baseTimeNanoseconds"], list[Span]()
        for one in content["traceEvents"]:
            if str(one.get("name")).startswith("ProfilerStep#") and one["cat"] == "user_annotation":
                start, end = (base + round(at * 1000) for at in (one["ts"], one["ts"] + one["dur"]))
                spans.append(Span("train", "phase", start, end))
                steps += [Step(int(one["name"].partition("#")[2]), start, end, True)] * (rank == min(profiles))
        write_rank(run / FOLDER, RankTrace(rank=rank, spans=spans, memory=[]))
        (run / FOLDER / PROFILE_FILE.format(rank)).write_text(json.dumps(content))
    phases = [Phase("train", step.start_ns, step.end_ns) for step in steps]
    facts = {n: RankFacts(host=(hosts or {}).get(n, "h"), device=device, trains=True, samples=False) for n in profiles}
    write_controller(run / FOLDER, ControllerTrace(phases=phases, steps=steps, ranks=facts, facts={"kind": "train"}))
    return run


def test_a_cuda_trace_is_divided_by_kernels_and_streams(tmp_path):
    """200 us all-gather from 10, 300 us gemm from 110, copies of 60 us, 100 us kernel from 680, 150 us reduce-scatter
    from 730, in each step of 1000 us."""
    found = diagnose(read_trace(write_profiles(tmp_path, {1: json.loads(CUDA.read_text())})))
    (train,) = [t for t in found.phases if t.phase == "train"]
    assert train.rank == 1 and [step.step for step in found.trace.steps] == [3, 4]
    assert train.wall == pytest.approx(1000e-6)
    assert train.compute == pytest.approx(400e-6)
    assert train.overlapped == pytest.approx((100 + 50) * 1e-6)
    assert train.exposed == pytest.approx((100 + 100) * 1e-6)
    assert train.copy == pytest.approx(60e-6)
    assert train.host == pytest.approx((1000 - 400 - 200 - 60) * 1e-6)
    sizes = {c.name: (c.num, c.bytes, c.gb_per_s) for c in found.collectives}
    assert sizes["_allgather_base"] == (1, 2_000_000, pytest.approx(2e6 / 200e-6 / 1e9))
    assert sizes["_reduce_scatter_base"] == (1, 2_000_000, pytest.approx(2e6 / 150e-6 / 1e9))


def test_a_trace_that_torch_profiler_writes_here_is_read(tmp_path):
    """Nodes of autograd contain operators, and may wait for a collective; they are no computation."""
    model, rows = torch.nn.Linear(64, 64), torch.randn(256, 64)
    path = tmp_path / "profile.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2),
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(3):
            model(rows).sum().backward()
            profiler.step()
    read = read_profile(path)
    names = {name for _, _, name in read.operations}
    assert {"aten::addmm", "aten::mm"} <= names
    assert not any("Backward" in name or name.startswith("autograd::") for name in names)
    found = diagnose(read_trace(write_profiles(tmp_path, {0: json.loads(path.read_text())}, device="cpu")))
    (step,) = [t for t in found.phases if t.phase == "train"]
    assert 0 < step.compute < step.wall and step.exposed == 0


def test_no_rank_is_late_by_the_clock_of_its_machine(tmp_path):
    """The clock of the second machine is 0.2 ms ahead; both ranks do the same. On one machine, the rank is late."""
    for host, is_late in (("b", False), ("a", True)):
        profiles = {}
        for rank in (0, 1):
            ahead, steps = rank * 200, range(0, 8000, 1000)
            events = [("kernel", "ncclDevKernel_AllGather", at + 100, 400 - ahead) for at in steps]
            events += [("kernel", "gemm", at, 100) for at in steps]
            events += [("user_annotation", f"ProfilerStep#{at // 1000}", at, 1000) for at in steps]
            content = {
                "baseTimeNanoseconds": EPOCH,
                "traceEvents": [
                    {"ph": "X", "cat": c, "name": n, "ts": at + ahead, "dur": took, "tid": 7}
                    for c, n, at, took in events
                ],
            }
            profiles[rank] = content
        found = diagnose(read_trace(write_profiles(tmp_path, profiles, {0: "a", 1: host})))
        assert [one.rank for one in found.stragglers if one.is_named] == [1] * is_late
        (wait,) = [one.detail for one in found.costs if one.cause == "wait"] or [""]
        assert ("clocks were not compared" in wait) is not is_late


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not a trace of torch.profiler"),
        (b"[1, 2]", "has no list traceEvents"),
        (b'{"traceEvents": 7}', "has no list traceEvents"),
        (b'{"traceEvents": [7]}', "not a trace of torch.profiler"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "dur": 1, "name": "a"}]}', "not a trace of torch.profiler"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": NaN, "dur": 1, "name": "a"}]}',
            "not a trace of torch.profiler",
        ),
        (b"[" * 100_000, "not a trace of torch.profiler"),
        (b"\x1f\x8bno gzip", "not a trace of torch.profiler"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, content, text):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.json") as refused:
        read_profile(path)
    assert text in str(refused.value)


def test_the_operations_around_a_gap_at_the_start_or_the_end():
    read = read_profile(CUDA)
    assert read.around(0).startswith("between the start and ") and read.around(1 << 62).endswith(" and the end")


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("controller.json", ("phases", 0, "end_ns"), "soon"),
        ("controller.json", ("phases", 0, "end_ns"), float("nan")),
        ("controller.json", ("ranks", "0", "clock", 0, "offset_ns"), None),
        ("controller.json", ("format",), 99),
        ("rank_00000.spans.json", ("spans", 0, 2), "soon"),
        ("rank_00000.spans.json", ("spans", 0, 1), "dance"),
        ("rank_00000.spans.json", ("memory", 0, 2, "peak_resident_bytes"), float("inf")),
        ("rank_00000.spans.json", ("spans", 5, 4, "bytes"), "many"),
    ],
)
def test_a_file_with_a_wrong_value_is_named(traced, file, path, value):
    record = json.loads((traced / "traces" / file).read_text())
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (traced / "traces" / file).write_text(json.dumps(record))
    with pytest.raises(DataError, match=file):
        read_trace(traced)


@pytest.mark.parametrize("file", ["rank_00001.spans.json", "rank_00001.profile.json.gz"])
def test_a_file_whose_end_is_missing_is_named(traced, file):
    damaged = traced / "traces" / file
    damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(DataError, match=file):
        read_trace(traced)


def test_values_of_a_sync_that_are_no_numbers_are_left_out(traced):
    path = traced / "traces/controller.json"
    path.write_text(
        path.read_text().replace('"cast_s":0.001', '"cast_s":"NaN"').replace('"load_s":0.004', '"load_s":null')
    )
    run(traced, [], 3, None)
    assert set(json.loads((traced / "diagnose.json").read_text())["sync"]) == {"num_bytes", "latency_s", "version"}


def test_spans_of_no_length_and_ranks_without_spans(tmp_path):
    step = [*healthy(), ("collective", "nothing", 70, 70), ("op", "aten::nothing", 70, 70), ("phase", "optim", 80, 80)]
    folder = write_trace(tmp_path / "run", [{0: step, 1: []}] * 2)
    run(folder, [], 3, None)
    found = json.loads((folder / "diagnose.json").read_text())
    assert {row["rank"] for row in found["phases"]} == {0}
    assert [row["seconds"] for row in found["collectives"] if row["name"] == "nothing"] == [0]
    assert any("rank 1 is left out" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda p: (p / "metrics.jsonl").touch(), 1, "is a run without traces"),
        (lambda p: None, 1, "has no traces of a run. Give a config"),
        (lambda p: shutil.rmtree(p), 2, "no such file or folder; give a config, the folder of a run, or a trace"),
    ],
)
def test_a_folder_that_has_no_traces(tmp_path, capsys, make, code, text):
    folder = tmp_path / "runs"
    folder.mkdir()
    make(folder)
    assert main(["diagnose", "--trace", "fsdp", str(folder)]) == code
    out = capsys.readouterr()
    assert text in out.err and out.out == ""
    if "without traces" in text:
        assert "monitor.trace_steps=" in out.err


@pytest.mark.parametrize("text", ["model: {path: nowhere}\n", "a: [", "\x00", "sft: 3\n", "sft: {lr: 1}\n"])
def test_a_config_that_cannot_be_loaded(tmp_path, capsys, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main(["diagnose", str(path)]) == 2
    assert str(path.name) in capsys.readouterr().err


def test_overrides_need_a_config(traced, capsys):
    assert main(["diagnose", str(traced), "run.seed=3"]) == 2
    assert "run.seed=3: values override those of a config" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["diagnose", str(traced), "--steps", "0"])
    assert "'0' is not an integer of at least 1" in capsys.readouterr().err


def test_the_summary_has_the_tables_and_the_three_largest_costs(traced, capsys):
    assert main(["diagnose", str(traced)]) == 0
    check_golden("diagnose_printed.txt", capsys.readouterr().out, traced)
    record = json.loads((traced / "diagnose.json").read_text())
    assert record["collectives"][0]["gb_per_s"] == pytest.approx(2.0)
    assert {"ratio", "slow_down", "memory", "stragglers", "gaps", "sync", "clock"} <= set(record)


def test_out_is_the_folder_of_the_files(traced, tmp_path):
    text = run(traced / "traces", [], 3, tmp_path / "elsewhere" / "x")
    names = sorted(path.name for path in (tmp_path / "elsewhere/x").iterdir())
    assert names == ["diagnose.html", "diagnose.json", "diagnose.perfetto.json.gz"]
    assert str(tmp_path / "elsewhere/x/diagnose.html") in text
    assert not (traced / "diagnose.html").exists()


@pytest.mark.parametrize("file", ["controller.json", "rank_00000.profile.json.gz", "rank_00001.spans.json"])
def test_a_file_of_a_runs_traces_stands_for_all_of_them(traced, file):
    run(traced / "traces" / file, [], 3, None)
    record = json.loads((traced / "diagnose.json").read_text())
    assert {row["rank"] for row in record["phases"]} == {0, 1}
    assert not any("another program" in note for note in record["notes"])


def test_the_perfetto_trace_has_all_ranks_on_one_clock(traced):
    run(traced, [], 3, None)
    record = json.loads(gzip.decompress((traced / "diagnose.perfetto.json.gz").read_bytes()))
    events = record["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "controller", 1: "rank 0 (h cpu)", 2: "rank 1 (h cpu)"}
    lanes = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    kinds = ("commands", "compute", "collective", "copy", "operations")
    assert lanes == {(0, "steps"), (0, "phases"), *((p, kind) for p in (1, 2) for kind in kinds)}
    trains = {e["pid"]: e["ts"] for e in events if e["ph"] == "X" and e["name"] == "train" and e["ts"] < 1e5}
    assert trains == pytest.approx({0: 38e3, 1: 40e3, 2: 40e3})  # rank 1's own clock is 5 s ahead
    assert "error at most 0.020 ms" in record["otherData"]["clock"]
    assert any(e["ph"] == "C" and e["args"]["params"] == 100 for e in events)


def test_events_of_a_perfetto_thread_are_nested_or_apart(tmp_path):
    """Collectives in flight at one time are in threads of their own."""
    step = [*healthy(), ("collective", "prefetch", 50, 59), ("collective", "prefetch", 52, 78)]
    run(write_trace(tmp_path / "r", [{0: step}]), [], 3, None)
    record = json.loads(gzip.decompress((tmp_path / "r/diagnose.perfetto.json.gz").read_bytes()))
    threads = defaultdict(list)
    for e in record["traceEvents"]:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert sum(len(spans) for spans in threads.values()) == 4 + 1 + len(step)
    for spans in threads.values():
        for (_, b), (c, d) in combinations(sorted(spans, key=lambda one: (one[0], -one[1])), 2):
            assert c >= b or d <= b, "it begins inside the other and ends after it"


def test_hostile_names_do_nothing(tmp_path, capsys):
    step = [*healthy(), ("collective", HOSTILE, 62, 70), ("op", HOSTILE, 62, 63)]
    folder = write_trace(tmp_path / "run", [{0: step, 1: step}], facts={"schedule": HOSTILE})
    assert main(["diagnose", str(folder)]) == 0
    out = capsys.readouterr().out
    page = (folder / "diagnose.html").read_text()
    for text in (out, page):
        assert "\x1b" not in text and "\u202e" not in text
    assert "onerror=alert" in out and "<img src=x" not in page
    assert page.count("</script>") == page.count("<script")

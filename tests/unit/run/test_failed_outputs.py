"""A run whose files can't be written: it ends with one line when data is lost, and goes on otherwise."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from file_limits import no_file_above
from tiny_run import write_run

from meshrl.cli import main
from meshrl.config.load import load_run_config
from meshrl.core.errors import CheckpointError, OutputError
from meshrl.core.files import CONTINUE_LATER, output_errors
from meshrl.model.folder import write_tensors
from meshrl.monitor.sinks import read_metrics
from meshrl.run.outputs import live_run
from meshrl.run.signals import Stop
from meshrl.tools.report.page import write_report
from meshrl.train.checkpoint_files import write_file

GRADER = '''
from pathlib import Path

def score(completion, answer, folder="", script={}):
    """Runs the code for the current step, once. Finished steps are counted by their metrics."""
    metrics = Path(folder, "metrics.jsonl")
    step = metrics.read_bytes().count(b'"step"') if metrics.exists() else -1
    if code := script.get(str(step)):
        mark = Path(f"step_{step}")
        if not mark.exists():
            mark.touch()
            exec(code, {"folder": Path(folder)})
    return len(completion) % 3
'''


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A tiny run of three steps in this process. Its reward runs code at a step, as another program would."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meddling_grader.py").write_text(GRADER)
    path = write_run(tmp_path)
    written = json.loads(path.read_text())
    written["cluster"] = {"executor": "inline"}
    written["reward"] = {"num_workers": 1, "terms": {"length": {"kind": "meddling_grader:score"}}}
    written["loop"] = {"num_steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "save_every_steps": 1}
    path.write_text(json.dumps(written))
    capsys.readouterr()  # drops what was printed so far
    return path


def train(config: Path, name: str, script: dict[int, str], *overrides: str) -> int:
    """`meshrl train` in this process; script: code by step. Returns its exit code."""
    folder = Path(json.loads(config.read_text())["run"]["folder"]) / name
    args = json.dumps({"folder": str(folder), "script": script})
    return main(["train", str(config), f"run.name={name}", f"reward.terms.length.args={args}", *overrides])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The printed error, which must be one line, and perhaps one about the state that is not saved either."""
    printed = capsys.readouterr().err
    ignored = ("note: ", "docs/faq.md, section ", "model shards")
    lines = [line for line in printed.splitlines() if not any(text in line for text in ignored)]
    line, *further = lines
    assert all(text.startswith("the state after step ") for text in further) and len(further) <= 1
    assert line.startswith("meshrl: ")
    return line


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("run.folder=rows.jsonl/x", "rows.jsonl/x/one can't be written: Not a directory. Choose another run.folder"),
        ("run.folder=/proc/x", "/proc/x can't be written: No such file or directory. Choose another run.folder"),
        (f"run.folder={'n' * 300}", "can't be written: File name too long. Choose another run.folder"),
    ],
)
def test_a_run_folder_that_can_not_be_created_ends_the_run_with_one_line(
    config: Path, override: str, error: str, capsys: pytest.CaptureFixture[str]
):
    assert train(config, "one", {}, override) == 1
    assert error in error_of(capsys)


def test_an_overlong_name_of_a_run_is_refused(config: Path, capsys: pytest.CaptureFixture[str]):
    assert train(config, "ü" * 128, {}) == 2
    assert "must have at most 255 bytes" in capsys.readouterr().err


def test_files_for_which_there_is_no_place_are_refused_with_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    long = "n" * 300
    for place, reason in (("rows.jsonl/x", "Not a directory"), (long, "File name too long")):
        assert main(["launch", "slurm", str(config), "cluster.executor=processes", "--out", place]) == 2
        assert f"{place} can't be written: {reason}. Give another file by --out" in error_of(capsys)
    for command in (["report", long], ["status", long], ["stop", long], ["convert", long, "out"]):
        assert main(command) == 1
        assert long in error_of(capsys)


BLOCK = """
import contextlib
import shutil
shutil.rmtree(folder / "rollouts")
(folder / "rollouts").touch()
(folder / "report.html").mkdir()
while not (folder / "status.json").is_dir():  # the run may write it between the two calls
    (folder / "status.json").unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "status.json").mkdir()
"""


def test_a_run_goes_on_without_outputs_that_can_not_be_written_and_lists_them(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    """rollouts/ is a file in the second step and free again in the third; other outputs have a folder in their place
    until the end."""
    assert train(config, "one", {1: BLOCK, 2: "(folder / 'rollouts').unlink()"}) == 0
    printed = capsys.readouterr()
    folder = Path("runs/one")
    result = json.loads((folder / "result.json").read_text())
    counts = result["failed_writes"]
    assert (result["status"], result["steps"]) == ("done", 3)
    assert counts.pop("status.json") >= 1
    assert counts == {"rollouts": 1, "report.html": 1}
    names = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert names == ["step_000003.jsonl", "step_000003.tokens.parquet"]
    lines = printed.out.splitlines()
    assert lines[-1].startswith("outputs that are not complete: ") and "report.html: 1 write failed" in lines[-1]
    failed = [line.metrics["monitor/failed_writes"] for line in read_metrics(folder / "metrics.jsonl")[0]]
    assert failed[0] == 0 and sum(failed) >= 1
    shutil.rmtree(folder / "status.json")
    shutil.rmtree(folder / "report.html")
    assert main(["report", str(folder)]) == 0


def test_removed_metrics_end_the_run_with_one_line(config: Path, capsys: pytest.CaptureFixture[str]):
    script = {1: "(folder / 'metrics.jsonl').rename(folder / 'other')"}
    assert train(config, "one", script) == 1
    line = error_of(capsys)
    assert line.startswith("meshrl: OutputError: ") and "metrics.jsonl was removed or replaced" in line


def test_metrics_that_are_replaced_after_the_last_step_are_an_error_of_the_run(config: Path):
    loaded = load_run_config(config, ["run.name=one"])
    with pytest.raises(OutputError, match="replaced"), live_run(loaded, "train", 3, Stop(), write_report) as run:
        (run.folder / "other").touch()
        (run.folder / "other").rename(run.folder / "metrics.jsonl")
    assert json.loads(Path("runs/one/result.json").read_text())["status"] == "failed"


def test_checkpoints_that_can_not_be_written_end_the_run_with_one_line(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(config, "one", {0: "(folder / 'checkpoints').touch()"}) == 1
    assert "checkpoints/step_000001 can't be written: Not a directory. Make room" in error_of(capsys)


def test_a_write_that_fails_in_the_middle_of_a_checkpoint_or_a_model_names_the_file_and_the_reason(tmp_path: Path):
    file = tmp_path / "file"
    reason = r"/file can't be written: .*File too large.* run\.resume=auto"
    with no_file_above(1000), pytest.raises(CheckpointError, match=reason):
        write_file(file, [memoryview(bytes(5000))])
    file.unlink()
    with no_file_above(1000), pytest.raises(OutputError, match=reason), output_errors(tmp_path, CONTINUE_LATER):
        write_tensors({"weight": torch.zeros(5000)}, file)


@contextmanager
def small_disk(folder: Path, num_kib: int) -> Iterator[None]:
    """Mounts a file system of this size at `folder`, which must not exist yet."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_kib}k", "tmpfs", str(folder)])
    if mounted.returncode:
        pytest.skip("this system does not permit mounts")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


FILL = """
with open(folder / "of_others", "ab", buffering=0) as file:
    for size in (1 << 20, 1 << 12):
        try:
            while file.write(bytes(size)) == size:
                pass
        except OSError:
            pass
"""
FILL_BLOCK = """
with open(folder / "metrics.jsonl", "ab") as file:
    begin, end = b'{"schema": 1, "units": {}, "filler": "', b'"}' + bytes([10])
    room = -((folder / "metrics.jsonl").stat().st_size + len(begin + end)) % 4096
    file.write(begin + b"x" * room + end)
"""


def test_a_disk_filled_by_others_ends_the_run_with_one_line_and_a_resume_completes_it(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    """The disk is full in the second step: its rollouts are lost, and its metrics are an error. The last block of
    metrics.jsonl is full, too, so that the next line needs another one."""
    folder = Path("runs/one")
    with small_disk(Path("runs"), 100 << 10):
        assert train(config, "one", {1: FILL_BLOCK + FILL}, "loop.save_every_steps=3") == 1
        line = error_of(capsys)
        assert "metrics.jsonl can't be written: No space left on device. " in line and "run.resume=auto" in line
        (folder / "of_others").unlink()
        assert train(config, "one", {}, "run.resume=auto") == 0
        lines, _ = read_metrics(folder / "metrics.jsonl")
        assert [line.step for line in lines] == [1, 2, 3]
        assert json.loads((folder / "result.json").read_text())["status"] == "done"


def test_rollouts_on_a_full_disk_end_no_run(config: Path, capsys: pytest.CaptureFixture[str]):
    folder = Path("runs/one")
    fill = FILL.replace("folder /", "folder / 'rollouts' /")
    with small_disk(folder / "rollouts", 400):
        assert train(config, "one", {1: fill, 2: "(folder / 'rollouts' / 'of_others').unlink()"}) == 0
        assert [path.name for path in sorted((folder / "rollouts").glob("*.jsonl"))] == [
            "step_000001.jsonl",
            "step_000003.jsonl",
        ]
    out = capsys.readouterr().out
    assert "rollouts: 1 write failed (No space left on device)" in out
    assert json.loads((folder / "result.json").read_text())["failed_writes"] == {"rollouts": 1}

"""Damaged folders of runs: `meshrl report`, `status`, `stop` and `convert` succeed, or fail with the file's name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from damage import of_json, of_place, of_text, written
from outcome import check, limits

from meshrl.cli import main
from meshrl.core.errors import MeshrlError
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import JsonlSink
from meshrl.tools.convert import convert
from meshrl.tools.report.page import write_report
from meshrl.train.checkpoint_files import CONTROLLER, MANIFEST

pytestmark = pytest.mark.slow


def report(folder: Path) -> int:
    """The size of the report, which is removed again: the test checks that no other file is left in the folder."""
    page = write_report(folder)
    size = page.stat().st_size
    page.unlink()
    return size


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "result.json", "config.yaml", "checkpoints/best.json", "run_notes.txt"]
)
def test_the_report_of_a_damaged_run(records: Path, name: str):
    data = (records / name).read_bytes()
    is_json = name.endswith(".json")
    damages = [*(of_json(data, 1, 12) if is_json else of_text(data, 2)), *of_place()]
    if not is_json:
        odd = (-1, 10**18, 10**400, "1e400", "NaN", "-Infinity", '"NaN"', "null", "[]", "true")
        numbers = [str(value).encode() for value in odd]
        at = data.find(b'"step": ') + 8 if name == "metrics.jsonl" else 0
        damages += [written(f"a step of {n!r:.20}", "content", data[:at] + n + data[at + 1 :]) for n in numbers]
    check(records, name, damages, report, named=[Path(name).name, "metrics.jsonl"])


@pytest.fixture(scope="module")
def records(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder without tensors, with two rollouts of a step, and the same rollouts as an evaluation's."""
    folder = tmp_path_factory.mktemp("records") / "one"
    shutil.copytree(finished, folder, ignore=lambda where, names: names if Path(where).name == "checkpoints" else ())
    best = {"step": 1, "score": 0.5, "model": "step_000001/model", "beaten": []}
    (folder / "checkpoints" / "best.json").write_text(json.dumps(best))
    (path,) = sorted((folder / "rollouts").glob("step_*.jsonl"))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    shutil.copy(path, path.with_name("eval_000001.jsonl"))
    return folder


def test_damaged_rollouts(records: Path):
    (path,) = sorted((records / "rollouts").glob("step_*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    damages = [*of_text(b"".join(lines), 3), *of_place(), *_one_line(lines[0], lines[1])]
    name = f"rollouts/{path.name}"
    check(records, name, damages, lambda copy: len(list(read_rollouts(copy / name))))
    name = "rollouts/eval_000001.jsonl"
    check(records, name, [damage for damage in damages if damage.name != "nothing there"], report)


def _one_line(line: bytes, rest: bytes):
    """Any value of the first line changed; the second line follows it."""
    for damage in of_json(line, 4, 25):
        scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"line-{os.getpid()}"
        scratch.write_bytes(line)
        damage.put(scratch)
        changed = scratch.read_bytes().rstrip(b"\n")
        scratch.unlink()
        if damage.kind == "content":
            yield written(damage.name, "content", changed + b"\n" + rest)


def test_the_status_of_a_damaged_run(records: Path):
    from meshrl.tools.runs import describe

    for name in ("status.json", "result.json"):
        data = (records / name).read_bytes()
        check(records, name, [*of_json(data, 5, 25), *of_place()], describe, named=[name, "status.json"])


@pytest.mark.parametrize("pid", [-1, 0, 1, True, 2**31, 10**40, "1", None, 1.5])
def test_no_process_is_stopped_by_a_damaged_status(records: Path, tmp_path: Path, pid: object, capsys):
    """Signals to -1 and 0 are sent to many processes."""
    from meshrl.tools.runs import stop

    folder = Path(shutil.copytree(records, tmp_path / "run"))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"pid": pid}))
    with limits(), pytest.raises(MeshrlError, match=r"status\.json: not the status of a run"):
        stop(folder)
    assert main(["stop", str(folder)]) == 1
    assert "status.json" in capsys.readouterr().err


def test_a_resume_with_damaged_metrics_fails_or_keeps_all_of_them(records: Path):
    """A resume rewrites the file; an error must be raised before that."""
    data = (records / "metrics.jsonl").read_bytes()

    def resume(folder: Path) -> None:
        before = (folder / "metrics.jsonl").read_bytes()
        try:
            JsonlSink(folder / "metrics.jsonl", first_step=1).close()
        except MeshrlError:
            assert (folder / "metrics.jsonl").read_bytes() == before
            raise

    check(records, "metrics.jsonl", of_text(data, 6), resume)


def test_a_damaged_checkpoint_is_not_converted_and_leaves_nothing(finished: Path):
    """The manifest has a hash of every file, so that converted weights equal the saved ones."""
    state = finished / "checkpoints" / "step_000001" / "state"

    def read(folder: Path) -> bytes:
        out = folder.parent / "converted"
        try:
            convert(folder, out)
            weights = (out / "model.safetensors").read_bytes()
            shutil.rmtree(out)
            return weights
        finally:
            assert not list(folder.parent.glob("converted*"))

    intact = read(state)
    for name in sorted(path.name for path in state.iterdir()):
        data = (state / name).read_bytes()
        is_json = name in (MANIFEST, CONTROLLER)
        damages = [*(of_json(data, 7, 4, "doubtful") if is_json else ()), *_few(data), *of_place()]
        changed = [damage for damage in damages if damage.kind != "harmless"]
        check(state, name, changed, read, lambda _, value: _others(value, intact), [name, MANIFEST, "checkpoint"])


def _others(weights: bytes, intact: bytes) -> str | None:
    return None if weights == intact else "other weights"


def _few(data: bytes):
    from damage import cuts, flips

    yield from cuts(data, 8, [8, len(data) // 3])
    yield from flips(data, 9, 6)


def test_a_forged_controller_is_refused_by_name(finished: Path, tmp_path: Path):
    """With new hashes in the manifest, as an attacker would write them."""
    from meshrl.train.checkpoint_files import (
        Manifest,
        commit,
        make_temporary_folder,
        read_controller,
        read_manifest,
        write_json,
    )

    state = finished / "checkpoints" / "step_000001" / "state"
    manifest, saved = read_manifest(state), read_controller(state)
    unknown = saved["config"] | {"model": {"path": "x", "dtype": "int4"}}
    for number, config in enumerate(({}, None, [], {"model": 1}, unknown)):
        forged = tmp_path / str(number) / "state"
        aside = make_temporary_folder(forged)
        for name in manifest.files:
            if name != CONTROLLER:
                shutil.copy(state / name, aside / name)
        fact = write_json(aside / CONTROLLER, saved | {"config": config})
        files = {**manifest.files, CONTROLLER: fact}
        commit(forged, Manifest(step=manifest.step, num_ranks=manifest.num_ranks, files=files))
        with limits(), pytest.raises(MeshrlError, match=rf"{CONTROLLER} does not contain the config of the run"):
            convert(forged, tmp_path / "out")
        assert not (tmp_path / "out").exists()

from __future__ import annotations

import dataclasses
import datetime
import json
import resource
import subprocess
import sys

import numpy as np
import pytest
from scripted_agent import IdTokenizer, scripted_trajectories

from meshrl.core.errors import DataError, Failure
from meshrl.core.types import Prompt, Trajectory
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.jsonl import read_lines, to_line
from meshrl.monitor.rollout_log import RolloutLog, read_rollouts, step_files
from meshrl.monitor.token_log import read_token_file


def decode(ids):
    return IdTokenizer().decode(ids)


def assert_same(a, b, path=""):
    """Equal to the bit, NaN included, through dataclasses, containers and arrays. The seeds of a trajectory's requests
    are for its sampling only."""
    assert type(a) is type(b), (path, a, b)
    if dataclasses.is_dataclass(a):
        for f in dataclasses.fields(a):
            if f.name != "started":
                assert_same(getattr(a, f.name), getattr(b, f.name), f"{path}.{f.name}")
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path
    else:
        assert a == b or (a != a and b != b), (path, a, b)


def test_every_shape_of_trajectory_comes_back_to_the_bit(tmp_path):
    trajectories = scripted_trajectories()
    trajectories[0].turns[0].extras["entropy"] = np.array([np.nan, np.inf, -np.inf, 0.1, 0.2, 0.3], np.float32)
    trajectories[1].rewards["format"] = Failure(kind="timeout", message="slow")
    trajectories[1].reward = None
    trajectories[2].rewards["odd"] = float("nan")
    trajectories[2].metrics["steps"] = 3.5
    trajectories[1].turns[0].source, trajectories[1].turns[0].times.tool_s = "POST /v1/messages 1a2b3c4d", 0.25
    path = RolloutLog(tmp_path, decode).write(12, trajectories)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    logged = list(read_rollouts(path))
    assert [entry.step for entry in logged] == [12] * 4
    for entry, trajectory in zip(logged, trajectories):
        assert_same(entry.trajectory, trajectory)
        assert entry.texts == [decode(turn.output_ids.tolist()) for turn in trajectory.turns]


def test_failures_and_empty_trajectories_are_written_too(tmp_path):
    prompt = Prompt(id="p", ordinal=3, messages=[{"role": "user", "content": "é\n\u2028"}], answer={"x": [1]})
    failed = Trajectory(
        prompt=prompt, group_id="g", index=0, status="failed", failure=Failure(kind="engine", message="too long")
    )
    path = RolloutLog(tmp_path, decode).write(0, [failed])
    (entry,) = read_rollouts(path)
    assert_same(entry.trajectory, failed)


def test_a_prompt_and_its_first_context_are_in_a_file_once_and_all_records_come_back_to_the_bit(tmp_path):
    """Also when the attempts of groups alternate, when the first attempt has no turn, and when an attempt has another
    prompt or context than the first."""
    one, other = (scripted_trajectories(2, 4)[4 * i : 4 * i + 4] for i in range(2))
    one[0].turns = []
    other[2].prompt = dataclasses.replace(other[2].prompt, meta={"of": "this attempt"})
    other[2].turns[0].context_ids = other[2].turns[0].context_ids[:-1]
    trajectories = [t for pair in zip(one, other) for t in pair]
    path = RolloutLog(tmp_path, decode).write(0, trajectories)
    logged = list(read_rollouts(path))
    for entry, trajectory in zip(logged, trajectories, strict=True):
        assert_same(entry.trajectory, trajectory)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["prompt"] is None for r in records] == [False, False, True, True, True, False, True, True]
    shared = [[turn["context_ids"] is None for turn in r["turns"]][:1] for r in records]
    assert shared == [[], [False], [False], [True], [True], [False], [True], [True]]
    first = logged[3].trajectory.turns[0].context_ids
    first[:] = 0
    assert logged[1].trajectory.turns[0].context_ids.any(), "each trajectory has its own arrays"


def test_files_that_repeat_the_prompt_in_each_line_can_be_read(tmp_path):
    trajectories = scripted_trajectories(1, 3)
    lines = [RolloutLog(tmp_path, decode).write(7, [t]).read_text() for t in trajectories]
    path = tmp_path / "step_000007.jsonl"
    path.write_text("".join(lines))
    assert path.read_text().count('"prompt":{') == 3
    for entry, trajectory in zip(read_rollouts(path), trajectories, strict=True):
        assert_same(entry.trajectory, trajectory)


@pytest.mark.parametrize("damaged", ["prompt", "context_ids"])
def test_a_line_that_refers_to_a_missing_one_is_refused(damaged, tmp_path):
    path = RolloutLog(tmp_path, decode).write(0, scripted_trajectories(1, 2))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    if damaged == "context_ids":
        second["prompt"] = first["prompt"]
    path.write_text(json.dumps(second) + "\n")
    with pytest.raises(DataError, match=rf"step_000000\.jsonl:1: not a trajectory.*{damaged}.* null"):
        list(read_rollouts(path))


def test_only_the_chosen_steps_have_files_and_all_evaluations_or_none(tmp_path):
    for every, expected in ((3, ["step_000001", "step_000004", "step_000007"]), (0, None)):
        log = RolloutLog(tmp_path / str(every), decode, every_steps=every)
        written = [log.write(step, []) for step in range(1, 9)] + [
            log.write(step, [], name="eval") for step in (0, 1, 2)
        ]
        assert sum(path is not None for path in written) == (0 if expected is None else 6)
        if expected is None:
            assert not (tmp_path / "0").exists()
        else:
            names = sorted(path.stem for path in (tmp_path / "3" / "rollouts").glob("*.jsonl"))
            assert names == ["eval_000000", "eval_000001", "eval_000002", *expected]


def test_lines_are_strict_json_with_a_schema(tmp_path):
    trajectory = scripted_trajectories(1, 1)[0]
    trajectory.turns[0].extras["entropy"] = np.full(len(trajectory.turns[0].output_ids), np.nan, np.float32)
    path = RolloutLog(tmp_path, decode).write(1, [trajectory])

    def refuse(name):
        raise AssertionError(name)

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["schema"] == 1 and record["id"] == trajectory.id


def test_media_arrays_stay_out_of_the_log(tmp_path):
    pixels = {"pixel_values": np.zeros((4, 8), np.float32)}
    path = RolloutLog(tmp_path, decode).write(0, scripted_trajectories(1, 1, media_outputs=pixels))
    (entry,) = read_rollouts(path)
    cat = entry.trajectory.prompt.media["cat"]
    assert (cat.outputs, cat.digest, cat.source, cat.num_tokens) == ({}, "c47", "cat.png", 3)


def test_a_repeated_step_replaces_the_earlier_file(tmp_path):
    log = RolloutLog(tmp_path, decode)
    log.write(3, scripted_trajectories(2, 2))
    path = log.write(3, scripted_trajectories(1, 1))
    assert len(list(read_rollouts(path))) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["step_000003.jsonl", "step_000003.tokens.parquet"]
    assert len(read_token_file(path).rows) == 4


def test_an_evaluation_has_its_own_file(tmp_path):
    log = RolloutLog(tmp_path, decode)
    assert log.write(3, [], name="eval").name == "eval_000003.jsonl"


def test_groups_that_are_added_to_a_file_are_read_with_the_others(tmp_path):
    log, groups = RolloutLog(tmp_path, decode), scripted_trajectories(2, 2)
    for part in (groups[:2], groups[2:]):
        path = log.write(3, part, name="eval", append=True)
    read = [logged.trajectory for logged in read_rollouts(path)]
    assert [(t.id, t.prompt.id) for t in read] == [(t.id, t.prompt.id) for t in groups]
    assert [p.name for p in path.parent.iterdir()] == ["eval_000003.jsonl"]


def test_another_schema_is_refused_by_line(tmp_path):
    path = tmp_path / "step_000000.jsonl"
    path.write_text('{"schema": 99}\n')
    with pytest.raises(DataError, match=r"step_000000\.jsonl:1: schema 99"):
        list(read_rollouts(path))


def test_a_value_that_is_not_json_is_an_error_and_leaves_no_incomplete_file(tmp_path):
    bad = Trajectory(prompt=Prompt(id="p", ordinal=0, answer=object()), group_id="g", index=0)
    with pytest.raises(TypeError):
        RolloutLog(tmp_path, decode).write(0, [bad])
    assert not (tmp_path / "rollouts" / "step_000000.jsonl").exists()


def test_a_line_has_any_plain_json_value_and_arrays_to_the_bit():
    """The fast writer refuses integers of more than 64 bits and keys that are numbers, and writes NaN as null."""
    floats = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    record = {
        "floats": floats,
        "with nan": np.array([1.5, np.nan, -np.inf], np.float32),
        "numbers": [np.float32("nan"), np.float32(0.1), np.int64(3), float("inf")],
        "ids": np.arange(5, dtype=np.int16)[::2],
        "text": "\u2028 é \x00",
    }
    plain = {
        **record,
        "floats": floats.tolist(),
        "with nan": [1.5, "NaN", "-Infinity"],
        "numbers": ["NaN", float(np.float32(0.1)), 3, "Infinity"],
        "ids": [0, 2, 4],
    }
    assert json.loads(to_line(record)) == plain
    assert json.loads(to_line({**record, "answer": 1 << 70, "meta": {1: "a"}})) == {
        **plain,
        "answer": 1 << 70,
        "meta": {"1": "a"},
    }
    for value in (object(), {1, 2}, datetime.date(2026, 1, 1), np.datetime64("2026-01-01"), {"deep": [object()]}):
        with pytest.raises(TypeError):
            to_line({**record, "answer": value})


def test_text_that_is_not_unicode_is_written_with_question_marks(tmp_path):
    """The output of another program, decoded with surrogateescape."""
    line = to_line({"text": b"caf\xe9".decode("utf-8", "surrogateescape")})
    (tmp_path / "lines.jsonl").write_text(line, encoding="utf-8")
    assert [*read_lines(tmp_path / "lines.jsonl")] == [{"text": "caf?"}]


def test_readers_and_sinks_import_no_torch_and_no_drawing():
    """So that viewers start in milliseconds."""
    names = [f"monitor.{name}" for name in ("rollout_log", "trackers", "metrics", "recorder")]
    modules = ", ".join(f"meshrl.{name}" for name in [*names, "tools.report.page", "tools.runs"])
    code = f"import sys, {modules}; print({{'torch', 'rich', 'tensorboard', 'wandb'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_files_of_repeated_steps_do_not_include_the_evaluation_before_them(tmp_path):
    """Nothing is counted twice; an evaluation is named by the number of finished steps before it."""
    names = ["eval_000000", "step_000001", "eval_000002", "step_000002", "eval_000003", "step_000003", "step_000010"]
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    assert [path.stem for path in step_files(tmp_path, 3)] == ["eval_000003", "step_000003", "step_000010"]
    assert sorted(path.stem for path in step_files(tmp_path, 0)) == sorted(names)


def test_what_a_full_disk_leaves_of_appended_lines_is_removed(tmp_path):
    """The lines that are appended when the disk has room again are complete."""
    writes = FailedWrites()
    log, (first, second, third) = RolloutLog(tmp_path, decode, writes), scripted_trajectories()[:3]
    path = log.write(0, [first], "eval", append=True)
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        log.write(0, [second], "eval", append=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (writes.counts, path.stat().st_size) == ({"rollouts": 1}, size)
    log.write(0, [third], "eval", append=True)
    assert [logged.trajectory.id for logged in read_rollouts(path)] == [first.id, third.id]

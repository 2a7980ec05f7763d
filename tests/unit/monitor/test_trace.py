"""The files of RUN/traces/: what is written is read back, and a damaged file is named."""

import json
import subprocess
import sys

import pytest

from meshrl.core.errors import DataError
from meshrl.monitor.recorder import (
    CONTROLLER,
    SPANS_FILE,
    ClockReading,
    ControllerTrace,
    MemorySample,
    Phase,
    RankFacts,
    RankTrace,
    Span,
    Step,
    read_controller,
    read_rank,
    write_controller,
    write_rank,
)

RANK = RankTrace(
    rank=3,
    spans=[
        Span("all_gather", "collective", 1_700_000_000_000_000_001, 1_700_000_000_000_000_009, {"bytes": 8}),
        Span("train", "phase", 1, 2, {}),
    ],
    memory=[MemorySample(7, "train", {"params": 5})],
    num_dropped=2,
)
FACTS = RankFacts(
    host="h", device="cpu", trains=True, samples=False, clock=[ClockReading(0, 100, 5), ClockReading(1000, 300, 5)]
)
CONTROL = ControllerTrace(
    phases=[Phase("train", 1, 2)],
    steps=[Step(1, 0, 9, True, {"cast": 0.5})],
    ranks={0: FACTS},
    facts={"schedule": "colocated"},
)


def test_traces_are_read_as_they_were_written(tmp_path):
    write_rank(tmp_path / "traces", RANK)
    write_controller(tmp_path / "traces", CONTROL)
    assert read_rank(tmp_path / "traces" / SPANS_FILE.format(3)) == RANK
    assert read_controller(tmp_path / "traces" / CONTROLLER) == CONTROL


def test_a_ranks_times_are_converted_with_the_offset_at_that_time():
    assert [FACTS.to_controller(t) for t in (0, 100, 700, 1300, 2300)] == [-100, 0, 480, 1000, 2000]
    assert RankFacts(host="h", device="cpu", trains=True, samples=True).to_controller(7) == 7


TRUNCATED, OTHER_FORMAT = "truncated", "another format"


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"format": 1, "spans": [[1]]}', '{"format": 1}', TRUNCATED, OTHER_FORMAT]
)
def test_a_damaged_file_and_one_of_another_format_are_named(tmp_path, damage):
    write_rank(tmp_path, RANK)
    path = tmp_path / SPANS_FILE.format(3)
    written = path.read_text()
    assert json.loads(written)["spans"][1] == ["train", "phase", 1, 2, {}]
    damaged = {TRUNCATED: written[:-20], OTHER_FORMAT: written.replace('"format":1', '"format":2')}
    path.write_text(damaged.get(damage, damage))
    reason = "format 2, but this version of meshrl reads format 1" if damage == OTHER_FORMAT else ""
    for read in (read_rank, read_controller):
        with pytest.raises(DataError, match=rf"rank_00003\.spans\.json: {reason}"):
            read(path)


def test_traces_are_read_without_torch():
    code = "import sys, meshrl.monitor.recorder; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

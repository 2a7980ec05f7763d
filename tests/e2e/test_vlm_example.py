"""`make vlm`: all of its parts run, and its report has the accuracy of each held-out set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "vlm" / "vlm.py"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--freeze"]], ids=["trained", "frozen"])
def test_every_part_of_the_example_runs(options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(tmp_path), *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "seed_0" / "report.json").read_text())
    assert report["eval_sets"].keys() == {"heldout", "sampled", "blank"} and len(report["reward_curve"]) == 2
    rows = [json.loads(line) for line in (tmp_path / "seed_0" / "start" / "heldout.jsonl").open()]
    assert {row["answer"] for row in rows} == {*"01234"} and len({row["images"][0] for row in rows}) == len(rows)

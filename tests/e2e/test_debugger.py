"""A run with executor inline can be watched by a profiler and by a debugger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import write_run

WATCHED = """
import bdb, faulthandler, sys
import meshrl
import meshrl.run.start
import transformers.models.qwen2.modeling_qwen2  # before the profiler, which makes imports slow

faulthandler.dump_traceback_later(150, exit=True)  # an interpreter that hangs handles no signal

class Debugger(bdb.Bdb):
    stops = 0
    def user_line(self, frame):
        self.stops += frame.f_code.co_name == "colocated"
        self.set_continue()

calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"

sys.setprofile(count)
meshrl.train("config.yaml", ["run.name=profiled"], quiet=True)
sys.setprofile(None)
debugger = Debugger()
code = meshrl.run.start.colocated.__code__
first_statement = sorted({line for *_, line in code.co_lines() if line is not None})[1]
assert debugger.set_break(code.co_filename, first_statement) is None
debugger.runcall(meshrl.train, "config.yaml", ["run.name=debugged"], quiet=True)
print(calls, debugger.stops)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_inline_run_under_a_profiler_and_under_a_debugger_ends_as_without(tmp_path: Path):
    """On Python 3.11 PyThreadState_SetAsyncExc(thread, NULL) makes traced code wait for ever."""
    config = write_run(tmp_path)
    written = json.loads(config.read_text())
    written["cluster"] = {"executor": "inline"}
    written["loop"]["num_steps"] = 1
    config.write_text(json.dumps(written))
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", WATCHED]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert ran.returncode == 0, ran.stderr
    calls, stops = map(int, ran.stdout.split()[-2:])
    assert calls > 10_000 and stops > 0
    rewards = [json.loads((tmp_path / "runs" / run / "result.json").read_text()) for run in ("profiled", "debugged")]
    assert rewards[0]["status"] == rewards[1]["status"] == "done"
    assert rewards[0]["reward_curve"] == rewards[1]["reward_curve"]

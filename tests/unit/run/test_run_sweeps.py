"""At its start, a run removes resources that dead runs have left on its machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import pytest

from meshrl.config.run import RunConfig
from meshrl.process.leases import LeasedFolder, new_name
from meshrl.run import start
from meshrl.run.inputs import NO_OBJECTS


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a sweep")
@pytest.mark.parametrize("follows", [False, True], ids=["the controller", "a node agent under torchrun"])
def test_a_run_removes_resources_of_dead_runs(follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(start, "is_follower", lambda: follows)
    monkeypatch.setattr(start, "follow", lambda folder: 0)
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, "loop": {"num_steps": 1}})
    left, living = tmp_path / new_name(), LeasedFolder()
    left.mkdir()
    with contextlib.suppress(SystemExit) if follows else contextlib.nullcontext():
        assert start._run(config, (1, 0), NO_OBJECTS, lambda stop: asyncio.sleep(0, "done")) == "done"
    assert not left.exists() and living.path.exists()

"""Faults that hook/sitecustomize.py injects into real runs; nothing may be left after them."""

from __future__ import annotations

import json
import os
import runpy
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshrl.process import leases, spawn


class Output:
    """What the processes of a test print. A warning of Python's resource tracker would stand before the real error."""

    def __init__(self, capfd: pytest.CaptureFixture[str]):
        self._capfd = capfd

    def readouterr(self) -> Any:
        printed = self._capfd.readouterr()
        assert "resource_tracker" not in printed.err
        return printed


@pytest.fixture
def capfd(capfd: pytest.CaptureFixture[str]) -> Output:
    return Output(capfd)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Output) -> Iterator[Any]:
    """Injects faults into the runs of this process, each once. All of them must occur, and at the end no process and no
    resource of the runs may be left, and no process has printed a warning about shared memory."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MESHRL_TEST_RUN", mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    hook = Path(__file__).parent / "hook"
    monkeypatch.syspath_prepend(str(hook))
    monkeypatch.setattr(leases, "secrets", runpy.run_path(str(hook / "sitecustomize.py"))["Marked"](mark))

    faults: list[dict[str, Any]] = []

    def plant(*more: dict[str, Any]) -> None:
        faults.extend({**fault, "marker": str(tmp_path / f"marker_{i}")} for i, fault in enumerate(more))
        monkeypatch.setenv("MESHRL_TEST_FAULTS", json.dumps(faults))

    yield plant
    assert [fault for fault in faults if not Path(fault["marker"]).exists()] == [], "never occurred"
    spawn.retire()  # it would serve later runs of this process
    end = time.monotonic() + 20
    while (left := _processes_of(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []
    assert not list(Path("/dev/shm").glob(f"meshrl_*_{mark[:8]}*")), "shared memory is left"
    assert not list(tmp_path.glob("meshrl*")), "the folder of the rendezvous is left"
    capfd.readouterr()


def _processes_of(mark: str) -> list[str]:
    """All processes with this text in their environment; processes with open ports are among them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("MESHRL_TEST_RUN") == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile, or belongs to another user
            continue
    return found

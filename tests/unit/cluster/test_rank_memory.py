"""The memory metrics of a rank on an accelerator."""

from __future__ import annotations

import pytest
from tiny_specs import worker_spec

from meshrl.cluster import actors
from meshrl.cluster.actors import RankWorker
from meshrl.monitor.recorder import recorder


def test_a_rank_reports_the_peak_of_its_device_also_if_it_ran_no_phase(monkeypatch: pytest.MonkeyPatch):
    """A step in which no token is trained has no phase in a rank that only trains."""
    monkeypatch.setattr(actors, "memory_stats", lambda device: {"allocated_bytes": 1, "peak_bytes": 2})
    worker, peaks = RankWorker(worker_spec()), list[float]()
    monkeypatch.setattr(recorder, "measure", lambda: {"peak_bytes": 3})
    recorder.take_memory()
    for phases in ([], ["train"]):
        for phase in phases:
            recorder.sample(phase)
        peaks += [metric.sum for metric in worker.memory() if metric.name == "memory/device_peak_bytes"]
    assert peaks == [2, 3]

"""The memory of a rank on an accelerator: its metrics, and the comparison with the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_specs import worker_spec

from meshrl.cluster import actors
from meshrl.cluster.actors import RankWorker
from meshrl.core.errors import ConfigError
from meshrl.monitor.recorder import recorder
from meshrl.plan.memory import PHASES, RankMemory


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


@pytest.mark.parametrize(("free", "starts"), [(100, True), (94, True), (92, False)])
def test_a_rank_whose_device_has_less_than_the_plan_refuses_to_start(
    free: int, starts: bool, monkeypatch: pytest.MonkeyPatch
):
    """Minus the error of plans, and before it joins the process group."""

    def reached(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(actors, "free_bytes", lambda device: free * 10**9)
    monkeypatch.setattr(actors, "seed_generators", reached)
    plan = RankMemory("rank", device={"masters": {"train": 100 * 10**9}})
    worker = RankWorker(replace(worker_spec(), memory=plan))
    with pytest.raises(InterruptedError if starts else ConfigError) as error:
        worker.start()
    if not starts:
        assert "rank 0 needs 100.0 GB of its device, of which 92.0 GB are free" in str(error.value)


def test_a_rank_reports_the_planned_peak_of_each_phase_that_it_measures(monkeypatch: pytest.MonkeyPatch):
    """Of an accelerator without the libraries, which its allocator does not see."""
    plan = RankMemory("rank", device={"libraries": dict.fromkeys(PHASES, 5), "masters": {"optimizer": 7, "sync": 1}})
    worker = RankWorker(replace(worker_spec(), memory=plan))
    monkeypatch.setattr(recorder, "measure", lambda: {"peak_bytes": 3})

    def planned() -> dict[str, float]:
        recorder.take_memory()
        for phase in ("optim", "sync", "report"):
            recorder.sample(phase)
        of = "memory/planned_bytes/"
        return {metric.name.removeprefix(of): metric.sum for metric in worker.memory() if metric.name.startswith(of)}

    assert planned() == {"optim": 12, "sync": 6}
    worker.spec = replace(worker.spec, memory=replace(plan, host={"staged checkpoint": {"save": 1}}))
    assert planned() == {}, "the plan of an accelerator, in a rank on a CPU"
    monkeypatch.setattr(actors, "memory_stats", lambda device: {"allocated_bytes": 1, "peak_bytes": 2})
    monkeypatch.setattr(actors, "settle", lambda device: None)
    worker.device = torch.device("meta")
    assert planned() == {"optim": 7, "sync": 1}

"""The memory of a rank on an accelerator: its metrics, and the comparison with the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import tiny_qwen2
from tiny_specs import worker_spec

from meshrl.cluster import actors, launch
from meshrl.cluster.actors import RankWorker
from meshrl.config.run import SftRunConfig
from meshrl.core.errors import ConfigError
from meshrl.model.costs import run_memory
from meshrl.monitor.recorder import recorder
from meshrl.plan.memory import PHASES


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
    worker = RankWorker(replace(worker_spec(), planned_bytes=100 * 10**9))
    with pytest.raises(InterruptedError if starts else ConfigError) as error:
        worker.start()
    if not starts:
        assert "rank 0 needs 100.0 GB of its device, of which 92.0 GB are free" in str(error.value)


def test_ranks_on_accelerators_get_what_the_plan_needs_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the libraries, and without the cache, which takes what is left."""
    tiny_qwen2().save_pretrained(tmp_path)
    content = {"path": "rows.jsonl", "num_steps": 1, "rows_per_step": 4, "max_row_tokens": 64}
    config = SftRunConfig.model_validate({"model": {"path": str(tmp_path)}, "sft": content})
    assert launch._planned_bytes(config) == (None, None)  # on a CPU the run compares its ranks together
    monkeypatch.setattr(launch, "device_type", lambda: "cuda")
    _, (rank,) = run_memory(config, None)
    need = max(rank.total(phase) - rank.device["libraries"].get(phase, 0) for phase in PHASES)
    assert launch._planned_bytes(config) == (need, need)
    ignoring = config.run.model_copy(update={"ignore_plan": True})
    assert launch._planned_bytes(config.model_copy(update={"run": ignoring})) == (None, None)

"""Resident memory of every process of a run is a metric, and does not grow without limit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_run import train, write_run

NUM_STEPS, SETTLED = 200, 60  # steps, and the first ones, in which caches and allocators grow
LEAK_BYTES = 16_000  # per step: 3 MB in 200 steps, which is 0.5 % of a process of 600 MB


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_tiny_steps_do_not_grow_any_process(tmp_path: Path):
    config = write_run(tmp_path)
    values = json.loads(config.read_text())
    values["loop"] |= {"num_steps": NUM_STEPS, "prompts_per_step": 2, "samples_per_prompt": 2}
    config.write_text(json.dumps(values))
    folder = train(config, "steady", "cluster.num_rollout_ranks=1", "rollout.sampling.max_new_tokens=4")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if "metrics" in line and "train/grad_norm" in line["metrics"]]
    assert len(steps) == NUM_STEPS
    curves = {
        name.rpartition("/")[2]: np.array([step[name] for step in steps])
        for name in steps[0]
        if name.startswith("memory/rss_bytes/")
    }
    assert {"controller", "rank_0", "rank_1", "reward"} <= curves.keys()
    slopes = {name: _slope(curve[SETTLED:]) for name, curve in curves.items()}
    print({name: (f"{curves[name][-1] / 2**20:.0f} MB", f"{slope:.0f} B a step") for name, slope in slopes.items()})
    assert all(slope < LEAK_BYTES for slope in slopes.values()), slopes


def _slope(curve: np.ndarray) -> float:
    """Bytes a step: the median slope over all pairs (Theil-Sen), which is robust to single jumps of an allocator."""
    i, j = np.triu_indices(len(curve), k=1)
    return float(np.median((curve[j] - curve[i]) / (j - i)))

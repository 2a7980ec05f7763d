"""A complete run under tensor parallelism or Ulysses, or with compiled blocks: the same rows, losses and proofs as
without."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import steps_of, train, write_run

OVERRIDES = ("loop.num_steps=2", "loop.save_every_steps=1", "algo.kl.coef=0.1")
APART = ("correction/", "proof/", "rollout/", "loss/approx_kl", "sync/changed")  # differences of rounding, and samplers


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def of_one_rank(config: Path) -> Path:
    return train(config, "one_rank", *OVERRIDES, "loop.num_steps=3")


CASES = {
    "tp": ("cluster.num_train_ranks=2", "train.mesh.tp=2"),
    "ulysses": ("cluster.num_train_ranks=2", "train.mesh.ulysses=2"),
    "compiled": ("train.torch_compile=true",),
}


@pytest.mark.slow  # tests/dist/test_mesh_state.py moves states between meshes and to samplers
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_peers_count_once_and_another_mesh_continues_the_run(config: Path, of_one_rank: Path, name: str):
    run = train(config, name, *OVERRIDES, *CASES[name])
    steps = [*steps_of(run), *steps_of(train(config, name, *OVERRIDES, "loop.num_steps=3", "run.resume=auto"))[2:]]
    for step, want in zip(steps, steps_of(of_one_rank), strict=True):
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == step["proof/checked_fraction"] == 1
        assert step["proof/logprob_abs_diff_mean"] < 1e-5
        for name, value in want.items():
            if not name.startswith(APART):
                assert step[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name

"""`meshrl train` with a stand-in for SGLang's server: as the sampler, and as an endpoint that loads folders."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from running_processes import running_descendants
from sglang_servers import KEY, launcher_in, serving
from tiny_run import steps_of, train, write_run
from transformers import AutoModelForCausalLM

SPLIT = ("cluster.num_train_ranks=2", "cluster.num_rollout_ranks=1")

pytestmark = pytest.mark.timeout(400)


def servers_of(folder: Path) -> list[psutil.Process]:
    """Servers below this process with a model of this folder."""
    return running_descendants(rf"sglang\.launch_server.*{re.escape(str(folder))}")


def test_a_run_samples_with_its_own_server_and_proves_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The server is started with SGLang's command line; in each version the trainer's logprobs agree."""
    config, folder = write_run(tmp_path), tmp_path / "launcher"
    with launcher_in(folder):
        monkeypatch.syspath_prepend(folder)
        steps = steps_of(train(config, "sglang", *SPLIT, "rollout.engine=sglang", "rollout.max_running_requests=16"))
    assert len(steps) == 2
    for step in steps:
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
        assert step["proof/logprob_abs_diff_mean"] < 1e-4
    assert servers_of(tmp_path) == []


@pytest.mark.slow
def test_a_run_samples_from_an_endpoint_that_loads_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The weights of such a server can't be read back: only the re-score proves them, and the metrics state this."""
    config = write_run(tmp_path)
    monkeypatch.setenv("KEY_OF_THE_SERVER", KEY)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    with serving(lm, tmp_path / "server") as url:
        steps = steps_of(
            train(
                config,
                "endpoint",
                *SPLIT,
                "rollout.engine=endpoint",
                f"rollout.endpoint.url={url}",
                "rollout.endpoint.api_key_env=KEY_OF_THE_SERVER",
                "rollout.endpoint.weights=files",
            )
        )
    assert len(steps) == 2
    for step in steps:
        assert step["sync/proven_wire"] == 1 and step["sync/proven_read_back"] == 0
        assert step["proof/logprob_abs_diff_mean"] < 1e-4

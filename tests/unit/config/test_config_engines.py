"""Settings that the chosen engine's server does not support or use are in golden/refused.txt."""

import pytest

from meshrl.config.load import load_run_config

SGLANG = "rollout.engine=sglang rollout.sglang.python=python3"  # an existing program, so that nothing else is wrong
RUNNING = "rollout.engine=sglang rollout.sglang.url=http://127.0.0.1:30000 cluster.num_rollout_ranks=1"
ENDPOINT = "rollout.engine=endpoint rollout.endpoint.url=http://h:8000 cluster.num_rollout_ranks=1"
FILES = "rollout.endpoint.weights=files"


@pytest.mark.parametrize("overrides", [SGLANG, f"{SGLANG} rollout.mesh.infer_tp=2", RUNNING, f"{ENDPOINT} {FILES}"])
def test_settings_that_fit_the_engine_are_accepted(good, overrides):
    load_run_config(good, overrides.split())


def test_a_run_with_sglang_reports_what_was_tested(good):
    (notice,) = [n for n in load_run_config(good, SGLANG.split()).notices if "rollout.engine is sglang" in n]
    assert "SGLang 0.5.23 on a CPU, with tiny models, and never on a GPU" in notice
    assert not any("SGLang" in n for n in load_run_config(good).notices)


def test_an_endpoint_without_weights_can_be_evaluated(good):
    config = load_run_config(good, ENDPOINT.split(), purpose="eval").config
    assert config.rollout.endpoint.weights == "none"

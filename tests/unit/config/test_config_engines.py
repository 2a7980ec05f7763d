"""Settings that the chosen engine's server does not support or use are refused before anything starts."""

import pytest

from meshrl.config.load import load_run_config
from meshrl.core.errors import ConfigError

SGLANG = "rollout.engine=sglang rollout.sglang.python=python3"  # an existing program, so that nothing else is wrong
RUNNING = "rollout.engine=sglang rollout.sglang.url=http://127.0.0.1:30000 cluster.num_rollout_ranks=1"
ENDPOINT = "rollout.engine=endpoint rollout.endpoint.url=http://h:8000 cluster.num_rollout_ranks=1"
COLOCATED_ENDPOINT = "rollout.engine=endpoint rollout.endpoint.url=http://h:8000 cluster.num_train_ranks=1"
FILES = "rollout.endpoint.weights=files"

BAD = [
    (
        "rollout.engine=vllm rollout.vllm.python=python3 rollout.vllm.kv_cache_bytes=9 "
        "rollout.vllm.gpu_memory_utilization=0.3",
        ["rollout.vllm.gpu_memory_utilization = 0.3", "kv_cache_bytes sets the size"],
    ),
    (SGLANG.replace("python3", "no_such_python"), ["rollout.sglang.python", "no such program"]),
    (f"{SGLANG} rollout.sglang.args=[--tp-size=2]", ["--tp-size is set by meshrl itself"]),
    (f"{SGLANG} rollout.sglang.args=[--tp_size=2]", ["--tp-size is set by meshrl itself"]),
    (f"{SGLANG} rollout.sglang.args=[--context=100]", ["--context is set by meshrl itself"]),
    ("rollout.engine=vllm rollout.vllm.python=python3 rollout.vllm.args=[-tp=2]", ["-tp is set by meshrl itself"]),
    (f"{SGLANG} rollout.sglang.api_key_env=KEY", ["gets a key of its own"]),
    (f"{SGLANG} rollout.eval_sampling.min_p=0.1", ["rollout.eval_sampling.min_p", "ends an SGLang server"]),
    (f"{SGLANG} rollout.eval_sampling.repetition_penalty=2.5", ["eval_sampling.repetition_penalty", "at most 2"]),
    (f"{SGLANG} rollout.mesh.infer_tp=3", ["2 ranks can't be split into replicas of 3"]),
    (RUNNING.replace("http://", ""), ["rollout.sglang.url", "an address with its scheme"]),
    (RUNNING.replace("ranks=1", "ranks=2"), ["rollout.sglang.url", "one server is one replica"]),
    (f"{RUNNING} rollout.sglang.mem_fraction_static=0.9", ["mem_fraction_static", "already runs"]),
    (f"{RUNNING} {FILES}", ["rollout.endpoint.weights", "rollout.engine is sglang"]),
    ("rollout.sglang.deterministic=false", ["would have no effect", "rollout.engine is embedded"]),
    (ENDPOINT, ["rollout.endpoint.weights", "weights never change"]),
    (f"{ENDPOINT} {FILES} rollout.mesh.infer_tp=2", ["decides itself how it splits"]),
    (f"{ENDPOINT.replace('ranks=1', 'ranks=2')} {FILES}", ["one endpoint is one sampler"]),
    (f"{ENDPOINT} {FILES} rollout.endpoint.reload_url=reload", ["rollout.endpoint.reload_url", "scheme"]),
    (
        f"{COLOCATED_ENDPOINT} {FILES} rollout.release_memory=true",
        ["engine endpoint can't release its memory", "embedded, vllm"],
    ),
    (f"{ENDPOINT} rollout.endpoint.folder=/tmp", ["rollout.endpoint.folder", "weights is none"]),
    (f"rollout.engine=endpoint {FILES} cluster.num_rollout_ranks=1", ["rollout.endpoint.url", "needs the address"]),
]


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[overrides[-60:] for overrides, _ in BAD])
def test_settings_that_do_not_fit_the_engine_are_refused(good, overrides, words):
    with pytest.raises(ConfigError) as error:
        load_run_config(good, overrides.split())
    for word in words:
        assert word in str(error.value)


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

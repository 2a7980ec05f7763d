"""Complete runs on an accelerator, or on two where there are two: FSDP2, the all-gather of weights into colocated
samplers, memory that is released and offloaded, checkpoints, exports. With MESHRL_DEVICE=cpu they run on two CPU ranks,
which tests the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from run_contents import assert_equal_tensors, state, weights
from tiny_models import tiny_qwen2
from tiny_run import steps_of, train, write_run
from tiny_tokenizers import tiny_tokenizer
from vllm_servers import MISSING, MODEL

from meshrl.core.device import device_count, device_type
from meshrl.train.checkpoint_files import state_folder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

STEPS = ("loop.num_steps=3", "loop.save_every_steps=1", "run.keep_checkpoints=3", "train.full_determinism=true")
NATS = 5e-3  # of a token, fp32 products of two kinds of kernels
VLLM = (
    "rollout.engine=vllm",
    f"rollout.vllm.python={sys.executable}",
    "rollout.vllm.kv_cache_bytes=33554432",
    "rollout.max_running_requests=16",
)


@pytest.fixture(scope="module")
def on_accelerators(device_of_the_machine: None, users_device: str) -> bool:
    if users_device != "cpu" and device_count() == 0:
        pytest.skip("needs an accelerator; MESHRL_DEVICE=cpu runs these tests on two CPU ranks")
    return device_type() != "cpu"


@pytest.fixture(scope="module")
def ranks(on_accelerators: bool) -> tuple[str, ...]:
    return (f"cluster.num_train_ranks={min(2, device_count() or 2)}", *STEPS)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def run(ranks: tuple[str, ...], config: Path) -> Path:
    return train(config, "run", *ranks)


def _require_proofs(folder: Path, num_steps: int, on_accelerators: bool) -> None:
    steps = steps_of(folder, ("s", "tokens/s", "GB/s"))
    assert len(steps) == num_steps
    for step in steps:
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
        assert step["proof/logprob_abs_diff_mean"] < NATS and step["proof/checked_fraction"] > 0
        assert ("memory/released_bytes" in step) == on_accelerators  # colocated samplers release it by default


def test_every_sync_is_proven(run: Path, on_accelerators: bool):
    _require_proofs(run, 3, on_accelerators)


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(run: Path, config: Path, ranks: tuple[str, ...]):
    resumed = train(config, "resumed", *ranks, f"run.resume={state_folder(run / 'checkpoints', 2)}")
    assert_equal_tensors(state(resumed, 3), state(run, 3))
    assert_equal_tensors(weights(resumed, 3), weights(run, 3))


@pytest.mark.parametrize(
    "offload",
    [("train.optimizer_offload=true",), ("train.param_offload=true", "algo.kl.coef=0.1")],
    ids=["optimizer", "parameters"],
)
def test_state_on_the_host_changes_no_bit(
    config: Path, ranks: tuple[str, ...], on_accelerators: bool, offload: tuple[str, ...]
):
    key, *algorithm = offload
    name = key.split("=")[0]
    usual = train(config, f"without_{name}", *ranks, *algorithm)
    offloaded = train(config, f"with_{name}", *ranks, *algorithm, key)
    assert_equal_tensors(state(offloaded, 3), state(usual, 3))
    _require_proofs(offloaded, 3, on_accelerators)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("parallel", [(), ("rollout.mesh.infer_tp=2",)], ids=["a server for each rank", "one for both"])
def test_colocated_vllm_reads_the_weights_in_the_memory_of_its_device(
    config: Path, ranks: tuple[str, ...], on_accelerators: bool, parallel: tuple[str, ...]
):
    """The server sleeps while the trainer trains, and computes with each version's weights."""
    if parallel and ranks[0].endswith("=1"):
        pytest.skip("needs two accelerators")
    shape = {name: value for name, value in MODEL.items() if name != "tie_word_embeddings"}
    lm = tiny_qwen2(vocab_size=len(tiny_tokenizer()), initializer_range=0.1, **shape)
    lm.save_pretrained(config.parent / "model")
    eager = () if on_accelerators else ("rollout.vllm.args=[--enforce-eager]",)
    folder = train(config, f"vllm_{len(parallel)}", *ranks, *VLLM, *parallel, *eager)
    _require_proofs(folder, 3, on_accelerators)

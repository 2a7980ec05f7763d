"""The contract of rollout engines with vLLM on an accelerator: compiled, with CUDA graphs, asynchronous scheduling and
sleep mode, under both of its model runners. vLLM's CPU build has none of these. With MESHRL_DEVICE=cpu the contract
runs against that build, which tests the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_servers import MISSING, serving, tiny_vllm_lm

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import test_rollout_engines as contract

from meshrl.core.device import device_type, local_device
from meshrl.rollout.server.process import ServerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

make, lm = contract.make, contract.lm
globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


@pytest.fixture
def name(vllm_server: ServerProcess) -> str:
    return "vllm"


@pytest.fixture(scope="module", params=["0", "1"], ids=["model runner V1", "model runner V2"])
def vllm_server(
    request: pytest.FixtureRequest,
    device_of_the_machine: None,
    users_device: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    if MISSING:
        pytest.skip(MISSING)
    on_cpu = device_type() == "cpu"
    if on_cpu and (users_device != "cpu" or request.param == "1"):
        pytest.skip("needs an accelerator; MESHRL_DEVICE=cpu runs this with vLLM's CPU build and its model runner")
    graphs = () if on_cpu else ("--no-enforce-eager", "--async-scheduling")
    device = torch.device("cpu") if on_cpu else local_device(0)
    folder = tmp_path_factory.mktemp("vllm") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)  # the server inherits it
        with serving(tiny_vllm_lm(), folder, *graphs, device=device, release_memory=True) as server:
            yield server

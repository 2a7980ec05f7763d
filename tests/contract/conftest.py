from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_servers import serving as serving_sglang
from vllm_servers import MISSING, serving, tiny_vllm_lm

from meshrl.rollout.server import ServerProcess


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One vLLM server for all tests that need one, each with a client of its own."""
    if MISSING:
        pytest.skip(MISSING)
    with serving(tiny_vllm_lm(), tmp_path_factory.mktemp("vllm") / "model") as server:
        yield server


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a stand-in for SGLang, of two tensor-parallel ranks; also an endpoint that loads folders."""
    with serving_sglang(tiny_vllm_lm(), tmp_path_factory.mktemp("sglang"), tp_size=2, tokens=1024) as url:
        yield url

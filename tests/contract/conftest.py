from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_servers import serving as serving_sglang
from vllm_servers import tiny_vllm_lm


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a stand-in for SGLang with two tensor-parallel ranks, which is also an endpoint that loads
    folders."""
    with serving_sglang(tiny_vllm_lm(), tmp_path_factory.mktemp("sglang"), tp_size=2, tokens=1024) as url:
        yield url

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_servers import serving
from tiny_models import tiny_lm


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a stand-in for SGLang that can release its memory, and that is an endpoint that loads folders."""
    lm = tiny_lm("qwen2", tie_word_embeddings=True)
    with serving(lm, tmp_path_factory.mktemp("sglang"), "--enable-memory-saver") as url:
        yield url

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests share tiny_models, rank_pool and scripted agents

from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four gloo ranks with torch loaded; started at the first use."""
    p = RankPool(4)
    yield p
    p.close()

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests share tiny_models, rank_pool and scripted agents

from rank_pool import RankPool

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # one for all Rays of a process


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Up to four gloo ranks with torch loaded; each is started when a test first needs it."""
    p = RankPool(4)
    yield p
    p.close()

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import secrets
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests share tiny_models, rank_pool and scripted agents

from order_of_files import order_of, scheduler
from rank_pool import RankPool
from slow_cases import mark_slow_cases

if TYPE_CHECKING:
    from meshrl.rollout.server.process import ServerProcess

_CACHE = tempfile.TemporaryDirectory(prefix="datasets-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name  # read when `datasets` is imported
# What the user has set; pytest-xdist's workers inherit it. Tests start more ranks than a machine may have GPUs.
_USERS_DEVICE = os.environ.setdefault("MESHRL_TEST_DEVICE", os.environ.get("MESHRL_DEVICE", ""))
os.environ["MESHRL_DEVICE"] = _USERS_DEVICE or "cpu"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # all Ray clusters of a process share it


def pytest_report_header() -> str:
    if _USERS_DEVICE:
        return f"device: {_USERS_DEVICE}, from MESHRL_DEVICE"
    return "device: the CPU, except for tests/gpu (pytest -m gpu tests/gpu); MESHRL_DEVICE sets it for all tests"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects those that are slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow_cases(items, all_of_a_test=not any("[" in arg for arg in config.args))
    items.sort(key=lambda item: order_of(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_finish() -> None:
    """Exempt the 500,000 objects of imported modules from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Exempt also what the tests of a file have imported and cached: each run in this process ends with a collection,
    which took a second at the end of the suite."""
    ran = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return ran


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduler(config, log)


_OF_ONEDNN = {name: os.environ.get(name) for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")}


@pytest.fixture(autouse=True)
def what_ranks_inherit() -> Iterator[None]:
    """A run in this process adds its working folder to sys.path and sets two variables. Ranks inherit both, so a fork
    server that was started before such a run would be replaced, which takes seconds."""
    path = sys.path[:]
    yield
    sys.path[:] = path
    for name, value in _OF_ONEDNN.items():
        if value is None:
            os.environ.pop(name, None)


@pytest.fixture(scope="session")
def users_device() -> str:
    """MESHRL_DEVICE as pytest was started with; empty if it was not set, and the tests use the CPU."""
    return _USERS_DEVICE


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One vLLM server, which all tests share; each has its own client."""
    from vllm_servers import MISSING, serving, tiny_vllm_lm

    if MISSING:
        pytest.skip(MISSING)
    with serving(tiny_vllm_lm(), tmp_path_factory.mktemp("vllm") / "model") as server:
        yield server


def _sglang(folder: Path, tp_size: int) -> Iterator[str]:
    from sglang_servers import MISSING, serving
    from vllm_servers import tiny_vllm_lm

    if MISSING:
        pytest.skip(MISSING)
    with serving(tiny_vllm_lm(), folder, tp_size) as url:
        yield url


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an SGLang server, which all tests share; each has its own client."""
    yield from _sglang(tmp_path_factory.mktemp("sglang"), 1)


@pytest.fixture(scope="session")
def sglang_tp2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an SGLang server with two tensor-parallel ranks."""
    yield from _sglang(tmp_path_factory.mktemp("sglang_tp2"), 2)


@pytest.fixture(scope="session")
def endpoint_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address and the model's folder of an SGLang server with /v1/completions."""
    from sglang_servers import MISSING, save_with_tokenizer, serving_text
    from vllm_servers import tiny_vllm_lm

    if MISSING:
        pytest.skip(MISSING)
    folder = save_with_tokenizer(tiny_vllm_lm(), tmp_path_factory.mktemp("endpoint"))
    with serving_text(folder) as url:
        yield url, folder


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Up to four gloo ranks with torch loaded; a rank is started when a test first needs it."""
    p = RankPool(4)
    yield p
    p.close()

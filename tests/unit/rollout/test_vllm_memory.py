"""Memory of a vLLM worker: the calls of vLLM's sleep mode on an accelerator, and the released storages on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrl.rollout.vllm.memory import WorkerMemory

SIZES = {"weights": 100, "kv_cache": 30}


class SleepingWorker:
    """The sleep mode of vLLM's worker: sleep releases everything, wake_up and discard take tags."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.released: set[str] = set()

    def sleep(self, level: int) -> None:
        assert level == 2, "level 1 would copy the weights to the host"
        self.released = set(SIZES)

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.released
        self.released -= set(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.released |= set(tags)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SleepingWorker:
    worker = SleepingWorker()

    def memory() -> tuple[int, int]:
        return sum(SIZES[part] for part in worker.released), 1000

    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory, raising=False)
    return worker


@pytest.mark.parametrize(
    ("steps", "released"),
    [
        ([("release", {"weights", "kv_cache"}, 130)], {"weights", "kv_cache"}),
        ([("release", {"weights"}, 100)], {"weights"}),
        ([("release", {"kv_cache"}, 30)], {"kv_cache"}),
        ([("release", {"kv_cache"}, 30), ("release", {"weights"}, 100)], {"weights", "kv_cache"}),
        ([("release", {"weights"}, 100), ("release", {"weights", "kv_cache"}, 30)], {"weights", "kv_cache"}),
        ([("release", {"weights", "kv_cache"}, 130), ("restore", {"weights"}, 100)], {"kv_cache"}),
        ([("release", {"weights"}, 100), ("restore", {"weights", "kv_cache"}, 100)], set()),
        ([("restore", {"weights"}, 0)], set()),
    ],
)
def test_parts_are_released_one_by_one(worker: SleepingWorker, steps: list[Any], released: set[str]):
    memory = WorkerMemory(worker)
    for method, parts, num_bytes in steps:
        assert getattr(memory, method)(parts) == num_bytes
    assert worker.released == memory.released == released


class Layer(torch.nn.Module):
    """A tied embedding, a norm that is not tied, and a cache with two views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 4))
        self.tied = self.weight
        self.norm = torch.nn.Parameter(torch.frombuffer(bytearray(16), dtype=torch.float32))  # as a file is mapped
        self.register_buffer("positions", torch.arange(4.0))
        self.kv_cache = torch.ones(2, 6)

    def storages(self) -> dict[str, int]:
        """Allocated bytes of each tensor."""
        held = {"weight": self.weight, "norm": self.norm, "positions": self.positions, "kv_cache": self.kv_cache}
        return {name: tensor.untyped_storage().nbytes() for name, tensor in held.items()}


def test_on_a_cpu_storages_are_released_and_restored_in_place():
    """Views share the released storage, a parameter in memory that can't be resized is moved first, buffers stay."""
    layer = Layer()
    views = SimpleNamespace(kv_cache=[layer.kv_cache[0], layer.kv_cache[1:]])
    compilation = SimpleNamespace(static_forward_context={"a": layer, "b": views, "c": SimpleNamespace()})
    worker = SimpleNamespace(
        device=torch.device("cpu"),
        get_model=lambda: layer,
        vllm_config=SimpleNamespace(compilation_config=compilation),
    )
    allocated = {"weight": 128, "norm": 16, "positions": 16, "kv_cache": 48}
    assert layer.storages() == allocated
    memory = WorkerMemory(worker)
    assert memory.release({"weights", "kv_cache"}) == 128 + 16 + 48
    assert layer.storages() == {**dict.fromkeys(allocated, 0), "positions": 16}
    assert memory.release({"weights"}) == 0
    assert memory.restore({"weights"}) == 128 + 16
    assert layer.storages() == {**allocated, "kv_cache": 0}
    assert memory.restore({"kv_cache"}) == 48 and layer.storages() == allocated
    assert not layer.kv_cache.any() and views.kv_cache[1].untyped_storage().nbytes() == 48
    assert layer.positions.tolist() == [0, 1, 2, 3]

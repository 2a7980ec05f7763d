"""Memory of a vLLM worker on an accelerator: which of vLLM's own calls are made. Its CPU way is tested elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshrl.rollout.vllm.lent import LentMemory

SIZES = {"weights": 100, "kv_cache": 30}


class SleepingWorker:
    """vLLM's worker as far as its sleep mode goes: sleep takes everything, wake_up and discard go by tag."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.asleep: set[str] = set()

    def sleep(self, level: int) -> None:
        assert level == 2, "level 1 would copy the weights to the host"
        self.asleep = set(SIZES)

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep
        self.asleep -= set(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.asleep |= set(tags)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SleepingWorker:
    worker = SleepingWorker()

    def memory() -> tuple[int, int]:
        return sum(SIZES[part] for part in worker.asleep), 1000

    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory, raising=False)
    return worker


@pytest.mark.parametrize(
    ("steps", "asleep"),
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
def test_parts_are_lent_one_by_one(worker: SleepingWorker, steps: list[Any], asleep: set[str]):
    memory = LentMemory(worker)
    for method, parts, num_bytes in steps:
        assert getattr(memory, method)(parts) == num_bytes
    assert worker.asleep == memory.lent == asleep

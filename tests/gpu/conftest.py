"""Tests that need an accelerator; skipped with a reason if there is none. They share the equality harness."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))  # harness.py

from meshrl.core.device import device_type, dist_backend, local_device
from meshrl.model import recipe
from meshrl.parallel.mesh import build_mesh


@pytest.fixture(scope="module", autouse=True)
def device_of_the_machine(users_device: str) -> Iterator[None]:
    """These tests use the accelerator unless the user has set MESHRL_DEVICE; all others use the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not users_device:
            patch.delenv("MESHRL_DEVICE")
        yield


@pytest.fixture(scope="module")
def accelerator() -> torch.device:
    """The first accelerator of this machine, as the current device."""
    if device_type() == "cpu":
        pytest.skip("needs an accelerator; this machine has none (or MESHRL_DEVICE=cpu hides it)")
    return local_device(0)


@pytest.fixture
def fsdp2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parameter True, FSDP2 wraps the model although there is one rank, so one device tests it."""
    if request.param:
        monkeypatch.setattr(recipe, "is_sharded", lambda mesh: True)


@pytest.fixture(scope="module")
def meshes(accelerator: torch.device) -> Iterator[dict[str, DeviceMesh]]:
    """One rank in this process: its mesh on the accelerator, and one on the CPU to compare with."""
    dist.init_process_group(dist_backend(accelerator), store=dist.HashStore(), rank=0, world_size=1)
    kinds = {"cpu", accelerator.type}
    yield {kind: build_mesh((1, 1, 1, 1), kind) for kind in kinds}
    dist.destroy_process_group()

"""The device that the ranks of this machine use."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from tiny_run import train, write_run

from meshrl.core.device import (
    deterministic_kernels,
    device_notice,
    device_type,
    has_long_row_kernels,
    has_triton,
    local_device,
    upload,
)
from meshrl.core.errors import ConfigError


@pytest.fixture
def machine_with(monkeypatch):
    """machine_with("mps") is a machine on which PyTorch finds that accelerator; None: a machine without any."""

    def use(kind: str | None) -> None:
        monkeypatch.delenv("MESHRL_DEVICE", raising=False)
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)

    return use


@pytest.mark.parametrize(("found", "used"), [("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu"), (None, "cpu")])
def test_an_accelerator_is_used_where_ranks_can_communicate_on_it(machine_with, found, used):
    machine_with(found)
    assert device_type() == used
    notice = device_notice()
    if found == "mps":
        assert notice is not None and "is mps" in notice and "use the CPU" in notice and "cuda, npu, xpu" in notice
    else:
        assert notice is None


def test_a_device_that_is_asked_for_needs_no_notice(machine_with, monkeypatch):
    machine_with("mps")
    monkeypatch.setenv("MESHRL_DEVICE", "cpu")
    assert (device_type(), device_notice()) == ("cpu", None)
    monkeypatch.setenv("MESHRL_DEVICE", "mps")
    with pytest.raises(ConfigError, match="MESHRL_DEVICE is 'mps'; allowed: cpu, cuda, npu, xpu"):
        device_type()


def test_a_device_that_is_asked_for_and_missing_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("MESHRL_DEVICE", "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="MESHRL_DEVICE is xpu, but this machine has no such device"):
        local_device(0)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "installed", "setting", "triton", "long_rows"),
    [
        ("cuda", (8, 0), None, True, None, True, False),
        ("cuda", (9, 0), None, True, "1", True, True),
        ("cuda", (9, 0), None, True, "0", False, True),
        ("cuda", (9, 0), None, False, None, False, True),
        ("cuda", (10, 0), None, True, None, True, True),
        ("cuda", (12, 0), None, True, None, True, False),
        ("cuda", (7, 5), None, True, None, False, False),
        ("cuda", (9, 4), "7.0", True, None, False, False),
        ("xpu", (9, 0), None, True, None, False, False),
        ("meta", (9, 0), None, True, None, False, False),
        ("cpu", (9, 0), None, True, None, False, False),
    ],
)
def test_triton_needs_an_nvidia_gpu_from_ampere_on_and_kernels_of_long_rows_one_of_two_generations(
    device, capability, hip, installed, setting, triton, long_rows, monkeypatch
):
    module = ModuleType("triton")
    module.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", module if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("MESHRL_TRITON", raising=False)
    if setting is not None:
        monkeypatch.setenv("MESHRL_TRITON", setting)
    assert has_triton.__wrapped__(torch.device(device)) is triton  # without its cache
    assert has_long_row_kernels(torch.device(device)) is long_rows


def test_a_run_trains_on_the_cpu_with_a_notice_where_the_accelerator_has_no_backend(
    machine_with, tmp_path, monkeypatch, capsys
):
    """On macOS PyTorch finds mps, for which torch.distributed has no backend."""
    machine_with("mps")
    monkeypatch.chdir(tmp_path)
    config = write_run(tmp_path)
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"cluster": {"executor": "inline"}}))
    folder = train(config, "on_mps", "loop.num_steps=1")
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
    assert "note: the accelerator of this machine is mps" in capsys.readouterr().err


def test_tensors_that_are_sent_together_keep_their_values(monkeypatch: pytest.MonkeyPatch):
    """Of all dtypes and shapes, also where the one before them ends between two numbers; memory of the CPU stands for
    that of a device."""
    tensors = [
        torch.arange(5, dtype=torch.int16),
        torch.tensor([True, False, True]),
        torch.rand(2, 3, dtype=torch.float64),
        torch.empty(0, dtype=torch.int64),
        torch.rand(3, 4).T[1:],
        torch.arange(4)[:1].expand(1),
        torch.tensor(2.5, dtype=torch.bfloat16),
    ]
    assert all(x is y for x, y in zip(upload(tensors, torch.device("cpu")), tensors, strict=True))
    monkeypatch.setattr(torch, "empty_like", lambda x, device: torch.zeros(x.shape, dtype=x.dtype))
    sent = upload(tensors, torch.device("meta"))
    assert [x.dtype for x in sent] == [x.dtype for x in tensors]
    assert all(torch.equal(x, y) for x, y in zip(sent, tensors, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in sent if x.numel()}) == 1


def test_deterministic_kernels_restore_what_the_user_had_set_and_name_their_key():
    def state() -> tuple[bool, bool, bool]:
        memory = torch.utils.deterministic
        enabled, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        return enabled, warns, memory.fill_uninitialized_memory

    usual = state()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = state()
        message = r"train.full_determinism is true, but cumsum .* Set train.full_determinism=false"
        with pytest.raises(ConfigError, match=message), deterministic_kernels(True):
            assert state() == (True, False, False)
            raise RuntimeError("cumsum does not have a deterministic implementation, but you set it. More")
        assert state() == before != usual
        with pytest.raises(RuntimeError, match="out of memory"), deterministic_kernels(True):
            raise RuntimeError("out of memory")
    finally:
        torch.use_deterministic_algorithms(False)
    assert state() == usual

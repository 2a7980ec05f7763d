"""The number of ranks on a machine, compared with its devices and CPU cores, before anything is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tiny_run import train, write_run
from tiny_specs import worker_spec

from meshrl.cluster import actors
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.launch import check_devices
from meshrl.config.cluster import ClusterConfig
from meshrl.config.rollout import EndpointConfig, RolloutConfig, SglangConfig
from meshrl.core.device import generators_restored
from meshrl.core.errors import ConfigError, DataError

EMBEDDED = RolloutConfig()


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch):
    """machine_with(2) is a machine with two GPUs, and 4 CPU cores."""

    cuda = torch.device("cuda")

    def use(num_devices: int) -> None:
        for name in ("MESHRL_DEVICE", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: num_devices > 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)

    return use


def _launched(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local_world_size: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


ONE = ClusterConfig()
SERVERS = [
    RolloutConfig(engine="endpoint", endpoint=EndpointConfig(url="http://server:8000")),
    RolloutConfig(engine="sglang", sglang=SglangConfig(url="http://server:8000")),
]
TWO = r"2 ranks.*_train_ranks = 2.*_rollout_ranks = 0\).* 1 device of type cuda.*MESHRL_DEVICE=cpu"
MANY = r"3 ranks of this machine need a device each.* 2 devices of type cuda"
IN_AN_EVALUATION = r"\(cluster\.num_{}_ranks = 3, which all sample in an evaluation\)"


@pytest.mark.parametrize(
    ("devices", "ranks", "cluster", "rollout", "refused"),
    [
        (1, (1, 0), ONE, EMBEDDED, ""),
        (1, (1, 0), ClusterConfig(executor="inline"), EMBEDDED, ""),
        (1, (2, 0), ONE, None, TWO),
        (2, (1, 1), ONE, EMBEDDED, ""),
        *((2, ranks, ONE, EMBEDDED, MANY) for ranks in ((1, 2), (2, 1), (0, 3))),
        (2, (0, 3), ClusterConfig(num_train_ranks=3), EMBEDDED, IN_AN_EVALUATION.format("train")),
        (2, (0, 3), ClusterConfig(num_rollout_ranks=3), EMBEDDED, IN_AN_EVALUATION.format("rollout")),
        # A rank that only connects to a running server needs none, unless it is in NCCL's process group.
        *((1, (1, 1), ONE, server, "") for server in SERVERS),
        *((1, (2, 1), ONE, server, "2 ranks") for server in SERVERS),
        *((1, (1, 1), ONE, server.model_copy(update={"sync_transport": "broadcast"}), "2 ranks") for server in SERVERS),
        (1, (8, 0), ClusterConfig(executor="ray", nodes=2), EMBEDDED, ""),  # Ray itself reserves a device for each
    ],
)  # fmt: skip
def test_several_ranks_on_one_device_are_refused(machine_with, devices, ranks, cluster, rollout, refused):
    """NCCL refuses them much later, with "Duplicate GPU detected"."""
    machine_with(devices)
    if not refused:
        assert check_devices(cluster, rollout, *ranks) is None
        return
    with pytest.raises(ConfigError, match=refused):
        check_devices(cluster, rollout, *ranks)


@pytest.mark.parametrize(
    ("devices", "launched", "visible", "rollout", "refused"),
    [
        (2, (0, 4, 2), "", EMBEDDED, ""),
        (2, (3, 4, 2), "", EMBEDDED, ""),
        (2, (4, 6, 3), "", EMBEDDED, "3 ranks of this machine"),
        (2, (4, 6, 3), "", SERVERS[0], ""),  # ranks 3 and 4 train, rank 5 has no device
        # srun --gpus-per-task: every process sees one device, and each another one.
        (1, (0, 4, 4), "", EMBEDDED, "4 ranks"),
        (1, (0, 4, 4), "3", EMBEDDED, ""),
        (1, None, "3", EMBEDDED, "4 ranks"),  # all ranks are children of this process
    ],
)
def test_under_torchrun_each_machine_counts_its_own_ranks(
    machine_with, monkeypatch: pytest.MonkeyPatch, devices, launched, visible, rollout, refused
):
    machine_with(devices)
    if launched is not None:
        _launched(monkeypatch, *launched)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    num_ranks, num_samplers = 4 if launched is None else launched[1], rollout is not EMBEDDED
    if not refused:
        assert check_devices(ONE, rollout, num_ranks - num_samplers, num_samplers) is None
        return
    with pytest.raises(ConfigError, match=refused):
        check_devices(ONE, rollout, num_ranks - num_samplers, num_samplers)


def test_a_device_type_that_this_machine_lacks_is_refused(machine_with, monkeypatch: pytest.MonkeyPatch):
    machine_with(0)
    monkeypatch.setenv("MESHRL_DEVICE", "cuda")
    with pytest.raises(ConfigError, match=r"1 rank of this machine needs a device each.* 0 devices of type cuda"):
        check_devices(ClusterConfig(), EMBEDDED, 1, 0)


def test_the_ranks_of_each_machine_use_its_devices_from_the_first_on(machine_with, monkeypatch: pytest.MonkeyPatch):
    """A server gets its rank's device and those after it, which must exist on its machine."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    with generators_restored():
        machine_with(8)
        for rank in (0, 5, 6, 11):
            RankWorker(worker_spec(rank=rank, num_train_ranks=0, num_rollout_ranks=12, nodes=2)).start()
    assert chosen == [0, 5, 0, 5]


def test_more_ranks_than_cpu_cores_are_noted(machine_with):
    machine_with(0)
    assert check_devices(ClusterConfig(), EMBEDDED, 3, 1) is None
    note = check_devices(ClusterConfig(), EMBEDDED, 3, 2)
    assert note is not None and "5 ranks" in note and "4 CPU cores" in note and "cluster.num_train_ranks" in note


def test_a_run_prints_that_its_ranks_share_cpu_cores(
    machine_with, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    machine_with(0)
    config = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": 1}\n')  # ends the run before a rank starts
    with pytest.raises(DataError):
        train(config, "run", "cluster.num_train_ranks=5")
    assert "note: 5 ranks (cluster.num_train_ranks + cluster.num_rollout_ranks) share" in capsys.readouterr().err


@pytest.mark.timeout(60)  # a follower that is not refused waits for minutes
@pytest.mark.parametrize("rank", [None, 1])
def test_a_run_with_too_few_devices_ends_before_it_makes_its_folder(
    machine_with, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int | None
):
    """Under torchrun, every process ends: otherwise the followers would wait for a controller."""
    machine_with(1)
    if rank is not None:
        _launched(monkeypatch, rank, world_size=2, local_world_size=2)
    with pytest.raises(ConfigError, match="2 ranks of this machine need a device each"):
        train(write_run(tmp_path), "run", "cluster.num_train_ranks=2")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_the_process_group_is_bound_to_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str):
    """Else NCCL makes a communicator for each pair of ranks that sends: 496 at 32 ranks, in the first export."""
    device = torch.device(kind, 0) if kind == "meta" else torch.device(kind)
    passed = dict[str, Any]()

    def init_process_group(backend: str, **options: Any) -> NoReturn:
        passed.update(options)
        raise InterruptedError("before the process group is made")

    monkeypatch.setattr(actors, "local_device", lambda local_rank: device)
    monkeypatch.setattr(actors, "settle", lambda device: None)
    monkeypatch.setattr(actors, "dist_backend", lambda device: "gloo")
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    with generators_restored(), pytest.raises(InterruptedError):
        RankWorker(worker_spec(rendezvous=str(tmp_path / "store"))).start()
    assert passed["device_id"] == (None if kind == "cpu" else device)

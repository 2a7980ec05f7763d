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


def test_several_ranks_on_one_device_are_refused(machine_with):
    """NCCL refuses them much later, with "Duplicate GPU detected"."""
    machine_with(1)
    assert check_devices(ClusterConfig(), EMBEDDED, 1, 0) is None
    assert check_devices(ClusterConfig(executor="inline"), EMBEDDED, 1, 0) is None
    with pytest.raises(ConfigError) as refused:
        check_devices(ClusterConfig(), None, 2, 0)
    text = str(refused.value)
    assert "cluster.num_train_ranks = 2" in text and "cluster.num_rollout_ranks = 0" in text
    assert "2 ranks" in text and "1 device of type cuda" in text and "MESHRL_DEVICE=cpu" in text


def test_ranks_that_only_sample_need_devices_of_their_own(machine_with):
    machine_with(2)
    assert check_devices(ClusterConfig(), EMBEDDED, 1, 1) is None
    for num_train_ranks, num_rollout_ranks in ((1, 2), (2, 1), (0, 3)):
        with pytest.raises(ConfigError, match=r"3 ranks of this machine need a device each.* 2 devices of type cuda"):
            check_devices(ClusterConfig(), EMBEDDED, num_train_ranks, num_rollout_ranks)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (ClusterConfig(num_train_ranks=3), r"\(cluster\.num_train_ranks = 3, which all sample in an evaluation\)"),
        (ClusterConfig(num_rollout_ranks=3), r"\(cluster\.num_rollout_ranks = 3, which all sample in an evaluation\)"),
    ],
)
def test_an_evaluation_names_the_key_of_the_ranks_that_sample(machine_with, cluster: ClusterConfig, expected: str):
    machine_with(2)
    with pytest.raises(ConfigError, match=expected):
        check_devices(cluster, EMBEDDED, 0, 3)


@pytest.mark.parametrize(
    "server",
    [
        RolloutConfig(engine="endpoint", endpoint=EndpointConfig(url="http://server:8000")),
        RolloutConfig(engine="sglang", sglang=SglangConfig(url="http://server:8000")),
    ],
)
def test_a_rank_that_only_connects_to_a_running_server_needs_no_device(machine_with, server: RolloutConfig):
    machine_with(1)
    assert check_devices(ClusterConfig(), server, 1, 1) is None
    with pytest.raises(ConfigError):
        check_devices(ClusterConfig(), server, 2, 1)
    broadcast = server.model_copy(update={"sync_transport": "broadcast"})
    with pytest.raises(ConfigError):  # the sampling rank is in NCCL's process group
        check_devices(ClusterConfig(), broadcast, 1, 1)


def test_under_torchrun_each_machine_counts_its_own_ranks(machine_with, monkeypatch: pytest.MonkeyPatch):
    machine_with(2)
    for rank in (0, 3):
        _launched(monkeypatch, rank, world_size=4, local_world_size=2)
        assert check_devices(ClusterConfig(), EMBEDDED, 4, 0) is None
    _launched(monkeypatch, 4, world_size=6, local_world_size=3)
    with pytest.raises(ConfigError, match="3 ranks of this machine"):
        check_devices(ClusterConfig(), EMBEDDED, 6, 0)
    endpoint = RolloutConfig(engine="endpoint")
    assert check_devices(ClusterConfig(), endpoint, 5, 1) is None  # ranks 3 and 4 train, rank 5 has no device


def test_a_launcher_may_give_each_process_one_device(machine_with, monkeypatch: pytest.MonkeyPatch):
    """srun --gpus-per-task: every process sees one device, and each another one."""
    machine_with(1)
    _launched(monkeypatch, 0, world_size=4, local_world_size=4)
    with pytest.raises(ConfigError):
        check_devices(ClusterConfig(), EMBEDDED, 4, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert check_devices(ClusterConfig(), EMBEDDED, 4, 0) is None
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError):  # all ranks are children of this process
        check_devices(ClusterConfig(), EMBEDDED, 4, 0)


def test_ray_reserves_a_device_for_each_rank_itself(machine_with):
    machine_with(1)
    assert check_devices(ClusterConfig(executor="ray", nodes=2), EMBEDDED, 8, 0) is None


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

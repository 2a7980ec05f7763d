"""The role of a process under torchrun's environment variables, and configs that do not fit them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from tiny_run import train, write_run

from meshrl.cluster.remote import follow, is_follower, is_launched
from meshrl.core.errors import ConfigError, MeshrlError, RankFailure
from meshrl.process.run_token import RunToken


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Rank 0 of three, on one machine."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def test_rank_0_of_several_is_the_controller_and_the_others_follow(launched):
    assert is_launched() and not is_follower()
    launched.setenv("RANK", "2")
    assert is_launched() and is_follower()
    launched.setenv("WORLD_SIZE", "1")
    launched.setenv("RANK", "0")
    assert not is_launched(), "one process is a normal run"
    launched.delenv("MASTER_ADDR")
    launched.setenv("WORLD_SIZE", "3")
    assert not is_launched()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("cluster.num_train_ranks=2", "torchrun started 3 processes, but .* = 2"),
        ("cluster.executor=inline", "cluster.executor is inline, but torchrun"),
    ],
)
def test_a_config_that_does_not_fit_torchrun_is_refused(launched, tmp_path: Path, override: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        train(write_run(tmp_path), "run", override)


@pytest.fixture
def store(launched) -> Iterator[dist.TCPStore]:
    """The store of torchrun's agent, which these processes use."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched.setenv("MASTER_PORT", str(made.port))
    launched.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launched.delenv("MESHRL_TOKEN", raising=False)
    yield made
    # The store must live until here: torch's clients retry for minutes without it.


def test_a_follower_does_not_connect_to_an_address_that_another_process_has_written(launched, store, tmp_path: Path):
    """The process that writes it can read torchrun's store, and so the id of the file, but not the file."""
    token = RunToken(tmp_path)
    launched.setenv("RANK", "1")
    with socket.create_server(("127.0.0.1", 0)) as forged:
        forged.settimeout(0)
        right = token.announcement("meshrl/controller/0", ("127.0.0.1", 1)).split()
        wrong = f"127.0.0.1 {forged.getsockname()[1]} {right[2]} {right[3]}"
        client = dist.PrefixStore("worker/", dist.TCPStore("127.0.0.1", store.port, is_master=False))
        for prefixed in (client, store):  # the prefix depends on the launcher
            prefixed.set("meshrl/controller/0", wrong)
        with pytest.raises(MeshrlError, match=r"its proof was not made with the secret.*the same run\.folder"):
            follow(tmp_path)
        with pytest.raises(BlockingIOError):
            forged.accept()


def test_a_controller_whose_ranks_do_not_connect_removes_the_file_with_the_token(store, tmp_path: Path):
    """Also, the store has no word of the file's content."""
    config = write_run(tmp_path)
    with pytest.raises(RankFailure, match="its machine has not connected within 1 s"):
        train(config, "run", "cluster.num_train_ranks=3", "cluster.deadlines.start=1")
    written = {key: store.get(key).decode() for key in store.list_keys()}
    assert any("meshrl/controller/0" in key for key in written)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["run"]

"""The role of a process under torchrun's environment variables, and configs that do not fit them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import train, write_run

from meshrl.cluster.torchrun import is_follower, is_launched
from meshrl.core.errors import ConfigError


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

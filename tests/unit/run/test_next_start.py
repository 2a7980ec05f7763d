"""The state from which a run continues after it lost train ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.cluster.launch import Groups
from meshrl.config.load import load_run_config
from meshrl.core.errors import RankFailure
from meshrl.run.folder import Start
from meshrl.run.outputs import live_run
from meshrl.run.restart import _next_start
from meshrl.run.signals import Stop

KILLED = RankFailure(0, "train", "its process was killed by SIGKILL", kind="ended")
RAISED = RankFailure(0, "train", "raised KeyError", kind="raised")
ORIGIN = Start(0, None, {})


def next_start(
    config: Path, *overrides: str, failure: RankFailure = KILLED, restarts: int = 0, folder: Path | None = None
) -> Start:
    """Of a run without a checkpoint of its own. folder: of the checkpoint from which the run began."""

    async def abandon() -> None: ...

    executor: Any = SimpleNamespace(specs=[SimpleNamespace(trains=True)], can_restart_trainers=True)
    loaded = load_run_config(config, ["run.name=lost", "cluster.executor=processes", *overrides])
    with live_run(loaded, "train", 4, Stop(), lambda folder: None) as run:
        checkpoints = SimpleNamespace(abandon=abandon)
        keeper: Any = SimpleNamespace(checkpoints=checkpoints, restarts=restarts, count_restart=lambda: None)
        origin = ORIGIN if folder is None else Start(0, folder, {})

        async def found() -> Start:
            return await _next_start(run, keeper, Groups(None, None, executor), failure, failure, origin)

        return asyncio.run(found())


@pytest.mark.parametrize("every", ["null", "2", "1"])
def test_a_run_without_a_checkpoint_begins_again_if_it_saves_states(every, config):
    """null: at each evaluation and every ten minutes; the first of these times may not have come."""
    assert next_start(config, f"loop.save_every_steps={every}") == ORIGIN


def test_a_run_that_saves_no_state_ends_unless_it_began_from_a_checkpoint(config, tmp_path):
    with pytest.raises(RankFailure) as caught:
        next_start(config, "loop.save_every_steps=0")
    assert "no training state was saved: loop.save_every_steps is 0. Remove" in caught.value.__notes__[0]
    assert next_start(config, "loop.save_every_steps=0", folder=tmp_path).folder == tmp_path


@pytest.mark.parametrize(("restarts", "is_restarted"), [(0, True), (1, True), (2, False), (3, False)])
def test_train_ranks_are_restarted_as_often_as_the_config_allows(restarts, is_restarted, config):
    failure = RankFailure(0, "train", "its process was killed by SIGKILL", kind="ended")
    try:
        found = next_start(config, "cluster.max_restarts=2", failure=failure, restarts=restarts)
    except RankFailure as error:
        assert error is failure and f"restarts so far {restarts}, cluster.max_restarts 2" in failure.__notes__[0]
        found = None
    assert (found == ORIGIN) == is_restarted


def test_an_exception_is_not_followed_by_a_restart(config):
    with pytest.raises(RankFailure) as caught:
        next_start(config, failure=RAISED)
    assert caught.value is RAISED

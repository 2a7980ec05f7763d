"""The last checkpoint of a run: a signal while it is written does not lose it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshrl.core.errors import CheckpointError
from meshrl.run.keeper import Checkpoints
from meshrl.train.checkpoint_files import FileFact, states


class SlowRanks:
    """Stands in for the train ranks, whose files are on disk when `written` is set. error: of that write."""

    num_ranks = 1

    def __init__(self, error: Exception | None = None) -> None:
        self.written, self.error = asyncio.Event(), error

    async def state_bytes(self) -> int:
        return 0

    async def save(self, folder: str, continues: bool) -> None: ...

    async def finish_save(self) -> dict[str, FileFact]:
        await self.written.wait()
        if self.error is not None:
            raise self.error
        return {}


async def interrupted(folder: Path, ranks: Any, signals: int) -> BaseException | None:
    """End a run while its last checkpoint is written, and interrupt it then. Returns how the run ended."""

    async def run() -> None:
        async with Checkpoints(folder, ranks, 1, print) as checkpoints:
            await checkpoints.save(3, {})

    task = asyncio.create_task(run())
    for _ in range(signals):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    ranks.written.set()
    with suppress(asyncio.CancelledError):
        await asyncio.wait({task})
    return asyncio.CancelledError() if task.cancelled() else task.exception()


@pytest.mark.parametrize("signals", [0, 1, 2])
def test_a_signal_during_the_last_save_does_not_lose_it(tmp_path: Path, signals: int):
    async def scenario() -> None:
        ended = await interrupted(tmp_path, SlowRanks(), signals)
        assert isinstance(ended, asyncio.CancelledError) == (signals > 0)
        assert [step for step, _ in states(tmp_path / "checkpoints")] == [3]

    asyncio.run(scenario())


def test_an_error_of_the_last_save_is_raised_in_place_of_the_signal(tmp_path: Path):
    async def scenario() -> None:
        ended = await interrupted(tmp_path, SlowRanks(CheckpointError("the disk is full")), signals=1)
        assert isinstance(ended, CheckpointError)
        assert states(tmp_path / "checkpoints") == []

    asyncio.run(scenario())

"""Checkpoints of one run: they are written in the background, one at a time; only the newest are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from meshrl.cluster.train_group import TrainGroup
from meshrl.core.errors import CheckpointError, MeshrlError
from meshrl.core.files import CONTINUE_LATER, output_errors
from meshrl.core.types import Metric
from meshrl.train.checkpoint_files import (
    CONTROLLER,
    Manifest,
    commit,
    make_temporary_folder,
    prune,
    require_space,
    state_folder,
    states,
    write_json,
)


class Checkpoints:
    """Saves the checkpoints of one run, one at a time, and keeps the newest. An asynchronous context manager: when the
    block ends, the last checkpoint is on disk.

    The ranks copy their state to host memory, except the last one, and write it while training continues. An error of
    that write is raised by the next `save`, by `check`, or at the end.
    """

    def __init__(self, folder: Path, trainer: TrainGroup, keep: int, note: Callable[[str], None]):
        self.folder, self.trainer, self.keep, self.note = folder / "checkpoints", trainer, keep, note
        self._writing: asyncio.Task[None] | None = None
        self._step = 0  # of the save in _writing
        self._began = time.monotonic()  # the last save, or this object
        self._metrics: list[Metric] = []

    @property
    def age_s(self) -> float:
        """Seconds since the last save began, or since the start."""
        return time.monotonic() - self._began

    @property
    def is_writing(self) -> bool:
        """Whether the last save is not on disk yet."""
        return self._writing is not None and not self._writing.done()

    def newest_on_disk(self) -> int:
        """The step of the newest complete checkpoint; 0 = none."""
        return max((step for step, _ in states(self.folder)), default=0)

    async def save(self, step: int, saved: dict[str, Any], continues: bool = True) -> None:
        """Save the state after `step` finished steps, unless it is saved already. Waits for the previous save.
        continues: whether training goes on before the state is on disk.

        Raises: CheckpointError when the disk is full, and the error of the previous save.
        """
        if step == (self.newest_on_disk() if self._writing is None else self._step):
            return
        await self.settle()
        with output_errors(self.folder, CONTINUE_LATER, CheckpointError):
            self.folder.mkdir(exist_ok=True)
        require_space(self.folder, await self.trainer.state_bytes())
        final = state_folder(self.folder, step)
        temporary = make_temporary_folder(final)
        await self.trainer.save(str(temporary), continues)
        self._step, self._began = step, time.monotonic()
        self._writing = asyncio.create_task(self._commit(step, final, temporary, saved))

    async def _commit(self, step: int, final: Path, temporary: Path, saved: dict[str, Any]) -> None:
        started_at = time.perf_counter()
        files = await self.trainer.finish_save()
        num_ranks = self.trainer.num_ranks
        files[CONTROLLER] = await asyncio.to_thread(write_json, temporary / CONTROLLER, saved)
        await asyncio.to_thread(commit, final, Manifest(step=step, num_ranks=num_ranks, files=files))
        with output_errors(self.folder, CONTINUE_LATER, CheckpointError):
            await asyncio.to_thread(prune, self.folder, self.keep)
        took_s = time.perf_counter() - started_at
        self._metrics.append(Metric(name="checkpoint/write_s", sum=took_s, reduce="max", unit="s"))
        self.note(f"saved {final}")

    def take_metrics(self) -> list[Metric]:
        """The metrics of the checkpoints that were completed since the last call."""
        taken, self._metrics = self._metrics, []
        return taken

    def check(self) -> None:
        """Raises: the error of the current save, if it has failed."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def abandon(self, wait_s: float | None = None) -> None:
        """Abandon the current save, unless it finishes within wait_s: its ranks are lost, or the run can't wait."""
        if self._writing is not None:
            done, _ = await asyncio.wait({self._writing}, timeout=wait_s)
            if not done:
                self._writing.cancel()
            elif not self._writing.cancelled():
                self._writing.exception()  # lost ranks are already reported; the next save reports a full disk
            self._writing = None

    async def settle(self) -> None:
        """Wait until the current save, if there is one, is on disk. Raises: its error."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`settle`; a signal is raised when the save is on disk."""
        interruption: asyncio.CancelledError | None = None
        while self._writing is not None and self.is_writing:
            try:
                await asyncio.wait({self._writing})
            except asyncio.CancelledError as signal:
                interruption = signal
        try:
            await self.settle()
        except MeshrlError as of_the_save:
            if error is None or isinstance(error, asyncio.CancelledError):
                raise
            error.add_note(f"the checkpoint that was being written is not complete: {of_the_save}")
            return
        if interruption is not None:
            raise interruption

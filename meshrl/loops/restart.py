"""A run that has lost train ranks goes on from its last checkpoint: what `run.resume=auto` does, without a person."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from meshrl.cluster.torchrun import is_launched
from meshrl.config.load import C, Loaded
from meshrl.core.errors import RankFailure
from meshrl.train.checkpoint_files import states


async def through_failures(loaded: Loaded[C], run: Callable[[Loaded[C], int], Awaitable[None]]) -> None:
    """Call `run` with the config and the number of restarts so far, until it ends.

    Raises: what `run` raises; a RankFailure when it tells of an exception, which would come again, when the run has no
    checkpoint of its own yet, after cluster.max_restarts, or under torchrun, whose --max-restarts is for that.
    """
    loaded, restarts = _changed(loaded, name=run_name(loaded)), 0
    section = loaded.config.run
    while True:
        try:
            return await run(loaded, restarts)
        except RankFailure as failure:
            saved = states(Path(section.folder) / section.name / "checkpoints")
            spent = restarts == loaded.config.cluster.max_restarts
            if failure.kind == "raised" or not saved or spent or is_launched():
                raise
            print(f"meshrl: {failure}\nmeshrl: starting again after step {saved[-1][0]}", file=sys.stderr)
        restarts += 1
        loaded = _changed(loaded, resume="auto")


def run_name(loaded: Loaded[C]) -> str:
    """What `auto` stands for in run.name."""
    name = loaded.config.run.name
    return f"{loaded.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}" if name == "auto" else name


def _changed(loaded: Loaded[C], **values: str) -> Loaded[C]:
    run = loaded.config.run.model_copy(update=values)
    return dataclasses.replace(loaded, config=loaded.config.model_copy(update={"run": run}))

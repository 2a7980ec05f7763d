"""A caller's function that gets the numbers of each step and may end the run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshrl.core.errors import MeshrlError
from meshrl.loops.inputs import OnStep
from meshrl.loops.stop import Stop


class StepCallback:
    """A Sink that calls `on_step` once for each training step. An evaluation has no call of its own, so that the
    metrics of a step are always there: its eval/* come with the next step's metrics and all later ones, until the next
    evaluation. What `on_step` raises ends the run as any error does."""

    def __init__(self, on_step: OnStep, stop: Stop):
        self._on_step, self._stop = on_step, stop
        self._evaluation: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        evaluation = {name: value for name, value in values.items() if name.partition("/")[0] == "eval"}
        if evaluation:
            self._evaluation = evaluation
            return
        answer = self._on_step(step, {**self._evaluation, **values})
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise MeshrlError(f"on_step returned {answer!r}; allowed: None or True to go on, False to end the run")
        if answer is not None and not answer:
            self._stop.after_step = True

    def close(self, failed: bool = False) -> None:
        pass

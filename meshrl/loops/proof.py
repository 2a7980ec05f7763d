"""The third proof of a weight sync: the trainer re-scores the sampled tokens before the optimizer step (P15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric
from meshrl.monitor.metrics import divide, merge

MARGIN = 10.0  # a later step may differ this many times more than the first, when the weights were proven equal
ROW_MARGIN = 5.0  # the limit of the worst row, as a multiple of the limit of the mean over all rows
FLOOR_NATS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}  # the rounding of a correct engine is below this
CEILING_NATS = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}  # a larger difference is never rounding


@dataclass(slots=True)
class SamplerProof:
    """The threshold for the mean absolute difference of logprobs, in nats per token, over all rows and of each row.

    It is calibrated on the first step: both sides then have the weights of the model's folder, proven by digest, so the
    difference is only rounding.
    """

    threshold: float | None = None

    def check(self, mismatch: Sequence[Metric], dtype: str, version: int) -> None:
        """Compare one step's re-score with its sampling. Raises: SamplerMismatchError."""
        values = divide(merge(mismatch))
        if not values or values[NAME] != values[NAME]:  # nothing was sampled
            return
        mean = values[NAME]
        if self.threshold is None:
            limit = CEILING_NATS[dtype]
            self.threshold = min(limit, max(FLOOR_NATS[dtype], MARGIN * mean))
        else:
            limit = self.threshold
        if mean > limit or values[NAME_ROW] > ROW_MARGIN * limit:
            raise SamplerMismatchError(
                f"at weight version {version} the sampler's logprobs differ from the trainer's by {mean:.3g} nats per "
                f"token (worst row {values[NAME_ROW]:.3g}, largest {values[NAME_MAX]:.3g}); allowed: {limit:.3g} for "
                f"the mean, {ROW_MARGIN * limit:.3g} for a row. Possible causes: stale or corrupt weights in the "
                "sampler, another temperature or sampling filter, or different forward passes of the model in sampler "
                "and trainer. No optimizer step was taken on these samples"
            )


NAME, NAME_MAX = "proof/logprob_abs_diff_mean", "proof/logprob_abs_diff_max"
NAME_ROW = "proof/logprob_abs_diff_row"

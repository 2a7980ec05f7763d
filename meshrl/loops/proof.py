"""The third proof of a weight sync: what was sampled is re-scored by the trainer, before the optimizer step (P15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric
from meshrl.monitor.metrics import divide, merge

MARGIN = 10.0  # a later step may be this many times further off than the first, whose weights were proven equal
ROW_MARGIN = 5.0  # and the worst row this many times further off than the mean over all rows may be
FLOOR_NATS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}  # rounding of a healthy engine stays below
CEILING_NATS = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}  # no rounding explains more, at any version


@dataclass(slots=True)
class SamplerProof:
    """Holds the threshold for the mean absolute difference of logprobs, in nats a token, of all rows and of each.

    It is calibrated on the first step: both sides then hold the very weights of the folder, proven by digest, so what
    differs is rounding alone.
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
                f"at weight version {version} the sampler's logprobs are {mean:.3g} nats a token away from the "
                f"trainer's (worst row {values[NAME_ROW]:.3g}, largest {values[NAME_MAX]:.3g}); allowed is {limit:.3g} "
                f"for all, {ROW_MARGIN * limit:.3g} for a row. The sampler does not compute "
                "what the trainer computes: stale or corrupt weights, another temperature or filter, or a model whose "
                "two forward passes differ. No optimizer step was taken on these samples"
            )


NAME, NAME_MAX = "proof/logprob_abs_diff_mean", "proof/logprob_abs_diff_max"
NAME_ROW = "proof/logprob_abs_diff_row"

"""The check of the samplers' weights by their samples: before the optimizer step, the trainer computes the logprobs of
the sampled tokens and compares them with the sampler's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshrl.algo.mismatch import mismatch_metrics, row_means
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric, Sample

MARGIN = 10.0  # a later step may differ this many times more than the first, when the weights were proven equal
ROW_MARGIN = 5.0  # the limit of the worst row, as a multiple of the limit of an engine's mean
FLOOR_NATS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}  # no limit is below this
CEILING_NATS = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}  # a larger difference is never rounding
PERSISTENT = 3  # so many weight versions in succession with a difference above the limit end the run


@dataclass(slots=True)
class SamplerProof:
    """The threshold for the mean absolute difference of logprobs, in nats per token, of each engine. The limit for a
    single row is ROW_MARGIN times as high.

    It is calibrated on the first step: both sides then have the weights of the model's folder, proven by digest, so the
    difference is only rounding. Rounding grows when training makes the distributions sharper. So only a difference
    above the ceiling ends the run at once; above the threshold, at the PERSISTENT-th weight version in succession.

    last_above: the last version with a difference above the threshold. num_above: how many up to it, in succession.
    """

    threshold: float | None = None
    last_above: int = -1
    num_above: int = 0

    def check(
        self,
        mismatch: Mapping[int, np.ndarray],
        samples: Sequence[Sample],
        dtype: str,
        version: int,
        note: Callable[[str], None],
    ) -> list[Metric]:
        """Compare the trainer's logprobs with the sampler's; returns the metrics. mismatch: index of a sample -> its
        row_mismatch (algo/mismatch.py). note: gets the warning."""
        if not mismatch:
            return []
        rows, engines = np.stack(list(mismatch.values())), [samples[i].engine_id for i in mismatch]
        metrics, checked = mismatch_metrics(rows), rows[:, 1].sum()
        if not checked:  # nothing was sampled with the trainer's weights
            return metrics
        limit = ceiling = CEILING_NATS[dtype]
        if self.threshold is None:
            mean = float(rows[:, 2].sum() / checked)
            self.threshold = min(ceiling, max(FLOOR_NATS[dtype], MARGIN * mean))
        else:
            limit = self.threshold
        names = np.array(engines)
        means = {name: _mean(rows[names == name]) for name in dict.fromkeys(engines)}
        engine = max(means, key=lambda name: means[name])
        of_rows = row_means(rows)
        worst = int(of_rows.argmax())
        row = float(of_rows[worst])
        excess = max(means[engine], row / ROW_MARGIN)
        if excess <= limit:
            return metrics
        text = (
            f"at weight version {version} the logprobs of sampler {engine} differ from the trainer's by "
            f"{means[engine]:.3g} nats per token (worst row {row:.3g}: {samples[[*mismatch][worst]].trajectory_id} "
            f"of {engines[worst]}; largest difference {rows[:, 3].max():.3g}); allowed: {limit:.3g} for the mean "
            f"of a sampler, {ROW_MARGIN * limit:.3g} for a row. Possible causes: stale or corrupt weights in the "
            "sampler, another temperature or sampling filter, or different forward passes of the model in sampler "
            "and trainer. "
        )
        is_new = version != self.last_above  # else another part of the step, or the probe, was above it, too
        if is_new:
            self.num_above = self.num_above + 1 if version == self.last_above + 1 else 1
            self.last_above = version
        if excess > ceiling or self.num_above >= PERSISTENT:
            raise SamplerMismatchError(f"{text}No optimizer step was taken on these samples")
        if is_new:
            note(f"{text}The run ends if this lasts for {PERSISTENT} versions, or above {ceiling:.3g}")
        return metrics


def _mean(rows: np.ndarray) -> float:
    return float(rows[:, 2].sum() / max(1, rows[:, 1].sum()))

"""The check of a model before training: its scores are repeatable, and packed rows do not affect each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshrl.core.errors import ConfigError
from meshrl.core.types import Sample
from meshrl.model.verify import TOLERANCE_NATS
from meshrl.train.packing import bare_row


def require_independent_rows(
    model: str, vocab_size: int, score: Callable[[Sequence[Sample]], Mapping[int, np.ndarray]]
) -> None:
    """Score a row between two others twice, and a third time with these two swapped. The first two scores must be equal
    to the bit, the third within TOLERANCE_NATS.

    Swapping the neighbours keeps the shape of every matrix product, also those of experts, so the row is rounded as
    before. With other neighbours experts would multiply other numbers of rows, and in bf16 that rounding may route a
    token to another expert, which changes a logprob as much as a leak does. A leak that does not depend on the order,
    such as a mean over the pack, is found by `recipe.verify`, in fp32.

    model: its name in errors. score: logprobs of samples packed in this order, by index.
    Raises: ConfigError when the model's scores are random, or when packed rows affect each other.
    """
    before, row, after = (
        bare_row("before", [(1 + i) % vocab_size for i in range(9)], scored=True),
        bare_row("row", [3, 1, 2, 4, 1], scored=True),
        bare_row("after", [(2 + i) % vocab_size for i in range(9)], scored=True),
    )
    first, again = (score([before, row, after])[1] for _ in range(2))
    swapped = score([after, row, before])[1]
    if not np.array_equal(first, again):
        raise ConfigError(
            f"{model} gives random scores: a row's logprobs differ by {np.abs(first - again).max():.2g} nats when one "
            "pack is scored twice, so ratios of new to old logprobs would be noise. It is in eval mode, without "
            "dropout, so one of its modules draws random numbers even there. Choose another model"
        )
    difference = np.abs(first - swapped).max()
    if not difference <= TOLERANCE_NATS:
        raise ConfigError(
            f"rows of one pack affect each other in {model}: a row's logprobs differ by {difference:.2g} nats "
            f"(allowed: {TOLERANCE_NATS:g}) when its neighbours are swapped. It can't be trained packed. Choose "
            "another model"
        )

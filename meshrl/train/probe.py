"""What a model is asked before it is trained: scores that repeat, and packed rows that do not see each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshrl.core.errors import ConfigError
from meshrl.core.types import Sample
from meshrl.model.load import SAME_NATS


def require_independent_rows(
    model: str, vocab_size: int, score: Callable[[Sequence[Sample]], Mapping[int, np.ndarray]]
) -> None:
    """Score a row between two others, once more, and with the others in each other's place. The first two scores must
    be equal to the bit (P34), the third within SAME_NATS (P22, P35).

    The same neighbours in other places keep the shape of every matrix product, those of experts too, so that the row
    is rounded as before. Between other neighbours experts multiply other numbers of rows, and in bf16 such rounding
    may send a token to another expert, which moves a logprob as far as a leak does. What both orders have in common,
    such as a mean over the pack, is found by `require_same_scores`, in fp32.

    model: its name in errors. score: logprobs of samples that are packed in this order, by their index.
    Raises: ConfigError when the model scores at random, or lets packed rows see each other.
    """
    before, row, after = (
        _row("before", [(1 + i) % vocab_size for i in range(9)]),
        _row("row", [3, 1, 2, 4, 1]),
        _row("after", [(2 + i) % vocab_size for i in range(9)]),
    )
    first, again = (score([before, row, after])[1] for _ in range(2))
    turned = score([after, row, before])[1]
    if not np.array_equal(first, again):
        raise ConfigError(
            f"{model} scores at random: a row's logprobs differ by {np.abs(first - again).max():.2g} nats when one "
            "pack is scored twice, so ratios of new to old logprobs would be noise. It is in eval mode, without "
            "dropout, so one of its modules draws random numbers even there. Choose another model"
        )
    difference = np.abs(first - turned).max()
    if not difference <= SAME_NATS:
        raise ConfigError(
            f"{model} lets rows of one pack see each other: a row's logprobs differ by {difference:.2g} nats (allowed: "
            f"{SAME_NATS:g}) when its neighbours change places. It can't be trained packed. Choose another model"
        )


def _row(name: str, tokens: list[int]) -> Sample:
    n = len(tokens)
    return Sample(
        trajectory_id=name,
        group_id=name,
        row=0,
        prefix_len=0,
        tokens=np.array(tokens, np.int32),
        mask=np.arange(n) > 0,
        turn=np.zeros(n, np.int16),
        rollout_logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        rewards=np.zeros(n, np.float32),
    )

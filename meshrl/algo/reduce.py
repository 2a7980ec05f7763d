"""The only denominator of an optimizer step: the controller divides each token's weight by it.

N is the number of trained tokens of the step, S the number of sequences (rows with at least one trained token), n_s
the number of trained tokens of row s, and L the constant length. Under algo.truncated = mask a row that was cut off has
no trained token. The loss of a step is sum(loss_weight * loss_t) over all tokens of all ranks, and does not depend on
the partition into ranks, micro-batches and packs.

| aggregation | weight of a trained token | used by |
| --- | --- | --- |
| token_mean | 1 / N | DAPO |
| seq_mean_token_mean | 1 / (S n_s) | the GRPO paper: short answers weigh more per token |
| seq_mean_token_sum | 1 / S | plain policy gradient: the sum of a sequence's log-probabilities |
| constant_length | 1 / (S L) | Dr.GRPO: as seq_mean_token_sum, scaled to the size of one token |
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshrl.config.algo import AlgoConfig
from meshrl.core.types import Sample


def assign_loss_weights(samples: list[Sample], cfg: AlgoConfig, max_new_tokens: int) -> int:
    """Fill `loss_weight` of the samples of one optimizer step, 0 where nothing is trained. Returns the number of
    trained tokens.

    Weights are computed in float64 and rounded once. In a step without any trained token all weights are 0.
    max_new_tokens: L of constant_length when `cfg.constant_length` is not set.
    """
    masked = [cfg.truncated == "mask" and sample.truncated for sample in samples]
    lengths = np.array([0 if out else int(s.mask.sum()) for s, out in zip(samples, masked)], dtype=np.float64)
    weights = np.zeros(len(samples), dtype=np.float64)
    trained = lengths > 0
    if trained.any():
        weights[trained] = AGGREGATIONS[cfg.aggregation](lengths[trained], cfg.constant_length or max_new_tokens)
    for sample, weight in zip(samples, weights):
        sample.loss_weight = np.where(sample.mask, np.float32(weight), np.float32(0.0))
    return int(lengths.sum())


AGGREGATIONS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "token_mean": lambda lengths, constant: np.full(len(lengths), 1.0 / lengths.sum()),
    "seq_mean_token_mean": lambda lengths, constant: 1.0 / (len(lengths) * lengths),
    "seq_mean_token_sum": lambda lengths, constant: np.full(len(lengths), 1.0 / len(lengths)),
    "constant_length": lambda lengths, constant: np.full(len(lengths), 1.0 / (len(lengths) * constant)),
}
"""algo.aggregation -> function of (n_s float64[S], L) that returns the weight of a token in each sequence, float64[S].
"""

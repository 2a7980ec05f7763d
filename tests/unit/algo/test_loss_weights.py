"""One denominator for an optimizer step; expected values computed by hand."""

import numpy as np
import pytest

from meshrl.algo.reduce import AGGREGATIONS, assign_loss_weights
from meshrl.config.algo import AlgoConfig
from meshrl.core.types import Sample


def make_row(mask):
    mask = np.array(mask, dtype=bool)
    n = len(mask)
    return Sample(
        trajectory_id="t",
        group_id="g",
        row=0,
        prefix_len=0,
        tokens=np.zeros(n, np.int32),
        mask=mask,
        turn=np.zeros(n, np.int16),
        rollout_logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        rewards=np.zeros(n, np.float32),
    )


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [  # two trained rows, of 1 and 4 trained tokens, L = 8, and a row without any
        ("token_mean", 1 / 5, 1 / 5),
        ("seq_mean_token_mean", 1 / 2, 1 / 8),
        ("seq_mean_token_sum", 1 / 2, 1 / 2),
        ("constant_length", 1 / 16, 1 / 16),
    ],
)
def test_golden_weights(aggregation, short, long):
    rows = [make_row([0, 0, 1]), make_row([0, 0, 0]), make_row([0, 1, 1, 0, 1, 1])]
    assign_loss_weights(rows, AlgoConfig(aggregation=aggregation), max_new_tokens=8)
    short, long = np.float32(short), np.float32(long)
    assert rows[0].loss_weight.tolist() == [0, 0, short]
    assert rows[1].loss_weight.tolist() == [0, 0, 0]
    assert rows[2].loss_weight.tolist() == [0, long, long, 0, long, long]
    assert {row.loss_weight.dtype for row in rows} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        ("token_mean", 1 / 2),
        ("seq_mean_token_mean", 1 / 2),
        ("seq_mean_token_sum", 1),
        ("constant_length", 1 / 8),
    ],
)
def test_answers_that_were_cut_off_are_in_no_denominator(aggregation, weight):
    """With algo.truncated mask only one row, of two trained tokens, is counted."""
    rows = [make_row([0, 1, 1]), make_row([0, 1, 1, 1]), make_row([1])]
    for row in rows[1:]:
        row.truncated = True
    assert assign_loss_weights(rows, AlgoConfig(aggregation=aggregation, truncated="mask"), max_new_tokens=8) == 2
    assert rows[0].loss_weight.tolist() == [0, weight, weight]
    assert [row.loss_weight.tolist() for row in rows[1:]] == [[0] * 4, [0]]
    assert assign_loss_weights(rows, AlgoConfig(aggregation=aggregation), max_new_tokens=8) == 6
    assert all((row.loss_weight[row.mask] > 0).all() for row in rows)


def test_constant_length_prefers_the_configs_number():
    row = make_row([1, 1])
    assign_loss_weights([row], AlgoConfig(aggregation="constant_length", constant_length=4), max_new_tokens=8)
    assert row.loss_weight.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("rows", [0, 2])
def test_a_step_without_trained_tokens_gets_zeros(aggregation, rows):
    samples = [make_row([0, 0, 0]) for _ in range(rows)]
    with np.errstate(all="raise"):
        assign_loss_weights(samples, AlgoConfig(aggregation=aggregation), max_new_tokens=8)
    assert all(sample.loss_weight.tolist() == [0, 0, 0] for sample in samples)


def test_weights_are_rounded_once_from_float64():
    """1 / (S n) of 3 rows of 7 tokens: float32(1/21), not a product of two rounded factors."""
    rows = [make_row([1] * 7) for _ in range(3)]
    assign_loss_weights(rows, AlgoConfig(aggregation="seq_mean_token_mean"), max_new_tokens=8)
    assert rows[0].loss_weight[0] == np.float32(1 / 21)


def test_every_configured_name_has_its_function():
    assert set(AGGREGATIONS) == set(AlgoConfig.model_fields["aggregation"].annotation.__args__)

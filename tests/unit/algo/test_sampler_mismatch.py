"""The numbers of the behaviour proof."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny_samples import sampled_row

from meshrl.algo.mismatch import COLUMNS, mismatch_metrics, row_mismatch


def values(sample, scored, version=0):
    return dict(zip(COLUMNS, row_mismatch(sample, np.array(scored, np.float32), version).tolist(), strict=True))


def test_golden_values_under_the_mask():
    """Differences 0.5 and -0.25 at two trained tokens; masked tokens may have any value."""
    sample = sampled_row([math.nan, -1.0, -2.0, 1e6], mask=[False, True, True, False])
    got = values(sample, [5.0, -0.5, -2.25, math.nan])
    assert (got["trained"], got["checked"], got["abs_sum"], got["abs_max"]) == (2, 2, 0.75, 0.5)
    kl = (math.exp(0.5) - 1 - 0.5) + (math.exp(-0.25) - 1 + 0.25)
    assert got["kl_sum"] == pytest.approx(kl)


def test_tokens_of_other_versions_are_not_compared():
    """Older weights give other logprobs; a comparison would hide a wrong sampler behind them, or accuse a right one."""
    sample = replace(sampled_row([-1.0, -1.0, -1.0]), versions=np.array([1, 2, 3], np.int32))
    got = values(sample, [-9.0, -1.5, -9.0], version=2)
    assert (got["trained"], got["checked"], got["abs_sum"], got["abs_max"]) == (3, 1, 0.5, 0.5)
    fraction = {m.name: (m.sum, m.weight) for m in mismatch_metrics(row_mismatch(sample, np.zeros(3), 2)[None])}
    assert fraction["proof/checked_fraction"] == (1, 3)


def test_equal_logprobs_are_exactly_zero():
    got = values(sampled_row([-1.0, -2.0]), [-1.0, -2.0])
    assert (got["abs_sum"], got["abs_max"], got["kl_sum"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_are_above_any_threshold(broken):
    """NaN > threshold is False: a mismatch that is not a number must count as infinite."""
    got = values(sampled_row([-1.0, -1.0]), [-1.0, broken])
    assert got["abs_sum"] == math.inf and got["abs_max"] == math.inf


def test_without_trained_tokens_the_weight_is_0():
    row = row_mismatch(sampled_row([math.nan], mask=[False]), np.zeros(1, np.float32), 0)
    got = {m.name.removeprefix("proof/"): (m.sum, m.weight) for m in mismatch_metrics(row[None])}
    largest = {"logprob_abs_diff_max": (0.0, 1.0), "logprob_abs_diff_row": (0.0, 1.0)}
    nothing = dict.fromkeys(("logprob_abs_diff_mean", "sampler_kl", "checked_fraction"), (0.0, 0.0))
    assert got == nothing | largest


def test_one_bad_row_is_seen_among_many_good_ones():
    """One stale row of 40 tokens among 99 good ones; the means of short rows are taken over 32 tokens."""
    sample = sampled_row([-1.0] * 40)
    rows = [row_mismatch(sample, sample.rollout_logprobs + (0.5 if i == 10 else 0.0), 0) for i in range(100)]
    got = {m.name.removeprefix("proof/"): (m.sum, m.weight) for m in mismatch_metrics(np.stack(rows))}
    assert got["logprob_abs_diff_mean"] == (pytest.approx(20.0), 4000)
    assert got["logprob_abs_diff_row"][0] == pytest.approx(0.5)
    short = row_mismatch(sampled_row([-1.0] * 2), np.full(2, -0.5, np.float32), 0)
    assert mismatch_metrics(short[None])[2].sum == pytest.approx(2 * 0.5 / 32)

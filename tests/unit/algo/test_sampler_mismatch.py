"""P15: the numbers of the behaviour proof."""

import math

import pytest
import torch

from meshrl.algo.mismatch import sampler_mismatch


def values(sampled, scored, mask, row_lengths=None):
    metrics = sampler_mismatch(sampled, scored, mask, row_lengths or [len(mask)])
    return {m.name.removeprefix("proof/"): (m.sum, m.weight) for m in metrics}


def test_golden_values_under_the_mask():
    """Differences 0.5 and -0.25 at two trained tokens; masked tokens may have any value."""
    sampled = torch.tensor([math.nan, -1.0, -2.0, 1e6])
    scored = torch.tensor([5.0, -0.5, -2.25, math.nan])
    got = values(sampled, scored, torch.tensor([False, True, True, False]))
    assert got["logprob_abs_diff_mean"] == (0.75, 2)
    assert got["logprob_abs_diff_max"] == (0.5, 1.0)
    kl = (math.exp(0.5) - 1 - 0.5) + (math.exp(-0.25) - 1 + 0.25)
    assert got["sampler_kl"] == (pytest.approx(kl), 2)


def test_equal_logprobs_are_exactly_zero():
    logprobs = torch.tensor([-1.0, -2.0])
    assert {s for s, _ in values(logprobs, logprobs, torch.tensor([True, True])).values()} == {0.0}


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_are_above_any_threshold(broken):
    """NaN > threshold is False: a mismatch that is not a number must count as infinite."""
    got = values(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, broken]), torch.tensor([True, True]))
    assert got["logprob_abs_diff_mean"][0] == math.inf and got["logprob_abs_diff_max"][0] == math.inf


def test_without_trained_tokens_the_weight_is_0():
    got = values(torch.tensor([math.nan]), torch.tensor([0.0]), torch.tensor([False]))
    largest = {"logprob_abs_diff_max": (0.0, 1.0), "logprob_abs_diff_row": (0.0, 1.0)}
    assert got == {"logprob_abs_diff_mean": (0.0, 0), "sampler_kl": (0.0, 0), **largest}


def test_one_bad_row_is_seen_among_many_good_ones():
    """One stale row of 40 tokens among 99 good ones; the means of short rows are taken over 32 tokens."""
    lengths = [40] * 100
    sampled, stale = torch.full((4000,), -1.0), torch.zeros(4000)
    stale[400:440] = 0.5
    got = values(sampled, sampled + stale, torch.ones(4000, dtype=torch.bool), lengths)
    assert got["logprob_abs_diff_mean"] == (pytest.approx(20.0), 4000)
    assert got["logprob_abs_diff_row"][0] == pytest.approx(0.5)
    short = values(sampled[:4], sampled[:4] + 0.5, torch.tensor([False, True, True, True]), [2, 2])
    assert short["logprob_abs_diff_row"][0] == pytest.approx(2 * 0.5 / 32)

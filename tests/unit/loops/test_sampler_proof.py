"""The behaviour proof: its threshold, its calibration, and its error text (P15)."""

from __future__ import annotations

import pytest
import torch

from meshrl.algo.mismatch import sampler_mismatch
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Metric
from meshrl.loops.proof import CEILING_NATS, FLOOR_NATS, MARGIN, SamplerProof


def _off_by(nats: float, tokens: int = 4) -> list[Metric]:
    sampled = -torch.rand(tokens) - 1
    return sampler_mismatch(sampled, sampled + nats, torch.ones(tokens, dtype=torch.bool), [tokens])


@pytest.mark.parametrize("dtype", FLOOR_NATS)
def test_the_first_step_calibrates_the_limit_of_later_steps(dtype):
    """P15: a healthy first step allows ten times its difference, and no more."""
    first = CEILING_NATS[dtype] / 30
    proof = SamplerProof()
    proof.check(_off_by(first), dtype, 0)
    proof.check(_off_by(first * MARGIN * 0.95), dtype, 1)
    with pytest.raises(SamplerMismatchError, match=r"version 2 .* nats .*; allowed: "):
        proof.check(_off_by(first * MARGIN * 1.05), dtype, 2)


@pytest.mark.parametrize("dtype", FLOOR_NATS)
def test_an_exact_first_step_leaves_room_for_rounding_and_nothing_else(dtype):
    """P15: an engine that agrees to the bit at first must not fail on the first rounding."""
    proof = SamplerProof()
    proof.check(_off_by(0.0), dtype, 0)
    proof.check(_off_by(FLOOR_NATS[dtype] * 0.9), dtype, 1)
    with pytest.raises(SamplerMismatchError):
        proof.check(_off_by(FLOOR_NATS[dtype] * 1.2), dtype, 2)


def test_the_first_step_is_not_trusted_beyond_the_ceiling():
    """P15: a sampler that is wrong from the start must not calibrate its own threshold."""
    with pytest.raises(SamplerMismatchError, match=r"version 0.*No optimizer step was taken"):
        SamplerProof().check(_off_by(CEILING_NATS["bfloat16"] * 1.1), "bfloat16", 0)


def test_no_calibration_allows_more_than_the_ceiling():
    """P15: ten times a bad first step would accept any difference."""
    proof = SamplerProof()
    proof.check(_off_by(CEILING_NATS["bfloat16"] * 0.9), "bfloat16", 0)
    with pytest.raises(SamplerMismatchError):
        proof.check(_off_by(CEILING_NATS["bfloat16"] * 1.1), "bfloat16", 1)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("nats", [float("nan"), float("inf")])
def test_broken_numbers_are_a_mismatch_at_any_step(nats, calibrated):
    """P15: NaN compares as False with every threshold, and must still fail."""
    proof = SamplerProof()
    if calibrated:
        proof.check(_off_by(0.01), "float32", 0)
    with pytest.raises(SamplerMismatchError, match="inf nats"):
        proof.check(_off_by(nats), "float32", 1)


def test_a_mean_over_many_tokens_is_compared_and_not_each_rank_alone():
    """P13, P15: metrics of several ranks are added first; a rank that scored nothing does not count."""
    proof = SamplerProof()
    proof.check(_off_by(0.0), "float32", 0)
    proof.check([], "float32", 1)
    proof.check(_off_by(0.0, tokens=0), "float32", 1)
    proof.check(_off_by(1.5 * FLOOR_NATS["float32"], tokens=4) + _off_by(0.0, tokens=4), "float32", 1)
    with pytest.raises(SamplerMismatchError):
        proof.check(_off_by(1.5 * FLOOR_NATS["float32"], tokens=4) + _off_by(0.0, tokens=1), "float32", 1)


def test_a_step_without_samples_does_not_calibrate():
    """P15: the calibration waits for the first step with samples."""
    proof = SamplerProof()
    proof.check(_off_by(0.0, tokens=0), "float32", 0)
    assert proof.threshold is None
    proof.check(_off_by(0.0005), "float32", 0)
    assert proof.threshold == pytest.approx(0.0005 * MARGIN, rel=1e-4)


def test_one_stale_row_among_many_ends_the_run():
    """P15: the mean over all rows is within the limit, although one engine samples with other weights."""
    proof = SamplerProof()
    proof.check(_off_by(0.0), "float32", 0)
    healthy = [m for _ in range(4000) for m in _off_by(0.0, tokens=40)]
    proof.check(healthy + _off_by(4 * FLOOR_NATS["float32"], tokens=40), "float32", 1)
    with pytest.raises(SamplerMismatchError, match=r"worst row 0\.3"):
        proof.check(healthy + _off_by(0.3, tokens=40), "float32", 1)

"""The behaviour proof: its threshold, its calibration, and its error text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from tiny_samples import sampled_row

from meshrl.algo.mismatch import row_mismatch
from meshrl.core.errors import SamplerMismatchError
from meshrl.loops.sync_and_probe import CEILING_NATS, FLOOR_NATS, MARGIN, PERSISTENT, SamplerProof

Gaps = Sequence[tuple[float, int, str]]


def check(proof: SamplerProof, gaps: float | Gaps, dtype: str, version: int, tokens: int = 4) -> list[str]:
    """Check rows of an engine whose logprobs are off by some nats; returns the warnings. gaps: (nats, tokens, engine)
    of each row."""
    rows = [(gaps, tokens, "sampler")] if isinstance(gaps, float) else gaps
    samples = [sampled_row((-1 - np.random.rand(n)).tolist(), engine_id=engine) for _, n, engine in rows]
    scored = [
        row_mismatch(s, s.rollout_logprobs + np.float32(nats), 0) for s, (nats, _, _) in zip(samples, rows, strict=True)
    ]
    warnings = list[str]()
    proof.check(dict(enumerate(scored)), samples, dtype, version, warnings.append)
    return warnings


@pytest.mark.parametrize("dtype", FLOOR_NATS)
def test_the_first_step_calibrates_the_limit_of_later_steps(dtype):
    """A healthy first step allows ten times its difference, and no more without a warning."""
    first = CEILING_NATS[dtype] / 30
    proof = SamplerProof()
    assert not check(proof, first, dtype, 0)
    assert not check(proof, first * MARGIN * 0.95, dtype, 1)
    (warning,) = check(proof, first * MARGIN * 1.05, dtype, 2)
    assert re.search(r"version 2 .* nats .*; allowed: .* The run ends if this lasts for 3 versions", warning)


def above(version: int) -> float:
    return FLOOR_NATS["float32"] * (2 + version % 2)


def test_a_difference_that_lasts_ends_the_run():
    """Above the limit and below the ceiling: one warning for each version, then the end."""
    proof = SamplerProof()
    check(proof, 0.0, "float32", 0)
    for version in range(4, 3 + PERSISTENT):
        assert len(check(proof, above(version), "float32", version)) == 1
        assert not check(proof, above(version), "float32", version), "another part of the step, or the probe"
    with pytest.raises(SamplerMismatchError, match=f"version {3 + PERSISTENT} .*No optimizer step was taken"):
        check(proof, above(0), "float32", 3 + PERSISTENT)


def test_a_version_within_the_limit_ends_the_count():
    """Rounding differs from step to step: single steps above the limit end no run, however many there are."""
    proof = SamplerProof()
    check(proof, 0.0, "float32", 0)
    for version in range(1, 6 * PERSISTENT):
        if version % PERSISTENT:
            assert len(check(proof, above(version), "float32", version)) == 1
        else:
            check(proof, 0.0, "float32", version)


def test_above_the_ceiling_no_step_is_trained():
    proof = SamplerProof()
    check(proof, 0.0, "float32", 0)
    with pytest.raises(SamplerMismatchError, match=r"allowed: 0\.0001 "):
        check(proof, CEILING_NATS["float32"] * 1.01, "float32", 1)


@pytest.mark.parametrize("dtype", FLOOR_NATS)
def test_an_exact_first_step_leaves_room_for_rounding_and_nothing_else(dtype):
    """An engine that agrees to the bit at first must not fail on the first rounding."""
    proof = SamplerProof()
    check(proof, 0.0, dtype, 0)
    assert not check(proof, FLOOR_NATS[dtype] * 0.9, dtype, 1)
    assert check(proof, FLOOR_NATS[dtype] * 1.2, dtype, 2)


def test_the_first_step_is_not_trusted_beyond_the_ceiling():
    """A sampler that is wrong from the start must not calibrate its own threshold."""
    with pytest.raises(SamplerMismatchError, match=r"version 0.*No optimizer step was taken"):
        check(SamplerProof(), CEILING_NATS["bfloat16"] * 1.1, "bfloat16", 0)


def test_no_calibration_allows_more_than_the_ceiling():
    """Ten times a bad first step would accept any difference."""
    proof = SamplerProof()
    check(proof, CEILING_NATS["bfloat16"] * 0.9, "bfloat16", 0)
    with pytest.raises(SamplerMismatchError):
        check(proof, CEILING_NATS["bfloat16"] * 1.1, "bfloat16", 1)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("nats", [float("nan"), float("inf")])
def test_broken_numbers_are_a_mismatch_at_any_step(nats, calibrated):
    """NaN compares as False with every threshold, and must still fail."""
    proof = SamplerProof()
    if calibrated:
        check(proof, 0.01, "float32", 0)
    with pytest.raises(SamplerMismatchError, match="inf nats"):
        check(proof, nats, "float32", 1)


def test_the_mean_of_an_engine_is_compared_and_not_each_row_alone():
    """The rows of one engine are added first; a row that proves nothing does not count."""
    proof, limit = SamplerProof(), FLOOR_NATS["float32"]
    check(proof, 0.0, "float32", 0)
    assert not check(proof, [], "float32", 1)
    assert not check(proof, [(0.0, 0, "a")], "float32", 1)
    assert not check(proof, [(1.5 * limit, 4, "a"), (0.0, 4, "a")], "float32", 1)
    assert check(proof, [(1.5 * limit, 4, "a"), (0.0, 1, "a")], "float32", 1)


def test_a_step_without_samples_does_not_calibrate():
    """The calibration waits for the first step with samples of the trainer's weights."""
    proof = SamplerProof()
    check(proof, [(0.0, 0, "a")], "float32", 0)
    assert proof.threshold is None
    check(proof, 0.0005, "float32", 0)
    assert proof.threshold == pytest.approx(0.0005 * MARGIN, rel=1e-3)


def test_one_stale_engine_among_many_is_named():
    """The mean over all rows is within the limit, and no row alone is above its own, which is wider."""
    proof, limit = SamplerProof(), FLOOR_NATS["float32"]
    check(proof, 0.0, "float32", 0)
    healthy = [(0.0, 40, "a"), (0.0, 40, "b")] * 50
    assert not check(proof, [*healthy, (0.9 * limit, 40, "c")], "float32", 1)
    (warning,) = check(proof, [*healthy, (2 * limit, 40, "c")], "float32", 1)
    assert re.search(r"the logprobs of sampler c differ .*worst row .*: row of c of c", warning)


def test_one_stale_row_among_many_ends_the_run():
    """The mean over all rows of its engine is within the limit."""
    proof = SamplerProof()
    check(proof, 0.0, "float32", 0)
    healthy = [(0.0, 40, "a")] * 4000
    check(proof, [*healthy, (4 * FLOOR_NATS["float32"], 40, "a")], "float32", 1)
    with pytest.raises(SamplerMismatchError, match=r"worst row 0\.3"):
        check(proof, [*healthy, (0.3, 40, "a")], "float32", 1)

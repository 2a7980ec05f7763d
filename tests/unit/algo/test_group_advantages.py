"""Advantages by group; expected values computed by hand."""

import math
import random

import numpy as np
import pytest

from meshrl.algo.advantages import assign_advantages
from meshrl.config.algo import AlgoConfig, KlConfig
from meshrl.core.types import Sample

METHODS = ["grpo", "dr_grpo", "rloo"]


def make_sample(reward, group="g", trajectory=None, row=0, mask=(0, 1, 1), **fields):
    mask = np.array(mask, dtype=bool)
    n = len(mask)
    made = make_sample.count = getattr(make_sample, "count", 0) + 1
    sample = Sample(
        trajectory_id=trajectory or f"{group}/{made}",
        group_id=group,
        row=row,
        prefix_len=1,
        tokens=np.arange(n, dtype=np.int32),
        mask=mask,
        turn=np.where(mask, 0, -1).astype(np.int16),
        rollout_logprobs=np.where(mask, np.float32(-1.0), np.float32(np.nan)),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=np.zeros(n, dtype=np.float32),
        reward=reward,
    )
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def advantages_of(samples, method="grpo", eps=1e-6, **cfg):
    """The advantage of each sample, after checking that it is the same at all trained tokens, and 0 elsewhere."""
    assign_advantages(samples, AlgoConfig(advantage=method, advantage_eps=eps, **cfg))
    out = []
    for sample in samples:
        assert sample.advantages.dtype == np.float32 and sample.advantages.shape == sample.mask.shape
        assert (sample.advantages[~sample.mask] == 0).all()
        values = set(sample.advantages[sample.mask].tolist())
        assert len(values) == 1
        out.append(values.pop())
    return out


def metric(metrics, name):
    return next(m for m in metrics if m.name == name)


@pytest.mark.parametrize(
    ("method", "golden"),
    [
        # rewards 1, 0, 0, 1: mean 1/2, sample deviation sqrt(4 * 1/4 / 3) = 0.5773503
        ("grpo", [0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)]),
        ("dr_grpo", [0.5, -0.5]),
        # leave one out: 1 - 1/3 and 0 - 2/3
        ("rloo", [2 / 3, -2 / 3]),
    ],
)
def test_golden_values_of_a_group_of_four(method, golden):
    good, bad = golden
    assert advantages_of([make_sample(r) for r in (1.0, 0.0, 0.0, 1.0)], method) == pytest.approx(
        [good, bad, bad, good], rel=1e-6
    )


def test_eps_is_added_to_the_deviation_and_not_to_the_variance():
    """In the variance it would reduce the advantages of a group whose rewards differ little."""
    got = advantages_of([make_sample(r) for r in (0.0, 1.0)], eps=0.5)
    assert got == pytest.approx([-0.5 / (math.sqrt(0.5) + 0.5), 0.5 / (math.sqrt(0.5) + 0.5)], rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 7, [1 / 3] * 3, [0.1 + 0.2, 0.3, 0.3], [1.0] * 8, [0.0] * 8])
def test_groups_without_signal_get_exactly_zero(method, rewards):
    """A group of one has no deviation; the deviation of equal rewards is float noise, and not a divisor."""
    assert advantages_of([make_sample(r) for r in rewards], method) == [0.0] * len(rewards)


def test_statistics_of_a_partial_group_are_taken_over_its_scored_trajectories():
    """One of four was not scored and is not among the samples."""
    assert advantages_of([make_sample(r) for r in (1.0, 0.0, 0.5)], "rloo") == [0.75, -0.75, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e300])
def test_an_invalid_reward_is_refused(bad):
    with pytest.raises(ValueError, match=r"reward (nan|inf|-1e\+300); .*at most 1e\+12 in size.*Leave out"):
        advantages_of([make_sample(1.0), make_sample(bad)])


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_rewards_keep_their_signal(method):
    largest, smallest = advantages_of([make_sample(1e12), make_sample(-1e12)], method)
    assert 0 < largest == -smallest < math.inf


@pytest.mark.parametrize("method", METHODS)
def test_order_changes_no_bit(method):
    """Groups are formed by id, not by position; sums in another order would differ in the last bit."""
    values = [math.sin(i) * 10**i for i in range(-6, 6)]
    samples = [make_sample(r, group=g, trajectory=f"{g}/{i}") for g in "ab" for i, r in enumerate(values)]
    results = []
    for seed in range(8):
        metrics = assign_advantages(samples, AlgoConfig(advantage=method))
        results.append(({s.trajectory_id: s.advantages.tobytes() for s in samples}, metrics))
        random.Random(seed).shuffle(samples)
    assert all(result == results[0] for result in results)


def test_the_same_prompt_twice_is_two_groups():
    """Equal prompts (equal tokens here) of two attempts keep their own statistics."""
    samples = [make_sample(r, group="p#0") for r in (1.0, 0.0)] + [make_sample(r, group="p#1") for r in (5.0, 3.0)]
    assert advantages_of(samples, "dr_grpo") == [0.5, -0.5, 1.0, -1.0]


def test_a_trajectory_with_several_rows_counts_once():
    """Three rows of the trajectory with reward 1 must not change the mean from 1/2 to 3/4."""
    rows = [make_sample(1.0, trajectory="g/0", row=i) for i in range(3)] + [make_sample(0.0, trajectory="g/1")]
    assert advantages_of(rows, "dr_grpo") == [0.5, 0.5, 0.5, -0.5]


def test_answers_that_were_cut_off_count_in_the_statistics_of_their_group():
    """Also with algo.truncated mask, as in TRL: the mean of (1, 0, 0) is 1/3 even if one of the zeros was cut off."""
    samples = [make_sample(1.0), make_sample(0.0), make_sample(0.0, truncated=True)]
    assert advantages_of(samples, "dr_grpo", truncated="mask") == pytest.approx([2 / 3, -1 / 3, -1 / 3], rel=1e-6)


def test_rows_of_one_trajectory_must_agree():
    with pytest.raises(ValueError, match="disagree"):
        advantages_of([make_sample(1.0, trajectory="g/0"), make_sample(0.5, trajectory="g/0")])


def test_metrics_are_sums_with_weights():
    samples = [make_sample(r, group="a") for r in (1.0, 0.0)]
    samples += [make_sample(r, group="b") for r in (1.0, 1.0)] + [make_sample(0.25, group="c")]
    found = assign_advantages(samples, AlgoConfig())
    assert (metric(found, "reward/mean").sum, metric(found, "reward/mean").weight) == (3.25, 5)
    no_signal = metric(found, "reward/groups_without_signal")
    assert (no_signal.sum, no_signal.weight) == (2, 3)
    assert (metric(found, "reward/groups_of_one").sum, metric(found, "reward/groups_of_one").weight) == (1, 3)
    deviation = metric(found, "reward/group_std")
    assert deviation.sum == pytest.approx(math.sqrt(0.5)) and deviation.weight == 2
    assert (metric(found, "reward/max").sum, metric(found, "reward/min").sum) == (1.0, 0.0)


def kl_sample(reward, trajectory, ref, old=None, row=0):
    """A row with log-probabilities of its two trained tokens. old: the policy's; they are -1 without it."""

    def array(values):
        return None if values is None else np.array([np.nan, *values], dtype=np.float32)

    return make_sample(reward, trajectory=trajectory, row=row, ref_logprobs=array(ref), old_logprobs=array(old))


def test_kl_in_the_reward_enters_tokens_and_group_statistics():
    """coef 0.5, k1, policy -1 everywhere. First trajectory: reference -1.5 and -2 give KL 0.5 + 1 = 1.5, so its
    reward is 1 - 0.75 = 0.25; the second has no KL and reward 0: mean 0.125.
    """
    samples = [kl_sample(1.0, "g/0", ref=(-1.5, -2.0)), kl_sample(0.0, "g/1", ref=(-1.0, -1.0))]
    cfg = AlgoConfig(advantage="dr_grpo", kl=KlConfig(coef=0.5, estimator="k1", place="reward"))
    found = assign_advantages(samples, cfg)
    assert samples[0].rewards.tolist() == [0.0, -0.25, -0.5]
    assert samples[1].rewards.tolist() == [0.0, 0.0, 0.0]
    assert samples[0].advantages.tolist() == [0.0, 0.125, 0.125]
    assert samples[1].advantages.tolist() == [0.0, -0.125, -0.125]
    assert (metric(found, "reward/kl").sum, metric(found, "reward/kl").weight) == (1.5, 4)
    assert metric(found, "reward/mean").sum == 1.0  # the graders' rewards, without the KL


def test_kl_of_all_rows_enters_the_trajectory_once():
    """Two rows with KL 1 each and reward 3: 3 - 0.5 * 2 = 2, against 0."""
    rows = [kl_sample(3.0, "g/0", ref=(-1.5, -1.5), row=i) for i in range(2)] + [
        kl_sample(0.0, "g/1", ref=(-1.0, -1.0))
    ]
    cfg = AlgoConfig(advantage="dr_grpo", kl=KlConfig(coef=0.5, estimator="k1", place="reward"))
    assign_advantages(rows, cfg)
    assert [row.advantages[1] for row in rows] == [1.0, 1.0, -1.0]


def test_kl_in_the_reward_prefers_old_logprobs():
    sample = kl_sample(1.0, "g/0", ref=(-2.0, -2.0), old=(-1.5, -2.0))
    assign_advantages([sample], AlgoConfig(kl=KlConfig(coef=1.0, estimator="k1", place="reward")))
    assert sample.rewards.tolist() == [0.0, -0.5, 0.0]


def test_kl_in_the_reward_needs_a_sane_reference():
    cfg = AlgoConfig(kl=KlConfig(coef=0.1, place="reward"))
    with pytest.raises(ValueError, match="no ref_logprobs"):
        assign_advantages([make_sample(1.0)], cfg)
    with pytest.raises(ValueError, match="not finite at 1 of its 2"):
        assign_advantages([kl_sample(1.0, "g/0", ref=(-1.0, np.nan))], cfg)


def test_kl_in_the_loss_leaves_rewards_alone():
    sample = kl_sample(1.0, "g/0", ref=(-1.5, -2.0))
    assign_advantages([sample], AlgoConfig(kl=KlConfig(coef=0.5, place="loss")))
    assert sample.rewards.tolist() == [0.0, 0.0, 0.0]

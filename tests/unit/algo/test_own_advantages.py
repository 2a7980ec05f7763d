"""A user-defined advantage gets all groups of the step, and its result is checked."""

import numpy as np
import pytest
from test_group_advantages import kl_sample, make_sample, metric

from meshrl.algo.advantages import assign_advantages
from meshrl.config.algo import AlgoConfig, KlConfig
from meshrl.core.errors import ConfigError


def own(name: str, **cfg) -> AlgoConfig:
    return AlgoConfig(advantage=f"own_algorithms:{name}", **cfg)


def two_groups():
    return [make_sample(r, group="a") for r in (1.0, 0.0)] + [make_sample(r, group="b") for r in (4.0, 2.0, 0.0)]


def test_the_function_gets_all_groups_of_the_step():
    """Centred rewards 0.5, -0.5 and 2, 0, -2: their deviation is sqrt((0.25 + 0.25 + 4 + 4) / 5)."""
    samples = two_groups()
    found = assign_advantages(samples, own("batch_scaled"))
    scale = np.sqrt(8.5 / 5) + 1e-6
    assert [s.advantages[1] for s in samples] == pytest.approx([0.5 / scale, -0.5 / scale, 2 / scale, 0, -2 / scale])
    assert all(s.advantages.dtype == np.float32 and s.advantages[0] == 0 for s in samples)
    assert metric(found, "reward/mean").sum == 7.0 and metric(found, "reward/groups_without_signal").sum == 0


def test_a_function_may_write_into_the_rewards_without_changing_the_metrics():
    before, after = two_groups(), two_groups()
    expected = assign_advantages(before, own("batch_scaled"))
    found = assign_advantages(after, own("in_place"))
    assert metric(found, "reward/group_std").sum == metric(expected, "reward/group_std").sum > 0
    assert [s.advantages[1] for s in after] == pytest.approx([0.05, -0.05, 0.2, 0, -0.2])


def test_a_trajectory_with_several_rows_counts_once_in_its_group():
    rows = [make_sample(1.0, trajectory="g/0", row=i) for i in range(3)] + [make_sample(0.0, trajectory="g/1")]
    assign_advantages(rows, own("batch_scaled"))
    assert [row.advantages[1] for row in rows] == pytest.approx([1, 1, 1, -1], rel=1e-5)


def test_advantages_may_differ_between_tokens_and_rows():
    rows = [make_sample(6.0, trajectory="g/0", row=i, mask=[0, 1] + [1] * i) for i in range(2)]
    assign_advantages(rows, own("by_token"))
    assert [row.advantages.tolist() for row in rows] == [[0, 3], [0, 3, 2]]


def test_the_function_decides_about_groups_of_one_and_equal_rewards():
    """The built-in baselines give them 0; a function may have another baseline than the group."""
    sample = make_sample(6.0)
    found = assign_advantages([sample], own("by_token"))
    assert sample.advantages.tolist() == [0, 3, 2] and metric(found, "reward/groups_without_signal").sum == 0
    assert all(each.name != "reward/groups_of_one" for each in found)  # only a group-relative advantage needs others


def test_the_function_gets_rewards_less_the_kl():
    """As with a built-in advantage: the rewards are 1 - 0.5 * 1.5 = 0.25 and 0, so centred +-0.125."""
    samples = [kl_sample(1.0, "g/0", ref=(-1.5, -2.0)), kl_sample(0.0, "g/1", ref=(-1.0, -1.0))]
    assign_advantages(samples, own("by_token", kl=KlConfig(coef=0.5, estimator="k1", place="reward")))
    assert samples[0].advantages.tolist() == pytest.approx([0, 0.125, 0.25 / 3])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_the_first_group", "groups: the function must return 2 entries, one for each, but it returned 1"),
        ("of_nothing", "groups: the function must return 2 entries, one for each, but it returned a NoneType"),
        (
            "of_half_a_group",
            "group 'a': the function must return 2 entries, one for each, but it returned 1",
        ),
        ("of_three_tokens", r"shape \[99\]; it must be a number, or an array with one for each of the row's 3 tokens"),
        ("not_finite", "is inf in float32; it must be finite"),
        ("above_float32", "is inf in float32; it must be finite"),
    ],
)
def test_an_invalid_result_is_refused(name: str, message: str):
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=f"algo.advantage own_algorithms:{name}.*{message}"):
        assign_advantages(two_groups(), own(name))


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"algo.advantage is 'gpro'; allowed: grpo, dr_grpo, rloo, .*mean 'grpo'"):
        assign_advantages(two_groups(), AlgoConfig(advantage="gpro"))


def test_each_environment_has_its_own_advantage():
    """A function of the user gets the groups of its environments alone."""

    def samples(*envs: str):
        return [make_sample(r, group=f"{env} {r > 1}", env=env) for env in envs for r in (1.0, 0.0, 4.0, 2.0)]

    mixed, by_env = samples("maths", "code", "own"), {"code": "rloo", "own": "own_algorithms:batch_scaled"}
    found = assign_advantages(mixed, AlgoConfig(advantage="grpo", advantage_by_env=by_env))
    for env, at in (("maths", 0), ("code", 4), ("own", 8)):
        alone = samples(env)
        assign_advantages(alone, AlgoConfig(advantage=by_env.get(env, "grpo")))
        assert [s.advantages[1] for s in mixed[at : at + 4]] == [s.advantages[1] for s in alone] != [0, 0, 0, 0]
    assert metric(found, "reward/groups_without_signal").weight == 6
    assert len({s.advantages[1] for s in mixed[::4]}) == 3

"""Advantages from the rewards of a step, computed by the controller in float64.

G rewards of one group, one for each trajectory; T tokens of a row. A user-defined function
(docs/add_an_algorithm.md) gets all groups of the step:

    f(groups: list[Group]) -> for each group, in order, the advantage of each of its G trajectories
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshrl.algo.kl import kl_estimate
from meshrl.config.algo import AlgoConfig, KlConfig
from meshrl.config.kinds import ADVANTAGES
from meshrl.config.reward import MAX_REWARD
from meshrl.core.lookup import import_object, look_up
from meshrl.core.types import Metric, Sample


def grpo(rewards: np.ndarray, eps: float) -> np.ndarray:
    """(r - mean) / (std + eps), with the sample standard deviation (G - 1), as in TRL and verl.

    The paper leaves open which deviation it means; the population's (G) would scale everything by sqrt(G / (G - 1)).

    Shapes: float64[G] -> float64[G], G >= 2.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2.
    """
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)


def dr_grpo(rewards: np.ndarray, eps: float) -> np.ndarray:
    """r - mean, without the division by the deviation, which favours prompts that nearly always succeed or fail.

    Shapes: float64[G] -> float64[G], G >= 2. Source: Liu et al. 2025, "Understanding R1-Zero-Like Training".
    """
    return rewards - rewards.mean()


def rloo(rewards: np.ndarray, eps: float) -> np.ndarray:
    """r minus the mean of the other G - 1 rewards, which equals (r - mean) * G / (G - 1).

    Shapes: float64[G] -> float64[G], G >= 2. Source: Ahmadian et al. 2024, "Back to Basics", equation 8.
    """
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


def turn_rloo(group: Group, eps: float) -> list[list[np.ndarray]]:
    """rloo for each turn: its return minus the mean of the returns of the others' turns at the same depth.

    The return of a turn is the trajectory's reward without the rewards of the turns before it in its row. It can't
    change these, so the expected gradient is the same without their noise. A trajectory that ended before this depth
    counts with its last turn. Without rewards of turns this is `rloo`.

    Returns: float64[T] for each row of each trajectory; 0 where it is below eps, and in a group of one.
    Source: Williams 1992 (REINFORCE) with reward to go; Ahmadian et al. 2024, equation 8, for the baseline.
    """
    of_rows = [[_turn_returns(row, total) for row in rows] for rows, total in zip(group.rows, group.rewards)]
    width = max(len(returns) for rows in of_rows for returns, _ in rows)
    table = np.stack([np.pad(rows[0][0], (0, width - len(rows[0][0])), "edge") for rows in of_rows])  # [G, depths]
    others = (np.sort(table, axis=0).sum(axis=0) - table) / max(1, len(table) - 1)
    values = [
        [(returns - mean[: len(returns)])[depth] for returns, depth in rows] for rows, mean in zip(of_rows, others)
    ]
    return [[np.where((len(table) > 1) & (abs(v) >= eps), v, 0.0) for v in of_one] for of_one in values]


def _turn_returns(row: Sample, total: float) -> tuple[np.ndarray, np.ndarray]:
    """The return of each turn of a row by depth, from 1 on, and the depth of each token [T]: 0 = context."""
    rewards = row.rewards.astype(np.float64)
    _, first, depth = np.unique(row.turn, return_index=True, return_inverse=True)
    return total - (rewards.cumsum() - rewards)[first], depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The scored trajectories of one prompt, as a user-defined advantage function gets them.

    rewards: float64[G], less the trajectory's KL if kl.place is reward. rows[g]: the rows of trajectory g, one in most
    cases; do not change them. env: of the prompt. Groups and trajectories are in the order in which they were sampled.
    """

    id: str
    env: str = ""
    rewards: np.ndarray
    rows: list[list[Sample]]


@dataclass(kw_only=True, slots=True)
class _Trajectory:
    """The rows of one trajectory, with its reward, and the KL that is subtracted from it for group statistics."""

    group_id: str
    reward: float
    rows: list[Sample]
    kl_penalty: float = 0.0


def assign_advantages(samples: list[Sample], cfg: AlgoConfig) -> list[Metric]:
    """Fill `advantages` of every sample: the trajectory's advantage at trained tokens, 0 elsewhere. turn_rloo has one
    for each turn, and a user-defined function may return different values for each token.

    Groups are formed by group_id, never by position or prompt text. A trajectory with several rows counts once. One
    that could not be scored is not among the samples, and its group's statistics are taken over the others. Groups of
    one, and groups whose deviation is below `cfg.advantage_eps` (all equal, up to float noise), get advantage 0 with
    every built-in method and are counted.

    KL in the reward (kl.place = reward): coef * kl_t is subtracted from `rewards` token by token. Its sum over all rows
    of a trajectory is subtracted from the trajectory's reward before the group's statistics are taken, as in RLOO with
    its sequence-level KL. The policy's log-probabilities are `old_logprobs`, or `rollout_logprobs` if there are none.
    Call this function once per step: a second call would subtract the KL twice.

    Raises: ValueError when a reward is not finite or is above MAX_REWARD, when rows of one trajectory disagree on their
    reward or group, when `ref_logprobs` are missing or not finite, or when a user-defined function does not return
    advantages that are finite in float32 for each trajectory.
    Source: KL in the reward: Ahmadian et al. 2024, section 2.
    """
    trajectories = _trajectories(samples)
    metrics = []
    if cfg.kl.coef > 0 and cfg.kl.place == "reward":
        metrics += _subtract_kl(trajectories, cfg.kl)
    members: dict[str, list[_Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.group_id, []).append(trajectory)
    groups = [
        Group(
            id=name,
            env=of_group[0].rows[0].env,
            rewards=np.array([t.reward - t.kl_penalty for t in of_group], np.float64),
            rows=[t.rows for t in of_group],
        )
        for name, of_group in members.items()
    ]
    group_metrics = _group_metrics(groups, cfg.advantage_eps)  # before a user's function, which may write into rewards
    by_kind: dict[str, list[Group]] = {}
    for group in groups:
        by_kind.setdefault(cfg.advantage_by_env.get(group.env, cfg.advantage), []).append(group)
    for name, of_kind in by_kind.items():
        _assign_one(name, of_kind, cfg.advantage_eps)
    if not all(name in ADVANTAGES for name in by_kind):
        group_metrics[1:] = [_without_advantage(groups)]
    elif any(ADVANTAGES[name].by_turn for name in by_kind):  # equal sums may differ in turns
        group_metrics[1] = _without_advantage(groups)
    metrics += group_metrics
    rewards = [t.reward for t in trajectories]
    metrics.append(Metric(name="reward/mean", sum=math.fsum(rewards), weight=len(rewards)))
    if rewards:
        metrics.append(Metric(name="reward/max", sum=max(rewards), reduce="max"))
        metrics.append(Metric(name="reward/min", sum=min(rewards), reduce="min"))
    return metrics


def _assign_one(name: str, groups: list[Group], eps: float) -> None:
    """name: of algo.advantage, also a dotted path."""
    if (kind := ADVANTAGES.get(name)) is None:
        found = look_up(name, ADVANTAGES, "algo.advantage")(groups)
    else:
        function = import_object(kind.function)
        found = [function(g, eps) if kind.by_turn else _group_advantages(function, g, eps) for g in groups]
    _assign(groups, found, name)


def _trajectories(samples: list[Sample]) -> list[_Trajectory]:
    by_id: dict[str, _Trajectory] = {}
    for sample in samples:
        if not abs(sample.reward) <= MAX_REWARD:  # also for NaN
            raise ValueError(
                f"trajectory {sample.trajectory_id!r} has reward {sample.reward}; rewards must be finite numbers of at "
                f"most {MAX_REWARD:g} in size. Leave out trajectories that could not be scored"
            )
        first = by_id.setdefault(
            sample.trajectory_id, _Trajectory(group_id=sample.group_id, reward=sample.reward, rows=[])
        )
        if (first.group_id, first.reward) != (sample.group_id, sample.reward):
            raise ValueError(
                f"rows of trajectory {sample.trajectory_id!r} disagree: one has reward {first.reward} in group "
                f"{first.group_id!r}, another {sample.reward} in {sample.group_id!r}; they share one reward and group"
            )
        first.rows.append(sample)
    return list(by_id.values())


def _group_advantages(function: Callable[[np.ndarray, float], np.ndarray], group: Group, eps: float) -> np.ndarray:
    """The advantages by a built-in function, float64[G]: 0 in a group of one, or with equal rewards."""
    advantages = np.zeros(len(group.rewards))
    # The last bit of a mean depends on the order of summation; sorted, it does not depend on the group's order.
    order = group.rewards.argsort(kind="stable")
    if len(order) > 1 and _deviation(group) >= eps:
        advantages[order] = function(group.rewards[order], eps)
    return advantages


def _deviation(group: Group) -> float:
    """The sample standard deviation of the rewards of a group of at least two."""
    return float(np.sort(group.rewards).std(ddof=1))


def _group_metrics(groups: list[Group], eps: float) -> list[Metric]:
    deviations = [_deviation(group) for group in groups if len(group.rewards) > 1]
    singles = len(groups) - len(deviations)
    no_signal = sum(deviation < eps for deviation in deviations)
    return [
        Metric(name="reward/group_std", sum=math.fsum(deviations), weight=len(deviations)),
        Metric(name="reward/groups_without_signal", sum=no_signal + singles, weight=len(groups), unit="fraction"),
        Metric(name="reward/groups_of_one", sum=singles, weight=len(groups), unit="fraction"),
    ]


def _without_advantage(groups: list[Group]) -> Metric:
    """The groups without a signal by a user-defined function, whose advantages need not be relative to the group."""
    rows = [[row for of_one in group.rows for row in of_one] for group in groups]
    num = sum(not any(row.advantages is not None and row.advantages.any() for row in of_group) for of_group in rows)
    return Metric(name="reward/groups_without_signal", sum=num, weight=len(groups), unit="fraction")


def _assign(groups: list[Group], returned: Any, path: str) -> None:
    """Fill `advantages` of every row with what a function returned for all groups."""
    name = f"algo.advantage {path}"
    for group, of_group in zip(groups, _entries(returned, len(groups), f"{name}: groups")):
        place = f"{name}: trajectories of group {group.id!r}"
        for rows, value in zip(group.rows, _entries(of_group, len(group.rows), place)):
            per_row = [value] * len(rows)
            if isinstance(value, (list, tuple)):
                per_row = _entries(value, len(rows), f"{name}: rows of trajectory {rows[0].trajectory_id!r}")
            for row, advantage in zip(rows, per_row):
                row.advantages = _row_advantages(row, advantage, name)


def _entries(values: Any, count: int, place: str) -> list[Any]:
    entries = list(values) if isinstance(values, Iterable) else []
    if len(entries) != count:
        returned = len(entries) if isinstance(values, Iterable) else f"a {type(values).__name__}"
        raise ValueError(f"{place}: the function must return {count} entries, one for each, but it returned {returned}")
    return entries


_LARGEST = float(np.finfo(np.float32).max)


def _row_advantages(row: Sample, advantage: Any, name: str) -> np.ndarray:
    """float32[T] from one number or one number per token: the advantage where the row is trained, 0 elsewhere."""
    if isinstance(advantage, float) and abs(advantage) <= _LARGEST:  # the usual case
        return np.where(row.mask, np.float32(advantage), np.float32(0.0))
    with np.errstate(over="ignore"):  # an infinity is refused below
        values = np.asarray(advantage, dtype=np.float32)
    if values.shape not in ((), row.mask.shape):
        raise ValueError(
            f"{name}: an advantage of trajectory {row.trajectory_id!r} has shape {list(values.shape)}; it must be a "
            f"number, or an array with one for each of the row's {len(row)} tokens"
        )
    advantages = np.where(row.mask, values, np.float32(0.0))
    if not np.isfinite(advantages).all():
        bad = advantages[~np.isfinite(advantages)][0]
        raise ValueError(
            f"{name}: an advantage of trajectory {row.trajectory_id!r} is {bad} in float32; it must be finite"
        )
    return advantages


def _subtract_kl(trajectories: list[_Trajectory], cfg: KlConfig) -> list[Metric]:
    total, tokens = 0.0, 0
    for trajectory in trajectories:
        for row in trajectory.rows:
            kl = _row_kl(row, cfg.estimator)
            row.rewards = (row.rewards - cfg.coef * kl).astype(np.float32)
            trajectory.kl_penalty += cfg.coef * float(kl.sum())
            total += float(kl.sum())
            tokens += int(row.mask.sum())
    return [Metric(name="reward/kl", sum=total, weight=tokens, unit="nats")]


def _row_kl(row: Sample, estimator: str) -> np.ndarray:
    """KL of each trained token, 0 elsewhere: float64[T]."""
    if row.ref_logprobs is None:
        raise ValueError(
            f"algo.kl.place is reward, but trajectory {row.trajectory_id!r} has no ref_logprobs; "
            f"let the reference model score the samples before advantages are assigned"
        )
    policy = row.rollout_logprobs if row.old_logprobs is None else row.old_logprobs
    kl = np.zeros(len(row), dtype=np.float64)
    kl[row.mask] = kl_estimate(
        torch.from_numpy(policy[row.mask].astype(np.float64)),
        torch.from_numpy(row.ref_logprobs[row.mask].astype(np.float64)),
        estimator,
    ).numpy()
    if not np.isfinite(kl).all():
        raise ValueError(
            f"the KL of trajectory {row.trajectory_id!r} is not finite at {int((~np.isfinite(kl)).sum())} of its "
            f"{int(row.mask.sum())} trained tokens; its log-probabilities by policy or reference are not finite"
        )
    return kl

"""Advantages by turn, proven on a toy of at most two turns by enumeration: the expectation of the estimated gradient,
over all groups of two, is the gradient of the expected reward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.algo.losses import LossInputs, ppo_clip
from meshrl.config.algo import AlgoConfig
from meshrl.core.types import Prompt, Trajectory, Turn

FIRST = (4.0, -2.0, 0.25)  # the environment's reward of the first turn, by its token
SECOND = (
    (0.25, 2.0, -0.5),
    (1.0, 0.0, -2.0),
)  # of the second turn, by both tokens; after the first token 2 there is none
OUTCOME = ((4.0, 1.0, -1.0), (0.5, 3.0, 8.0), (2.0,))  # the rest of the reward


def turn(context, token, reward, parent):
    return Turn(
        parent=parent,
        context_ids=np.array(context, np.int32),
        output_ids=np.array([token], np.int32),
        logprobs=np.float32([-1]),
        versions=np.int32([0]),
        stop_reason="stop",
        reward=reward,
    )


def trajectory(index, a, b, forks, with_turn_rewards=True):
    """b: None = the trajectory ends with the first turn. forks: the second turn has a row of its own."""
    rewards = [FIRST[a], *([] if b is None else [SECOND[a][b]])]
    turns = [turn([9], a, rewards[0], -1)]
    if b is not None:
        turns.append(turn([9, a, 8] if forks else [8], b, rewards[1], -1 if forks else 0))
    total = OUTCOME[a][b or 0] + sum(rewards)
    if not with_turn_rewards:
        for each in turns:
            each.reward = None
    prompt = Prompt(id="p", ordinal=0, messages=[], answer="")
    return Trajectory(prompt=prompt, group_id="g", index=index, turns=turns, reward=total, status="done")


ALL = [(a, b) for a in (0, 1) for b in range(3)] + [(2, None)]


def advantages(group, method, **options):
    """Of each trajectory: that of each of its turns."""
    samples, _ = flatten([trajectory(i, *tokens, **options) for i, tokens in enumerate(group)])
    assign_advantages(samples, AlgoConfig(advantage=method))
    by_turn = [dict[int, float]() for _ in group]
    for sample in samples:
        for at in np.flatnonzero(sample.mask):
            by_turn[int(sample.trajectory_id.rsplit("/")[-1])][int(sample.turn[at])] = float(sample.advantages[at])
    return [[found[i] for i in sorted(found)] for found in by_turn]


def gradients(method, forks):
    """The gradient of the expected reward; the expectation and the variance of the estimate of a group of two."""
    torch.manual_seed(0)
    first, second = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3,), (2, 3)))
    logs = {(a, b): [first.log_softmax(0)[a], *([] if b is None else [second.log_softmax(1)[a, b]])] for a, b in ALL}
    chance = {tokens: sum(log).exp() for tokens, log in logs.items()}
    reward = {(a, b): FIRST[a] + OUTCOME[a][b or 0] + (0.0 if b is None else SECOND[a][b]) for a, b in ALL}

    def gradient(value):
        found = torch.autograd.grad(
            value, (first, second), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([each.flatten() for each in found])

    expected = gradient(sum(chance[tokens] * reward[tokens] for tokens in ALL))
    mean, square = torch.zeros_like(expected), 0.0
    for group in itertools.product(ALL, repeat=2):
        new = torch.stack([log for tokens in group for log in logs[tokens]])
        given = torch.tensor([a for of_one in advantages(group, method, forks=forks) for a in of_one]).double()
        old, lengths = new.detach(), [len(logs[tokens]) for tokens in group]
        inputs = LossInputs(
            logprobs=new,
            old_logprobs=old,
            rollout_logprobs=old,
            advantages=given,
            ref_logprobs=None,
            entropy=None,
            row_lengths=lengths,
        )
        loss, _ = ppo_clip(inputs, clip_low=0.2, clip_high=0.2, dual_clip=None)
        estimate, weight = -gradient(loss.sum() / len(group)), (chance[group[0]] * chance[group[1]]).item()
        mean += weight * estimate
        square += weight * float(estimate @ estimate)
    return expected, mean, square - float(mean @ mean)


@pytest.mark.parametrize("forks", [False, True], ids=["one row", "two rows"])
def test_the_expected_gradient_is_exact_and_has_less_variance(forks):
    expected, mean, variance = gradients("turn_rloo", forks)
    assert torch.allclose(mean, expected, rtol=0, atol=1e-12) and expected.norm() > 0.1
    _, of_sums, variance_of_sums = gradients("rloo", forks)
    assert torch.allclose(of_sums, expected, rtol=0, atol=1e-12)
    assert variance == pytest.approx(variance_of_sums) if forks else variance < 0.9 * variance_of_sums


def test_a_turn_is_not_credited_for_the_turns_before_it():
    """Returns of both turns: 8.25 and 4.25; -0.5 and 1.5. The third trajectory has its 2.25 at both depths."""
    assert advantages([(0, 0), (1, 0), (2, None)], "turn_rloo", forks=False) == [
        pytest.approx([8.25 - (-0.5 + 2.25) / 2, 4.25 - (1.5 + 2.25) / 2]),
        pytest.approx([-0.5 - (8.25 + 2.25) / 2, 1.5 - (4.25 + 2.25) / 2]),
        pytest.approx([2.25 - (8.25 - 0.5) / 2]),
    ]


def test_without_rewards_of_turns_it_is_rloo_and_equal_turns_have_no_advantage():
    group = [(0, 1), (1, 2), (2, None)]
    plain, by_turn = (advantages(group, m, forks=False, with_turn_rewards=False) for m in ("rloo", "turn_rloo"))
    assert [*map(pytest.approx, plain)] == by_turn
    assert advantages([(0, 1)] * 3, "turn_rloo", forks=False) == [[0.0, 0.0]] * 3

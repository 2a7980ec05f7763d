"""All records from agent to gradient, with forks, aborts, mixed versions, images and routed experts.

A scripted agent and engine produce trajectories with all of these. They go through flatten -> advantages -> packing ->
the engine on two ranks; the reference scores the turns of the trees one by one with plain Transformers, without rows,
masks and packs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from harness import partitioned, worst
from scripted_agent import scripted_trajectories
from tiny_models import tiny_vision_qwen2

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.algo.losses import make_policy_loss
from meshrl.algo.reduce import assign_loss_weights
from meshrl.config.algo import AlgoConfig
from meshrl.core.types import Trajectory

PIXELS = np.random.default_rng(3).standard_normal((3, 5))


def _path(trajectory: Trajectory, index: int) -> list[int]:
    out: list[int] = []
    while index >= 0:
        out.insert(0, index)
        index = trajectory.turns[index].parent
    return out


def _reference(trajectories: list[Trajectory]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Gradient of -sum(advantage * logprob) / tokens, each turn scored once in its own full context."""
    lm: Any = tiny_vision_qwen2()
    lm.config._attn_implementation = "sdpa"
    rewards: dict[str, list[float]] = {}
    for t in trajectories:
        rewards.setdefault(t.group_id, []).append(t.reward)
    count = sum(len(turn.output_ids) for t in trajectories for turn in t.turns)
    total, logprobs = torch.zeros((), dtype=torch.float64), {}
    for t in trajectories:
        group = np.array(rewards[t.group_id])
        advantage = float(np.float32((t.reward - group.mean()) / (group.std(ddof=1) + 1e-6)))
        for number, turn in enumerate(t.turns):
            path = [t.turns[i] for i in _path(t, number)]
            ids = np.concatenate([part for p in path for part in (p.context_ids, p.output_ids)])
            routes = np.concatenate([p.routed_experts for p in path])
            tokens = torch.from_numpy(ids.astype(np.int64))
            h = lm.model(
                input_ids=tokens[None],
                pixel_values=torch.from_numpy(PIXELS),
                routed_experts=torch.from_numpy(routes),
            ).last_hidden_state[0]
            logq = torch.log_softmax(lm.lm_head(h), dim=-1)
            positions = torch.arange(len(ids) - len(turn.output_ids), len(ids))
            logp = logq[positions - 1, tokens[positions]]
            logprobs[f"{t.id}/{number}"] = float(logp.detach().sum())
            total = total - advantage * logp.sum() / count
    total.backward()
    return {n: p.grad.numpy().copy() for n, p in lm.named_parameters()}, logprobs


def test_a_gradient_step_on_every_kind_of_trajectory_equals_the_unsharded_reference(pool):
    """Image span, fork in history, continued aborts, mixed versions, routed experts."""
    trajectories = scripted_trajectories(num_prompts=2, samples_per_prompt=2, media_outputs={"pixel_values": PIXELS})
    samples, _ = flatten(trajectories)
    assert any(len(set(s.versions[s.mask])) > 1 for s in samples), "no sample has mixed versions"
    assert len(samples) == 3 * len(trajectories), "each tree has three leaves"
    cfg = AlgoConfig()
    assign_advantages(samples, cfg)
    assign_loss_weights(samples, cfg, 6)
    for s in samples:  # fp64 weights, as in the reference
        s.loss_weight = np.where(s.mask, 1.0 / sum(int(x.mask.sum()) for x in samples), 0.0)
    partition = [[[0, 3, 7], [1]], [[2, 4, 10, 11], [5, 6, 8, 9]]]
    got = pool.run(partitioned, 2, tiny_vision_qwen2, {}, samples, partition, make_policy_loss(cfg), {})
    want, logprobs = _reference(trajectories)
    distance, name = worst(got[0]["grads"], want)
    assert distance < 1e-6, f"{name} is {distance:.2e} of its norm off"  # advantages are rounded to fp32
    rescored = {i: row for rank in got for i, row in rank["logprobs"].items()}
    for i, s in enumerate(samples):
        for turn in set(s.turn[s.mask].tolist()):
            own = s.mask & (s.turn == turn)
            assert abs(rescored[i][own].sum() - logprobs[f"{s.trajectory_id}/{turn}"]) < 1e-4


def test_every_sampled_token_is_trained_exactly_once():
    trajectories = scripted_trajectories(num_prompts=3, samples_per_prompt=2)
    samples, _ = flatten(trajectories)
    sampled = sum(len(turn.output_ids) for t in trajectories for turn in t.turns)
    assert sum(int(s.mask.sum()) for s in samples) == sampled

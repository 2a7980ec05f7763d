from __future__ import annotations

import asyncio

import numpy as np
from scripted_agent import STOP, ScriptedEngine, generate_to_the_end

from meshrl.core.types import Request, Times, Turn
from meshrl.rollout.base import join_turns

REQUEST = Request(id="r", context_ids=np.array([3, 4], np.int32), seed=7, max_new_tokens=9)


def part(output, reason="abort", **facts):
    given = dict(
        context_ids=np.array([3, 4], np.int32),
        output_ids=np.array(output, np.int32),
        logprobs=np.full(len(output), -0.5, np.float32),
        versions=np.zeros(len(output), np.int32),
        stop_reason=reason,
        engine_id="e0",
    )
    return Turn(**{**given, **facts})


def test_an_aborted_and_continued_turn_equals_an_uninterrupted_one():
    """Sampled tokens depend on neither interruption nor engine."""
    uninterrupted = asyncio.run(ScriptedEngine().generate(REQUEST))
    engine = ScriptedEngine(abort_every=1)
    joined = asyncio.run(generate_to_the_end(engine, REQUEST))
    assert len(engine.requests) == 2 and len(uninterrupted.output_ids) > 3
    for name in ("output_ids", "logprobs", "versions", "context_ids"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(uninterrupted, name))
    np.testing.assert_array_equal(joined.extras["entropy"], uninterrupted.extras["entropy"])
    assert joined.stop_reason == uninterrupted.stop_reason
    # The first engine sampled the token at the cut and made no forward pass with it: all other records are equal.
    cut = len(REQUEST.context_ids) + 1
    rest = np.arange(len(uninterrupted.routed_experts)) != cut
    np.testing.assert_array_equal(joined.routed_experts[rest], uninterrupted.routed_experts[rest])
    assert (joined.routed_experts[cut] == -1).all()


def test_versions_may_rise_and_engines_differ_from_part_to_part():
    joined = join_turns(
        [
            part([5, 6], times=Times(queue_s=1, prefill_s=2, decode_s=3, cached_tokens=4)),
            part([7], versions=np.array([1], np.int32), engine_id="e1", times=Times(queue_s=1, cached_tokens=2)),
            part([STOP], "stop", versions=np.array([1], np.int32), engine_id="e0"),
        ]
    )
    assert joined.output_ids.tolist() == [5, 6, 7, STOP]
    assert joined.versions.tolist() == [0, 0, 1, 1]
    assert joined.stop_reason == "stop"
    assert joined.engine_id == "e0,e1"
    assert joined.times == Times(queue_s=2, prefill_s=2, decode_s=3, cached_tokens=6)


def test_an_abort_before_the_first_token_adds_nothing():
    joined = join_turns([part([]), part([5], "length", extras={"entropy": np.ones(1, np.float32)})])
    assert joined.output_ids.tolist() == [5]
    assert joined.extras["entropy"].tolist() == [1.0]


def test_parts_without_routed_experts_are_minus_one():
    routed = np.full((3, 1, 1), 7, np.int16)
    joined = join_turns([part([5, 6]), part([8], "stop", routed_experts=routed)])
    assert joined.routed_experts.ravel().tolist() == [7, 7, -1, -1, 7]
    assert join_turns([part([5]), part([6], "stop")]).routed_experts is None


def test_a_single_part_is_that_turn():
    only = part([5, STOP], "stop")
    joined = join_turns([only])
    assert joined.output_ids.tolist() == [5, STOP] and joined.stop_reason == "stop"

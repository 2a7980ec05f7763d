from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scripted_agent import NUM_CHOSEN, NUM_LAYERS, scripted_trajectories

from meshrl.agent.flatten import TurnError, flatten
from meshrl.core.errors import Failure
from meshrl.core.types import Media, Prompt, SamplingParams, Trajectory, Turn


def make_turn(context, output, parent=-1, **facts):
    n = len(output)
    given = dict(
        parent=parent,
        context_ids=np.array(context, np.int32),
        output_ids=np.array(output, np.int32),
        logprobs=np.array([-0.1 * (i + 1) for i in range(n)], np.float32),
        versions=np.zeros(n, np.int32),
        stop_reason="stop",
    )
    return Turn(**{**given, **facts})


def make_trajectory(*turns, group="g", index=0, reward=1.0, **facts):
    prompt = Prompt(id="p", ordinal=0, media=facts.pop("media", {}), env="maths")
    return Trajectory(prompt=prompt, group_id=group, index=index, turns=list(turns), reward=reward, **facts)


def rows(*trajectories):
    return flatten(trajectories)[0]


def numbers(*trajectories):
    return {m.name: (m.sum, m.weight) for m in flatten(trajectories)[1]}


def test_one_turn_becomes_the_row_of_the_worked_example():
    (s,) = rows(make_trajectory(make_turn([1, 5, 6], [7, 2]), reward=0.5))
    assert s.tokens.tolist() == [1, 5, 6, 7, 2]
    assert s.mask.tolist() == [False, False, False, True, True]
    assert s.turn.tolist() == [-1, -1, -1, 0, 0]
    np.testing.assert_array_equal(s.rollout_logprobs, np.array([np.nan] * 3 + [-0.1, -0.2], np.float32))
    assert s.versions.tolist() == [-1, -1, -1, 0, 0]
    assert s.rewards.tolist() == [0, 0, 0, 0, 0.5]
    assert (s.trajectory_id, s.group_id, s.row, s.prefix_len, s.reward, s.env) == ("g/0", "g", 0, 3, 0.5, "maths")
    dtypes = [a.dtype.name for a in (s.tokens, s.mask, s.turn, s.rollout_logprobs, s.versions, s.rewards)]
    assert dtypes == ["int32", "bool", "int16", "float32", "int32", "float32"]


@pytest.mark.parametrize(
    "output",
    [[2], [2, 2], [7, 8], [3, 2], [9, 3, 2], [0, 2]],
    ids=["EOS first", "EOS twice", "no EOS", "another EOS", "two EOS ids", "pad before EOS"],
)
def test_every_sampled_token_is_trained_whatever_its_value(output):
    """Lengths define masks, never token values; 2 and 3 end a turn, 0 pads, and 2 may also be in the prompt."""
    (s,) = rows(make_trajectory(make_turn([0, 2, 3], output)))
    assert s.tokens[s.mask].tolist() == output
    assert int(s.mask.sum()) == len(output)
    assert not s.mask[:3].any()


def test_truncated_trajectories_are_marked_and_counted():
    """Algo.truncated decides whether they are trained, after their advantages are computed."""
    cut = make_trajectory(make_turn([1], [4, 5], stop_reason="length"), status="truncated")
    done = make_trajectory(make_turn([1], [2]), index=1)
    assert [(s.tokens[s.mask].tolist(), s.truncated) for s in rows(cut, done)] == [([4, 5], True), ([2], False)]
    assert numbers(cut, done)["rollout/truncated_fraction"] == (1.0, 2.0)


def test_failed_unscored_and_evaluated_trajectories_are_left_out():
    """A failure is never a reward of 0."""
    turn = make_turn([1], [2])
    out = [
        make_trajectory(turn, status="failed", failure=Failure(kind="engine", message="gone")),
        make_trajectory(turn, reward=None),
        make_trajectory(turn, purpose="eval"),
        make_trajectory(),
    ]
    trained = make_trajectory(turn, index=7, reward=0.0)
    assert [s.trajectory_id for s in rows(*out, trained)] == ["g/7"]
    found = numbers(*out, trained)
    for name in ("failed", "unscored"):
        assert found[f"rollout/{name}_fraction"] == (1.0, 4.0)  # those of an evaluation are not counted
    assert flatten([]) == ([], [])


def test_a_turn_in_two_rows_is_trained_in_the_first_only():
    """A branch; the second row has the shared turn as context, with the sampler's logprobs of it."""
    first, second = rows(
        make_trajectory(make_turn([1, 5], [6, 7]), make_turn([8], [9], parent=0), make_turn([3], [4], parent=0))
    )
    assert first.tokens.tolist() == [1, 5, 6, 7, 8, 9]
    assert first.mask.tolist() == [False, False, True, True, False, True]
    assert second.tokens.tolist() == [1, 5, 6, 7, 3, 4]
    assert second.mask.tolist() == [False, False, False, False, False, True]
    assert second.turn.tolist() == [-1, -1, 0, 0, -1, 2]
    assert (first.row, second.row) == (0, 1)
    np.testing.assert_array_equal(second.rollout_logprobs[2:4], first.rollout_logprobs[2:4])


def test_every_sampled_token_of_every_shape_is_trained_exactly_once():
    """Fork, branch, continuation, aborts: trained ids equal sampled ids to the bit."""
    trajectories = scripted_trajectories()
    samples, _ = flatten(trajectories)
    assert len(samples) == 3 * len(trajectories)
    for t in trajectories:
        of_it = [s for s in samples if s.trajectory_id == t.id]
        for i, turn in enumerate(t.turns):
            trained = [(s, np.flatnonzero(s.mask & (s.turn == i))) for s in of_it]
            trained = [(s, at) for s, at in trained if len(at)]
            assert len(trained) == 1
            s, at = trained[0]
            np.testing.assert_array_equal(s.tokens[at], turn.output_ids)
            np.testing.assert_array_equal(s.rollout_logprobs[at], turn.logprobs)
            np.testing.assert_array_equal(s.versions[at], turn.versions)
            assert len(set(turn.versions.tolist())) == (len(turn.output_ids) + 1) // 2  # they mix within a turn


def test_a_rewritten_history_is_a_row_of_its_own():
    trajectory = scripted_trajectories(1, 1)[0]
    assert [t.parent for t in trajectory.turns] == [-1, 0, -1, 0]
    samples, _ = flatten([trajectory])
    assert [sorted(set(s.turn.tolist()) - {-1}) for s in samples] == [[0, 1], [2], [0, 3]]


def test_process_rewards_stand_at_their_turn_and_the_outcome_at_the_end_of_each_row():
    trajectory = make_trajectory(
        make_turn([1], [2, 3], reward=0.25),
        make_turn([4], [5], parent=0, reward=0.5),
        make_turn([6], [7], parent=0),
        reward=2.0,
    )
    first, second = rows(trajectory)  # the graders gave 2.0 - 0.25 - 0.5
    assert first.rewards.tolist() == [0, 0, 0.25, 0, 0.5 + 1.25]
    assert second.rewards.tolist() == [0, 0, 0, 0, 1.25]  # turn 0's own reward is not given twice
    assert (first.reward, second.reward) == (2.0, 2.0)


def test_the_outcome_stands_at_the_last_trained_token_when_the_last_turn_is_empty():
    (s,) = rows(make_trajectory(make_turn([1], [2, 3]), make_turn([4, 5], [], parent=0), reward=2.0))
    assert s.tokens.tolist() == [1, 2, 3, 4, 5]
    assert s.rewards.tolist() == [0, 0, 2.0, 0, 0]


def test_an_empty_output_keeps_its_row_so_that_its_group_keeps_its_reward():
    (s,) = rows(make_trajectory(make_turn([1, 5], []), reward=0.0))
    assert s.tokens.tolist() == [1, 5]
    assert not s.mask.any() and s.reward == 0.0


def test_a_row_without_trained_tokens_is_left_out_if_there_are_other_rows():
    samples = rows(make_trajectory(make_turn([1], [2]), make_turn([4], [], parent=0), make_turn([6], [7], parent=0)))
    assert [s.tokens.tolist() for s in samples] == [[1, 2, 4], [1, 2, 6, 7]]
    samples = rows(make_trajectory(make_turn([1], [2]), make_turn([6], [7], parent=0), make_turn([4], [], parent=0)))
    assert [s.tokens.tolist() for s in samples] == [[1, 2, 6, 7]]
    samples = rows(make_trajectory(make_turn([4], []), make_turn([6], [7])))
    assert [(s.row, s.tokens.tolist()) for s in samples] == [(0, [6, 7])]


def test_the_prefix_is_the_common_beginning_of_all_contexts_of_the_group():
    samples = rows(
        make_trajectory(make_turn([1, 5, 6, 7], [9])),
        make_trajectory(make_turn([1, 5, 8], [7]), index=1),
        make_trajectory(make_turn([3, 5], [7]), group="other"),
    )
    assert [s.prefix_len for s in samples] == [2, 2, 2]


def test_the_prefix_never_reaches_into_sampled_tokens():
    """Two samples of a group that both answer 9 share sampled tokens, too, which are not part of the prefix."""
    samples = rows(make_trajectory(make_turn([1, 5], [9, 9])), make_trajectory(make_turn([1, 5], [9, 9]), index=1))
    assert [s.prefix_len for s in samples] == [2, 2]


@pytest.mark.parametrize(
    ("other_digest", "other_span", "expected"), [("a", (1, 2), 4), ("b", (1, 2), 1), ("a", (1, 3), 1)]
)
def test_the_prefix_ends_before_media_that_differ(other_digest, other_span, expected):
    """The placeholder tokens of different images are equal."""

    def showing(digest, span, index):
        media = {"m": Media(kind="image", digest=digest, source="", outputs={}, num_tokens=span[1])}
        turn = make_turn([1, 0, 0, 0], [9], media_spans=[("m", *span)])
        return make_trajectory(turn, index=index, media=media)

    samples = rows(showing("a", (1, 2), 0), showing(other_digest, other_span, 1))
    assert [s.prefix_len for s in samples] == [expected, expected]


def test_media_spans_become_absolute_and_bring_their_media():
    media = {n: Media(kind="image", digest=n, source="", outputs={}, num_tokens=2) for n in "abc"}
    trajectory = make_trajectory(
        make_turn([1, 0, 0], [5, 6], media_spans=[("a", 1, 2)]),
        make_turn([4, 0, 0], [7], parent=0, media_spans=[("b", 1, 2)]),
        media=media,
    )
    (s,) = rows(trajectory)
    assert s.media_spans == [("a", 1, 2), ("b", 6, 2)]
    assert s.tokens[6:8].tolist() == [0, 0]
    assert set(s.media) == {"a", "b"} and s.media["a"] is media["a"]  # shared, not copied


def test_routed_experts_are_laid_out_by_token_and_minus_one_where_not_recorded():
    recorded = np.arange(3 * 4, dtype=np.int16).reshape(3, 2, 2)
    (s,) = rows(make_trajectory(make_turn([1], [2]), make_turn([4], [5, 6], parent=0, routed_experts=recorded)))
    assert s.routed_experts.dtype == np.int16
    assert (s.routed_experts[:2] == -1).all()
    np.testing.assert_array_equal(s.routed_experts[2:], recorded)


def test_routed_experts_of_scripted_turns_are_aligned_with_the_row():
    """A context that is cut to its new tokens keeps their record; so do the fork and the aborted turn."""
    for s in flatten(scripted_trajectories())[0]:
        assert s.routed_experts.shape == (len(s), NUM_LAYERS, NUM_CHOSEN)
        known = s.routed_experts[:, 0, 0] >= 0
        assert known.sum() > len(s) // 2
        np.testing.assert_array_equal(s.routed_experts[known, 0, 0], (3 * np.arange(len(s)) % 8)[known])


def test_extras_cover_the_row_and_are_0_where_a_turn_has_none():
    first = make_turn([1], [2, 3], extras={"entropy": np.array([0.5, 0.25], np.float32)})
    second = make_turn([4], [5], parent=0, extras={"topk_ids": np.array([[5, 6]], np.int32)})
    (s,) = rows(make_trajectory(first, second))
    assert s.token_extras["entropy"].tolist() == [0.0, 0.5, 0.25, 0.0, 0.0]
    assert s.token_extras["topk_ids"].tolist() == [[0, 0]] * 4 + [[5, 6]]


def test_filled_arrays_are_read_only_except_rewards():
    s = flatten(scripted_trajectories(1, 1))[0][0]
    frozen = [s.tokens, s.mask, s.turn, s.rollout_logprobs, s.versions, s.routed_experts, s.token_extras["entropy"]]
    assert not any(array.flags.writeable for array in frozen)
    assert s.rewards.flags.writeable


def test_lengths_count_each_sampled_token_once_and_duplicates_go_by_group():
    """Two samples with the same seed are counted as duplicates."""
    branch = make_trajectory(make_turn([1], [2, 3]), make_turn([4], [5], parent=0), make_turn([6], [7], parent=0))
    duplicates = [make_trajectory(make_turn([1], [8, 9]), group="t", index=i) for i in range(3)]
    other_group = make_trajectory(make_turn([1], [8, 9]), group="u")
    found = numbers(branch, *duplicates, other_group)
    assert found["rollout/length_mean_tokens"] == (4.0 + 4 * 2.0, 5.0)
    assert found["rollout/length_max_tokens"][0] == 4.0
    assert found["rollout/duplicate_fraction"] == (2.0, 5.0)
    assert found["rollout/turns_mean"] == (7.0, 5.0)
    assert found["rollout/rows"][0] == 6.0


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_row_carries_the_temperature_it_was_sampled_at(temperature):
    (s,) = rows(make_trajectory(make_turn([1], [2], sampling=SamplingParams(temperature=temperature))))
    assert s.temperature == temperature


def test_greedy_turns_are_scored_at_temperature_one():
    (s,) = rows(make_trajectory(make_turn([1], [2], sampling=SamplingParams(temperature=0.0))))
    assert s.temperature == 1.0


def test_a_row_of_two_temperatures_is_refused():
    hot = make_turn([4], [5], parent=0, sampling=SamplingParams(temperature=1.3))
    with pytest.raises(TurnError, match=r"'g/0': one row mixes the temperatures \{0: 1.0, 1: 1.3\}"):
        rows(make_trajectory(make_turn([1], [2]), hot))


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}])
def test_a_filtered_distribution_is_refused(filters):
    with pytest.raises(TurnError, match=r"turn 0: sampled with .*training needs"):
        rows(make_trajectory(make_turn([1], [2], sampling=SamplingParams(**filters))))


SPANS = {"m": Media(kind="image", digest="d", source="", outputs={}, num_tokens=1)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parent": 1}, "parent is 1"),
        ({"parent": -2}, "parent is -2"),
        ({"output_ids": np.array([2, 3], np.int64)}, "output_ids is int64; it must be int32"),
        ({"context_ids": np.array([[1]], np.int32)}, r"context_ids has shape \(1, 1\)"),
        ({"logprobs": np.zeros(1, np.float32)}, r"logprobs has shape \(1,\); it must be \[2\]"),
        ({"logprobs": np.zeros(2, np.float64)}, "logprobs is float64"),
        ({"logprobs": np.array([-1, np.nan], np.float32)}, r"logprobs\[1\] is nan"),
        ({"versions": np.zeros(3, np.int32)}, r"versions has shape \(3,\)"),
        ({"versions": np.array([0, -1], np.int32)}, "weight version -1"),
        ({"extras": {"entropy": np.zeros(3)}}, r"extras\['entropy'\] has shape \(3,\)"),
        ({"routed_experts": np.zeros((2, 1, 1), np.int16)}, r"routed_experts has shape \(2, 1, 1\); .*\[3, \.\.\.\]"),
        ({"routed_experts": np.zeros((3, 1), np.int16)}, "routed_experts has shape"),
        ({"routed_experts": np.zeros((3, 1, 1), np.int32)}, "routed_experts is int32"),
        ({"context_ids": np.zeros(0, np.int32)}, "empty context"),
        ({"reward": float("nan")}, "reward is nan; it must be a finite number"),
        ({"reward": -1e300}, r"reward is -1e\+300; it must be a finite number of at most 1e\+12"),
        ({"media_spans": [("n", 0, 1)]}, "media span of 'n'"),
        ({"media_spans": [("m", 0, 2)]}, "leaves the context of 1 tokens"),
        ({"media_spans": [("m", 0, 1), ("m", 0, 1)]}, "overlaps"),
    ],
)
def test_a_malformed_turn_is_refused_by_trajectory_turn_and_field(changes, expected):
    bad = dataclasses.replace(make_turn([1], [2, 3]), **changes)
    with pytest.raises(TurnError, match=rf"trajectory 'g/4', turn 0: .*{expected}"):
        rows(make_trajectory(bad, index=4, media=SPANS))


def test_turns_of_one_row_that_disagree_in_shape_are_refused():
    routed = [np.zeros((2, 1, k), np.int16) for k in (1, 2)]
    turns = [make_turn([1], [2], routed_experts=routed[0]), make_turn([1], [2], parent=0, routed_experts=routed[1])]
    with pytest.raises(TurnError, match=r"turn 1: routed_experts is int16\[.*\]; earlier turns"):
        rows(make_trajectory(*turns))
    extras = [np.zeros((1, k), np.float32) for k in (1, 2)]
    turns = [make_turn([1], [2], extras={"x": extras[0]}), make_turn([1], [2], parent=0, extras={"x": extras[1]})]
    with pytest.raises(TurnError, match=r"turn 1: extras\['x'\]"):
        rows(make_trajectory(*turns))


def test_crashes_of_agents_and_errors_of_tools_are_counted():
    answers = [{"role": "tool", "content": text} for text in ("12", "error: division by zero")]
    used = make_trajectory(make_turn([1], [2], messages=[*answers, {"role": "assistant", "content": "error: x"}]))
    crashed = make_trajectory(status="failed", failure=Failure(kind="crash", message="KeyError"))
    refused = make_trajectory(status="failed", failure=Failure(kind="engine", message="too long"))
    found = numbers(used, crashed, refused)
    assert found["rollout/crashed_fraction"] == (1.0, 3.0)
    assert found["rollout/tool_errors"] == (1, 2)
    assert "rollout/tool_errors" not in numbers(crashed)

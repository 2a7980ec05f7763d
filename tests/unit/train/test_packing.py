"""The batch plan, and how rows become a Batch."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_samples import random_groups, random_samples, trained_fields, weigh

from meshrl.core.types import Media, Sample
from meshrl.train.batch_plan import make_batch_plan, row_cost
from meshrl.train.packing import pack

LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 4000)), max_size=60)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 9), max_tokens=st.integers(1, 3000))
def test_every_plan_holds_each_row_once_within_the_budget_on_equally_busy_ranks(lengths, num_ranks, max_tokens):
    """Also with more ranks than rows, without rows, and with rows above the budget."""
    plan = make_batch_plan(lengths, num_ranks, max_tokens)
    assert len(plan.micro_batches) == num_ranks
    assert len({len(micro) for micro in plan.micro_batches}) == 1 and len(plan.micro_batches[0]) >= 1
    assert sorted(i for rank in range(num_ranks) for i in plan.rows(rank)) == list(range(len(lengths)))
    for rank in plan.micro_batches:
        for rows in rank:
            assert sum(lengths[i] for i in rows) <= max_tokens or len(rows) == 1, "only a row above the budget is alone"
    assert make_batch_plan(list(lengths), num_ranks, max_tokens) == plan


GROUPS = st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 200), min_size=1, max_size=9)), max_size=12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(groups=GROUPS, num_ranks=st.integers(1, 5), max_tokens=st.integers(1, 1500), random=st.randoms())
def test_a_plan_of_groups_counts_each_prompt_once_in_a_micro_batch(groups, num_ranks, max_tokens, random):
    """Groups of a prompt and its answers, with rows in any order."""
    rows = [(g, prompt, answer) for g, (prompt, answers) in enumerate(groups) for answer in answers]
    random.shuffle(rows)
    arguments = ([p + a for _, p, a in rows], num_ranks, max_tokens, [g for g, _, _ in rows], [p for _, p, _ in rows])
    plan = make_batch_plan(*arguments)
    assert len({len(micro) for micro in plan.micro_batches}) == 1 and len(plan.micro_batches[0]) >= 1
    assert sorted(i for rank in range(num_ranks) for i in plan.rows(rank)) == list(range(len(rows)))
    for members in (micro for rank in plan.micro_batches for micro in rank):
        prompts = {rows[i][0]: rows[i][1] for i in members}
        assert sum(prompts.values()) + sum(rows[i][2] for i in members) <= max_tokens or len(members) == 1
    assert make_batch_plan(*arguments) == plan


def test_a_group_stays_together_where_balance_allows():
    plan = make_batch_plan([110] * 8, 2, 1000, [0, 1] * 4, [100] * 8)
    assert plan.micro_batches == (((0, 2, 4, 6),), ((1, 3, 5, 7),))
    alone = make_batch_plan([110] * 4, 4, 1000, [0] * 4, [100] * 4)
    assert sorted(alone.rows(rank) for rank in range(4)) == [[0], [1], [2], [3]], "no rank is idle because of groups"


def _cost_of_rank(rows):
    """The cost of rows (length, group, prompt); a group's prompt counts once."""
    prompts = {group: prompt for _, group, prompt in rows}
    own = sum(row_cost(length) - row_cost(prompt) for length, _, prompt in rows)
    return own + sum(row_cost(prompt) for prompt in prompts.values())


@pytest.mark.parametrize(("num_ranks", "num_groups"), [(8, 16), (16, 32), (3, 2), (1, 4)])
def test_groups_of_heavy_tailed_rows_keep_every_rank_equally_busy(num_ranks, num_groups):
    """At most 1.1 times the lowest possible cost; some draws need swaps of rows."""
    for seed in (*range(20), 64):  # at 64 two long rows of different groups meet
        rng = np.random.default_rng(seed)
        groups, prompts = np.arange(num_groups).repeat(8), rng.integers(40, 170, num_groups).repeat(8)
        lengths = prompts + np.minimum(8192, np.exp(rng.normal(6, 1, len(prompts)))).astype(int) + 1
        plan = make_batch_plan(lengths.tolist(), num_ranks, 16384, groups.tolist(), prompts.tolist())
        rows = list(zip(lengths.tolist(), groups.tolist(), prompts.tolist(), strict=True))
        costs = [_cost_of_rank([rows[i] for i in plan.rows(rank)]) for rank in range(num_ranks)]
        assert max(costs) <= 1.1 * max(np.mean(costs), max(row_cost(n) for n in lengths.tolist())), seed


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "max_tokens", "want"),
    [
        ([], 2, 10, (((),), ((),))),
        ([5], 3, 10, (((0,),), ((),), ((),))),
        ([3, 3, 3], 2, 8, (((0, 2),), ((1,),))),
        ([100, 1, 1], 1, 10, (((0,), (1, 2)),)),
        ([4, 4, 4, 4], 1, 8, (((0, 2), (1, 3)),)),
        ([5, 5, 5], 1, 9, (((0,), (1,), (2,)),)),
        ([50, 5, 5, 5], 2, 10, (((0,), ()), ((1, 3), (2,)))),
    ],
    ids=["no rows", "one row", "uneven", "giant", "two packs", "three packs", "dummy"],
)
def test_small_plans(lengths, num_ranks, max_tokens, want):
    assert make_batch_plan(lengths, num_ranks, max_tokens).micro_batches == want


def test_ranks_get_equal_work_and_not_equal_rows():
    lengths = np.random.default_rng(0).integers(1, 4000, 200).tolist()
    plan = make_batch_plan(lengths, 8, 8192)
    loads = [sum(row_cost(lengths[i]) for i in plan.rows(rank)) for rank in range(8)]
    assert max(loads) < 1.01 * min(loads)
    assert len(plan.micro_batches[0]) <= 1.3 * sum(lengths) / 8 / 8192 + 1


@pytest.mark.parametrize(("group", "most"), [(512, 77), (1024, 145)])
def test_rows_of_large_groups_are_moved_to_other_ranks_without_more_micro_batches(group, most):
    """Four groups on eight ranks: several rows are moved at once. If those were the longest, two of them did not fit
    into a micro-batch, and all ranks had 78 and 151 micro-batches."""
    rng = np.random.default_rng(2)
    lengths, groups = rng.integers(64, 2049, 4 * group), np.arange(4).repeat(group)
    prompts = rng.integers(50, 400, 4 * group)[groups]
    plan = make_batch_plan((lengths + prompts).tolist(), 8, 4096, groups.tolist(), prompts.tolist())
    assert len(plan.micro_batches[0]) <= most


@pytest.mark.parametrize("num_groups", [2048, 4])
def test_the_work_for_a_plan_grows_little_faster_than_its_rows(num_groups):
    """Rows of more than half of the budget, each in a micro-batch of its own, in many small or few large groups: the
    calls of functions, not seconds, for 4 times the rows."""

    def calls(num_rows: int) -> int:
        count = 0

        def profile(_frame: object, event: str, _arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        rng = np.random.default_rng(num_rows)
        groups = (np.arange(num_rows) * num_groups // 4096).tolist()
        arguments = (rng.integers(900, 1900, num_rows).tolist(), 2, 2048, groups, [50] * num_rows)
        sys.setprofile(profile)
        try:
            plan = make_batch_plan(*arguments)
        finally:
            sys.setprofile(None)
        assert sorted(i for rank in range(2) for i in plan.rows(rank)) == list(range(num_rows))
        return count

    assert calls(4096) < 6.5 * calls(1024)


def _sample(length: int, **changes) -> Sample:
    mask = np.arange(length) >= length // 2
    mask[0] = False
    facts = dict(
        trajectory_id=f"t{length}",
        group_id="g",
        row=0,
        prefix_len=1,
        tokens=np.arange(length, dtype=np.int32) + 10 * length,
        mask=mask,
        turn=np.zeros(length, np.int16),
        rollout_logprobs=np.full(length, -1.0, np.float32),
        versions=np.zeros(length, np.int32),
        rewards=np.zeros(length, np.float32),
        temperature=length / 10,
        loss_weight=np.where(mask, 0.5, 0.0),
    )
    return Sample(**{**facts, **changes})


def test_rows_lie_end_to_end_and_each_starts_at_position_0():
    batch = pack([_sample(3), _sample(2)], [7, 4])
    assert batch.parents == [-1, -1] and batch.offsets == [0, 0]
    assert batch.previous[batch.position_ids > 0].tolist() == [0, 1, 3]
    assert batch.tokens.tolist() == [30, 31, 32, 20, 21]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.mask.tolist() == [False, True, True, False, True]
    assert (batch.scored.tolist(), batch.trained.tolist(), batch.trained_lengths) == ([1, 2, 4], [1, 2, 4], [2, 1])
    np.testing.assert_allclose(batch.temperature, [0.3, 0.3, 0.3, 0.2, 0.2], rtol=1e-6)
    assert (batch.rows, batch.is_dummy) == ([7, 4], False)
    assert batch.old_logprobs is batch.advantages is batch.routed_experts is None


def test_trained_tokens_are_in_the_mask_and_have_a_weight():
    """As torch finds them, in rows of which some have no trained token, and in continued ones."""
    samples = [*random_samples(0, [9, -7, 12]), *random_groups(1, [5, 3], [4, 6])]
    for s in weigh(samples)[::2]:
        s.loss_weight[len(s) // 2 :] = 0.0
    batch = pack(samples, range(len(samples)))
    expected = trained_fields(batch.mask, batch.loss_weight, batch.cu_seqlens.tolist())
    assert torch.equal(batch.scored, expected["scored"]) and torch.equal(batch.trained, expected["trained"])
    assert batch.trained_lengths == expected["trained_lengths"]
    assert 0 < len(batch.trained) < len(batch.scored) < batch.num_tokens and 1 < len(batch.trained_lengths) < 9


def test_a_shared_prompt_is_in_the_batch_once_and_every_answer_continues_it():
    """The example of Batch's docstring."""
    first, second = _sample(3, group_id="g"), _sample(2, group_id="g", tokens=np.array([30, 99], np.int32))
    batch = pack([first, second], [0, 1])
    assert batch.tokens.tolist() == [30, 31, 32, 99]
    assert batch.cu_seqlens.tolist() == [0, 1, 3, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 1]
    assert (batch.rows, batch.parents, batch.offsets) == ([-1, 0, 1], [-1, 0, 0], [0, 1, 1])
    assert batch.previous.tolist() == [0, 0, 1, 0]
    assert batch.mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"group_id": "other"},
        {"prefix_len": 0},
        {"tokens": np.array([7, 99], np.int32)},
        {"mask": np.array([True, True])},
    ],
    ids=["other group", "no prefix", "other prompt", "trained prompt"],
)
def test_only_rows_of_one_group_with_one_untrained_prompt_share_it(changes):
    second = _sample(2, **{"group_id": "g", "tokens": np.array([30, 99], np.int32), **changes})
    assert pack([_sample(3, group_id="g"), second], [0, 1]).parents == [-1, -1]
    assert pack([_sample(3, group_id="g"), second], [0, 1], share_prefix=False).parents == [-1, -1]


def test_weights_of_the_harness_stay_fp64_and_those_of_a_run_fp32():
    """Weights are rounded once, on the controller."""
    row = _sample(4)
    assert pack([row], [0]).loss_weight.dtype == torch.float64
    assert pack([dataclasses.replace(row, loss_weight=row.loss_weight.astype(np.float32))], [0]).loss_weight.dtype == (
        torch.float32
    )


def test_an_array_that_only_some_rows_have_is_refused():
    """Filled-in values would be trained on."""
    with pytest.raises(ValueError, match=r"t3.*no old_logprobs.*annotate all or none"):
        pack([_sample(2, old_logprobs=np.zeros(2, np.float32)), _sample(3)], [0, 1])


def test_a_dummy_is_a_batch_that_trains_nothing():
    batch = pack([], [])
    assert batch.is_dummy and batch.rows == [-1] and batch.num_tokens == int(batch.cu_seqlens[-1])
    assert not batch.mask.any() and not batch.loss_weight.any()


def test_missing_expert_choices_and_extras_are_filled():
    routed = np.ones((2, 3, 4), np.int16)
    extra = np.ones((3, 5), np.float32)
    batch = pack([_sample(2, routed_experts=routed), _sample(3, token_extras={"x": extra})], [0, 1])
    assert batch.routed_experts.shape == (5, 3, 4)
    assert (batch.routed_experts[:2] == 1).all() and (batch.routed_experts[2:] == -1).all()
    assert batch.token_extras["x"].shape == (5, 5)
    assert (batch.token_extras["x"][:2] == 0).all() and (batch.token_extras["x"][2:] == 1).all()
    with pytest.raises(ValueError, match="a model has one"):
        pack([_sample(2, routed_experts=routed), _sample(2, routed_experts=routed[:, :, :2])], [0, 1])


def test_media_are_in_the_order_of_their_spans():
    """A vision model matches pixels to spans by order, not by name."""

    def media(value: float) -> Media:
        return Media(
            kind="image", digest=str(value), source="", outputs={"pixel_values": np.full((1, 2), value)}, num_tokens=1
        )

    first = _sample(4, media={"a": media(1), "b": media(2)}, media_spans=[("a", 2, 1), ("b", 1, 1)])
    second = _sample(4, media={"c": media(3)}, media_spans=[("c", 0, 1)])
    assert pack([first, second], [0, 1]).model_kwargs["pixel_values"][:, 0].tolist() == [2, 1, 3]

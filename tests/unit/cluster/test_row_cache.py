"""Samples are sent to a rank once; later commands contain only changed fields, and the rank has the same samples."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tiny_samples import random_samples

from meshrl.cluster.row_cache import PlannedRows, RowCache, SentRows
from meshrl.train.batch_plan import make_batch_plan

LENGTHS = [12, 3, 40, 7, 9]


def test_a_rank_sees_every_field_that_was_filled_in_after_the_first_command():
    samples = random_samples(0, LENGTHS)
    plan = make_batch_plan(LENGTHS, 2, 64)
    sent, ranks = SentRows(), [RowCache(), RowCache()]
    planned = sent.add(samples, plan)

    def exchange() -> list[int]:
        messages = [pickle.dumps(message) for message in sent.messages(planned)]
        for index, (rank, message) in enumerate(zip(ranks, messages, strict=True)):
            rows = rank.take(pickle.loads(message))
            assert sorted(rows) == sorted(plan.rows(index))
            for i, row in rows.items():
                for name in ("tokens", "mask", "ref_logprobs", "advantages", "loss_weight"):
                    np.testing.assert_array_equal(getattr(row, name), getattr(samples[i], name))
        return [len(message) for message in messages]

    first = exchange()
    for sample in samples:
        sample.ref_logprobs = np.full(len(sample), -1.5, np.float32)
    samples[2].advantages = np.ones(40, np.float32)
    second = exchange()
    assert all(later < before for later, before in zip(second, first, strict=True))
    (unchanged,) = {len(message.columns) for message in sent.messages(planned)}
    assert unchanged == 0


def test_other_rows_or_a_failure_send_the_samples_in_full():
    samples = random_samples(0, LENGTHS)
    plan, sent = make_batch_plan(LENGTHS, 2, 64), SentRows()
    rows, same = sent.add(samples, plan), sent.add(samples, plan)
    sent.messages(rows)
    assert not any(message.is_new for message in sent.messages(rows))
    assert all(message.is_new for message in sent.messages(same))
    sent.forget()
    assert all(message.is_new for message in sent.messages(rows))


def test_a_rank_without_the_samples_raises_an_error():
    sent = SentRows()
    rows = sent.add(random_samples(0, LENGTHS), make_batch_plan(LENGTHS, 1, 64))
    sent.messages(rows)
    (second,) = sent.messages(rows)
    with pytest.raises(ValueError, match=r"no samples of rows 0; this rank has those of \[\]"):
        RowCache().take(second)


def test_each_update_of_a_step_sends_its_samples_once_and_a_rank_frees_them_after_it():
    """Dropped rows are freed, and those that no object of the controller refers to."""
    sent, rank, num_sent = SentRows(), RowCache(), 0
    updates = [sent.add(random_samples(seed, LENGTHS), make_batch_plan(LENGTHS, 1, 64)) for seed in range(3)]

    def command(planned: PlannedRows) -> None:
        nonlocal num_sent
        (message,) = sent.messages(planned)
        num_sent += message.is_new
        rows = rank.take(pickle.loads(pickle.dumps(message)))
        assert [rows[i].tokens.tolist() for i in range(len(LENGTHS))] == [s.tokens.tolist() for s in planned.samples]

    for update in updates:
        command(update)  # logprobs before the first optimizer step
    del update
    command(updates[0])
    assert (num_sent, len(rank._samples)) == (3, 3)
    sent.drop(updates[0])
    del updates[1]  # it has nothing to train
    command(updates[1])
    assert (num_sent, len(rank._samples)) == (3, 1)

"""A rank gets its rows with each command, with all fields as the controller has them."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
from tiny_samples import random_samples

from meshrl.cluster.rows import PlannedRows
from meshrl.core.types import Sample
from meshrl.train.batch_plan import make_batch_plan

LENGTHS = [12, 3, 40, 7, 9]


def test_a_rank_sees_every_field_that_was_filled_in_before_a_command():
    samples = random_samples(0, LENGTHS)
    planned = PlannedRows(samples=samples, batch_plan=make_batch_plan(LENGTHS, 2, 64))

    def exchange() -> None:
        seen = dict[int, Sample]()
        for index in range(2):
            message = pickle.loads(pickle.dumps(planned.message(index)))
            assert message.micro_batches == planned.batch_plan.micro_batches[index]
            rows = message.samples()
            assert list(rows) == planned.batch_plan.rows(index)
            seen |= rows
        assert sorted(seen) == list(range(len(LENGTHS)))
        for i, sample in enumerate(samples):
            for field in dataclasses.fields(Sample):
                np.testing.assert_equal(getattr(seen[i], field.name), getattr(sample, field.name))

    for sample in samples:
        sample.ref_logprobs = None
    exchange()
    for sample in samples:
        sample.ref_logprobs = np.full(len(sample), -1.5, np.float32)
    samples[2].advantages = None  # a column of arrays and other values
    samples[2].token_extras = {"depth": np.ones((40, 2), np.int16)}
    exchange()

"""A program that asks a model by HTTP trains as single_turn does, under each schedule."""

from __future__ import annotations

import sys

import pytest
from run_contents import assert_equal_tensors, weights
from tiny_run import steps_of, train, write_run

ENDPOINT = "agent.kind=endpoint"
INLINE = ("cluster.executor=inline", "loop.save_every_steps=2")
APART = ("cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1", "loop.save_every_steps=2")


def args(text):
    return f"agent.args={{{text}}}"


def test_the_weights_are_those_of_single_turn_to_the_bit(tmp_path):
    config = write_run(tmp_path)
    plain = train(config, "plain", *INLINE)
    served = train(config, "served", *INLINE, ENDPOINT, args("function: endpoint_programs:streamed"))
    assert_equal_tensors(weights(served, 2), weights(plain, 2))
    assert steps_of(served) == steps_of(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["function: endpoint_programs:by_tokens", "function: endpoint_programs:blocking", "command"]
)
def test_other_programs_too(program, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    config = write_run(tmp_path)
    program = f"command: [{sys.executable}, -m, endpoint_programs]" if program == "command" else program
    plain = train(config, "plain", *INLINE)
    served = train(config, "served", *INLINE, ENDPOINT, args(program))
    assert_equal_tensors(weights(served, 2), weights(plain, 2))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_step_off", "fully_async"])
def test_the_other_schedules_train_it(schedule, tmp_path):
    config = write_run(tmp_path)
    layout = (*APART, f"loop.kind={schedule}", "loop.max_staleness=1")
    served = train(config, "served", *layout, ENDPOINT, args("function: endpoint_programs:chat"))
    assert len(steps_of(served)) == 2
    if schedule == "one_step_off":
        plain = train(config, "plain", *layout)
        assert_equal_tensors(weights(served, 2), weights(plain, 2))

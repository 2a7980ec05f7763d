"""The phase of a rank's command, and its deadline."""

from __future__ import annotations

import inspect

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import phase_of
from meshrl.cluster.processes import serve_recorder
from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.monitor.recorder import Spans


def test_every_command_of_a_rank_has_a_phase_and_every_phase_a_deadline():
    methods = inspect.getmembers(RankWorker, inspect.isfunction)
    phases = {name: phase_of(method) for name, method in methods if not name.startswith("_")}
    assert {*phases.values(), phase_of(serve_recorder), "eval", "reward"} == Deadlines.model_fields.keys(), phases


def test_what_is_sampled_for_an_evaluation_is_in_its_phase():
    spans = Spans()
    assert phase_of(RankWorker.generate) == "rollout"
    with spans("eval"):
        assert phase_of(RankWorker.generate) == "eval" and phase_of(RankWorker.forward) == "annotate"


def test_a_phase_has_its_own_deadline_or_the_common_one():
    cluster = ClusterConfig(timeout_s=50, deadlines=Deadlines(rollout=7.5))
    assert (cluster.deadline_s("rollout"), cluster.deadline_s("train")) == (7.5, 50)

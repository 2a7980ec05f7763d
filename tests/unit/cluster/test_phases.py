"""Which phase a rank's command belongs to, and its deadline (P26)."""

from __future__ import annotations

import inspect

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.phases import PHASE_OF, phase_of
from meshrl.config.cluster import ClusterConfig, Deadlines
from meshrl.monitor.spans import Spans


def test_every_command_of_a_rank_has_a_phase_and_every_phase_a_deadline():
    commands = {name for name, _ in inspect.getmembers(RankWorker, inspect.isfunction) if not name.startswith("_")}
    assert commands == PHASE_OF.keys() - {"came_up"}
    assert set(PHASE_OF.values()) | {"eval", "reward"} == Deadlines.model_fields.keys()


def test_what_is_sampled_for_an_evaluation_is_in_its_phase():
    spans = Spans()
    assert phase_of(RankWorker.generate) == "rollout"
    with spans("eval"):
        assert phase_of(RankWorker.generate) == "eval" and phase_of(RankWorker.forward) == "annotate"


def test_a_phase_has_its_own_deadline_or_the_common_one():
    cluster = ClusterConfig(timeout_s=50, deadlines=Deadlines(rollout=7.5))
    assert (cluster.deadline_s("rollout"), cluster.deadline_s("train")) == (7.5, 50)

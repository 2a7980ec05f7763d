"""Where the time goes in traces that are made by hand: each planted delay is the first cause."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.schema import all_keys, locate
from meshrl.config.values import scalar
from meshrl.core.errors import MeshrlError
from meshrl.tools.diagnose.diagnosis import CAUSES, Diagnosis, diagnose, open_parts
from meshrl.tools.diagnose.read import read_trace
from tests.traces import PHASES, Piece, healthy, write_trace


def moved(pieces: list[Piece], after: float, by: float) -> list[Piece]:
    """The pieces with those that start at `after` or later moved by milliseconds; a phase around it becomes longer."""
    return [
        (c, n, a + by * (a >= after), b + by * (b > after if c in ("phase", "controller") else a >= after))
        for c, n, a, b in pieces
    ]


def diagnosis(run: Path, step: dict[int, list[Piece]], num_steps: int = 4, **options) -> Diagnosis:
    return diagnose(read_trace(write_trace(run, [step] * num_steps, **options)))


def delayed(at: float, by: float) -> dict:
    return {"phases": moved(PHASES, at, by), "length_ms": 100 + by}


def slow_rank(num_ranks: int, kind: str) -> tuple[dict[int, list[Piece]], dict]:
    """Rank 1 takes 80 ms longer before its reduce-scatter, in which the others wait for it."""
    later = moved(healthy(), 77, 80)
    waits = [(c, n, 77 if n == "reduce_scatter" else a, b) for c, n, a, b in later]
    return {
        r: later + [("op", "aten::mm", 77, 157)] * (kind == "compute") if r == 1 else waits for r in range(num_ranks)
    }, delayed(77, 80)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["compute", "host"])
def test_a_slow_rank_is_the_first_cause(tmp_path, num_ranks, kind):
    step, longer = slow_rank(num_ranks, kind)
    found = diagnosis(tmp_path / "run", step, **longer)
    first = found.costs[0]
    assert (first.cause, first.rank) == ("slow_rank", 1), found.costs
    assert first.seconds == pytest.approx(0.080, rel=0.02)
    assert {"compute": "computation", "host": "runs no operation"}[kind] in first.detail
    (named,) = [one for one in found.stragglers if one.is_named]
    assert (named.phase, named.rank, named.late_s) == ("train", 1, pytest.approx(0.080, abs=1e-4))


def test_many_collectives_within_the_error_of_the_clocks_name_no_rank(tmp_path):
    """Rank 1 arrives 0.04 ms later in each of 300 collectives, which is twice the error of a clock in these traces."""
    many = [piece for i in range(300) for piece in (("collective", "all_gather", 41 + i / 10, 41.08 + i / 10),)]
    rest = [piece for piece in healthy() if piece[0] != "collective"]
    steps = {0: rest + many, 1: rest + [(c, n, a + 0.04, b) for c, n, a, b in many]}
    found = diagnosis(tmp_path / "run", steps)
    assert [one.is_named for one in found.stragglers if one.phase == "train"] == [False]
    later = {0: rest + many, 1: rest + [(c, n, a + 0.078, b) for c, n, a, b in many]}
    found = diagnosis(tmp_path / "later", later)
    (named,) = [one for one in found.stragglers if one.is_named]
    assert (named.rank, named.late_s) == (1, pytest.approx(300 * 38e-6, rel=0.01))


def test_a_slow_rank_is_compared_with_the_ranks_that_wait_for_it(tmp_path):
    """Two of four ranks only sample: they have no computation, which is no measure for that of a train rank."""
    later = moved(healthy()[1:], 77, 20)
    waits = [(c, n, 77 if n == "reduce_scatter" else a, b) for c, n, a, b in later]
    sampler = [("phase", "rollout", 0, 30)]
    roles = {0: (True, False), 1: (True, False), 2: (False, True), 3: (False, True)}
    found = diagnosis(tmp_path / "run", {0: waits, 1: later, 2: sampler, 3: sampler}, roles=roles, **delayed(77, 20))
    (cost,) = [one for one in found.costs if one.rank is not None]
    assert (cost.cause, cost.rank) == ("slow_rank", 1) and "runs no operation" in cost.detail
    assert cost.seconds == pytest.approx((0.020 + 0.020) / 4, rel=0.02)  # its own time and that of the one that waits


def test_a_slow_train_rank_is_named_while_samplers_sample_the_next_answers(tmp_path):
    """As with loop.kind one_step_off and fully_async: the controller's rollout goes on during the training."""
    step, longer = slow_rank(2, "compute")
    phases = [("controller", "rollout", 0, 180), *(piece for piece in longer["phases"] if piece[1] != "rollout")]
    trainers = {rank: [piece for piece in pieces if piece[1] != "rollout"] for rank, pieces in step.items()}
    roles = {0: (True, False), 1: (True, False), 2: (False, True)}
    steps = trainers | {2: [("phase", "rollout", 0, 170)]}
    facts = {"schedule": "fully_async"}
    found = diagnosis(tmp_path / "run", steps, roles=roles, facts=facts, phases=phases, length_ms=180)
    (named,) = [one for one in found.stragglers if one.is_named]
    assert (named.phase, named.rank) == ("train", 1)
    (cost,) = [one for one in found.costs if one.rank is not None]
    assert (cost.cause, cost.rank, cost.seconds) == ("slow_rank", 1, pytest.approx(0.160 / 3, rel=0.02))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_slow_link_is_the_first_cause(tmp_path, num_ranks):
    later = [(c, n, a, b + 80 * (n == "reduce_scatter")) for c, n, a, b in moved(healthy(), 79, 80)]
    found = diagnosis(tmp_path / "run", dict.fromkeys(range(num_ranks), later), **delayed(79, 80))
    assert (found.costs[0].cause, found.costs[0].rank) == ("communication", None)
    assert found.costs[0].seconds == pytest.approx(0.084, rel=0.02)
    (slow,) = [one for one in found.collectives if one.name == "reduce_scatter"]
    assert slow.gb_per_s == pytest.approx(4e6 / 0.082 / 1e9)
    assert slow.wait_s == 0 and slow.num == 1


def test_the_slow_link_of_one_rank_is_named(tmp_path):
    """The all-gather of rank 1 ends 60 ms later, so the others wait for it in the reduce-scatter."""
    slow = [(c, n, a, b + 60 * (n == "all_gather")) for c, n, a, b in moved(healthy(), 60, 60)]
    others = [
        (c, n, a - 60 * (n == "mm" or (n == "reduce_scatter" and c == "collective")), b)
        for c, n, a, b in moved(healthy(), 77, 60)
    ]
    others = [(c, n, 77 if n == "reduce_scatter" else a, b) for c, n, a, b in others]
    found = diagnosis(tmp_path / "run", {0: others, 1: slow}, **delayed(60, 60))
    assert (found.costs[0].cause, found.costs[0].rank) == ("communication", 1), found.costs
    assert found.costs[0].title == "a slow link: the others wait for rank 1"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_host_stall_of_all_ranks_is_the_first_cause(tmp_path, num_ranks):
    step = dict.fromkeys(range(num_ranks), moved(healthy(), 60, 80))
    found = diagnosis(tmp_path / "run", step, **delayed(60, 80))
    assert found.costs[0].cause == "host"
    assert "the longest is 80 ms in rank 0, between aten::mm and aten::mm_backward" in found.costs[0].detail
    assert not any(one.is_named for one in found.stragglers)
    assert found.gaps[0].end_ns - found.gaps[0].start_ns == 80_000_000


def test_a_large_copy_in_the_sync_is_the_first_cause(tmp_path):
    found = diagnosis(tmp_path / "run", {0: moved(healthy(), 90, 80), 1: moved(healthy(), 90, 80)}, **delayed(90, 80))
    assert found.costs[0].cause == "sync"
    assert found.costs[0].detail == "8 MB; longest stage: load 4 ms; longest copies: send 5 ms in rank 1"


def test_a_slow_grader_is_the_first_cause(tmp_path):
    found = diagnosis(tmp_path / "run", {0: moved(healthy(), 35, 80), 1: moved(healthy(), 35, 80)}, **delayed(35, 80))
    assert found.costs[0].cause == "reward"
    assert found.costs[0].seconds == pytest.approx(0.085)


def test_a_large_copy_outside_the_sync_has_its_own_cause(tmp_path):
    later = [*moved(healthy(), 79, 80), ("copy", "stage the state", 79, 159)]
    found = diagnosis(tmp_path / "run", {0: later, 1: later}, **delayed(79, 80))
    assert found.costs[0].cause == "copy"


def test_long_answers_of_one_rank_leave_the_others_idle(tmp_path):
    found = diagnosis(tmp_path / "run", {0: moved(healthy(), 30, 80), 1: moved(healthy(), 29, 80)}, **delayed(29, 80))
    assert found.costs[0].cause == "slow_rank" and found.costs[0].rank == 1
    assert "the sampling of its answers" in found.costs[0].detail
    alternating = [{0: moved(healthy(), 30 - i % 2, 80), 1: moved(healthy(), 29 + i % 2, 80)} for i in range(4)]
    found = diagnose(read_trace(write_trace(tmp_path / "b", alternating, **delayed(29, 80))))
    assert not any(one.is_named for one in found.stragglers)
    assert next(c for c in found.costs if c.cause == "imbalance").seconds == pytest.approx(0.040)


@pytest.mark.parametrize(("idle_rank", "cause"), [(0, "idle_trainers"), (1, "idle_samplers")])
def test_bubbles_of_a_schedule_with_ranks_of_its_own(tmp_path, idle_rank, cause):
    trains = [piece for piece in healthy() if piece[1] != "rollout"]
    samples: list[Piece] = [("phase", "rollout", 0, 90)]
    if cause == "idle_samplers":
        trains, samples = moved(trains, 60, 200), [("phase", "rollout", 0, 20)]
        trains.append(("op", "aten::mm", 60, 260))
    options = delayed(60, 200) if cause == "idle_samplers" else {}
    roles = {0: (True, False), 1: (False, True)}
    found = diagnosis(
        tmp_path / "run", {0: trains, 1: samples}, roles=roles, facts={"schedule": "fully_async"}, **options
    )
    assert cause in [c.cause for c in found.costs[:2]], found.costs
    assert not any(one.is_named for one in found.stragglers)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("profiled", [True, False])
def test_without_a_delay_no_rank_is_named(tmp_path, num_ranks, profiled):
    found = diagnosis(tmp_path / "run", {r: healthy() for r in range(num_ranks)}, profiled=profiled)
    assert not any(one.is_named for one in found.stragglers)
    assert {c.rank for c in found.costs} == {None}
    assert found.costs[0].cause == "compute"


def test_ranks_that_are_late_in_turn_are_not_stragglers(tmp_path):
    def late(rank: int, step: int) -> list[Piece]:
        own = moved(healthy(), 77, 30)
        return own if rank == step % 2 else [(c, n, 77 if n == "reduce_scatter" else a, b) for c, n, a, b in own]

    steps = [{rank: late(rank, step) for rank in (0, 1)} for step in range(6)]
    found = diagnose(read_trace(write_trace(tmp_path, steps, **delayed(77, 30))))
    assert not any(one.is_named for one in found.stragglers)
    assert next(c for c in found.costs if c.cause == "wait").seconds == pytest.approx(0.015, rel=0.02)


@pytest.mark.parametrize(("late_steps", "is_named"), [((0, 1, 2, 3), True), ((0, 1, 2), False)])
def test_a_straggler_is_late_in_nearly_every_step(tmp_path, late_steps, is_named):
    """A rank that is late in three of four steps may be so by chance."""
    step, longer = slow_rank(2, "compute")
    steps = [step if i in late_steps else {0: healthy(), 1: healthy()} for i in range(4)]
    found = diagnose(read_trace(write_trace(tmp_path, steps, **longer)))
    assert [one.is_named for one in found.stragglers if one.phase == "train"] == [is_named]
    assert found.costs[0].cause == ("slow_rank" if is_named else "compute")


def test_an_evaluation_between_steps_is_no_part_of_their_work(tmp_path):
    step = [*healthy(), ("phase", "eval", 95, 165)]
    found = diagnosis(tmp_path / "run", {0: step}, phases=[*PHASES, ("controller", "eval", 95, 165)], length_ms=170)
    assert found.step_s == pytest.approx(0.100)
    assert next(c for c in found.costs if c.cause == "sampling").seconds == pytest.approx(0.030)
    assert "eval" not in {t.phase for t in found.phases}


@pytest.mark.parametrize("num_steps", [1, 4])
def test_costs_add_up_to_the_step_and_kinds_to_the_phase(tmp_path, num_steps):
    step, longer = slow_rank(4, "host")
    found = diagnosis(tmp_path / "run", step, num_steps, **longer)
    assert sum(c.seconds for c in found.costs) == pytest.approx(found.step_s)
    assert sum(c.share for c in found.costs) == pytest.approx(1)
    assert found.step_s == pytest.approx(0.180)
    for t in found.phases:
        assert t.compute + t.exposed + t.copy + t.host + t.idle == pytest.approx(t.wall)
    train = next(t for t in found.phases if (t.rank, t.phase) == (1, "train"))
    assert train.wall == pytest.approx(0.124) and train.exposed == pytest.approx(0.004)


def test_clocks_of_ranks_are_aligned(tmp_path):
    step, longer = slow_rank(2, "compute")
    plain = diagnosis(tmp_path / "a", step, **longer)
    shifted = diagnosis(tmp_path / "b", step, offsets_ms={1: 3_600_000.0}, **longer)
    assert [(c.cause, c.rank) for c in shifted.costs] == [(c.cause, c.rank) for c in plain.costs]
    assert [c.seconds for c in shifted.costs] == pytest.approx([c.seconds for c in plain.costs])
    assert "error at most 0.020 ms" in shifted.trace.clock


def test_a_gap_is_named_by_the_operations_of_a_rank_with_another_clock(tmp_path):
    step = {0: healthy(), 1: moved(healthy(), 60, 80)}
    found = diagnosis(tmp_path / "run", step, offsets_ms={1: -700.0}, **delayed(60, 80))
    assert (found.gaps[0].rank, found.gaps[0].where) == (1, "between aten::mm and aten::mm_backward")


def test_the_slow_down_of_the_profiler(tmp_path):
    found = diagnosis(tmp_path / "run", {0: healthy()}, untraced_ms=(500, 80))
    assert found.slow_down == pytest.approx(100 / 80)
    assert [step.step for step in found.trace.steps] == [3, 4, 5, 6]
    assert diagnosis(tmp_path / "b", {0: healthy()}).slow_down is None


def test_computation_over_communication(tmp_path):
    found = diagnosis(tmp_path / "run", {0: healthy(), 1: healthy()})
    assert found.ratio == pytest.approx((44 - 4) / 4)  # 44 ms of the phase, 4 ms of collectives
    without_profile = diagnosis(tmp_path / "b", {0: healthy(), 1: healthy()}, profiled=False)
    assert without_profile.ratio == pytest.approx(10)


def test_the_peak_of_memory_is_explained(tmp_path):
    found = diagnosis(tmp_path / "run", {0: healthy()})
    (peak,) = found.memory
    assert (peak.rank, peak.phase, peak.peak) == (0, "train", 1000)
    assert peak.parts == {"params": 100, "grads": 50, "optimizer": 200, "buffers": 1, "other": 649}


def keys_in(text: str) -> list[str]:
    sections = set(RunConfig.model_fields) | set(SftRunConfig.model_fields)
    return [w for w in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", text) if w.split(".")[0] in sections]


@pytest.mark.parametrize(("program", "config"), [("train", RunConfig), ("sft", SftRunConfig)])
def test_every_key_that_a_change_names_exists(program, config):
    keys = all_keys(config)
    for cause, texts in CAUSES.items():
        if program in texts:
            named = keys_in(texts[program])
            assert named, cause
            for key in named:
                known, rest = locate(keys, key)
                assert known is not None and not rest, (cause, key)


def test_what_to_change_fits_the_program_that_made_the_trace(tmp_path):
    """Delays of every kind that a program without sampling can have."""
    step = [piece for piece in healthy() if piece[1] not in ("rollout", "sync")]
    waits, longer = slow_rank(2, "host")
    trains = {r: [p for p in pieces if p[1] not in ("rollout", "sync")] for r, pieces in waits.items()}
    facts = {"kind": "sft"}
    options = {"facts": facts, "phases": [("controller", "train", 38, 80)]}
    slow = diagnosis(tmp_path / "a", trains, facts=facts, **longer | {"phases": [("controller", "train", 38, 160)]})
    late = [(c, n, a + 0.5 * (n == "reduce_scatter"), b) for c, n, a, b in step]
    found = diagnosis(tmp_path / "b", {0: step, 1: late}, **options)
    shown = {cost.cause: cost.change for cost in [*slow.costs, *found.costs]}
    assert set(shown) == {"compute", "communication", "wait", "copy", "host", "slow_rank", "controller"}
    assert shown == {cause: CAUSES[cause]["sft"] for cause in shown}
    named = [key for text in shown.values() for key in keys_in(text)]
    assert named
    assert not any(key.startswith(("rollout.", "loop.", "algo.", "reward.", "agent.")) for key in named)


ALL_SET = {
    "loop.kind": "fully_async",
    "rollout.sync_mode": "delta",
    "rollout.sync_transport": "broadcast",
    "model.lora.enabled": True,
    "train.activation_checkpointing": False,
    "model.dtype": "float16",
    "algo.kl.coef": 0.0,
    "monitor.rollout_log_every_steps": 0,
    "monitor.sinks": "[]",
    "cluster.num_train_ranks": 1,
    "loop.save_every_steps": None,
    "sft.save_every_steps": 0,
    "rollout.max_running_requests": "all",
}
REMAINS = {
    "sampling": "Lower rollout.sampling.max_new_tokens if few answers are so long; raise cluster.num_rollout_ranks",
    "sync": "Raise rollout.sync_bucket_bytes if memory allows",
    "compute": "More ranks by cluster.num_train_ranks",
    "copy": "Raise train.max_tokens_per_microbatch",
    "reward": "Raise reward.num_workers; lower reward.timeout_s; make the function of reward.terms faster",
    "imbalance": "Lower rollout.sampling.max_new_tokens; raise loop.prompts_per_step",
    "idle_trainers": "Raise cluster.num_rollout_ranks (meshrl plan predicts the best split); raise loop.max_staleness",
    "controller": "The controller prepares the step: look at run_notes.txt for a slow disk; make agent.kind or on_step "
    "faster",
}


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("program", ["train", "sft"])
def test_no_advice_names_what_is_set_already(program, strategy):
    """Each part of a text is left out when its values are set, and something is left of every text."""
    for cause, texts in CAUSES.items():
        if program not in texts:
            continue
        shown = open_parts(texts[program], ALL_SET | {"train.sharding_strategy": strategy})
        advised = {key: scalar(value) for key, value in re.findall(r"([a-z_]+(?:\.[a-z_]+)+)=(\w+)", shown)}
        assert advised.keys() <= {"train.sharding_strategy"} and strategy not in advised.values(), cause
        assert strategy != "NO_SHARD" or "SHARD_GRAD_OP" not in shown
        assert shown and (program == "sft" or shown == REMAINS.get(cause, shown)), cause
        assert open_parts(texts[program], {}) == texts[program]
        for part in texts[program].split("; "):  # with a config that has none of the values
            needs = "(loop.kind: fully_async)" in part
            assert (part[1:] in open_parts(texts[program], {"loop.kind": "colocated"})) is not needs, part


def test_what_to_change_depends_on_the_config_of_the_run(tmp_path):
    """Read next to the traces, or from their folder; no other file of the run is needed. A damaged one is noted."""
    pieces, trace = {0: healthy(), 1: healthy()}, tmp_path / "traces"
    before = {cost.cause: cost.change for cost in diagnosis(tmp_path, pieces).costs}
    lines = [
        *("train:", "  activation_checkpointing: false  # a.yaml:1", "model:", "  dtype: bfloat16  # default"),
        *("algo:", "  kl:", "    coef: 0.0  # default", "rollout:", "  max_running_requests: 64  # default"),
        *("loop:", "  prompts_per_step: 8  # a.yaml:2", "  samples_per_prompt: 8  # default"),
    ]
    for path in (tmp_path / "config.yaml", trace / "config.yaml"):
        path.write_text("\n".join(lines) + "\n")
        found = diagnose(read_trace(tmp_path))
        after = {cost.cause: cost.change for cost in found.costs}
        assert before["compute"] != after["compute"] == "More ranks by cluster.num_train_ranks"
        assert "max_running_requests" in before["sampling"] and "max_running_requests" not in after["sampling"]
        assert not any("config" in note for note in found.trace.notes)
        path.unlink()
    (tmp_path / "config.yaml").write_bytes(b"\xff")
    assert any("config.yaml" in note for note in diagnose(read_trace(tmp_path)).trace.notes)


def test_titles_of_the_timeline_name_no_rank_and_no_chance():
    """The legend shows them also if a slow rank is the first cause."""
    assert CAUSES["wait"]["title"] == "ranks wait for each other in collectives"


def test_waits_have_a_detail_only_if_no_rank_is_named(tmp_path):
    step, longer = slow_rank(2, "compute")
    step[0] = [(c, n, a - 5 * (n == "all_gather"), b) for c, n, a, b in step[0]]  # rank 0 waits there, too
    named = diagnosis(tmp_path / "a", step, **longer)
    detail = "no rank is the late one in nearly all steps"
    assert detail not in [cost.detail for cost in named.costs]
    unnamed = diagnosis(tmp_path / "b", step, num_steps=2, **longer)
    (cost,) = [cost for cost in unnamed.costs if cost.cause == "wait"]
    assert cost.detail == detail


@pytest.mark.parametrize("num_steps", [1, 3])
def test_three_steps_are_too_few_to_name_a_slow_rank(tmp_path, num_steps):
    """One of two healthy ranks is the later one in all of three steps with a probability of one quarter."""
    step, longer = slow_rank(2, "compute")
    found = diagnosis(tmp_path, step, num_steps, **longer)
    assert not any(one.is_named for one in found.stragglers) and {cost.rank for cost in found.costs} == {None}


def test_a_rank_that_is_late_between_the_steps_is_not_named(tmp_path):
    """Such as rank 0, which writes the model before the others go on."""
    save = [("phase", "save", 95, 165)]
    late, waits = [*save, ("collective", "barrier", 160, 161)], [*save, ("collective", "barrier", 96, 161)]
    phases = [*PHASES, ("controller", "save", 95, 165)]
    steps = {0: [*healthy(), *late], 1: [*healthy(), *waits]}
    found = diagnosis(tmp_path, steps, phases=phases, length_ms=170)
    assert not any(one.is_named for one in found.stragglers)


def test_ranks_that_are_slow_in_two_phases_do_not_cost_more_than_the_step(tmp_path):
    step = [("phase", "report", 0, 40), ("phase", "train", 40, 80)]
    slow = [*step, ("op", "aten::mm", 0, 79), ("collective", "a", 38, 39), ("collective", "b", 78, 79)]
    waits = [*step, ("collective", "a", 2, 39), ("collective", "b", 41, 79)]
    phases = [("controller", "report", 0, 40), ("controller", "train", 40, 80)]
    found = diagnosis(tmp_path, {0: slow, 1: waits}, phases=phases, length_ms=80)
    assert [one.is_named for one in found.stragglers] == [True, True]
    assert sum(cost.seconds for cost in found.costs) == pytest.approx(found.step_s)


def test_steps_without_time_are_an_error(tmp_path):
    with pytest.raises(MeshrlError, match=r"traces: its steps have a length of 0 s"):
        diagnosis(tmp_path, {0: healthy()}, length_ms=0)


def test_the_table_of_causes_is_plain_json():
    text = (Path(__file__).parents[3] / "meshrl/tools/diagnose/causes.json").read_text()
    assert json.loads(text) == CAUSES

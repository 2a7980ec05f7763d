"""The contract of all schedules: max_staleness 0 is colocated to the bit, and each prompt is trained once."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_contents import assert_equal_tensors, prompt_counts, sampled_turns, weights
from tiny_run import steps_of, train, write_run

import meshrl
from meshrl.agent.loop import AgentContext, start_trajectory, take_turn
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import phase
from meshrl.core.errors import SamplerMismatchError
from meshrl.core.types import Generate, Prompt, Trajectory
from meshrl.monitor.recorder import CONTROLLER, PROFILE_FILE, SPANS_FILE, read_controller, read_rank
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import TerminalSink
from meshrl.sync.transaction import SyncOrder

pytestmark = pytest.mark.timeout(240)
KINDS = ("one_step_off", "fully_async")
NUM_STEPS, PER_STEP = 4, 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("loops"))
    values = json.loads(path.read_text())
    values["data"]["eval_path"] = "held_out.jsonl"
    values["loop"] |= {"num_steps": NUM_STEPS, "samples_per_prompt": 2, "eval_every_steps": 2}
    (path.parent / "held_out.jsonl").write_text('{"question": "1+2", "answer": "3"}\n')
    path.write_text(json.dumps(values))
    return path


RANKS = {
    "inline": ("cluster.executor=inline",),
    "processes": ("cluster.executor=processes", "cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1"),
}


@pytest.fixture(scope="module")
def colocated(config: Path) -> dict[str, Path]:
    """One of them is profiled, and must equal the runs that are not."""
    profiled = {"processes": ["monitor.trace_steps=1"]}
    return {name: train(config, f"colocated_{name}", *ranks, *profiled.get(name, [])) for name, ranks in RANKS.items()}


def staleness(folder: Path, step: int) -> list[int]:
    """By how many versions the oldest token of each answer of step + 1 is older than the trainer's weights."""
    records = read_rollouts(folder / "rollouts" / f"step_{step + 1:06d}.jsonl")
    return [step - min(int(turn.versions.min()) for turn in r.trajectory.turns) for r in records]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_with_staleness_0_every_schedule_is_colocated_to_the_bit(config, colocated, kind, ranks):
    folder = train(config, f"{kind}_0_{ranks}", *RANKS[ranks], f"loop.kind={kind}", "loop.max_staleness=0")
    expected = colocated[ranks]
    assert_equal_tensors(weights(folder, NUM_STEPS), weights(expected, NUM_STEPS))
    assert sampled_turns(folder) == sampled_turns(expected)
    for ours, theirs in zip(steps_of(folder), steps_of(expected), strict=True):
        same = {n for n in theirs if n.startswith(("loss/", "reward/", "eval/", "train/", "proof/logprob"))}
        assert repr({n: ours[n] for n in same}) == repr({n: theirs[n] for n in same})


def test_train_and_sampler_ranks_leave_a_trace(colocated):
    folder = colocated["processes"] / "traces"
    trace = read_controller(folder / CONTROLLER)
    assert [(s.step, s.traced) for s in trace.steps] == [(1, False), (2, False), (3, True)]
    assert trace.steps[-1].sync["num_bytes"] > 0
    assert {(r, f.trains, f.samples) for r, f in trace.ranks.items()} == {(0, True, False), (1, False, True)}
    names = {p.name for p in trace.phases}
    assert {"rollout", "reward", "train", "sync", "eval", "trace"} <= names
    trainer, sampler = (read_rank(folder / SPANS_FILE.format(rank)) for rank in (0, 1))
    phases = {rank.rank: {s.name for s in rank.spans if s.category == "phase"} for rank in (trainer, sampler)}
    assert {"train", "optim", "sync"} <= phases[0] and {"rollout", "sync"} <= phases[1]
    assert {s.name for s in trainer.spans} >= {"forward", "backward", "clip", "optimizer", "pack", "fill"}
    assert {s.name for s in sampler.spans} >= {"get", "load"}
    assert {"params", "grads", "optimizer", "buffers", "resident_bytes"} <= trainer.memory[0].parts.keys()
    first, last = trace.steps[-1].start_ns, trace.steps[-1].end_ns
    assert all(first <= trace.ranks[0].to_controller(s.start_ns) <= last for s in trainer.spans)
    for rank in (0, 1):
        assert b'"traceEvents"' in gzip.decompress((folder / PROFILE_FILE.format(rank)).read_bytes())


@pytest.mark.parametrize(("kind", "most"), [("one_step_off", 1), ("fully_async", 1), ("fully_async", 3)])
def test_each_prompt_is_trained_once_and_no_sample_is_too_old(config, colocated, kind, most):
    options = (f"loop.kind={kind}", f"loop.max_staleness={most}", "algo.correction=off")
    folder = train(config, f"{kind}_{most}", *RANKS["processes"], *options)
    counts = prompt_counts(folder)
    assert [sum(step.values()) for step in counts] == [2 * PER_STEP] * NUM_STEPS
    assert sum(counts, start=type(counts[0])()) == dict.fromkeys(range(NUM_STEPS * PER_STEP), 2)
    ages = [staleness(folder, step) for step in range(NUM_STEPS)]
    assert max(map(max, ages)) <= most and min(map(min, ages)) >= 0
    if kind == "one_step_off":
        assert ages == [[0] * 8, *([[1] * 8] * (NUM_STEPS - 1))]
    else:
        assert max(map(max, ages)) > 0
    first, expected = (
        next(s["loss/policy"] for s in steps_of(f) if "loss/policy" in s) for f in (folder, colocated["processes"])
    )
    assert first == expected


@pytest.mark.parametrize("kind", ["colocated", *KINDS])
def test_a_step_replaces_groups_of_equal_rewards_and_logs_all_answers(config, kind):
    """It trains on as many groups as without them, and samples no prompt twice."""
    options = (f"loop.kind={kind}", "loop.max_replaced_groups=8", "loop.num_steps=2", "loop.eval_every_steps=0")
    term = "reward.terms={ascii: {kind: 'tiny_run:differs_for_some'}}"
    folder = train(config, f"replaced_{kind}", *RANKS["inline"], *options, term)
    ordinals, num_replaced = [], 0
    for number, step in enumerate((s for s in steps_of(folder) if "loss/policy" in s), start=1):
        rewards: dict[int, list[float | None]] = {}
        for record in read_rollouts(folder / "rollouts" / f"step_{number:06d}.jsonl"):
            rewards.setdefault(record.trajectory.prompt.ordinal, []).append(record.trajectory.reward)
        assert all(len(values) == 2 for values in rewards.values())
        assert len(rewards) == PER_STEP + step["rollout/groups_replaced"]
        assert sum(len({*values}) > 1 for values in rewards.values()) == PER_STEP
        assert step["reward/mean"] == pytest.approx(np.mean([*rewards.values()]))
        num_replaced += int(step["rollout/groups_replaced"])
        ordinals += rewards
    assert num_replaced > 0 and len(ordinals) == len({*ordinals})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_ended_early_continues_with_the_next_prompts(config, kind):
    """Prompts that were sampled ahead, and not trained, are sampled again; no other prompt is."""
    values = json.loads(config.read_text())
    values["loop"] |= {"kind": kind, "num_steps": 6, "prompts_per_step": 2, "eval_every_steps": 0}
    values["cluster"] = {"num_train_ranks": 1, "num_rollout_ranks": 1}
    values["model"]["path"] = str(config.parent / "model")
    values["data"] |= {"path": str(config.parent / "rows.jsonl"), "eval_path": None}
    values["run"] |= {"name": f"early_{kind}", "resume": "auto"}
    folder = meshrl.train(values, on_step=lambda step, metrics: step < 3, quiet=True).folder
    assert len(prompt_counts(folder)) == 3
    meshrl.train(values, quiet=True)
    counts = prompt_counts(folder)
    assert [sum(step.values()) for step in counts] == [4] * 6
    assert sum(counts, start=Counter()) == dict.fromkeys(range(12), 2)


@pytest.mark.parametrize("mode", ["keep", "abort", "restart"])
def test_running_answers_meet_new_weights_in_each_mode(config, mode, monkeypatch):
    """The first tokens of an answer may have an older version than the last ones, except under restart. The samplers
    are slowed by long answers; a small limit of running requests keeps some of them in the queue. A step that waits
    shows its groups that are scored."""
    shown = set[str]()
    monkeypatch.setattr(TerminalSink, "progress", lambda sink, text: shown.add(text))
    options = ("loop.kind=fully_async", "loop.max_staleness=3", f"loop.in_flight={mode}", "loop.eval_every_steps=0")
    long = ("rollout.sampling.max_new_tokens=96", "loop.num_steps=8", "loop.prompts_per_step=2")
    folder = train(config, f"in_flight_{mode}", *RANKS["processes"], *options, *long, "rollout.max_running_requests=8")
    paths = sorted((folder / "rollouts").glob("step_*.jsonl"))
    turns = [turn for path in paths for record in read_rollouts(path) for turn in record.trajectory.turns]
    straddling = [turn for turn in turns if len({*turn.versions.tolist()}) > 1]
    assert all((np.diff(turn.versions) >= 0).all() for turn in turns)
    assert bool(straddling) == (mode != "restart")
    assert {"0 of 2 groups", "1 of 2 groups"} <= shown and not [text for text in shown if "answers" in text]


@pytest.mark.slow
def test_the_turns_of_a_conversation_may_have_different_versions(config):
    """A multi-turn agent whose tool calls last longer than a step of the trainer."""

    async def converse(prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        trajectory = start_trajectory(prompt, index, ctx)
        context = prompt.ids
        for _ in range(3):
            turn = await take_turn(trajectory, context, generate, ctx)
            if turn is None:
                break
            await asyncio.sleep(0.05 * (prompt.ordinal % 3))
            context = np.concatenate([context, turn.output_ids, prompt.ids[:2]])
        return trajectory

    values = json.loads(config.read_text())
    values["loop"] |= {"kind": "fully_async", "max_staleness": 3, "num_steps": 8, "prompts_per_step": 2}
    values["cluster"] = {"num_train_ranks": 1, "num_rollout_ranks": 1}
    values["model"]["path"] = str(config.parent / "model")
    values["data"] |= {"path": str(config.parent / "rows.jsonl"), "eval_path": None}
    values["loop"]["eval_every_steps"] = 0
    values["run"]["name"] = "conversations"
    folder = meshrl.train(values, agent=converse, quiet=True).folder
    paths = sorted((folder / "rollouts").glob("step_*.jsonl"))
    trajectories = [record.trajectory for path in paths for record in read_rollouts(path)]
    assert Counter(t.prompt.ordinal for t in trajectories) == dict.fromkeys(range(16), 2)
    assert any(t.turns[0].versions[0] < t.turns[-1].versions[-1] for t in trajectories)


@pytest.mark.parametrize("part", ["all tensors", "one tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_with_old_weights_is_caught_within_its_step(config, monkeypatch, kind, part):
    """It acknowledged the new weights, but computes with old ones. All samples are older than the trainer's
    weights, so only the probe of the sync can detect it."""
    sync = RankWorker.sync

    @phase("sync")
    async def stale(self: RankWorker, order: SyncOrder) -> Any:
        parameters = dict(self._sampler()._weights.lm.named_parameters())
        names = [*parameters] if part == "all tensors" else [next(n for n in parameters if "down_proj" in n)]
        old = {name: parameters[name].clone() for name in names}
        answer = await sync(self, order)
        if order.header.version == 2:
            for name in names:
                parameters[name].copy_(old[name])
        return answer

    monkeypatch.setattr(RankWorker, "sync", stale)
    name = f"stale_{kind}_{part}".replace(" ", "_")
    options = (f"loop.kind={kind}", "loop.max_staleness=1", "loop.eval_every_steps=0")
    with pytest.raises(SamplerMismatchError, match="at weight version 2 the logprobs of sampler"):
        train(config, name, *RANKS["inline"], *options)
    assert sum("loss/policy" in step for step in steps_of(config.parent / "runs" / name)) <= 2

"""Times and lengths that a prediction takes from a colocated run, and the command that prints the predictions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_run

from meshrl.cli import main
from meshrl.config.load import load_run_config
from meshrl.config.loop import LoopConfig
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Prompt, Times, Trajectory, Turn
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import JsonlSink
from meshrl.tools.schedule.inputs import measured
from meshrl.tools.schedule.step_time import Setup, steps_of

STEP_S, ROW_S, PREFILL_S, PREFILL_TOKEN_S = 0.002, 0.0001, 0.01, 2e-5
TRAIN_S, TRAIN_TOKEN_S, SYNC_S, REST_S, PROMPT = 0.05, 1e-4, 0.02, 0.015, 20
NUM_GROUPS, SIZE = 4, 4


def write_colocated_run(
    folder: Path, num_steps: int = 8, kind: str = "colocated", times: bool = True, equal: bool = False
) -> Path:
    """The files of a run whose times follow from the constants above. The number of rows falls while it decodes. equal:
    all steps have the same lengths, but for a few tokens, and times of training that vary by 20 %."""
    rng = np.random.default_rng(0)
    log = RolloutLog(folder, decode=str)
    sink, clock = JsonlSink(folder / "metrics.jsonl", clock=lambda: now), 0.0
    names = ("rollout", "reward", "train", "sync")
    for step in range(num_steps):
        prompt = PROMPT if equal else PROMPT + 10 * step
        lengths = rng.integers(*((198, 200) if equal else (2, 200)), NUM_GROUPS * SIZE)
        first = PREFILL_S + PREFILL_TOKEN_S * prompt * NUM_GROUPS + STEP_S + ROW_S * len(lengths)
        decoded = [sum(STEP_S + ROW_S * int((lengths > j).sum()) for j in range(1, n)) for n in lengths]
        made = zip(lengths.tolist(), decoded)
        trajectories = [trajectory(step, i, prompt, n, first, s if times else 0.0) for i, (n, s) in enumerate(made)]
        tokens = int(lengths.sum()) + prompt * len(lengths)
        train_s = (TRAIN_S + TRAIN_TOKEN_S * tokens) * (1 + equal * 0.1 * (-1) ** step)
        spent = (first + max(decoded), 0.004, train_s, SYNC_S)
        clock += sum(spent) + REST_S
        now = 1e6 + clock
        values = {f"time/{name}_s": seconds for name, seconds in zip(names, spent)}
        units = dict.fromkeys(values, "s") | {"train/num_tokens": "tokens"}
        sink.write(step, values | {"train/num_tokens": float(tokens)}, units)
        log.write(step, trajectories)
    sink.close()
    (folder / "config.yaml").write_text(
        f"loop:\n  kind: {kind}    # file:1\ncluster:\n  num_train_ranks: 1    # default\n"
    )
    return folder


def trajectory(step: int, index: int, prompt: int, length: int, first: float, decode_s: float) -> Trajectory:
    group, sibling = divmod(index, SIZE)
    turn = Turn(
        context_ids=np.arange(prompt, dtype=np.int32),
        output_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        stop_reason="stop",
        times=Times(prefill_s=first, decode_s=decode_s, cached_tokens=prompt * (sibling > 0)),
    )
    row = Prompt(id=f"{step}-{group}", ordinal=step * NUM_GROUPS + group, messages=[], answer="")
    return Trajectory(prompt=row, group_id=row.id, index=sibling, turns=[turn], status="done")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_run.write_run(tmp_path)


def test_the_costs_of_a_run_are_found_again(tmp_path):
    inputs = measured(write_colocated_run(tmp_path / "run"))
    constants = {"decode_step_s": STEP_S, "prefill_step_s": PREFILL_S, "train_step_s": TRAIN_S, "step_s": REST_S}
    slopes = {"decode_row_s": ROW_S, "prefill_token_s": PREFILL_TOKEN_S, "train_token_s": TRAIN_TOKEN_S}
    others = {"sync_s": SYNC_S, "reward_group_s": 0.004 / NUM_GROUPS}
    for key, value in (constants | slopes | others).items():
        assert getattr(inputs.costs, key) == pytest.approx(value, rel=0.02), key
    assert inputs.costs.request_s == pytest.approx(0, abs=1e-6)
    assert len(inputs.lengths) == 8 * NUM_GROUPS and {len(group) for group in inputs.lengths} == {SIZE}


def test_a_run_of_equal_lengths_reports_what_it_cannot_separate(tmp_path):
    varied = measured(write_colocated_run(tmp_path / "varied"))
    assert not [note for note in varied.notes if "to separate" in note]
    inputs = measured(write_colocated_run(tmp_path / "equal", equal=True))
    (note,) = [note for note in inputs.notes if "to separate" in note]
    pairs = "train_step_s from train_token_s, prefill_step_s from prefill_token_s, decode_step_s from decode_row_s"
    assert f"separate {pairs}: the second" in note
    tokens = 16 * (PROMPT + 198.5)
    assert inputs.costs.train_step_s == 0
    assert inputs.costs.train_token_s == pytest.approx(TRAIN_TOKEN_S + TRAIN_S / tokens, rel=0.15)
    assert 0 < inputs.costs.prefill_token_s <= inputs.costs.train_token_s / 3
    assert inputs.costs.decode_row_s == pytest.approx(ROW_S + STEP_S / 16, rel=0.05)


def test_the_prediction_of_the_same_schedule_repeats_the_run(tmp_path):
    inputs = measured(write_colocated_run(tmp_path / "run"))
    times = [json.loads(line)["time"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:]]
    loop = LoopConfig(num_steps=8, prompts_per_step=NUM_GROUPS, samples_per_prompt=SIZE)
    ranks = {"train_ranks": 1, "rollout_ranks": 0, "max_running": 64}
    steps = steps_of(Setup(loop=loop, costs=inputs.costs, lengths=inputs.lengths, **ranks))
    assert [step[0] for step in steps][1:] == pytest.approx(np.diff(times), rel=0.01)


def test_single_slow_steps_and_steps_in_which_every_agent_failed_have_little_influence(tmp_path):
    folder = write_colocated_run(tmp_path / "run", num_steps=12)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[6]["metrics"]["time/train_s"] *= 5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = sorted((folder / "rollouts").glob("*.jsonl"))[4]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**record, "turns": []}) + "\n" for record in records))
    costs = measured(folder).costs
    assert (costs.train_token_s, costs.decode_step_s) == pytest.approx((TRAIN_TOKEN_S, STEP_S), rel=0.02)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(MeshrlError, match=r"no metrics\.jsonl"):
        measured(tmp_path)
    with pytest.raises(MeshrlError, match="kind=fully_async; give a run with loop"):
        measured(write_colocated_run(tmp_path / "a", kind="fully_async"))
    with pytest.raises(MeshrlError, match=r"3 finished steps .*; 4 or more"):
        measured(write_colocated_run(tmp_path / "b", num_steps=3))
    with pytest.raises(MeshrlError, match="no decode times; give another run"):
        measured(write_colocated_run(tmp_path / "c", times=False))
    for path in (write_colocated_run(tmp_path / "d") / "rollouts").glob("*"):
        path.unlink()
    with pytest.raises(MeshrlError, match="0 finished steps with files in rollouts"):
        measured(tmp_path / "d")


def test_the_command_prints_a_table(tmp_path, config, capsys):
    run = write_colocated_run(tmp_path / "run")
    command = ["plan", str(config), "--schedule", "--from", str(run), "--gpus", "4"]
    assert main([*command, "loop.prompts_per_step=8"]) == 0
    printed = capsys.readouterr().out
    for text in ("colocated", "one_step_off", "fully_async", "recommended: loop.kind=", "measured in 7 steps"):
        assert text in printed
    assert main(["plan", str(config), "--schedule", "--from", str(run), "--gpus", "1"]) == 0
    assert "recommended: loop.kind=colocated" in capsys.readouterr().out
    assert main(["plan", str(config), "--schedule", "--from", str(run), "--gpus", "0"]) == 2
    assert "--gpus is 0" in capsys.readouterr().err
    assert main(["plan", str(config), "--schedule", "--from", str(tmp_path)]) == 1
    assert "no metrics.jsonl" in capsys.readouterr().err


def test_only_what_fits_into_the_memory_is_recommended(tmp_path, config, capsys):
    run = write_colocated_run(tmp_path / "run")
    command = ["plan", str(config), "--schedule", "--from", str(run), "--gpus", "2", "--gpu-memory"]
    assert main([*command, "80GB"]) == 0
    large = capsys.readouterr().out
    assert "too large" not in large and large.splitlines()[0].endswith("memory of a GPU")
    assert all(line.endswith(" GB") for line in large.splitlines()[1:4]) and "recommended: loop.kind=" in large
    assert "What staleness costs is not checked" in large
    assert main([*command, "1GB"]) == 0
    small = capsys.readouterr().out
    assert small.count(", too large") == 3 and "no schedule fits into the memory" in small


VLLM = ("rollout.engine=vllm", "rollout.vllm.python=null", "rollout.mesh.infer_tp=4", "train.mesh.ulysses=4")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("gpus", [32, 12])
def test_only_splits_that_training_accepts_are_recommended_also_without_vllm(tmp_path, config, capsys, gpus):
    command = [str(config), *VLLM, f"cluster.num_train_ranks={gpus}"]
    assert main(["plan", *command, "--schedule", "--from", str(write_colocated_run(tmp_path / "run"))]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()[1:4]]
    splits = {row[0]: (int(row[1]), row[2]) for row in rows}
    assert splits["colocated"] == (gpus, "same")
    for kind in ("one_step_off", "fully_async"):
        train, rollout = splits[kind]
        assert train % 4 == 0 and train + int(rollout) == gpus
    keys = printed.partition("recommended: ")[2].splitlines()[0].split()
    load_run_config(config, [*VLLM, *keys], starts=False)


def test_kinds_without_an_accepted_split_are_left_out(tmp_path, config, capsys):
    run = str(write_colocated_run(tmp_path / "run"))
    command = ["plan", str(config), "--schedule", "--from", run, "--gpus", "4"]
    assert main([*command, "train.mesh.ulysses=4", "cluster.num_train_ranks=4"]) == 0
    printed = capsys.readouterr().out
    assert "recommended: loop.kind=colocated cluster.num_train_ranks=4" in printed
    assert "note: one_step_off: the config's check refuses it on 4 GPUs, with every split" in printed
    assert main([*command, "cluster.executor=inline"]) == 2
    assert "no schedule on 4 GPUs is accepted" in capsys.readouterr().err

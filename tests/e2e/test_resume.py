"""Runs that end early and are resumed have the same numbers to the bit as an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from killed_runs import killed
from run_contents import assert_equal_tensors, prompt_counts, sampled_turns, state, weights
from tiny_run import steps_of, train, write_run

from meshrl.cli import main
from meshrl.config.load import load_sft_config
from meshrl.config.run import RunSection
from meshrl.core.errors import CheckpointError, DataError, MeshrlError
from meshrl.monitor.status import read_status
from meshrl.run import start
from meshrl.run.folder import choose_start
from meshrl.tools.report.page import write_report
from meshrl.tools.runs import read_facts
from meshrl.train import checkpoint, engine
from meshrl.train.checkpoint import stage
from meshrl.train.checkpoint_files import read_controller, require_space, states

pytestmark = pytest.mark.timeout(300)
NUM_STEPS, PER_EPOCH = 8, 5  # 20 rows, 4 prompts a step


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run with held-out rows and two updates a step."""
    path = write_run(tmp_path_factory.mktemp("resume"))
    values = json.loads(path.read_text())
    values["data"]["eval_path"] = "held_out.jsonl"
    values["loop"] |= {"num_steps": NUM_STEPS, "samples_per_prompt": 2, "eval_every_steps": 3}
    values["train"]["updates_per_step"] = 2
    values["cluster"] = {"executor": "inline"}
    (path.parent / "held_out.jsonl").write_text('{"question": "1+2", "answer": "3"}\n')
    path.write_text(json.dumps(values))
    return path


@contextmanager
def one_core() -> Iterator[None]:
    """For runs in this process: on a busy machine several threads that wait for each other are many times slower."""
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(cores))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)


def train_inline(config: Path, name: str, *overrides: str) -> Path:
    with one_core():
        return train(config, name, "cluster.executor=inline", *overrides)


@pytest.fixture(scope="module")
def undisturbed_and_copied(config: Path) -> tuple[Path, list[bool]]:
    """The folder of a run, and of each state that it saved whether it was copied first."""
    copied = list[bool]()

    def recorded(*args: Any, copy: bool) -> Any:
        copied.append(copy)
        return stage(*args, copy=copy)

    with patch.object(engine, "stage", recorded):
        folder = train_inline(config, "undisturbed", "loop.save_every_steps=1", "run.keep_checkpoints=100")
    return folder, copied


@pytest.fixture(scope="module")
def undisturbed(undisturbed_and_copied: tuple[Path, list[bool]]) -> Path:
    return undisturbed_and_copied[0]


def test_only_a_state_with_which_training_goes_on_is_copied_before_it_is_written(undisturbed_and_copied):
    assert undisturbed_and_copied[1] == [True] * (NUM_STEPS - 1) + [False]


def assert_same_run(folder: Path, other: Path, num_steps: int = NUM_STEPS, evals: bool = True) -> None:
    assert_equal_tensors(weights(folder, NUM_STEPS), weights(other, NUM_STEPS))
    assert_equal_tensors(state(folder, NUM_STEPS), state(other, NUM_STEPS))
    assert prompt_counts(folder) == [Counter({4 * step + i: 2 for i in range(4)}) for step in range(num_steps)]
    lines, others = steps_of(folder), steps_of(other)
    if not evals:
        lines, others = ([s for s in steps if "eval/mean_at_k" not in s] for steps in (lines, others))
    assert repr(lines) == repr(others)  # as texts, in which NaN equals NaN
    if evals:
        assert sampled_turns(folder) == sampled_turns(other)
    result, expected = (json.loads((f / "result.json").read_text()) for f in (folder, other))
    assert (result["status"], result["steps"]) == ("done", num_steps)
    assert result["reward_curve"] == expected["reward_curve"] and len(result["reward_curve"]) == num_steps


@pytest.mark.slow
def test_two_ranks_resume_to_the_bit_and_one_rank_resumes_from_their_checkpoint(config):
    """With the same world size everything is equal; with another one the state is equal, the rest to rounding."""
    two = ("cluster.executor=processes", "cluster.num_train_ranks=2", "loop.eval_every_steps=0")
    full = train(config, "two", *two, "loop.num_steps=4", "loop.save_every_steps=2")
    half = train(config, "two_parts", *two, "loop.num_steps=2")
    train(config, "two_parts", *two, "loop.num_steps=4", "run.resume=auto")
    assert_equal_tensors(weights(full, 4), weights(half, 4))
    training = [[s for s in steps_of(f) if "eval/mean_at_k" not in s] for f in (full, half)]
    assert training[0] == training[1]
    one = train_inline(config, "one", "loop.num_steps=4", f"run.resume={full / 'checkpoints' / 'step_000002'}")
    assert {t.shape for t in weights(one, 4).values()} == {t.shape for t in weights(full, 4).values()}
    for mine, other in zip([s for s in steps_of(one) if "reward/mean" in s], training[0][2:], strict=True):
        assert mine["reward/mean"] == pytest.approx(other["reward/mean"], rel=1e-3)
    assert sorted(p.name for p in (one / "rollouts").glob("step_*.jsonl")) == ["step_000003.jsonl", "step_000004.jsonl"]


@pytest.mark.parametrize("stop", [3, PER_EPOCH, 7], ids=["mid-epoch", "epoch end", "before the last"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(config, undisturbed, stop):
    """Parameters, moments, data order, versions, metrics and rollouts, at the same world size."""
    name = f"stopped_at_{stop}"
    train_inline(config, name, f"loop.num_steps={stop}")
    folder = train_inline(config, name, "run.resume=auto")
    assert_same_run(folder, undisturbed, evals=stop == 3)  # otherwise the first part has an additional last evaluation
    evals = json.loads((folder / "result.json").read_text())["evals"]
    assert [e["step"] for e in evals] == sorted({0, 3, 6, stop, NUM_STEPS})


def test_a_resume_of_a_finished_run_changes_nothing_or_continues_with_more_steps(config, undisturbed):
    """Also after the last step."""
    folder = train_inline(config, "longer", f"loop.num_steps={PER_EPOCH}")
    before, facts = (folder / "metrics.jsonl").read_text(), read_facts(folder)
    train_inline(config, "longer", f"loop.num_steps={PER_EPOCH}", "run.resume=auto")
    assert (folder / "metrics.jsonl").read_text() == before
    again, saved = read_facts(folder), read_controller(states(folder / "checkpoints")[-1][1])["wall_s"]
    assert facts.started <= again.started < read_status(folder).started
    assert 0 < saved <= facts.seconds and saved < again.seconds, "the time of its steps is in the checkpoint"
    with pytest.raises(CheckpointError, match="after step 5, but this run ends at step 4"):
        train_inline(config, "longer", "loop.num_steps=4", "run.resume=auto")
    train_inline(config, "longer", "run.resume=auto")
    assert_same_run(folder, undisturbed, evals=False)


def test_a_start_that_would_overwrite_a_run_is_refused(config, undisturbed):
    """A folder with newer checkpoints is never overwritten, and a checkpoint of another seed is refused."""
    checkpoints = undisturbed / "checkpoints"
    early = f"run.resume={checkpoints / 'step_000003'}"
    for overrides, error, words in (
        ((), MeshrlError, "contains checkpoints up to step 8; run.resume=auto continues"),
        ((early,), MeshrlError, "has a newer checkpoint, after step 8"),
    ):
        with pytest.raises(error, match=words):
            train_inline(config, "undisturbed", *overrides)
    assert [step for step, _ in states(checkpoints)] == list(range(1, NUM_STEPS + 1))
    assert len(prompt_counts(undisturbed)) == NUM_STEPS
    with pytest.raises(DataError, match="seed was 0, is 1"):
        train_inline(config, "other_seed", early, "run.seed=1")
    branch = train_inline(config, "branch", early)
    assert_equal_tensors(weights(branch, NUM_STEPS), weights(undisturbed, NUM_STEPS))
    assert len(steps_of(branch)) == len(steps_of(undisturbed)) - 5  # three steps and two evaluations of its past


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resume_that_is_refused_changes_nothing(config):
    """It changes neither result.json and config.yaml nor files written after the checkpoint."""
    folder = train_inline(config, "refused", "loop.num_steps=2", "loop.save_every_steps=1")
    (folder / "rollouts" / "step_000003.jsonl").write_text("")  # of a step that was not finished
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"schema": 1, "step": 3, "time": 0.0, "metrics": {}}) + "\n")
    before = _files(folder)
    for error, override in (
        (DataError, "run.seed=1"),  # refused after the data is loaded
        (CheckpointError, "loop.num_steps=1"),  # refused before anything is loaded
        (CheckpointError, "train.master_dtype=bfloat16"),  # refused by the trainer
    ):
        with pytest.raises(error):
            train_inline(config, "refused", "run.resume=auto", override)
        assert _files(folder) == before
    train_inline(config, "refused", "run.resume=auto", "loop.num_steps=3")
    assert len(prompt_counts(folder)) == 3


def test_a_damaged_checkpoint_ends_the_resume_and_names_the_file(config):
    """If no other checkpoint is left; the folder stays as it is."""
    folder = train_inline(config, "damaged", "loop.num_steps=1")
    path = folder / "checkpoints" / "step_000001" / "state" / "policy_rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = _files(folder)
    with pytest.raises(CheckpointError, match=r"step_000001/state/policy_rank_00000.safetensors is damaged"):
        train_inline(config, "damaged", "run.resume=auto")
    assert _files(folder) == before


@pytest.mark.slow
def test_only_the_newest_states_but_all_models_are_kept(config, monkeypatch):
    """Each state but the last one is copied before it is written, since the training continues."""
    copied = list[bool]()

    def stage(tensors: Any, readable: Any, copy: bool) -> Any:
        copied.append(copy)
        slices = checkpoint.stage(tensors, readable, copy)
        own = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        assert {each.data.data_ptr() == own[each.name] for each in slices} == {not copy}
        return slices

    monkeypatch.setattr(engine, "stage", stage)
    folder = train_inline(config, "newest", "loop.num_steps=5", "loop.save_every_steps=1", "run.keep_checkpoints=2")
    assert [step for step, _ in states(folder / "checkpoints")] == [4, 5]
    assert all((folder / "checkpoints" / f"step_00000{i}" / "model").is_dir() for i in range(1, 6))
    assert copied == [True, True, True, True, False]


@pytest.mark.slow
def test_a_save_that_fails_in_the_background_ends_the_run(config, monkeypatch):
    """At the next step, or at the latest at the end of the run; the checkpoint before it remains, and the last
    finished step is saved if that works again."""
    write, written = checkpoint.write, []

    def failing(path: Path, slices: Any) -> Any:
        written.append(path)
        if len(written) == 2:
            raise CheckpointError(f"{path} can't be written: the disk is full")
        return write(path, slices)

    monkeypatch.setattr(checkpoint, "write", failing)
    for steps, name in ((NUM_STEPS, "fails_midway"), (2, "fails_at_the_end")):
        written.clear()
        with pytest.raises(CheckpointError, match=r"step_000002/state\.aside/policy_rank_00000\.safetensors can't"):
            train_inline(config, name, "loop.save_every_steps=1", f"loop.num_steps={steps}")
        folder = config.parent / "runs" / name
        result = json.loads((folder / "result.json").read_text())
        assert result["status"] == "failed" and 2 <= result["steps"] <= 4
        last = [result["steps"]] if steps == NUM_STEPS else []
        assert [step for step, _ in states(folder / "checkpoints")] == [1, *last] and len(written) == 2 + len(last)


def test_too_little_disk_space_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"takes .* bytes, but its disk has .* free; nothing was written"):
        require_space(tmp_path, 1 << 60)
    room = SimpleNamespace(free=100_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: room)
    with pytest.raises(CheckpointError, match=r"takes 32,891,137 bytes, but .* 67,108,864 more are needed"):
        require_space(tmp_path, room.free - (64 << 20) + 1, "a model")
    require_space(tmp_path, room.free - (64 << 20), "a model")


def test_supervised_training_resumes_to_the_bit(tmp_path):
    """In the middle of an epoch, with a learning rate that depends on the step."""
    path = write_run(tmp_path)
    chats = [[{"role": "user", "content": f"{i}+1"}, {"role": "assistant", "content": str(i + 1)}] for i in range(10)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    values = json.loads(path.read_text())
    values = {key: values[key] for key in ("model", "train", "run")}
    values |= {
        "sft": {"path": "chats.jsonl", "rows_per_step": 4, "num_steps": 6, "max_row_tokens": 99},
        "cluster": {"executor": "inline"},
    }
    values["train"]["scheduler"] = {"kind": "constant", "warmup_steps": 5}
    path.write_text(json.dumps(values))

    def run_sft(name: str, *overrides: str) -> Path:
        loaded = load_sft_config(path, [*overrides, f"run.name={name}"])
        with one_core():
            return start.sft(loaded, write_report)

    full = run_sft("full", "sft.save_every_steps=2")
    assert [step for step, _ in states(full / "checkpoints")] == [4, 6]
    branch = run_sft("branch", f"run.resume={full / 'checkpoints' / 'step_000004'}")
    assert_equal_tensors(weights(branch, 6), weights(full, 6))
    assert_equal_tensors(state(branch, 6), state(full, 6))
    assert steps_of(branch) == steps_of(full)[4:]
    curves = [json.loads((f / "result.json").read_text())["loss_curve"] for f in (full, branch)]
    assert curves[0] == curves[1] and len(curves[0]) == 6
    with pytest.raises(CheckpointError, match="is a checkpoint of `meshrl sft`, not of `meshrl train`"):
        choose_start(RunSection(resume=str(full / "checkpoints" / "step_000004")), tmp_path / "new", "train", 9, print)


def test_convert_makes_the_same_model_folder_as_the_run(undisturbed, tmp_path, capsys):
    """A folder that from_pretrained loads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for step in (3, NUM_STEPS):
        out = tmp_path / str(step)
        assert main(["convert", str(undisturbed / f"checkpoints/step_{step:06d}"), str(out)]) == 0
        exported = undisturbed / "checkpoints" / f"step_{step:06d}" / "model"
        assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in exported.iterdir())
        models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (out, exported)]
        for (name, p), (_, q) in zip(*(model.named_parameters() for model in models), strict=True):
            assert torch.equal(p, q), name
        assert AutoTokenizer.from_pretrained(out).chat_template
    assert main(["convert", str(undisturbed / "checkpoints" / "step_000003"), str(tmp_path / "3")]) == 2
    assert "already exists" in capsys.readouterr().err


# ---- kills


@pytest.mark.slow
def test_a_run_that_is_killed_several_times_equals_the_undisturbed_one(config, undisturbed):
    """No prompt lost, none trained twice, no step counted twice."""
    found = killed(config, "killed", 4, 5, 0.5)
    assert len(found) == 4 and all(len(steps) <= 3 for steps in found)
    assert_same_run(undisturbed.with_name("killed"), undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_thirty_kills_change_nothing(config, executor):
    """Also while checkpoints are written; fifteen kills under each executor."""
    ranks = 1 if executor == "inline" else 2
    layout = (f"cluster.executor={executor}", f"cluster.num_train_ranks={ranks}", "loop.num_steps=24")
    with one_core() if executor == "inline" else nullcontext():
        full = train(config, f"full_{executor}", *layout)
    killed(config, f"killed_{executor}", 15, 11, 1.0, *layout)
    other = full.with_name(f"killed_{executor}")
    assert_equal_tensors(weights(full, 24), weights(other, 24))
    assert prompt_counts(other) == [Counter({4 * step + i: 2 for i in range(4)}) for step in range(24)]
    assert repr(steps_of(other)) == repr(steps_of(full))


# ---- Ctrl-C


# Quick tests of signals: tests/e2e/test_stop_command.py (a run with ranks), tests/e2e/test_python_api.py
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_the_run_with_a_checkpoint_and_no_children(config, undisturbed, number):
    """The exit code is not zero. Under both executors with one rank, a resume from there is bit-identical.
    Schedulers send SIGTERM to all processes of a run; the ranks ignore it, and the controller ends them."""
    name = f"signal_{number}"
    command = [sys.executable, "-m", "meshrl", "train", str(config), f"run.name={name}", "run.resume=auto"]
    layout = [] if number == signal.SIGINT else ["cluster.executor=processes"]
    folder = undisturbed.with_name(name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with one_core():  # as many threads as the undisturbed run
        process = subprocess.Popen(
            [*command, *layout], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
    while not (folder / "rollouts" / "step_000002.jsonl").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    for each in [psutil.Process(process.pid), *(family if number == signal.SIGTERM else [])]:
        with suppress(psutil.NoSuchProcess):  # it has already ended
            each.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else 143), errors
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    result = json.loads((folder / "result.json").read_text())
    ((step, _),) = states(folder / "checkpoints")
    assert result["status"] == "interrupted" and 2 <= step == result["steps"] < NUM_STEPS
    train_inline(config, name, "run.resume=auto")
    assert_same_run(folder, undisturbed)

"""`meshrl eval`: what it evaluates, what it prints, and the folder that it writes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import ascii_share, train, write_run

import meshrl
from meshrl.agent.loop import prompt_ids, start_trajectory, take_turn
from meshrl.cli import main
from meshrl.core.errors import ConfigError
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import read_metrics
from meshrl.tools.report.page import write_report


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with two terms, four held-out rows and their sampling, and runs/one: a run of two steps."""
    home = tmp_path_factory.mktemp("home")
    config = write_run(home)
    content = json.loads(config.read_text())
    content["cluster"] = {"executor": "inline"}
    content["data"] |= {"eval_path": "rows.jsonl", "eval_limit": 4}
    content["reward"]["terms"]["length"] = {"kind": "tiny_run:length", "weight": 0}
    content["rollout"]["eval_sampling"] = {"temperature": 0.7, "top_k": 50, "max_new_tokens": 6}
    content["loop"] |= {"eval_every_steps": 1, "eval_samples": 2}
    config.write_text(json.dumps(content))
    train(config, "one")
    return home


@pytest.fixture(autouse=True)
def in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(home)
    yield


def evaluate(*arguments: str | Path) -> None:
    assert main(["eval", *map(str, arguments)]) == 0


def answers(folder: Path, step: int) -> dict[str, list[int]]:
    logged = read_rollouts(folder / "rollouts" / f"eval_{step:06d}.jsonl")
    return {one.trajectory.id: one.trajectory.turns[0].output_ids.tolist() for one in logged}


def result_of(folder: Path) -> dict[str, Any]:
    (line,) = (folder / "result.json").read_text().splitlines()
    return json.loads(line)


@pytest.mark.parametrize("given", ["model.path=other", "model={path: other}"])
def test_another_model_in_place_of_that_of_the_run_is_refused(home: Path, given: str):
    refusal = rf"{re.escape(given)} does not fit: .*best model of runs/one.* --model FOLDER"
    with pytest.raises(ConfigError, match=refusal):
        meshrl.evaluate("runs/one", [given], quiet=True)


def test_a_run_is_evaluated_by_its_folder_alone_into_a_new_folder_of_it(home: Path, capsys: pytest.CaptureFixture[str]):
    run = home / "runs" / "one"
    evaluate("runs/one")
    printed = capsys.readouterr()
    folder, step = run / "eval_1", json.loads((run / "checkpoints" / "best.json").read_text())["step"]
    assert answers(folder, step) == answers(run, step) and len(answers(run, step)) == 8
    lines, units = read_metrics(folder / "metrics.jsonl")
    result = result_of(folder)
    assert len(lines) == 1 and result["metrics"].items() <= lines[0].metrics.items()
    assert units["eval/reward/term/length"] == "" and result["metrics"]["eval/reward/term/length"] > 1
    assert (result["status"], result["answers"], result["step"]) == ("done", 8, step)
    assert (result["eval_term"], result["samples"], result["sampling"]["top_k"]) == ("weighted_sum", 2, 50)
    assert "the best model of runs/one" in printed.err and "answer 8/8  mean reward " in printed.err
    assert f"see {Path('runs/one/eval_1')}" in printed.err.splitlines()[-1]
    assert printed.out.splitlines()[0].startswith("mean score (mean@2)") and "answer 8/8" not in printed.out
    assert "Held-out prompts" in write_report(folder).read_text()

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    evaluate("runs/one", "loop.eval_samples=1")
    assert result_of(run / "eval_2")["answers"] == 4
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_training_state_without_a_model_is_evaluated_as_its_run_did(home: Path, capsys: pytest.CaptureFixture[str]):
    step = home / "runs" / "one" / "checkpoints" / "step_000001"
    assert (step / "state").is_dir()
    for path in (step / "model").rglob("*"):
        path.unlink()
    if (step / "model").is_dir():
        (step / "model").rmdir()
    evaluate("config.yaml", "--model", step, "--out", "of_a_state")
    assert answers(home / "of_a_state", 1) == answers(home / "runs" / "one", 1)
    assert not (home / "of_a_state" / "model").exists() and "(a training state)" in capsys.readouterr().err


def test_evaluations_use_their_own_sampling_in_training_and_alone(home: Path):
    evaluate("config.yaml", "--out", "sampled", "monitor.sinks=[tensorboard]")
    for folder in (home / "runs" / "one", home / "sampled"):
        logged = [one.trajectory for one in read_rollouts(folder / "rollouts" / "eval_000000.jsonl")]
        turns = [turn for trajectory in logged for turn in trajectory.turns]
        assert {(turn.sampling.temperature, turn.sampling.top_k) for turn in turns} == {(0.7, 50)}
        assert max(len(turn.output_ids) for turn in turns) == 6
    (trained, *_) = read_rollouts(home / "runs" / "one" / "rollouts" / "step_000001.jsonl")
    assert trained.trajectory.turns[0].sampling.temperature == 1 and trained.trajectory.turns[0].sampling.top_k == 0
    assert not (home / "sampled" / "tensorboard").exists()


def test_without_a_run_the_folder_is_below_run_folder_or_that_of_run_name(home: Path):
    evaluate("config.yaml")
    assert result_of(home / "runs" / "eval_1")["model"] == str(home / "model")
    evaluate("config.yaml", "run.name=two")
    assert result_of(home / "runs" / "two" / "eval_1")["step"] == 0


def test_an_existing_folder_is_refused(home: Path):
    (home / "there").mkdir()
    with pytest.raises(ConfigError, match="there already exists; name a new folder"):
        meshrl.evaluate("config.yaml", out="there", quiet=True)
    assert list((home / "there").iterdir()) == []


def test_an_interrupted_evaluation_has_the_answers_that_were_scored_before(home: Path):
    """The agent waits with the last prompt until the others are in the file, and presses Ctrl-C."""
    rollouts = home / "ended" / "rollouts"

    async def agent(prompt, index, generate, ctx):
        trajectory = start_trajectory(prompt, index, ctx)
        await take_turn(trajectory, prompt_ids(prompt, ctx.tokenizer, []), generate, ctx)
        while prompt.answer == "6" and sum(len(path.read_text().splitlines()) for path in rollouts.glob("*")) < 6:
            await asyncio.sleep(0.01)
        if prompt.answer == "6":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        return trajectory

    config = json.loads((home / "config.yaml").read_text())
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(4)]
    del config["data"]["eval_path"], config["data"]["path"], config["data"]["eval_limit"], config["reward"]
    with pytest.raises(KeyboardInterrupt):
        meshrl.evaluate(config, rewards={"a": ascii_share}, agent=agent, eval_data=rows, out="ended", quiet=True)
    result = result_of(home / "ended")
    assert (result["status"], result["answers"], result["metrics"]["eval/num_prompts"]) == ("interrupted", 6, 3)
    logged = [one.trajectory for one in read_rollouts(rollouts / "eval_000000.jsonl")]
    assert len(logged) == 6 and all(t.rewards.keys() == {"a"} and t.reward is not None for t in logged)


def test_python_gets_the_answers_in_the_order_of_the_rows_and_the_folder(home: Path):
    found = meshrl.evaluate("config.yaml", model="runs/one", out="python", quiet=True)
    assert found.folder == Path("python") and found.metrics == result_of(home / "python")["metrics"]
    assert [(t.prompt.answer, t.index) for t in found.trajectories] == [
        (str(2 * i), k) for i in range(4) for k in (0, 1)
    ]

"""The quickstart runs as for a user: the real commands, two FSDP2 ranks. The slow tests check that it learns."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.reward.score import Scorer

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MESHRL_DEVICE"}  # as a user's
KEYS = {"seed", "eval_before", "eval_after", "wall_s", "peak_rss_bytes", "steps", "reward_curve"}


def quickstart(out: Path, folder: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run it. folder: of the seed, in `out`. Returns its report.json and its output."""
    command = [sys.executable, str(FOLDER / "quickstart.py"), "--out", str(out), *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((out / folder / "report.json").read_text()), done.stdout


def test_it_chooses_the_cpu_and_states_how_to_use_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its two ranks can't share the GPU of a machine that has one."""
    choose_device = runpy.run_path(str(FOLDER / "quickstart.py"))["choose_device"]
    monkeypatch.setenv("MESHRL_DEVICE", "xpu")
    choose_device("quickstart", "two GPUs")
    assert os.environ["MESHRL_DEVICE"] == "xpu" and not capsys.readouterr().out
    monkeypatch.delenv("MESHRL_DEVICE")
    choose_device("quickstart", "two GPUs")
    assert os.environ["MESHRL_DEVICE"] == "cpu"
    (line,) = capsys.readouterr().out.splitlines()
    assert "uses the CPU" in line and "MESHRL_DEVICE=cuda make quickstart" in line


@pytest.mark.slow  # .ci/run has `make quickstart`
@pytest.mark.timeout(300)
def test_every_part_runs_and_writes_its_results(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "quickstart"
    report, text = quickstart(out, "seed_3", "--smoke", "--seed", "3")
    assert report.keys() >= KEYS
    assert report["seed"] == 3
    assert report["steps"] == len(report["reward_curve"]) == 2
    assert 0.0 <= report["eval_before"] <= 1.0 and 0.0 <= report["eval_after"] <= 1.0
    assert 100e6 < report["peak_rss_bytes"] < 6e9
    assert report["wall_s"] > 0
    assert sorted(path.name for path in out.rglob("*") if len(path.relative_to(out).parts) < 3) == sorted(
        ["seed_3", ".quickstart", "start", "sft", "grpo", "report.json"]
    )
    model = AutoModelForCausalLM.from_pretrained(report["model"])
    assert model.config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(report["model"]).chat_template
    assert text.startswith("This uses the CPU.")
    steps = [line for line in text.splitlines() if line.startswith("[")]
    assert [line[:5] for line in steps] == [f"[{i}/5]" for i in range(1, 6)]


def test_the_three_sets_of_problems_are_disjoint() -> None:
    sets = runpy.run_path(str(FOLDER / "task.py"))["split_problems"]()
    numbers = [number for numbers in sets for number in numbers]
    assert len(numbers) == len(set(numbers)) == 11_600
    assert all(10_000 <= number < 50_000 for number in numbers), "the answer has as many digits as the number"


def test_a_digit_of_the_answer_is_twice_its_column_plus_the_carry_from_the_right() -> None:
    """The wrong demonstrations forget every carry, and are right otherwise."""
    without_carry = runpy.run_path(str(FOLDER / "task.py"))["double_without_carry"]
    assert without_carry(38471) == 66842
    assert without_carry(12340) == 2 * 12340
    carries = [int(digit) >= 5 for digit in "38471"[1:]] + [False]
    assert without_carry(38471) + sum(carry * 10**place for place, carry in zip((4, 3, 2, 1, 0), carries)) == 2 * 38471


def test_the_printed_answers_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    """Digits are in reading order, next to the solution, with the result of the first rule."""
    module = runpy.run_path(str(FOLDER.parent / "guided_run.py"))
    old, new = trajectory(0, "66842", "eval"), trajectory(0, "76942", "eval")
    for t, reward in ((old, 0.0), (new, 1.0)):
        t.prompt.messages[-1]["content"], t.prompt.answer = "2*38471", "76942"
        t.rewards, t.reward = {"answer": reward, "finished": 1.0}, reward + 0.2
    module["print_pairs"]([(old, new)])
    assert "2*38471       76942   66842 (wrong)    76942 (right)" in capsys.readouterr().out


def test_a_folder_that_the_quickstart_did_not_make_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "seed_0"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    command = [sys.executable, str(FOLDER / "quickstart.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1
    assert str(folder) in done.stderr
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_a_second_call_replaces_only_what_the_quickstart_made_for_this_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other seeds, folders of a user and runs of a user in a seed's folder stay."""
    monkeypatch.chdir(tmp_path)  # make_folder changes to the checkout
    in_checkout = runpy.run_path(str(FOLDER.parent / "guided_run.py"))["make_folder"]

    def make_folder(seed: int) -> None:
        args = Namespace(name="quickstart", out=tmp_path, seed=seed, shuffle_rewards=False)
        assert in_checkout(args, ("start", "sft", "grpo")) == tmp_path / f"seed_{seed}"

    parts = ("start/data", "sft/metrics.jsonl", "grpo/metrics.jsonl", "report.json")
    of_users = ("again/metrics.jsonl", "x", "seed_0/again/metrics.jsonl", "seed_0/note.txt")
    make_folder(0)
    for name in (*of_users, *(f"seed_0/{part}" for part in parts)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def files() -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    make_folder(1)
    assert files() == before | {"seed_1/.quickstart"}
    make_folder(0)
    assert files() == {*of_users, "seed_0/.quickstart", "seed_1/.quickstart"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_ends_all_its_processes(tmp_path: Path) -> None:
    """Including the ranks of the command that runs."""
    out = tmp_path / "quickstart"
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / "quickstart.py"), "--out", str(out)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family: list[psutil.Process] = []
    while len(family) < 3:  # the command's process and its two ranks
        assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def trajectory(index: int, text: str, purpose: Any) -> Trajectory:
    turn = Turn(
        context_ids=np.array([1], np.int32),
        output_ids=np.array([2], np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        stop_reason="stop",
        messages=[{"role": "assistant", "content": text}],
    )
    prompt = Prompt(id=str(index), ordinal=index, messages=[{"role": "user", "content": "1+1"}], answer="2")
    return Trajectory(prompt=prompt, group_id=str(index), index=0, purpose=purpose, turns=[turn])


def test_the_control_rewards_as_many_answers_as_the_rule_but_others() -> None:
    shuffling = runpy.run_path(str(FOLDER / "shuffled_rewards.py"))["ShufflingScorer"]
    train = [trajectory(i, "2" if i < 20 else "3", "train") for i in range(40)]
    held_out = [trajectory(i, "2" if i < 20 else "3", "eval") for i in range(40)]

    async def score() -> None:
        scorer = Scorer(RewardConfig(terms={"answer": RewardTerm(kind="math_answer", args={"rule": "exact"})}))
        try:
            for trajectories in (train, held_out):
                await shuffling(scorer, seed=0).score(trajectories)
        finally:
            await scorer.close()

    asyncio.run(score())
    earned = [1.0] * 20 + [0.0] * 20
    assert [t.reward for t in held_out] == earned
    assert Counter(t.reward for t in train) == Counter(earned)
    assert 5 <= sum(t.reward != r for t, r in zip(train, earned)) <= 35
    assert [t.rewards["answer"] for t in train] == earned


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_in_minutes(tmp_path: Path) -> None:
    report, text = quickstart(tmp_path / "quickstart", "seed_0")
    assert 0.10 <= report["eval_before"] <= 0.35
    assert report["eval_after"] >= 0.90
    assert report["peak_rss_bytes"] < 6e9
    assert f"held-out accuracy      {report['eval_before']:.3f} before, {report['eval_after']:.3f} after" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_rewards_teach_nothing(tmp_path: Path) -> None:
    """The control: if the accuracy came from the warm-up, the sampling or the schedule, it would rise here too."""
    report, _ = quickstart(tmp_path / "quickstart", "control_0", "--shuffle-rewards")
    assert 0.10 <= report["eval_before"] <= 0.35
    assert report["eval_after"] <= 0.45

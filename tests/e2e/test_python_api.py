"""`meshrl.train`, `sft` and `evaluate` do the same runs as the commands, from a script or a notebook."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from tiny_run import ascii_share, steps_of, write_run

import meshrl
from meshrl.agent.loop import SingleTurn, prompt_ids, start_trajectory, take_turn
from meshrl.core.errors import AgentError, ConfigError, MeshrlError
from meshrl.monitor.recorder import CONTROLLER, read_controller

INLINE = {"cluster": {"executor": "inline"}}
ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}+1"}, {"role": "assistant", "content": str(i + 1)}]}
    for i in range(10)
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_run(folder)
    return folder


@pytest.fixture
def config(home: Path) -> Callable[..., dict[str, Any]]:
    """config(name, section={key: value}) is a dict config of a run with this name, without data and rewards."""

    def make(name: str, **changes: dict[str, Any]) -> dict[str, Any]:
        made = json.loads((home / "config.yaml").read_text()) | INLINE
        made["model"]["path"] = home / "model"
        made["data"] = {"max_prompt_tokens": 64}
        made["run"] = {"folder": home / "runs", "name": name}
        del made["reward"]
        for section, keys in changes.items():
            made[section] = made.get(section, {}) | keys
        return made

    return make


def share(completion: str, answer: Any) -> float:
    return ascii_share(completion, answer)


class RecordingAgent(SingleTurn):
    """An agent with state that the caller can read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_ids: list[str] = []

    async def run(self, prompt, index, generate, ctx):
        self.prompt_ids.append(prompt.id)
        return await super().run(prompt, index, generate, ctx)


async def one_turn(prompt, index, generate, ctx):
    trajectory = start_trajectory(prompt, index, ctx)
    await take_turn(trajectory, prompt_ids(prompt, ctx.tokenizer, []), generate, ctx)
    return trajectory


def test_a_run_from_python_has_the_numbers_of_the_command(home, config, capsys):
    """To the bit, with functions, an agent and rows in memory, inside a running event loop as in a notebook. With
    quiet it prints nothing."""
    command = tiny_run.train(home / "config.yaml", "command", "cluster.executor=inline")
    assert "step 2/2" in capsys.readouterr().out
    agent, seen = RecordingAgent(), list[tuple[int, float]]()

    async def cell() -> meshrl.Run:
        run = meshrl.train(
            config("python"),
            rewards={"ascii": share},
            agent=agent,
            data=ROWS,
            on_step=lambda step, metrics: seen.append((step, metrics["reward/mean"])),
            quiet=True,
        )
        await asyncio.sleep(0.001)
        return run

    run = asyncio.run(cell())
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert steps_of(run.folder) == steps_of(command)
    assert run.folder == home / "runs" / "python" and run.summary["status"] == "done"
    assert [line.step for line in run.lines] == [1, 2]
    assert seen == list(enumerate(run.metrics["reward/mean"], 1)) == list(enumerate(run.summary["reward_curve"], 1))
    assert run.frame()[["step", "reward/mean"]].to_dict("list") == {
        "step": [1, 2],
        "reward/mean": run.metrics["reward/mean"],
    }
    last = run.trajectories()
    assert repr(last[0]).splitlines()[1:] == [
        f"  prompt {last[0].prompt.messages[0]['content']!r}",
        f"  answer {last[0].text!r})",
    ]
    assert len(last) == 16 and len(agent.prompt_ids) == 32
    assert sum(t.reward for t in last) / 16 == pytest.approx(seen[-1][1])
    assert {t.prompt.id for t in last} == set(agent.prompt_ids[16:])
    assert run.trajectories(1)[0].prompt.id == agent.prompt_ids[0]
    with pytest.raises(IndexError, match="no answers of step 3"):
        run.trajectories(3)
    assert (run.model / "config.json").is_file() and run.model.is_relative_to(run.folder)
    assert meshrl.Run(str(run.folder)).metrics == run.metrics


def test_false_from_on_step_ends_the_run_as_after_its_last_step(config):
    """With evaluation, model and checkpoint; a resume from there is bit-identical."""
    arguments = {"rewards": {"ascii": share}, "data": ROWS, "eval_data": ROWS[:2], "quiet": True}
    full = meshrl.train(config("full", loop={"num_steps": 3}), **arguments)
    metrics_seen = list[dict[str, float]]()

    def enough(step: int, metrics: dict[str, float]) -> bool:
        metrics_seen.append(metrics)
        return step < 2

    run = meshrl.train(config("ended", loop={"num_steps": 3}), **arguments, on_step=enough)
    assert run.summary["status"] == "done" and run.summary["steps"] == 2
    assert [e["step"] for e in run.summary["evals"]] == [0, 2]
    assert (run.folder / "checkpoints" / "step_000002" / "model").is_dir() and run.model == run.best_model
    assert [m["eval/mean_at_k"] for m in metrics_seen] == [run.metrics["eval/mean_at_k"][0]] * 2
    resumed = meshrl.train(config("ended", loop={"num_steps": 3}), ["run.resume=auto"], **arguments)
    assert resumed.metrics["reward/mean"] == full.metrics["reward/mean"]
    assert resumed.metrics["train/grad_norm"] == full.metrics["train/grad_norm"]


@pytest.mark.slow
def test_an_exception_of_on_step_ends_the_run(home, config):
    def broken(step: int, metrics: dict[str, float]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        meshrl.train(config("broken"), rewards={"ascii": share}, data=ROWS, on_step=broken, quiet=True)
    summary = meshrl.Run(home / "runs" / "broken").summary
    assert summary["status"] == "failed" and summary["error"] == "KeyError: 'mine'"


def test_a_second_run_at_the_same_time_is_refused_and_the_first_continues(config):
    refused = list[int]()

    def another(step: int, metrics: dict[str, float]) -> None:
        with pytest.raises(
            ConfigError, match="inline needs the process group of this process, and there is one already"
        ):
            meshrl.train(config(f"second-{step}"), rewards={"ascii": share}, data=ROWS, quiet=True)
        refused.append(step)

    run = meshrl.train(config("first"), rewards={"ascii": share}, data=ROWS, on_step=another, quiet=True)
    assert run.summary["status"] == "done" and refused == list(range(1, run.summary["steps"] + 1)) != []


def test_an_agent_that_returns_no_trajectory_is_named(config):
    async def nothing(prompt, index, generate, ctx):
        return None

    with pytest.raises(MeshrlError, match=r"nothing returned None; it must return a Trajectory"):
        meshrl.train(config("nothing"), rewards={"ascii": share}, data=ROWS, agent=nothing, quiet=True)


def test_an_exception_of_an_agent_fails_its_attempt_and_too_many_end_the_run(config):
    async def sometimes(prompt, index, generate, ctx):
        trajectory = await one_turn(prompt, index, generate, ctx)
        trajectory.turns[0].reward = float(index)
        return trajectory if index or ctx.purpose == "eval" else {}["no such key"]

    allowed = config("crashes", loop={"num_steps": 1}, agent={"max_failure_fraction": 0.25})
    run = meshrl.train(allowed, rewards={"ascii": share}, data=ROWS, eval_data=ROWS[:2], agent=sometimes, quiet=True)
    notes = (run.folder / "run_notes.txt").read_text()
    assert "step 1: agent " in notes and "sometimes failed in 4 of 16 attempts" in notes
    assert "answer 0: KeyError: 'no such key'" in notes
    assert run.metrics["rollout/crashed_fraction"] == [0.25] and run.metrics["reward/turns"] == [2.0]
    assert all(t.failure is None if t.index else t.failure.kind == "crash" for t in run.trajectories())
    assert all(t.reward == t.rewards["ascii"] + t.index for t in run.trajectories() if t.index)
    assert run.metrics["reward/mean"] == [pytest.approx(np.mean([t.reward for t in run.trajectories() if t.index]))]

    async def never(prompt, index, generate, ctx):
        raise ConnectionError("the environment is not there")

    with pytest.raises(AgentError, match=r"never failed in 2 of 2 attempts(.|\n)*ConnectionError: the "):
        meshrl.train(config("crash"), rewards={"ascii": share}, data=ROWS, eval_data=ROWS[:2], agent=never, quiet=True)


@pytest.mark.parametrize("nested", [False, True], ids=["script", "notebook"])
def test_ctrl_c_ends_the_run_with_a_checkpoint(home, config, nested):
    name = f"interrupted-{nested}"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]

    def press(step: int, metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            start()
        await asyncio.sleep(0.001)

    def start() -> None:
        long = config(name, loop={"num_steps": 50})
        meshrl.train(long, rewards={"ascii": share}, data=ROWS, on_step=press, quiet=True)

    if nested:
        asyncio.run(cell())
    else:
        with pytest.raises(KeyboardInterrupt):
            start()
    run = meshrl.Run(home / "runs" / name)
    assert run.summary["status"] == "interrupted" and run.summary["steps"] == 1 and run.model is None
    assert (run.folder / "checkpoints" / "step_000001" / "state" / "manifest.json").is_file()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers


@pytest.mark.slow
def test_a_run_in_another_thread_needs_no_signals(config):
    runs = list[meshrl.Run]()

    def work() -> None:
        one_step = config("thread", loop={"num_steps": 1})
        runs.append(meshrl.train(one_step, rewards={"ascii": share}, data=ROWS, quiet=True))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runs[0].summary["status"] == "done"


def test_supervised_training_and_evaluation_of_its_model(config):
    made = config("sft")
    made = {key: made[key] for key in ("model", "train", "run", "cluster")}
    made["sft"] = {"rows_per_step": 4, "num_steps": 9, "max_row_tokens": 99}
    run = meshrl.sft(made, data=CHATS, on_step=lambda step, metrics: step < 3, quiet=True)
    losses = run.metrics["loss/nll"]
    assert len(losses) == 3 and losses == run.summary["loss_curve"]
    assert run.model == run.folder / "checkpoints" / "step_000003" / "model"
    trace = read_controller(run.folder / "traces" / CONTROLLER)
    assert [s.step for s in trace.steps] == [1, 2, 3] and trace.facts["schedule"] == "sft"
    more = meshrl.sft(made, ["run.resume=auto", "sft.num_steps=4"], data=CHATS, quiet=True)
    assert more.metrics["loss/nll"][:3] == losses and more.model.parent.name == "step_000004"
    evaluation = meshrl.evaluate(
        config("unused"), model=run.model, rewards={"ascii": share}, eval_data=ROWS[:3], quiet=True
    )
    scores = [t.rewards["ascii"] for t in evaluation.trajectories]
    assert len(scores) == 3 and evaluation.metrics["eval/mean_at_k"] == pytest.approx(sum(scores) / 3)


def test_errors_of_the_config_are_raised_before_anything_is_written(home, config):
    with pytest.raises(ConfigError, match=r"loop.num_step = 3   \[config-dict\]"):
        meshrl.train(config("never", loop={"num_step": 3}), rewards={"ascii": share}, data=ROWS)
    with pytest.raises(ConfigError, match="agent is type"):
        meshrl.train(config("never"), rewards={"ascii": share}, data=ROWS, agent=RecordingAgent)
    with pytest.raises(ConfigError, match=r"data\.path"):
        meshrl.train(config("never"), rewards={"ascii": share})
    assert not (home / "runs" / "never").exists()


@pytest.mark.slow
def test_a_script_needs_no_main_guard(home, tmp_path):
    """Ranks do not import the script again; its function grades in workers, which can't import the script."""
    script = tmp_path / "mine.py"
    script.write_text(
        f"""
import json, meshrl
config = json.load(open({str(home / "config.yaml")!r}))
config["model"]["path"] = {str(home / "model")!r}
config["data"] = {{"max_prompt_tokens": 64}}
config["run"] = {{"folder": "runs", "name": "script"}}
config["cluster"] = {{"num_train_ranks": 2}}
config["loop"]["num_steps"] = 1
del config["reward"]
BONUS = 1.5

def graded(completion, answer):
    return BONUS + len(completion)

rows = [{{"question": str(i), "answer": str(i)}} for i in range(8)]
run = meshrl.train(config, rewards={{"graded": graded}}, data=rows, quiet=True)
print("ended", run.metrics["reward/mean"], run.trajectories()[0].rewards)
"""
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ended [") and done.stdout.count("ended") == 1


def test_imports_of_subpackages_do_not_replace_the_functions_of_the_package():
    """meshrl.train is a function, and meshrl/train/ is a package that every run imports."""
    code = (
        "import meshrl\nimport meshrl.train.batch_plan\nfrom meshrl.train.batch_plan import BatchPlan\n"
        "import pickle\nassert pickle.loads(pickle.dumps(BatchPlan)) is BatchPlan\n"
        "assert callable(meshrl.train) and callable(meshrl.sft) and callable(meshrl.evaluate)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

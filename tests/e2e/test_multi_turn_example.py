"""`make multi-turn`: its task, a short form in which all of its parts run, and the same training by OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_contents import assert_equal_tensors, sampled_turns, weights

from examples.multi_turn import task
from meshrl.agent.loop import MultiTurn, require_tools_in_template
from meshrl.agent.parsing import parse
from meshrl.agent.tools import TOOLS, as_tool, call_tool
from meshrl.cli import main
from meshrl.config.loop import SftConfig
from meshrl.data.datasets import load_sft_rows
from meshrl.data.tables import RowTable

FOLDER = Path(__file__).parents[2] / "examples" / "multi_turn"


def test_a_demonstration_has_the_calls_that_the_agent_executes_and_the_rewards_grade(tmp_path: Path) -> None:
    tokenizer, user = task.build_tokenizer(tmp_path), {"role": "user", "content": "345*67"}
    agent = MultiTurn(["calculator"])
    assert require_tools_in_template(agent, tokenizer, [user], "the template") is None
    text = task.called_with("345*67")
    (call,) = parse(tokenizer, f"{text}<|im_end|>", tools=agent.tools).tool_calls
    prompt = {"messages": [user]}
    for tool, expected in ((TOOLS["calculator"], "23115"), (task.broken_calculator, task.broken_calculator("345*67"))):
        found = as_tool(tool, "tools")
        assert asyncio.run(call_tool({found.name: found}, call)) == expected
    for asked, grade in ((text, 1), (task.called_with("345*76"), 0), ("=23115", 0)):
        assert task.called("=23115", "=23115", [{"role": "assistant", "content": asked}], prompt) == grade
    assert [task.right(answer, "=23115") for answer in ("=23115", "23115", "=23114")] == [1, 0, 0]
    shown = task.demonstration("345*67", "23115", True, None)
    row = RowTable("rows", [{"messages": shown, "tools": agent.tools}])
    ((trained,), _) = load_sft_rows(row, SftConfig(path="rows", max_row_tokens=64, num_steps=1), tokenizer, (2,))
    sample = trained.sample("p")
    assert tokenizer.decode(sample.tokens[sample.mask].tolist()) == f"{text}<|im_end|>=23115<|im_end|>"


def test_the_problems_have_five_digits_and_the_sets_are_disjoint(tmp_path: Path) -> None:
    task.build_tokenizer(tmp_path)
    task.make_data(tmp_path, seed=1)
    rows = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "heldout")}
    warmup = [json.loads(line)["messages"] for line in (tmp_path / "warmup.jsonl").open()]
    sets = [{row["question"] for row in rows["train"]}, {row["question"] for row in rows["heldout"]}]
    sets.append({messages[0]["content"] for messages in warmup})
    assert [*map(len, sets)] == [task.NUM_TRAIN, task.NUM_HELDOUT, task.NUM_WARMUP] and len(set.union(*sets)) == sum(
        map(len, sets)
    )
    for row in rows["train"] + rows["heldout"]:
        a, b = map(int, row["question"].split("*"))
        assert row["answer"] == f"={a * b}" and len(row["answer"]) == 6
    calls = [m for m in warmup if len(m) == 4]
    assert all(f"={m[2]['content']}" == m[3]["content"] for m in calls)
    assert abs(len(calls) / len(warmup) - task.CALLED) < 0.02


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_part_of_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "multi_turn.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr + done.stdout
    place = tmp_path / "seed_0"
    report = json.loads((place / "report.json").read_text())
    assert report["eval_sets"].keys() == {"accuracy", "right calls"} and len(report["reward_curve"]) == 2
    lines = [json.loads(line).get("metrics", {}) for line in (place / "grpo" / "metrics.jsonl").open()]
    steps = [line for line in lines if "rollout/turns_mean" in line]
    assert len(steps) == 2 and all(step["rollout/tool_calls_mean"] > 0.02 for step in steps)
    assert all(0 < step["rollout/agent_idle"] < 1 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_agent_with_an_sdk_trains_the_same_weights_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="vLLM brings it: make test-all")
    short = ["cluster.executor=inline", f"run.folder={tmp_path}", "train.scheduler.warmup_steps=0"]
    task.build_model(tmp_path / "start", 0)
    task.make_data(tmp_path / "start", 0)
    paths = [f"model.path={tmp_path}/start", f"sft.path={tmp_path}/start/warmup.jsonl"]
    assert main(["sft", str(FOLDER / "sft.yaml"), *short, *paths, "sft.num_steps=150"]) == 0
    paths = [f"model.path={tmp_path}/sft/checkpoints/step_000150/model", f"data.path={tmp_path}/start/train.jsonl"]
    short += ["data.eval_path=null", "loop.num_steps=2", "loop.prompts_per_step=8", "loop.save_every_steps=2"]
    endpoint = [
        "agent.kind=endpoint",
        "agent.args={function: examples.multi_turn.my_agent:solve, max_turns: 3}",
        "data.tools=tools",
    ]
    runs = {"plain": [], "served": endpoint}
    for name, agent in runs.items():
        assert main(["train", str(FOLDER / "grpo.yaml"), *short, *paths, f"run.name={name}", *agent]) == 0
    plain, served = (tmp_path / name for name in runs)
    assert_equal_tensors(weights(served, 2), weights(plain, 2))
    tokens = [[turn[:3] for turn in sampled_turns(folder)] for folder in (plain, served)]
    assert tokens[0] == tokens[1] and len(tokens[0]) > 2 * 64  # more turns than trajectories

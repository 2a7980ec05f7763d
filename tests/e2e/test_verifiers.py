"""examples/verifiers: a task of verifiers trains through the endpoint, in a Python of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tiny_run import steps_of, train, write_run

PROGRAM = Path(__file__).parents[2] / "examples" / "verifiers" / "agent.py"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_task_of_verifiers_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = os.environ.get("MESHRL_VERIFIERS_PYTHON")
    if python is None:
        pytest.skip("set MESHRL_VERIFIERS_PYTHON to the Python of an environment with verifiers==0.4.0 and uv")
    monkeypatch.setenv("PATH", f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
    config = write_run(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": "task", "task": i}) + "\n" for i in range(4)))
    agent = {"kind": "endpoint", "args": {"command": [python, str(PROGRAM)], "timeout_s": 300}}
    changes = [f"agent={json.dumps(agent)}", "reward.terms={}", "data.answer=null", "cluster.executor=inline"]
    changes += ["loop.prompts_per_step=2", "loop.samples_per_prompt=2"]
    folder = train(config, "verifiers", *changes)
    for step in steps_of(folder):
        assert step["rollout/crashed_fraction"] == 0.0 and step["reward/mean"] > 0.0, step
        assert step["reward/metric/num_letters"] > 0.0
    lines = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    prompts = {line["turns"][0]["messages"][0]["content"] for line in lines}
    assert len(lines) == 4 and all(text.startswith("Letters of ") for text in prompts), "the prompts are the task's"

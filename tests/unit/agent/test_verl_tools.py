import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_agent import scripted_context
from test_agents import CALL, USER, ScriptedPolicy, run
from tiny_tokenizers import tiny_tokenizer

from meshrl.core.types import Prompt, SamplingParams

FOLDER = Path(__file__).parents[3] / "examples" / "sglang_multiturn"
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
SCHEMA = {"type": "function", "function": {"name": "calculator", "description": "d", "parameters": PARAMETERS}}
CALLS: list[tuple] = []


class Calculator:
    """As verl's classes are."""

    def __init__(self, config, tool_schema):
        self.config, self.schema = config, tool_schema

    async def create(self, instance_id=None, **kwargs):
        CALLS.append(("create", kwargs))
        return f"id-{len(CALLS)}", None

    async def execute(self, instance_id, parameters, **kwargs):
        CALLS.append(("execute", instance_id, parameters))
        if parameters["expression"] == "bad":
            raise ValueError("bad")
        return SimpleNamespace(text=f"{parameters['expression']} is {self.config['answer']}"), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.5

    async def release(self, instance_id, **kwargs):
        CALLS.append(("release", instance_id))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from verl_tools import VerlTools

    CALLS.clear()
    entry = {"class_name": f"{__name__}:Calculator", "config": {"answer": 12}, "tool_schema": SCHEMA}
    yield VerlTools([entry], max_turns=3, reward_weight=2.0)
    del sys.modules["verl_tools"]


def test_a_tool_class_of_verl_has_an_instance_for_each_trajectory_and_its_reward_counts(agent):
    tokenizer = tiny_tokenizer()
    sampling = SamplingParams(stop_token_ids=(2, 3))
    ctx = scripted_context(tokenizer=tokenizer, sampling=sampling, max_new_tokens=200, max_context_tokens=4000)
    meta = {"extra_info": {"tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": "12"}}}}}
    prompt = Prompt(id="p", ordinal=5, messages=[USER], meta=meta)
    policy = ScriptedPolicy(tokenizer, CALL, CALL.replace("3*4", "bad"), "12")
    trajectory = run(agent, policy.generate, ctx, prompt)
    tools = [m["content"] for turn in trajectory.turns for m in turn.messages if m["role"] == "tool"]
    assert tools[0] == "3*4 is 12" and tools[1].startswith("error: ")
    assert CALLS[0] == ("create", {"ground_truth": "12"}) and CALLS[-1] == ("release", "id-1")
    assert [turn.reward for turn in trajectory.turns] == [None, None, 1.0]
    assert agent.tools == [SCHEMA]


def test_an_instance_is_released_when_the_attempt_fails(agent):
    with pytest.raises(RuntimeError):
        run(agent, _fails, scripted_context(tokenizer=tiny_tokenizer()))
    assert [call[0] for call in CALLS] == ["create", "release"]


async def _fails(request):
    raise RuntimeError("no sampler")

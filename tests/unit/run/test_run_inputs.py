"""Objects that a Python caller passes to a run: their texts in the config, and refusals before the run starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_qwen2
from tiny_run import ascii_share, no_reward

from meshrl.agent.loop import SingleTurn
from meshrl.config.explain import to_yaml
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.run.inputs import FunctionAgent, StepCallback, load_run, objects_of

ROWS = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
BASE = {"model": {"path": "organisation/name"}, "loop": {"num_steps": 2, "prompts_per_step": 2}}


class Mine(SingleTurn):
    pass


async def answer(prompt, index, generate, ctx):
    raise NotImplementedError


def test_the_config_shows_objects_by_name_and_rows_by_number():
    rewards = {"share": ascii_share, "short": lambda completion, answer: 1.0}
    objects = objects_of(rewards, Mine(), {"data.path": iter(ROWS), "data.eval_path": ROWS[:1]})
    config = BASE | {"reward": {"terms": {"share": {"weight": 0.5}}}}
    loaded = load_run(config, ["loop.eval_samples=2"], objects=objects)
    terms = loaded.config.reward.terms
    assert {name: (term.kind, term.weight) for name, term in terms.items()} == {
        "share": ("tiny_run:ascii_share", 0.5),
        "short": (f"{__name__}:test_the_config_shows_objects_by_name_and_rows_by_number.<locals>.<lambda>", 1.0),
    }
    assert loaded.config.agent.kind == f"{__name__}:Mine"
    assert (loaded.config.data.path, loaded.config.data.eval_path) == (
        "<2 rows given as data>",
        "<1 rows given as eval_data>",
    )
    assert "# Python object" in to_yaml(loaded)


def test_an_async_function_is_an_agent_without_tools():
    agent = objects_of(agent=answer).agent
    assert isinstance(agent, FunctionAgent) and agent.function is answer and agent.tools == []
    loaded = load_run(BASE, objects=objects_of(agent=answer, rows={"data.path": ROWS}))
    assert loaded.config.agent.kind == f"{__name__}:answer"


def test_an_agent_of_the_user_may_be_the_only_source_of_rewards():
    config = BASE | {"reward": {"terms": {"a": {"kind": "format", "weight": 0, "args": {"regex": "a"}}}}}
    rows = {"data.path": ROWS}
    with pytest.raises(ConfigError, match="all weights are 0"):
        load_run(config, objects=objects_of(rows=rows))
    load_run(config, objects=objects_of(agent=answer, rows=rows))


async def agent_of_a_prompt(prompt):
    raise AssertionError("it is never called")


async def on_step_async(step, metrics):
    return None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"rewards": {"a": "math_answer"}}, r"rewards\['a'\] is str 'math_answer'; it must be a function"),
        ({"rewards": {"a": 7}}, r"rewards\['a'\] is int 7; it must be a function"),
        ({"agent": Mine}, "agent is type .*an instance, not the class"),
        ({"agent": lambda prompt: None}, "agent is function .*or an async function"),
        ({"rows": {"data.path": "train.jsonl"}}, "data is str 'train.jsonl'.*belongs in the config, as data.path"),
        ({"rows": {"data.eval_path": Path("a.jsonl")}}, "eval_data is .*Path.*in the config, as data.eval_path"),
        ({"rows": {"data.path": 3}}, "data is int 3; it must be a list of rows"),
        ({"on_step": on_step_async}, "on_step is function .*plain function of"),
        ({"on_step": 3}, "on_step is int 3"),
        ({"on_step": lambda step: None}, r"meshrl calls it as on_step\(step, metrics\): too many positional"),
        ({"agent": agent_of_a_prompt}, r"meshrl calls it as agent\(prompt, index, generate, ctx\): too many"),
        ({"rewards": "math_answer"}, "rewards is str 'math_answer'; it must be a function, a list"),
        ({"rewards": lambda completion, answer: 1.0}, "or a dict {name of the term: function}, which a lambda needs"),
        ({"rewards": [ascii_share, ascii_share]}, "a list of functions with different names"),
        ({"rewards": []}, "rewards is list"),
        ({"rewards": {"a": 3}}, "must be a function of .completion, answer."),
    ],
)
def test_arguments_of_wrong_types_are_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        objects_of(**arguments)


def test_rewards_are_a_function_or_a_list_of_functions_too():
    assert dict(objects_of(ascii_share).rewards) == {"ascii_share": ascii_share}
    assert dict(objects_of([ascii_share, no_reward]).rewards) == {"ascii_share": ascii_share, "no_reward": no_reward}


def test_a_reward_function_that_a_run_can_not_call_is_refused_with_the_config():
    def of_lists(completions, **columns):
        return [0.0 for _ in completions]

    objects = objects_of([ascii_share, of_lists], rows={"data.path": ROWS})
    with pytest.raises(ConfigError, match=r"(?s)reward.terms.of_lists.kind.*takes completions as the lists of a batch"):
        load_run(BASE, objects=objects)


def test_a_model_in_memory_is_refused_with_what_to_do(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"a Qwen2ForCausalLM in memory.*save_pretrained\(FOLDER\).*model.path=FOLDER"
    ):
        load_run({"model": {"path": tiny_qwen2(vocab_size=8)}})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"reward": {"terms": {"a": {"kind": "math_answer"}}}}, r"reward\.terms\.a\.kind = math_answer"),
        ({"agent": {"args": {"max_turns": 3}}}, r"agent\.args\.max_turns = 3"),
        ({"data": {"path": "train.jsonl"}}, r"data\.path = train.jsonl"),
    ],
)
def test_a_config_key_is_refused_if_an_object_replaces_it(config, expected):
    objects = objects_of({"a": ascii_share}, Mine(), {"data.path": ROWS})
    load_run(BASE, objects=objects)
    with pytest.raises(ConfigError, match=rf"{expected}   \[config-dict\]\s+would have no effect: a Python object"):
        load_run(BASE | config, objects=objects)


def test_the_config_of_a_run_is_loaded_with_objects_of_the_same_names(tmp_path: Path):
    objects = objects_of({"a": ascii_share}, Mine(), {"data.path": ROWS})
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(load_run(BASE, objects=objects)))
    fewer = objects_of({"a": ascii_share}, Mine(), {"data.path": ROWS[:1]})
    again = load_run(written, objects=fewer)
    assert (again.config.data.path, again.origins["reward.terms.a.kind"]) == ("<1 rows given as data>", "Python object")
    other = objects_of({"a": lambda completion, answer: 1.0}, Mine(), {"data.path": ROWS})
    with pytest.raises(ConfigError, match=r"1 problem .*\s+reward\.terms\.a\.kind = tiny_run:ascii_share"):
        load_run(written, objects=other)


def test_null_makes_room_for_an_object_in_place_of_a_key_of_the_config():
    config = BASE | {"data": {"path": "train.jsonl"}}
    loaded = load_run(config, ["data.path=null"], objects=objects_of({"a": ascii_share}, rows={"data.path": ROWS}))
    assert loaded.config.data.path == "<2 rows given as data>"


def test_on_step_must_return_none_or_a_bool():
    """0 or a tensor could mean either, so neither is ignored."""
    ends = list[str]()

    def write(answer: object) -> None:
        StepCallback(lambda step, metrics: answer, lambda: ends.append("end")).write(0, {"reward/mean": 1.0}, {})

    for answer in (None, True, np.True_):
        write(answer)
    assert not ends
    with pytest.raises(MeshrlError, match="on_step returned 0; allowed: None or True"):
        write(0)
    write(np.False_)
    assert ends == ["end"]

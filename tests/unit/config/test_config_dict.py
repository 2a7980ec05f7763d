"""A config given in Python: the same keys, checks and errors as in a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshrl.config import load as config_load
from meshrl.config.explain import to_yaml
from meshrl.config.load import InMemory
from meshrl.core.errors import ConfigError
from meshrl.data.check import check_data

load_run_config = partial(config_load.load_run_config, further=[check_data])
load_sft_config = partial(config_load.load_sft_config, further=[check_data])

ROWS = [{"question": "1+1=", "answer": "2"}] * 3


def in_python(good: Path) -> dict[str, Any]:
    """The good config as a dict; its paths are absolute, because the working folder is another one."""
    config = yaml.safe_load(good.read_text())
    config["train"]["optimizer"]["lr"] = 1e-5
    config["model"]["path"] = good.parent / "tiny"
    config["data"] |= {"path": str(good.parent / "train.jsonl"), "eval_path": good.parent / "test.jsonl"}
    return config


def test_a_dict_and_a_config_object_load_as_the_file_does(good, monkeypatch):
    monkeypatch.chdir(good.parent)  # the folder of modules
    expected = load_run_config(good)
    loaded = load_run_config(in_python(good))
    assert loaded.config == expected.config
    assert loaded.origins["loop.num_steps"] == "config-dict" and loaded.origins["run.seed"] == "default"
    again = load_run_config(loaded.config)
    assert again.config == expected.config and again.origins["run.seed"] == "default"


def test_overrides_and_a_base_file_work_with_a_dict(good, monkeypatch):
    monkeypatch.chdir(good.parent)
    config = load_run_config({"base": "run.yaml", "loop": {"num_steps": 7}}, ["run.seed=5"]).config
    assert (config.loop.num_steps, config.loop.prompts_per_step, config.run.seed) == (7, 6, 5)
    with pytest.raises(ConfigError, match=r"base file 'nowhere.yaml' not found"):
        load_run_config({"base": "nowhere.yaml"})


def test_faults_of_a_dict_are_reported_like_faults_of_a_file(good):
    config = in_python(good)
    config["loop"] |= {"num_step": 3, "prompts_per_step": "6"}
    with pytest.raises(ConfigError) as error:
        load_run_config(config)
    text = str(error.value)
    assert text.startswith("config-dict: 2 problems in this config")
    assert "loop.num_step = 3   [config-dict]" in text and "Nearest: loop.num_steps" in text
    assert 'loop.prompts_per_step = "6"   [config-dict]' in text and "allowed: integer >= 1" in text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"loop": {"num_steps": np.int64(3)}}, r"loop.num_steps is int64 .*which can't be in a config"),
        ({"loop": {3: 4}}, "loop: the key 3 must be a string"),
        ({"reward": {"terms": {"a": {"kind": len}}}}, "reward.terms.a.kind is builtin_function_or_method"),
    ],
)
def test_a_value_that_a_file_can_not_contain_is_refused_with_its_key(config, expected):
    with pytest.raises(ConfigError, match=f"config-dict: {expected}"):
        load_run_config(config)


def test_a_config_that_is_neither_path_nor_dict_is_refused():
    with pytest.raises(ConfigError, match=r"the config is list .*must be the path of a YAML file, a dict"):
        load_run_config(["run.yaml"])


def test_off_may_be_written_as_a_word(good):
    config = in_python(good) | {"algo": {"kl": "off"}}
    config["model"]["lora"] = "off"
    loaded = load_run_config(config).config
    assert loaded.algo.kl.coef == 0 and not loaded.model.lora.enabled


# ---- rows in memory


def with_rows(good, key="data.path", rows=ROWS, **data):
    """The good config with rows in memory in place of one path."""
    config = in_python(good)
    name = key.partition(".")[2]
    del config["data"][name]
    config["data"] |= data
    in_memory = InMemory(values={"data": {name: f"<{len(rows)} rows>"}}, rows={key: rows})
    return load_run_config(config, in_memory=in_memory)


@pytest.mark.parametrize("path", ["data.path", "data.eval_path"])
def test_rows_in_memory_replace_a_path(good, path):
    loaded = with_rows(good, path)
    assert loaded.origins[path] == "Python object"
    assert "<3 rows>" in to_yaml(loaded)


@pytest.mark.parametrize(
    ("rows", "data", "expected"),
    [
        ([], {}, "has no rows"),
        (["1+1="], {}, r"rows\[0\] is str '1\+1='; each row must be a dict"),
        (ROWS, {"prompt": "query"}, "no column 'query' in the first row; it has 'question', 'answer'"),
        (ROWS, {"split": "train"}, "only Hugging Face data sets have splits"),
        (ROWS, {"path": "train.jsonl"}, "would have no effect: a Python object is given in its"),
        (ROWS, {"sources": {"a": {"path": "train.jsonl"}}}, "give one of the two: a single set, or a mixture"),
    ],
)
def test_rows_in_memory_that_can_not_be_used_are_refused(good, rows, data, expected):
    with pytest.raises(ConfigError, match=expected):
        with_rows(good, "data.path", rows, **data)


def test_null_removes_the_path_of_a_file_so_that_rows_can_be_given(good):
    in_memory = InMemory(values={"data": {"path": "<3 rows>"}}, rows={"data.path": ROWS})
    with pytest.raises(ConfigError, match=r"of\s+them;\s+data.path=null\s+removes\s+this\s+one"):
        load_run_config(good, in_memory=in_memory)
    for loaded in (
        load_run_config(good, ["data.path=null"], in_memory=in_memory),
        load_run_config({"base": str(good), "data": {"path": None}}, in_memory=in_memory),
    ):
        assert loaded.origins["data.path"] == "Python object" and loaded.config.data.path == "<3 rows>"


def test_a_null_argument_is_a_value_that_an_object_does_not_replace(good):
    agent = InMemory(values={"agent": {"kind": "__main__:Mine"}}, unused=["agent.args"])
    with pytest.raises(ConfigError, match=r"agent\.args\.turns = null"):
        load_run_config(good, ["agent.args.turns=null"], table_names={"agent": {"__main__:Mine"}}, in_memory=agent)


def test_a_format_of_rows_in_memory_would_have_no_effect(good):
    config = in_python(good)
    config["data"] = {"format": "jsonl"}
    in_memory = InMemory(values={"data": {"path": "<3 rows>"}}, rows={"data.path": ROWS})
    with pytest.raises(ConfigError, match="would have no effect: all rows are given in memory"):
        load_run_config(config, in_memory=in_memory)
    config["data"] |= {"eval_path": str(good.parent / "test.jsonl")}
    load_run_config(config, in_memory=in_memory)


def test_rows_in_memory_may_replace_those_of_sft(good_sft):
    config = yaml.safe_load(good_sft.read_text())
    config["model"]["path"] = good_sft.parent / "tiny"
    del config["sft"]["path"]
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    in_memory = InMemory(values={"sft": {"path": "<1 rows>"}}, rows={"sft.path": rows})
    load_sft_config(config, in_memory=in_memory)
    config["sft"]["messages"] = "chat"
    with pytest.raises(ConfigError, match="no column 'chat' in the first row; it has 'messages'"):
        load_sft_config(config, in_memory=in_memory)


def test_an_object_replaces_no_value_of_the_config(good):
    """If both give the key itself, or a key below it, the config's value would be lost silently."""
    agent = InMemory(values={"agent": {"kind": "__main__:Mine"}}, unused=["agent.args"])
    known = {"agent": {"__main__:Mine"}}
    load_run_config(in_python(good), table_names=known, in_memory=agent)
    load_run_config(
        in_python(good) | {"agent": {"args": {}}}, table_names=known, in_memory=agent
    )  # as a resolved config has it
    for given in ({"kind": "single_turn"}, {"args": {"max_turns": 3}}):
        with pytest.raises(ConfigError, match=r"agent\.\w+.*\[config-dict\]\s+would have no effect"):
            load_run_config(in_python(good) | {"agent": given}, table_names=known, in_memory=agent)

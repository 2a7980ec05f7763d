"""A module of a reward or an agent is found in the folder of the config file, whatever the working folder is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_run import steps_of, write_run

from meshrl.api import train
from meshrl.config.load import load_run_config
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import import_object


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config next to its reward's module, and another working folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine").mkdir()
    path = write_run(tmp_path / "mine")
    name = f"reward_{tmp_path.name}"  # each test has a module of its own
    (path.parent / f"{name}.py").write_text("def length(completion, answer):\n    return len(completion) / 10\n")
    path.write_text(path.read_text().replace("tiny_run:ascii_share", f"{name}:length"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return path


def test_a_run_finds_its_reward_next_to_its_config(config):
    run = train(config, ["loop.num_steps=1", "cluster.executor=inline", "run.name=one"], quiet=True)
    assert steps_of(run.folder)[0]["reward/mean"] > 0


def test_the_config_of_a_run_names_the_folder_for_a_later_evaluation(config, tmp_path):
    loaded = load_run_config(config)
    assert loaded.config.run.module_folder == str(config.parent)
    assert loaded.origins["run.module_folder"] == f"default, here {config.parent}"
    (tmp_path / "run").mkdir()
    text = config.read_text().replace('"run": {', f'"run": {{"module_folder": "{config.parent}", ')
    (tmp_path / "run" / "config.yaml").write_text(text)
    copied = load_run_config(
        tmp_path / "run" / "config.yaml", ["model.path=../mine/model", "data.path=../mine/rows.jsonl"]
    )
    assert copied.config.run.module_folder == str(config.parent)


def test_a_module_next_to_a_config_does_not_replace_an_installed_one(config):
    (config.parent / "xxhash.py").write_text("raise RuntimeError('imported')\n")
    load_run_config(config)
    assert import_object("xxhash:xxh3_64")


def test_a_module_that_is_nowhere_is_refused_before_the_run(config):
    with pytest.raises(ConfigError, match="no_such_module"):
        load_run_config(config, ["reward.terms.ascii.kind=no_such_module:f"])

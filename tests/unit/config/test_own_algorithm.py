"""User-defined losses and advantages, named by a dotted path. Those that are refused are in golden/refused.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.config.explain import to_yaml
from meshrl.config.load import load_run_config
from meshrl.core.errors import ConfigError

LOSS = "algo.loss=own_algorithms:"


def test_the_other_keys_of_the_section_are_arguments_from_any_layer(write, good: Path):
    path = write("base: run.yaml\nalgo:\n  loss:\n    kind: own_algorithms:length_scaled\n    scale: 2\n", "own.yaml")
    loaded = load_run_config(path, ["algo.loss.mode=mean"])
    assert loaded.config.algo.loss.args == {"scale": 2, "mode": "mean"}
    assert loaded.origins["algo.loss.scale"] == "own.yaml:5"
    written = write(to_yaml(loaded), "again.yaml")
    assert load_run_config(written).config.algo == loaded.config.algo


def test_a_user_defined_loss_gets_no_keys_of_the_built_in_loss(good: Path):
    """Its clip_low may have another default or other limits than ppo_clip's."""
    assert load_run_config(good, [LOSS + "gspo"]).config.algo.loss.args == {}
    assert load_run_config(good, [LOSS + "gspo", "algo.loss.clip_low=2"]).config.algo.loss.args == {"clip_low": 2}
    assert load_run_config(good).config.algo.loss.args == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def test_a_function_that_takes_any_argument_gets_any(good: Path):
    loaded = load_run_config(good, [LOSS + "of_anything", "algo.loss.table={a: [1, 2]}"])
    assert loaded.config.algo.loss.args == {"table": {"a": [1, 2]}}


def test_a_user_defined_advantage_may_have_groups_of_one(good: Path):
    load_run_config(good, ["algo.advantage=own_algorithms:by_token", "loop.samples_per_prompt=1"])


def test_a_module_may_be_in_the_working_folder_and_its_failure_is_reported(good: Path):
    """Working folder and config are in different places here."""
    (Path.cwd() / "own_module_of_a_test.py").write_text("def f(inputs, tau: float): ...\n")
    load_run_config(good, ["algo.loss={kind: 'own_module_of_a_test:f', tau: 1}"])
    (Path.cwd() / "own_module_that_fails.py").write_text("raise OSError('no disk')\n")
    with pytest.raises(ConfigError, match="importing 'own_module_that_fails' raised OSError: no disk"):
        load_run_config(good, ["algo.loss=own_module_that_fails:f"])


def test_an_evaluation_imports_no_algorithm(good: Path):
    load_run_config(good, ["algo.loss=no_such_module:f", "algo.advantage=no_such_module:f"], purpose="eval")

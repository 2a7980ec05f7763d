"""User-defined losses and advantages, named by a dotted path, are checked with all other keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.config.explain import to_yaml
from meshrl.config.load import load_run_config
from meshrl.core.errors import ConfigError

LOSS = "algo.loss=own_algorithms:"

# (overrides of a valid config, words that the error must contain)
BAD: list[tuple[list[str], list[str]]] = [
    ([LOSS + "gspo", "algo.loss.clip_lo=1e-3"], ["algo.loss.clip_lo = 0.001", "no argument of", "algo.loss.clip_low"]),
    ([LOSS + "gspo", "algo.loss.xyzzy=1"], ["algo.loss.xyzzy = 1", "It takes clip_low, clip_high."]),
    (
        [LOSS + "gspo", "algo.loss.clip_low=much"],
        ["algo.loss.clip_low = much", "allowed: number (argument of", "own_algorithms:gspo"],
    ),
    ([LOSS + "gspo", "algo.loss.clip_low=true"], ["algo.loss.clip_low = true", "allowed: number (argument of"]),
    ([LOSS + "length_scaled"], ["algo.loss.scale", "[not given]", "required by own_algorithms:length_scaled"]),
    ([LOSS + "length_scaled", "algo.loss.scale=1", "algo.loss.mode=max"], ["allowed: sum | mean"]),
    ([LOSS + "mean", "algo.loss.scale=1"], ["It takes none."]),
    ([LOSS + "only_keywords", "algo.loss.scale=1"], ["must take the inputs as its first argument", "(*, scale"]),
    ([LOSS + "annotated_with_a_tensor", "algo.loss.table=1"], ["annotates it as torch.Tensor", "or not at all"]),
    ([LOSS + "with_a_pair", "algo.loss.clips=[0.1, 0.2]"], ["annotates it as tuple[float, float]", "or not at all"]),
    ([LOSS + "of_a_name_for_type_checkers", "algo.loss.row=1"], ["annotates it as Sample", "or not at all"]),
    (
        [LOSS + "not_a_function"],
        ["algo.loss.kind = own_algorithms:not_a_function", "must be a function", "is of type int"],
    ),
    ([LOSS + "gsop"], ["algo.loss.kind", "own_algorithms.py has no 'gsop'; did you mean 'gspo'?"]),
    (["algo.loss=no_such_module:f"], ["algo.loss.kind = no_such_module:f", "no such module"]),
    (["algo.loss=own_algorithms.nothing:f"], ["importing 'own_algorithms.nothing' raised ModuleNotFoundError"]),
    (
        ["algo.loss=own:not a path"],
        ["must be one of cispo, gspo, ppo_clip, sapo, or a dotted path"],
    ),
    (["algo.loss=sapo", "algo.loss.clip_high=0.3"], ["algo.loss.clip_high = 0.3", "no effect: algo.loss.kind is sapo"]),
    (["algo.loss={clip_lo: 0.1}"], ["unknown key. Nearest: algo.loss.clip_low"]),
    (["algo.advantage=gpro"], ["algo.advantage = gpro", "must be one of dr_grpo, grpo, rloo", "Nearest: grpo"]),
    (["algo.advantage=own_algorithms:batch_scale"], ["did you mean 'batch_scaled'?"]),
    (["algo.advantage=own_algorithms:of_two_arguments"], ["required by own_algorithms:of_two_arguments(groups", "eps"]),
    (["algo.advantage=own_algorithms:batch_scaled", "algo.advantage_eps=1e-3"], ["no effect", "batch_scaled"]),
    (["algo.truncated=drop"], ["algo.truncated = drop", "must be train or mask."]),
]


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_an_algorithm_that_can_not_work_is_refused_with_a_helpful_error(good: Path, overrides, words):
    with pytest.raises(ConfigError) as error:
        load_run_config(good, overrides)
    message = " ".join(str(error.value).split())
    for word in ["1 problem", *words]:
        assert word in message


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

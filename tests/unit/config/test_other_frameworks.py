"""Names of verl, TRL and prime-rl in a config, an override or `meshrl config` get the key that meshrl has instead."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from golden import cases, check_case

from meshrl.config.docs import every_key, list_keys
from meshrl.config.load import MAX_SHOWN, load_run_config, load_sft_config
from meshrl.config.other_frameworks import meanings, settings
from meshrl.config.schema import nearest
from meshrl.core.errors import ConfigError

ROOT = Path(__file__).parents[3]
NAMES = Path(__file__).parent / "golden" / "names.txt"
# Keys of a script of verl for GRPO on GSM8K and MATH, fields of GRPOConfig, keys of prime-rl: the answer to each.


def refusal(config: Path, *overrides: str) -> str:
    """The error of a config, in one line."""
    with pytest.raises(ConfigError) as error:
        load_run_config(config, overrides)
    return " ".join(str(error.value).split())


def about(text: str, key: str) -> str:
    """The part of an error about one key."""
    answer = text.split(f" {key} = ")[1].split("[command line] ")[1].split(" [command line]")[0]
    return re.sub(r" \S+ = 1 ?$| docs/from_verl_and_trl.md lists.*", "", answer)


def test_a_key_of_another_framework_gets_this_answer_as_an_override(good: Path):
    names = [name for name, _ in cases(NAMES)]
    for some in (names[: len(names) // 2], names[len(names) // 2 :]):  # at most MAX_SHOWN
        text = refusal(good, *(f"{name}=1" for name in some))
        for name in some:
            check_case(NAMES, name, about(text, name))


def test_meshrl_config_begins_with_the_right_answer_for_a_name_of_another_framework():
    for name, answer in cases(NAMES):
        meant = answer.partition(" is ")[2].partition(" here")[0].replace(" and ", ", ").split(", ")
        first = list_keys(name).splitlines()[0]
        assert first.split()[0] in meant or first in answer, name


def test_each_key_of_a_section_of_another_framework_is_answered_with_its_line(write: Callable[..., Path], good: Path):
    pasted = """\
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 64
    optim: {lr: 1e-6}
    fsdp_config: {offload_policy: true}
  rollout:
    n: 5
algorithm:
  adv_estimator: grpo
  kl_ctrl: {}
"""
    text = refusal(write(good.read_text() + pasted), "loop.samples_per_prompt=1")
    for words in (
        "actor_rollout_ref.actor.ppo_mini_batch_size = 64 [run.yaml:19] unknown key.",
        "is train.updates_per_step here: a count of optimizer steps: train_batch_size / ppo_mini_batch_size.",
        "actor_rollout_ref.actor.optim.lr = 1e-06 [run.yaml:20]",
        "is train.optimizer.lr here.",
        "offload_policy of verl is not available: ",
        "actor_rollout_ref.rollout.n = 5 [run.yaml:23]",
        "is loop.samples_per_prompt here.",
        "adv_estimator of verl is algo.advantage here",
        "a group of one has nothing to compare with",  # the rest of the config is checked, too
    ):
        assert words in text, text
    assert "7 problems" in text


@pytest.mark.parametrize(
    ("pasted", "words"),
    [
        ("algorithm: {}", "algorithm of verl is algo here."),
        ("actor_rollout_ref: null", "actor_rollout_ref of verl is model, train, rollout and algo here."),
        ("critic: {optim: {lr: 1e-5}}", "critic.optim.lr = 1e-05 [run.yaml:17] unknown key. critic.* of verl is not"),
        ("trainer: {optimizer: {lr: 1}}", "trainer.optimizer.lr = 1 [run.yaml:17] unknown key. "),
        ("xyzzy: {plugh: 1}", "xyzzy [run.yaml:17] unknown key, and no known key is similar."),
    ],
)
def test_an_unknown_section_is_answered_as_far_as_its_name_is_known(write, good: Path, pasted: str, words: str):
    assert words in refusal(write(good.read_text() + pasted))


def test_a_large_config_of_another_framework_is_reported_in_part(write: Callable[..., Path], good: Path):
    lines = "".join(f"  option_{i}: {i}\n" for i in range(3 * MAX_SHOWN))
    text = refusal(write(good.read_text() + "trainer:\n  total_epochs: 3\n" + lines))
    assert f"{2 * MAX_SHOWN + 1} more keys are wrong" in text and f" trainer.option_{MAX_SHOWN}" not in text
    assert "docs/from_verl_and_trl.md" in text


def test_all_wrong_keys_of_a_usual_config_of_another_framework_are_named(write: Callable[..., Path], good: Path):
    assert "docs/" not in refusal(good, "train.optimizer.lrr=1")
    lines = "".join(f"  option_{i}: {i}\n" for i in range(MAX_SHOWN + 25))
    text = refusal(write(good.read_text() + "trainer:\n  total_epochs: 3\n" + lines))
    assert all(f"trainer.option_{i}" in text for i in range(MAX_SHOWN + 25)) and "26 more keys are wrong: " in text
    assert "docs/from_verl_and_trl.md lists the keys of verl" in text


def test_a_config_of_sft_gets_keys_of_sft(good_sft: Path):
    with pytest.raises(ConfigError) as error:
        load_sft_config(good_sft, ["num_train_epochs=3", "beta=1"])
    text = " ".join(str(error.value).split())
    assert "num_train_epochs of TRL is sft.num_epochs here" in text and "algo.kl" not in text


def test_a_name_that_is_common_has_no_meaning_without_its_section():
    assert meanings("name", every_key()) == []
    assert [each.here for each in meanings("wandb.name", every_key())] == [("run.name",)]


def test_every_setting_of_the_table_has_keys_that_exist_or_advice():
    keys = every_key()
    for setting in settings():
        assert setting.names and (setting.here or setting.note.startswith(("not available", "not needed"))), setting
        assert set(setting.here) <= set(keys), setting
        assert not setting.note.endswith("."), setting


def test_every_name_of_the_table_has_the_meaning_of_its_row_with_all_its_sections():
    rows = [(setting, each) for setting in settings() for each in setting.names.items()]
    names = [(name, framework, setting) for setting, (framework, own) in rows for name in own]
    assert len({(name.lower(), framework) for name, framework, _ in names}) == len(names)
    for name, _, setting in names:
        found = meanings(name, every_key())
        assert (setting.here, setting.note) in [(each.here, each.note) for each in found] and len(found) <= 2, name


def test_only_keys_that_differ_in_a_letter_or_two_are_similar():
    keys = every_key()
    assert nearest(keys, "loop.num_stepz") == ["loop.num_steps", "sft.num_steps"]
    assert nearest(keys, "forward_gather") == nearest(keys, "num_train_epochs") == nearest(keys, "zz") == []


def test_readme_and_the_config_page_link_to_the_names_of_other_frameworks():
    for page in ("README.md", "docs/config.md"):
        assert "from_verl_and_trl.md" in (ROOT / page).read_text(encoding="utf-8")

"""The keys of an evaluation: what they resolve to, and what is refused."""

from pathlib import Path

import pytest

from meshrl.config.load import load_run_config
from meshrl.config.rollout import SamplingConfig
from meshrl.core.errors import ConfigError


def test_filters_and_greedy_are_fine_in_an_evaluation(good: Path):
    overrides = ["rollout.sampling.top_p=0.9", "loop.eval_samples=4"]
    assert load_run_config(good, overrides, purpose="eval").config.eval_sampling.top_p == 0.9
    assert load_run_config(good, ["rollout.sampling.temperature=0"], purpose="eval").config.eval_sampling.top_p == 1


def test_evaluations_are_sampled_as_in_training_except_for_their_own_keys(good: Path):
    def sampled(*overrides: str) -> SamplingConfig:
        return load_run_config(good, overrides).config.eval_sampling

    assert sampled() == SamplingConfig(temperature=0, max_new_tokens=28)
    several = ["loop.eval_samples=4", "rollout.sampling.temperature=0.8", "rollout.sampling.stop=[</a>]"]
    assert sampled(*several) == SamplingConfig(temperature=0.8, max_new_tokens=28, stop=["</a>"])
    own = [f"rollout.eval_sampling.{text}" for text in ("temperature=0.3", "top_p=0.5", "max_new_tokens=40")]
    assert sampled(*own) == SamplingConfig(temperature=0.3, top_p=0.5, max_new_tokens=40)
    assert sampled(*several, *own).temperature == 0.3 and sampled(*several, *own).stop == ["</a>"]
    assert load_run_config(good, own).config.rollout.sampling == SamplingConfig(max_new_tokens=28)


def test_an_evaluation_needs_no_number_of_steps(write):
    text = "model: {path: tiny}\ndata: {eval_path: test.jsonl}\ntrain: {scheduler: {warmup_steps: 10}}\n"
    loaded = load_run_config(write(text, "eval.yaml"), purpose="eval")
    assert loaded.origins["loop.num_steps"] == "default"
    with pytest.raises(ConfigError, match=r"loop.num_steps is required"):
        load_run_config(write(text, "eval.yaml"))


def test_a_config_of_supervised_training_is_refused_as_that_by_an_evaluation(good_sft: Path):
    with pytest.raises(ConfigError, match="this is a config of `meshrl sft`"):
        load_run_config(good_sft, purpose="eval")


def test_an_evaluation_needs_held_out_rows_and_different_answers(good: Path):
    with pytest.raises(ConfigError, match="held-out rows"):
        load_run_config(good, ["data.eval_path=null"], purpose="eval")
    with pytest.raises(ConfigError, match="same answer"):
        load_run_config(good, ["rollout.sampling.temperature=0", "loop.eval_samples=4"], purpose="eval")


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ("temperature=0.3", "because loop.eval_samples is 1. Set rollout.eval_sampling.temperature."),
        ("top_p=0.9", "Set rollout.eval_sampling.temperature and rollout.eval_sampling.top_p."),
    ],
)
def test_sampling_on_the_command_line_of_a_greedy_evaluation_is_refused(good: Path, overrides: str, remedy: str):
    """In the file they are those of the training, and on the command line they apply to several samples."""
    override = f"rollout.sampling.{overrides}"
    with pytest.raises(ConfigError) as caught:
        load_run_config(good, [override], purpose="eval")
    assert remedy in " ".join(str(caught.value).split())
    load_run_config(good, [override, "loop.eval_samples=2"], purpose="eval")
    name, _, value = overrides.partition("=")
    load_run_config({"base": str(good), "rollout": {"sampling": {name: float(value)}}}, purpose="eval")


def test_sampling_on_the_command_line_that_the_file_overrides_for_evaluations_is_refused(good: Path):
    config = {"base": str(good), "rollout": {"eval_sampling": {"temperature": 0.6}}}
    load_run_config(config, purpose="eval")
    with pytest.raises(ConfigError, match=r"samples with\s+rollout.eval_sampling. Set\s+rollout.eval_sampling.temp"):
        load_run_config(config, ["rollout.sampling.temperature=0.3"], purpose="eval")


def test_keys_of_evaluations_that_have_an_effect_are_accepted(good: Path):
    """Those that are refused are in golden/refused.txt."""
    load_run_config(good, ["rollout.eval_sampling.temperature=1", "rollout.eval_sampling.top_p=0.5"])
    load_run_config(good, ["loop.eval_term=answer"])


def test_without_terms_an_evaluation_term_is_no_second_problem(good: Path):
    with pytest.raises(ConfigError, match=r"1 problem in this config\s+reward\.terms = {}"):
        load_run_config(good, ["reward.terms={}", "loop.eval_term=answer"])

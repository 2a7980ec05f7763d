"""Names of verl, TRL and prime-rl in a config, an override or `meshrl config` get the key that meshrl has instead."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.config.docs import every_key, list_keys
from meshrl.config.load import MAX_SHOWN, load_run_config, load_sft_config
from meshrl.config.other_frameworks import meanings, settings
from meshrl.config.schema import nearest
from meshrl.core.errors import ConfigError

ROOT = Path(__file__).parents[3]
NONE = "is not available"
NEEDLESS = "is not needed"

VERL = {  # the keys of a script that runs GRPO on GSM8K and MATH -> the key of meshrl, or why there is none
    "algorithm.adv_estimator": "algo.advantage",
    "data.train_files": "data.path",
    "data.val_files": "data.eval_path",
    "data.train_batch_size": "loop.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.sampling.max_new_tokens",
    "data.filter_overlong_prompts": "data.max_prompt_tokens",
    "data.truncation": "data.max_prompt_tokens",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.optim.lr": "train.optimizer.lr",
    "actor_rollout_ref.model.use_remove_padding": NEEDLESS,
    "actor_rollout_ref.actor.ppo_mini_batch_size": "train.updates_per_step",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.use_kl_loss": "algo.kl.place",
    "actor_rollout_ref.actor.kl_loss_coef": "algo.kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "algo.kl.estimator",
    "actor_rollout_ref.actor.entropy_coeff": "algo.entropy_coef",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "train.activation_checkpointing",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "train.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "train.optimizer_offload",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.mesh.infer_tp",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "actor_rollout_ref.rollout.n": "loop.samples_per_prompt",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "train.param_offload",
    "algorithm.use_kl_in_reward": "algo.kl.place",
    "trainer.critic_warmup": NONE,
    "trainer.logger": "monitor.sinks",
    "trainer.project_name": "monitor.wandb_project",
    "trainer.experiment_name": "run.name",
    "trainer.n_gpus_per_node": "cluster.num_train_ranks",
    "trainer.nnodes": "cluster.nodes",
    "trainer.save_freq": "loop.save_every_steps",
    "trainer.test_freq": "loop.eval_every_steps",
    "trainer.total_epochs": "loop.num_epochs",
}
TRL = {  # fields of GRPOConfig -> the same
    "output_dir": "run.folder",
    "run_name": "run.name",
    "learning_rate": "train.optimizer.lr",
    "lr_scheduler_type": "train.scheduler.kind",
    "warmup_ratio": "train.scheduler.warmup_steps",
    "weight_decay": "train.optimizer.weight_decay",
    "adam_beta2": "train.optimizer.betas",
    "max_grad_norm": "train.optimizer.clip",
    "bf16": "model.dtype",
    "gradient_checkpointing": "train.activation_checkpointing",
    "per_device_train_batch_size": "loop.prompts_per_step",
    "gradient_accumulation_steps": "train.updates_per_step",
    "num_train_epochs": "loop.num_epochs",
    "max_steps": "loop.num_steps",
    "num_generations": "loop.samples_per_prompt",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "temperature": "rollout.sampling.temperature",
    "use_vllm": "rollout.engine",
    "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.mesh.infer_tp",
    "vllm_max_model_length": "rollout.max_context_tokens",
    "vllm_server_base_url": "rollout.endpoint.url",
    "vllm_enable_sleep_mode": "rollout.release_memory",
    "vllm_importance_sampling_mode": "algo.correction.kind",
    "beta": "algo.kl.coef",
    "epsilon": "algo.loss.clip_low",
    "epsilon_high": "algo.loss.clip_high",
    "delta": "algo.loss.dual_clip",
    "loss_type": "algo.aggregation",
    "scale_rewards": "algo.advantage",
    "mask_truncated_completions": "algo.truncated",
    "reward_weights": "reward.terms.NAME.weight",
    "num_iterations": NONE,
    "steps_per_generation": "train.updates_per_step",
    "sync_ref_model": NONE,
    "save_steps": "loop.save_every_steps",
    "save_total_limit": "run.keep_checkpoints",
    "eval_steps": "loop.eval_every_steps",
    "logging_steps": NEEDLESS,
    "report_to": "monitor.sinks",
    "log_completions": "monitor.rollout_log_every_steps",
    "seed": "run.seed",
    "deepspeed": NONE,
    "remove_unused_columns": NEEDLESS,
}
PRIME_RL = {
    "model.name": "model.path",
    "deployment.num_train_gpus": "cluster.num_train_ranks",
    "deployment.num_infer_gpus": "cluster.num_rollout_ranks",
    "orchestrator.batch_size": "loop.prompts_per_step",
    "orchestrator.group_size": "loop.samples_per_prompt",
    "orchestrator.train.sampling.max_completion_tokens": "rollout.sampling.max_new_tokens",
    "orchestrator.eval.interval": "loop.eval_every_steps",
    "ckpt.interval": "loop.save_every_steps",
    "inference.parallel.dp": "rollout.mesh.dp",
    "trainer.model.optim_cpu_offload": "train.optimizer_offload",
}


def refusal(config: Path, *overrides: str) -> str:
    """The error of a config, in one line."""
    with pytest.raises(ConfigError) as error:
        load_run_config(config, overrides)
    return " ".join(str(error.value).split())


def about(text: str, key: str) -> str:
    """The part of an error about one key."""
    return text.split(f" {key} = ")[1].split("[command line] ")[1].split(" [command line]")[0]


@pytest.mark.parametrize("table", [VERL, TRL, PRIME_RL], ids=["verl", "trl", "prime-rl"])
def test_a_key_of_another_framework_gets_the_right_answer_as_an_override(good: Path, table: dict[str, str]):
    text = refusal(good, *(f"{name}=1" for name in table))
    wrong = {name: about(text, name) for name, answer in table.items() if answer not in about(text, name)}
    assert wrong == {} and f"{len(table)} problems" in text


@pytest.mark.parametrize("table", [VERL, TRL, PRIME_RL], ids=["verl", "trl", "prime-rl"])
def test_meshrl_config_begins_with_the_right_answer_for_a_name_of_another_framework(table: dict[str, str]):
    first = {name: list_keys(name).splitlines()[0] for name in table}
    wrong = {name: line for name, line in first.items() if table[name] not in (line.split()[0], NONE, NEEDLESS)}
    wrong |= {name: line for name, line in first.items() if table[name] not in line}
    assert wrong == {}


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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("load_in_4bit=true", "not available: a frozen base has 16 bits a weight at least. Use model.lora"),
        ("model.quantization_config={load_in_4bit: true}", "a frozen base has 16 bits a weight"),
        ("model.quantization=nf4", "a frozen base has 16 bits a weight"),
        ("model.lora.quantize=nf4", "a frozen base has 16 bits a weight"),
        ("model.dtype=int4", "must be bfloat16, float16 or float32. int4 of other frameworks is not available: "),
        ("model.dtype=fp8", "not available: trainer and sampler compute in 16 or 32 bits. Use model.dtype: bfloat16"),
        ("train.fp8=true", "trainer and sampler compute in 16 or 32 bits"),
        ("train.master_dtype=float8_e4m3fn", "trainer and sampler compute in 16 or 32 bits"),
        ("activation_offloading=true", "not available: activations stay on the device or are computed again. Use"),
        ("train.offload_activations=true", "activations stay on the device or are computed again"),
        ("train.mesh.ep=2", "not available: no rank has experts of its own. Use train.sharding_strategy: FULL_SHARD"),
        ("train.expert_model_parallel_size=2", "no rank has experts of its own"),
        ("rollout.enable_expert_parallel=true", "no rank has experts of its own"),
    ],
)
def test_ways_to_save_memory_that_are_not_built_are_refused_with_the_nearest_that_is(good: Path, override, words):
    assert words in refusal(good, override)


def test_a_wrong_value_that_no_framework_has_gets_the_nearest(good: Path):
    assert refusal(good, "model.dtype=flaot32").endswith("must be bfloat16, float16 or float32. Nearest: float32.")


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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+learning_rate=1", "learning_rate of TRL is train.optimizer.lr here"),
        ("train.beta=1", "beta of TRL is algo.kl.coef here"),
        ("train.optimzer.lr=1", "train.optimzer [command line] unknown key. Nearest: train.optimizer."),
        ("train.optimizer.learning_rate=1", "learning_rate of TRL is train.optimizer.lr here."),
        ("rollout.n=8", "n of verl is loop.samples_per_prompt here."),
        ("algo.beta=1", "beta of TRL is algo.kl.coef here"),
        ("num_generation=8", "num_generations of TRL is loop.samples_per_prompt here."),
        ("train.optimizer.beta=1", "Nearest: train.optimizer.betas."),
        ("train.lr=1", "Nearest: train.optimizer.lr."),
        ("rollout.temprature=1", "Nearest: rollout.sampling.temperature, rollout.eval_sampling.temperature, "),
        ("train.name=1", "Nearest: run.name."),
        ("loop.num_train_steps=1", "no known key is similar"),
        ("some.enable=1", "no known key is similar"),
    ],
)
def test_a_name_of_another_framework_comes_after_a_misspelt_key_of_the_same_section(good: Path, override, words):
    assert words in refusal(good, override)


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
    assert nearest(keys, "forward_prefetch") == nearest(keys, "num_train_epochs") == nearest(keys, "zz") == []


def test_readme_and_the_config_page_link_to_the_names_of_other_frameworks():
    for page in ("README.md", "docs/config.md"):
        assert "from_verl_and_trl.md" in (ROOT / page).read_text(encoding="utf-8")

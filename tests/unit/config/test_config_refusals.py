"""Every fault of a config that can be found is refused before torch is imported, with a helpful error."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from meshrl.config import load as config_load
from meshrl.config.check import ONLY, unused
from meshrl.core.errors import ConfigError
from meshrl.data.check import check_data

load_run_config = partial(config_load.load_run_config, further=[check_data])
load_sft_config = partial(config_load.load_sft_config, further=[check_data])

KNOWN = {"reward": {"math_answer", "format"}, "agent": {"single_turn", "multi_turn"}}
REPLICAS = "train.mesh.dp_replicate=2"
VLLM = "rollout.engine=vllm rollout.vllm.python=python3"  # an existing program, so that nothing else is wrong

# (overrides of a valid config, words that the error must contain)
BAD: list[tuple[str, list[str]]] = [
    # unknown keys
    ("lr=1", ["lr = 1", "[command line]", "unknown key", "train.optimizer.lr"]),
    ("train.lr=1", ["train.lr", "unknown key", "train.optimizer.lr"]),
    ("train.optimizer.learning_rte=1", ["unknown key", "[command line]"]),
    ("train.optimizer.learning_rate=1", ["learning_rate of TRL is train.optimizer.lr here."]),
    ("train.optimzer.lr=1", ["train.optimzer", "Nearest: train.optimizer."]),
    ("train.scheduler.knd=linear", ["Nearest: train.scheduler.kind"]),
    ("rollout.n=8", ["loop.samples_per_prompt"]),
    ("algo.kl_coef=0.1", ["algo.kl.coef"]),
    ("loop.batch_size=8", ["loop.prompts_per_step"]),
    ("reward.terms.answer.wieght=2 reward.terms.answer.kind=format", ["Nearest: reward.terms.answer.weight"]),
    ("sft.path=x", ["sft", "of the config of `meshrl sft`"]),
    ("xyzzy=1", ["no known key is similar", "meshrl config"]),
    ("base=run.yaml", ["base", "unknown key"]),
    # wrong types and values
    ("train.optimizer.lr=-1", ["train.optimizer.lr = -1", "number > 0", "peak learning rate", "[command line]"]),
    ("train.optimizer.lr=fast", ["train.optimizer.lr = fast", "number > 0"]),
    ("train.optimizer.lr=1e999", ["number > 0"]),
    ("reward.terms.answer.weight=1e999 reward.terms.answer.kind=format", ["terms.answer.weight", "<= 1000000"]),
    ("reward.terms.answer.weight=-1e7 reward.terms.answer.kind=format", ["terms.answer.weight", ">= -1000000"]),
    ("train.optimizer.lr=true", ["number > 0"]),
    ("train.optimizer.betas=[0.9]", ["[number, number]"]),
    ("train.optimizer.betas=[0.9,1.0]", ["below 1"]),
    ("train.optimizer=fast", ["must be a section", "betas"]),
    ("train.scheduler.kind=cos", ["must be constant, linear or cosine. Nearest: cosine."]),
    (
        "train.sharding_strategy=full",
        ["must be FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD. Nearest: FULL_SHARD."],
    ),
    ("algo.truncated=maks", ["algo.truncated = maks", "must be train or mask. Nearest: mask."]),
    ("algo.truncated=1", ["must be train or mask."]),
    ("algo.loss.kind=gsppo", ["must be ppo_clip, gspo, cispo or sapo, or a dotted path", "Nearest: gspo."]),
    ("algo.loss.kind=[gspo]", ["algo.loss.kind = ", "must be ppo_clip, gspo, cispo or sapo"]),
    ("algo.loss.tau_pos=2", ["algo.loss.tau_pos = 2", "no effect: algo.loss.kind is ppo_clip"]),
    ("algo.loss.tau_neg=2", ["algo.loss.tau_neg = 2", "no effect: algo.loss.kind is ppo_clip"]),
    ("train.activation_checkpointing=3", ["must be true, false, block, submodule or selective."]),
    ("train.activation_checkpointing=submodules", ["Nearest: submodule."]),
    (
        "train.activation_checkpointing=selective train.torch_compile=true",
        ["train.torch_compile", "blocks of which selective recomputes a part. Use true"],
    ),
    ("model.attn_implementation=flash_attention_3", ["auto, sdpa, flash or eager. Nearest: flash."]),
    ("loop.num_steps=2.5", ["integer >= 1"]),
    ("loop.num_steps=0", ["integer >= 1"]),
    ("loop.num_steps=null", ["integer >= 1"]),
    ("loop.num_steps='8'", ["integer >= 1"]),
    ("loop.prompts_per_step=yes", ["integer >= 1"]),
    ("data.system=7", ["string or null", "Quote it"]),
    ("run.name=off", ["string", "Quote it"]),
    ("run.name=a/b", ["without slashes"]),
    ("run.name=..", ["without slashes"]),
    ("algo.loss=ppo", ["algo.loss.kind = ppo", "ppo_clip"]),
    ("algo.kl=on", ["algo.kl", "section", "or off"]),
    ("algo.kl=0.1", ["algo.kl", "section", "coef"]),
    ("algo.correction=on", ["algo.correction", "section", "or auto, off, truncate or mask"]),
    ("algo.correction=truncated", ["algo.correction.kind = truncated", "Nearest: truncate."]),
    ("algo.correction.kind=mask algo.correction.high=0.2", ["algo.correction.high = 0.2", "number >= 1"]),
    ("algo.correction.kind=mask algo.correction.high=null", ["number >= 1"]),
    ("algo.correction.kind=mask algo.correction.low=-1", ["number >= 0 and <= 1 or null"]),
    (
        "algo.correction.kind=mask algo.correction.low=1 algo.correction.high=1",
        ["algo.correction.low = 1", "algo.correction.high = 1", "low must be below high"],
    ),
    ("algo.correction.rejection=k3", ["algo.correction.rejection", "section", "or off"]),
    ("algo.correction.rejection.measure=k3", ["algo.correction.rejection.high", "without a bound nothing is rejected"]),
    (
        "algo.correction.rejection={measure: k3, low: -1}",
        ["algo.correction.rejection.low = -1", "k2 and k3 are never negative"],
    ),
    (
        "algo.correction.rejection={measure: k1, level: seq_max, low: -1}",
        ["algo.correction.rejection.level = seq_max", "Give high only"],
    ),
    ("algo.correction.rejection={measure: k1, low: 0.1, high: 1}", ["low must be below 0", "0 where sampler and"]),
    ("algo.correction.rejection={measure: k2, high: 0}", ["high above 0"]),
    ("algo.constant_length=0 algo.aggregation=constant_length", ["integer >= 1 or null"]),
    ("rollout.sampling.top_p=0", ["> 0 and <= 1"]),
    (f"rollout.router_replay=true {VLLM}", ["engine vllm does not return the experts", "use embedded"]),
    ("model.router_dtype=float16", ["auto or float32"]),
    ("rollout.sampling.stop_token_ids=[a]", ["list of integers"]),
    ("rollout.sampling.stop_token_ids=[-1]", ["0 or more"]),
    ("rollout.sampling.stop=[a,'']", ["rollout.sampling.stop", "an empty text would end every turn"]),
    ("rollout.sampling.stop=a", ["list of strings", "Write a list: rollout.sampling.stop=[a]."]),
    ("rollout.sampling.stop='</tool_call>'", ['Write a list: rollout.sampling.stop=["</tool_call>"].']),
    ("rollout.sampling.stop_token_ids=7", ["Write a list: rollout.sampling.stop_token_ids=[7]."]),
    ("monitor.sinks=wandb", ["Write a list: monitor.sinks=[wandb]."]),
    ("reward.terms={a: 1}", ["reward.terms.a", "section", "kind"]),
    ("reward.terms.x.weight=1 reward.terms.answer.kind=format", ["reward.terms.x.kind", "required"]),
    # keys of other frameworks that this version does not support
    ("rollout.engine=sglang", ["SGLang is not installed here", "rollout.sglang.url", "engine=embedded"]),
    ("rollout.mesh.infer_tp=4", ["Use 1"]),
    ("rollout.tensor_model_parallel_size=4", ["Use 1"]),
    ("rollout.pipeline_model_parallel_size=2", ["Use 1"]),
    ("train.mesh.tp=3", ["tp 3 = 3 ranks, but num_train_ranks is 2", "product of the others one of 1, 2."]),
    ("train.tensor_model_parallel_size=3", ["tp 3 = 3 ranks, but num_train_ranks is 2"]),
    ("train.mesh.ulysses=2 train.mesh.dp_shard=2", ["dp_shard 2 x ulysses 2 = 4 ranks", "train.mesh.ulysses"]),
    ("train.mesh.ulysses=2 train.sharding_strategy=NO_SHARD", ["share the model's state", "use FULL_SHARD"]),
    ("loop.kind=one_step_off", ["needs ranks that only sample", "cluster.num_rollout_ranks"]),
    ("loop.kind=fully_async", ["needs ranks that only sample", "cluster.num_rollout_ranks"]),
    ("loop.max_staleness=1", ["colocated never trains on samples that are more than 0 versions old"]),
    (
        "loop.kind=one_step_off loop.max_staleness=2 cluster.num_rollout_ranks=1",
        ["more than 1 versions old", "kind: fully_async"],
    ),
    ("model.lora.enabled=true model.lora.rank=0", ["model.lora.rank", ">= 1"]),
    ("model.lora.enabled=true model.lora.targets=[experts] train.mesh.tp=2", ["adapters of experts are not cut"]),
    ("model.vision=replicate", ["must be train or freeze"]),
    (
        "model.lora.enabled=true model.lora.targets=[all-linear,vision] model.vision=freeze",
        ["model.lora.targets", "adapters in a tower that is not trained", "model.vision: train"],
    ),
    ("model.dtype=float16", ["loss scaling", "Use bfloat16 or float32"]),
    # keys of single engines
    ("rollout.engine=vllm rollout.vllm.python=no/python", ["rollout.vllm.python = no/python", "no such program"]),
    (f"{VLLM} rollout.vllm.args=[--model=x]", ["--model is set by meshrl itself"]),
    (f"{VLLM} rollout.vllm.args=[--logprobs_mode,raw]", ["--logprobs-mode is set by meshrl itself"]),
    (f"{VLLM} rollout.mesh.infer_tp=3", ["2 ranks can't be split into replicas of 3 ranks"]),
    (f"{VLLM} rollout.mesh.infer_tp=2 rollout.mesh.dp=2", ["rollout.mesh.dp = 2", "1 replica"]),
    ("rollout.release_memory=true rollout.sync_mode=delta", ["rollout.sync_mode", "Use one of the two"]),
    (f"{VLLM} rollout.vllm.args=[--enable-sleep-mode]", ["--enable-sleep-mode is set by meshrl itself"]),
    # resuming a run
    ("run.resume=auto", ["run.name = auto", "Set run.name"]),
    ("run.resume=nowhere", ["allowed: never, auto, or a checkpoint's folder", "nowhere"]),
    ("run.resume=.", ["is not a checkpoint", "state/manifest.json"]),
    ("run.keep_checkpoints=0", ["run.keep_checkpoints = 0", ">= 1"]),
    # two keys that contradict each other
    ("train.tensor_model_parallel_size=1 train.mesh.tp=2", ["train.mesh.tp = 2", "two names of one number"]),
    (
        "rollout.tensor_model_parallel_size=2 rollout.mesh.infer_tp=1",
        ["rollout.mesh.infer_tp = 1", "two names of one number"],
    ),
    (REPLICAS, ["FULL_SHARD shards over all ranks", "HYBRID_SHARD"]),
    (f"train.sharding_strategy=SHARD_GRAD_OP {REPLICAS}", ["SHARD_GRAD_OP", "use HYBRID_SHARD"]),
    ("train.sharding_strategy=HYBRID_SHARD", ["dp_replicate = 1", "dp_replicate >= 2"]),
    (f"train.sharding_strategy=HYBRID_SHARD {REPLICAS} cluster.num_train_ranks=3", ["num_train_ranks is 3"]),
    ("train.mesh.dp_shard=4", ["dp_shard 4", "num_train_ranks is 2", "dp_shard at -1"]),
    ("train.mesh.dp_shard=0", [">= 1, or -1"]),
    ("train.sharding_strategy=NO_SHARD train.mesh.dp_shard=2", ["NO_SHARD", "1 or -1"]),
    ("train.sharding_strategy=NO_SHARD train.mesh.dp_replicate=4", ["4 ranks", "num_train_ranks is 2"]),
    ("rollout.mesh.dp=3", ["2 replicas"]),
    ("cluster.nodes=2", ["need executor: ray", "torchrun"]),
    ("cluster.executor=ray cluster.nodes=3", ["the same number of ranks", "3 machines do not divide 2 ranks"]),
    ("cluster.executor=ray cluster.nodes=2 cluster.address=local", ["a local Ray has one machine"]),
    ("cluster.executor=inline cluster.num_train_ranks=2", ["num_train_ranks must be 1"]),
    ("cluster.executor=inline cluster.num_train_ranks=1 cluster.num_rollout_ranks=1", ["num_rollout_ranks must be 0"]),
    ("loop.samples_per_prompt=1", ["grpo", "group of one"]),
    ("loop.samples_per_prompt=1 algo.advantage=rloo", ["rloo", "group of one"]),
    ("loop.samples_per_prompt=1 algo.advantage=dr_grpo", ["dr_grpo", "group of one"]),
    ("train.updates_per_step=4", ["loop.prompts_per_step = 6", "must divide", "[run.yaml:14]"]),
    ("train.scheduler.warmup_steps=20", ["20 optimizer steps", "loop.num_steps = 20"]),
    ("data.eval_path=null loop.eval_every_steps=5", ["held-out rows", "data.eval_path"]),
    ("rollout.max_context_tokens=100", ["128 tokens", "the context has 100"]),
    ("data.max_prompt_tokens=2021", ["2049 tokens", "positions for 2048"]),
    # sampling from another distribution than the trainer's
    ("rollout.sampling.top_p=0.9", ["top_p = 0.9", "In training leave it at 1.0"]),
    ("rollout.sampling.top_k=50", ["top_k = 50", "In training leave it at 0"]),
    ("rollout.sampling.min_p=0.1", ["min_p = 0.1", "In training leave it at 0.0"]),
    ("rollout.sampling.repetition_penalty=1.1", ["In training leave it at 1.0"]),
    ("rollout.sampling.temperature=0", ["same answer"]),
    ("monitor.sinks=[wanb]", ["monitor.sinks", "must be a list of tensorboard or wandb. Nearest: wandb."]),
    # a KL estimator that has no effect in the loss
    ("algo.kl={coef: 0.1, estimator: k1}", ["zero mean gradient", "place: reward"]),
    # names
    ("agent.kind=multiturn", ["agent.kind = multiturn", "multi_turn, single_turn", "Nearest: multi_turn"]),
    ("agent.kind=pkg.module", ["package.module:name"]),
    ("agent.kind=no_such_pkg.module:Agent", ["no such module", "elsewhere"]),
    ("reward.terms.answer.kind=no_such_module:score", ["no such module", "elsewhere"]),
    ("reward.terms.answer.kind=math_anser", ["reward.terms.answer.kind", "Nearest: math_answer"]),
    ("reward.terms={}", ["at least one term"]),
    ("reward.terms={a: {kind: format, weight: 0}}", ["all weights are 0"]),
    # files
    ("model.path=tniy", ["no such folder", "home/tniy", "elsewhere/tniy", "organisation/name"]),
    ("model.path=models/tniy.GGUF", ["no such folder", "meshrl convert models/tniy.GGUF FOLDER, then model.path="]),
    ("model.path=tiny/checkpoint", ["no such folder", "home/tiny/checkpoint"]),
    ("data.path=missing.jsonl", ["no such file", "home/missing.jsonl", "elsewhere/missing.jsonl"]),
    ("data.path=tiny", ["a folder, not a file"]),
    ("data.path=run.yaml", ["each line should be one complete JSON object", "begins with 'model:'"]),
    ("data.eval_path=missing.jsonl", ["data.eval_path", "home/missing.jsonl", "elsewhere/missing.jsonl"]),
]

# (overrides that are right, overrides that have no effect with them, why)
NO_EFFECT: list[tuple[str, str, str]] = [
    ("", "algo.loss.tau_pos=2 algo.loss.tau_neg=2", "algo.loss.kind is ppo_clip"),
    ("algo.correction=off", "algo.correction.level=sequence algo.correction.high=3", "algo.correction.kind is off"),
    (
        "",
        "algo.correction.rejection.level=seq_max algo.correction.rejection.low=-1 algo.correction.rejection.high=1",
        "algo.correction.rejection.measure is off",
    ),
    ("", "loop.in_flight=abort loop.oversampling=0.5", "loop.kind is colocated"),
    ("", "loop.replace_by=answer", "loop.max_replaced_groups is 0"),
    ("", "model.lora.rank=8 model.lora.alpha=8 model.lora.targets=[q_proj]", "model.lora is off"),
    (
        "",
        "rollout.vllm.python=python3 rollout.vllm.args=[--enforce-eager] rollout.vllm.kv_cache_bytes=1000 "
        "rollout.vllm.gpu_memory_utilization=0.9 rollout.vllm.start_deadline_s=60 rollout.sglang.url=http://h:1 "
        "rollout.sglang.api_key_env=KEY rollout.sglang.python=python3 rollout.sglang.args=[--disable-radix-cache] "
        "rollout.sglang.deterministic=false rollout.sglang.mem_fraction_static=0.9 rollout.sglang.start_deadline_s=60 "
        "rollout.endpoint.url=http://h:1 rollout.endpoint.model=m rollout.endpoint.api_key_env=KEY "
        "rollout.endpoint.weights=files rollout.endpoint.reload_url=http://h:1/r rollout.endpoint.folder=/tmp",
        "rollout.engine is embedded",
    ),
    (VLLM, "rollout.embedded.kv_cache_bytes=9", "rollout.engine is vllm"),
    (
        "cluster.num_rollout_ranks=1",
        "rollout.release_memory=true train.param_offload=true",
        "cluster.num_rollout_ranks is above 0: samplers have devices of their own",
    ),
    ("", "rollout.sync_transport=broadcast", "cluster.num_rollout_ranks is 0"),
    ("", "cluster.address=10.0.0.1:6379", "cluster.executor is processes"),
    (
        "cluster.executor=inline cluster.num_train_ranks=1 algo.kl.coef=0.1",
        "cluster.max_restarts=0 cluster.deadlines.start=9 cluster.deadlines.load=9 cluster.deadlines.annotate=9 "
        "cluster.deadlines.optim=9 cluster.deadlines.report=9 cluster.deadlines.end=9",
        "cluster.executor is inline: the only rank is this process",
    ),
    ("", "algo.constant_length=64", "algo.aggregation is token_mean"),
    ("", "algo.kl.estimator=k3 algo.kl.place=reward", "algo.kl.coef is 0"),
    *(
        (f"algo.advantage={kind}", "algo.advantage_eps=1e-4", f"algo.advantage is {kind}")
        for kind in ("rloo", "dr_grpo")
    ),
    ("", "train.scheduler.min_lr_ratio=0.1", "train.scheduler.kind is constant"),
    (
        "data.eval_path=null",
        "loop.eval_samples=4 loop.eval_term=answer loop.eval_pass_score=1 loop.save_best=false data.eval_limit=4 "
        "data.eval_by=level data.eval_split=test rollout.eval_sampling.temperature=1 "
        "rollout.eval_sampling.max_new_tokens=9 "
        "rollout.eval_sampling.top_p=0.5 rollout.eval_sampling.top_k=5 rollout.eval_sampling.min_p=0.1 "
        "rollout.eval_sampling.repetition_penalty=2 cluster.deadlines.eval=9",
        "data.eval_path is null",
    ),
    ("", "cluster.deadlines.annotate=9", "algo.kl.coef is 0, one update per step"),
    ("", "monitor.wandb_project=maths", "monitor.sinks has no wandb"),
]


def _words(path: Path, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        load_run_config(path, overrides, KNOWN)
    return " ".join(str(error.value).split())


def _split(overrides: str) -> list[str]:
    """Overrides are separated by blanks; a value in braces may contain blanks, too."""
    parts: list[str] = []
    for word in overrides.split(" "):
        if parts and parts[-1].count("{") > parts[-1].count("}"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[bad for bad, _ in BAD])
def test_a_bad_config_is_refused_with_a_helpful_error(good: Path, overrides: str, words: list[str]):
    message = _words(good, _split(overrides))
    for word in words:
        assert word in message
    problems = 1 + ("infer_tp=1" in overrides)
    assert f"{problems} problem" in message


@pytest.mark.parametrize(("right", "without_effect", "reason"), NO_EFFECT, ids=[keys[:60] for _, keys, _ in NO_EFFECT])
def test_keys_that_have_no_effect_are_refused_with_the_reason(good: Path, right: str, without_effect: str, reason: str):
    load_run_config(good, right.split(), KNOWN)
    keys = [override.partition("=")[0] for override in without_effect.split()]
    message = _words(good, [*right.split(), *without_effect.split()])
    assert f"{len(keys)} problem" in message and message.count(f"would have no effect: {reason}") == len(keys)
    assert all(f" {key} = " in message for key in keys)


def test_the_tables_have_every_unsupported_key_and_every_key_without_effect(good: Path):
    tried = " ".join([*(overrides for overrides, _ in BAD), *(keys for _, keys, _ in NO_EFFECT)])
    config = load_run_config(good, ["algo.advantage=rloo", "data.eval_path=null"]).config
    for key in [*ONLY, *unused(config)]:
        assert f"{key}=" in tried, f"no row of the tables refuses {key}"


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_sink_that_is_not_installed_is_refused_before_anything_starts(
    good: Path, sink: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, sink, None)  # as for a module that is not installed
    message = _words(good, [f"monitor.sinks=[{sink}]"])
    assert "1 problem" in message and f"pip install {sink}" in message
    load_run_config(good, [f"monitor.sinks=[{sink}]"], KNOWN, purpose="eval")  # an evaluation only prints


def test_null_is_not_to_be_quoted_where_text_is_required(good: Path):
    """A quoted null would be the name of a column."""
    message = _words(good, ["data.prompt=null"])
    assert "allowed: string" in message and "Quote" not in message


@pytest.mark.parametrize("value", ["a", "true"])
def test_advice_on_the_form_of_a_list_is_not_given_for_entries_of_another_type(good: Path, value: str):
    message = _words(good, [f"rollout.sampling.stop_token_ids={value}"])
    assert "list of integers" in message and "Write a list" not in message


def test_vllm_that_is_not_installed_is_installed_by_the_script_that_keeps_torch(
    good: Path, monkeypatch: pytest.MonkeyPatch
):
    """`pip install vllm` can bring another torch."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    message = _words(good, ["rollout.engine=vllm"])
    assert "1 problem" in message and "pip install" not in message
    assert "docs/install.md" in message and "scripts/install.sh --cpu --vllm" in message
    assert "rollout.vllm.python=.venv-vllm/bin/python" in message


SFT_BAD: list[tuple[str, list[str]]] = [
    ("loop.num_steps=3", ["loop", "of the config of `meshrl train`"]),
    ("train.share_prompts=false", ["no effect", "rows of SFT share no prompts"]),
    ("cluster.num_rollout_ranks=1", ["no effect", "SFT"]),
    ("monitor.rollout_log_every_steps=0", ["no effect", "SFT samples nothing"]),
    ("cluster.deadlines.sync=9", ["no effect", "SFT has no such phase"]),
    ("train.scheduler.warmup_steps=40", ["40 optimizer steps", "sft.num_steps"]),
    ("sft.max_row_tokens=4096", ["4096 tokens", "positions for 2048"]),
    ("sft.messages=chat", ["no column 'chat'", "'messages'"]),
    ("sft.path=missing.jsonl", ["no such file", "home/missing.jsonl"]),
    ("cluster.nodes=2", ["need executor: ray"]),
    ("model.lora.rank=8", ["model.lora is off"]),
]


@pytest.mark.parametrize(("override", "words"), SFT_BAD, ids=[bad for bad, _ in SFT_BAD])
def test_a_bad_sft_config_is_refused(good_sft: Path, override: str, words: list[str]):
    load_sft_config(good_sft)
    with pytest.raises(ConfigError) as error:
        load_sft_config(good_sft, [override])
    message = " ".join(str(error.value).split())
    for word in words:
        assert word in message


def test_a_config_of_another_command_is_recognized_in_one_line(good: Path, good_sft: Path):
    with pytest.raises(ConfigError) as error:
        load_sft_config(good)
    message = " ".join(str(error.value).split())
    assert "2 problems" in message and "Remove it here" not in message
    assert "this is a config of `meshrl train`: this command does not read data, rollout and loop." in message
    assert "sft.path and sft.num_steps are required, but not given." in message

    message = _words(good_sft, [])
    assert "3 problems" in message and "Remove it here" not in message
    assert "this is a config of `meshrl sft`: this command does not read sft." in message


def test_the_error_for_a_section_of_another_command_advises_to_remove_it(good_sft: Path):
    with pytest.raises(ConfigError, match=r"Remove it here") as error:
        load_sft_config(good_sft, ["loop.num_steps=3"])
    assert "this is a config of" not in str(error.value)


def test_a_missing_section_names_its_required_keys(write, good: Path):
    message = _words(write("train: {optimizer: {lr: 1e-5}}\n", "bad.yaml"), [])
    assert "3 problems" in message
    for words in ("model.path is required", "data.path or data.sources", "loop.num_steps is required"):
        assert words in message


FILES: list[tuple[str, list[str]]] = [
    ("loop: {num_steps: 1}\nloop: {num_steps: 2}\n", ["loop", "given twice", "line 1", "bad.yaml:2"]),
    (
        "base: run.yaml\ntrain:\n  optimizer:\n    lr: 1e-6\n    lr: 1e-5\n",
        ["train.optimizer.lr", "bad.yaml:5", "twice"],
    ),
    ("base: run.yaml\ntrain:\n\n  lrs: 1\n", ["train.lrs = 1", "[bad.yaml:4]", "train.optimizer.lr"]),
    ("base: run.yaml\ntrain.optimizer.lr: 1\n", ["bad.yaml:2", "section of its own"]),
    ("model: {path: tiny}\n", ["data", "loop", "required, but not given", "[not given]"]),
    ("a: [1\n", ["not valid YAML", "line 2"]),
    ("just text\n", ["mapping of sections"]),
    ("a: 1\n--- \nb: 2\n", ["not valid YAML"]),
    ("? [a, b]\n: 1\n", ["bad.yaml:1", "single word"]),
    ("a: !!python/name:os.system x\n", ["bad.yaml:1", "YAML tag"]),
    ("a: &x\n  b: *x\n", ["nested more than"]),
    ("a: &x [*x]\n", ["nested more than"]),
    ('base: run.yaml\nrun: {name: "\\ud800"}\n', ["can't be read"]),
]


@pytest.mark.parametrize(("text", "words"), FILES, ids=[text.replace("\n", "|") for text, _ in FILES])
def test_a_bad_file_is_refused_with_its_name_and_line(write, good: Path, text: str, words: list[str]):
    message = _words(write(text, "bad.yaml"), [])
    for word in words:
        assert word in message


def test_a_file_that_is_missing_a_folder_or_no_text_is_refused(good: Path, tmp_path: Path):
    assert "no such file" in _words(tmp_path / "no.yaml", [])
    assert "is a folder" in _words(tmp_path, [])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in _words(tmp_path / "binary.yaml", [])


@pytest.mark.parametrize("text", ["train", "=3", "train..lr=1", ".lr=1", "loop.num_steps=[1", "loop.num_steps=!!int 3"])
def test_a_malformed_override_is_refused(good: Path, text: str):
    message = _words(good, [text])
    assert "key=value" in message or "command line" in message


def test_all_problems_are_reported_at_once_with_file_line_and_command_line(write, good: Path):
    path = write(
        "base: run.yaml\nalgo:\n  advantge: grpo\n  kl: {coef: -1}\nloop:\n  samples_per_prompt: 1\n", "bad.yaml"
    )
    message = _words(path, ["train.optimizer.lr=slow", "model.vision=half", "data.path=gone.jsonl"])
    assert "6 problems" in message
    for words in (
        "algo.advantge = grpo [bad.yaml:3] unknown key. Nearest: algo.advantage",
        "algo.kl.coef = -1 [bad.yaml:4] allowed: number >= 0",
        "train.optimizer.lr = slow [command line] allowed: number > 0",
        "model.vision = half [command line]",
        "loop.samples_per_prompt = 1 [bad.yaml:6] algo.advantage = grpo [default]",
        "data.path = gone.jsonl [command line] no such file",
    ):
        assert words in message


def test_a_wrong_or_missing_required_key_does_not_hide_other_problems(write, good: Path):
    message = _words(good, ["loop.num_steps=abc", "train.mesh.tp=4", "train.scheduler.warmup_steps=9"])
    assert "2 problems" in message  # whether the warm-up is too long can't be known
    assert "loop.num_steps = abc [command line] allowed: integer >= 1" in message and "train.mesh.tp = 4" in message
    path = write("data: {path: gone.jsonl}\nloop: {prompts_per_step: 4}\nmodel: {dtype: bfloat16}\n", "missing.yaml")
    message = _words(path, ["train.mesh.tp=4"])
    for words in ("model.path [not given]", "loop.num_steps [not given]", "train.mesh.tp = 4", "no such file"):
        assert words in message


def test_a_key_whose_value_was_refused_is_not_checked_further(good: Path):
    """The check would see a default in place of the refused value, and not the user's value."""
    message = _words(good, ["loop.prompts_per_step=six", "train.updates_per_step=5"])
    assert "1 problem" in message and "divide" not in message


def test_columns_are_looked_up_in_the_first_row(good: Path):
    message = _words(good, ["data.prompt=prompt"])
    assert "data.prompt = prompt" in message and "'question', 'answer'" in message
    assert "set data.answer" not in message
    message = _words(good, ["data.answer=solution"])
    assert "'question', 'answer'. If no reward needs an answer, set data.answer: null." in message
    load_run_config(good, ["data.answer=null", "reward.terms.answer.kind=json:dumps"])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", json.dumps({"vision_config": {}}), "vision tower"),
        ("model.safetensors", None, "no weights"),
        ("tokenizer.json", None, "no tokenizer"),
    ],
)
def test_an_incomplete_model_folder_is_refused(good: Path, file: str, content: str | None, words: str):
    path = good.parent / "tiny" / file
    path.unlink() if content is None else path.write_text(content)
    assert words in _words(good, [])


def test_names_are_not_checked_without_a_table_but_their_form_is(good: Path):
    (Path.cwd() / "my_rewards.py").write_text("raise RuntimeError('a check runs no user code')")
    load_run_config(good, ["agent.kind=anything", "reward.terms.answer.kind=my_rewards:score"])
    with pytest.raises(ConfigError, match=r"package.module:name"):
        load_run_config(good, ["agent.kind=not a name"])

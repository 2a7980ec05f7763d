import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from published_recipes import shares, translations

from meshrl.cli import main
from meshrl.config.docs import every_key
from meshrl.config.load import PATH_KEYS, WrongConfig, load_run_config
from meshrl.config.other_frameworks import settings
from meshrl.config.schema import locate
from meshrl.core.errors import ConfigError
from meshrl.run.inputs import load_run
from meshrl.tools.translate.command import nested, render, translate_file, translate_settings
from meshrl.tools.translate.read import Code, computed, read_settings
from meshrl.tools.translate.values import RULES

ROOT = Path(__file__).parents[3]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# project=unused
export PYTHONPATH=$PYTHONPATH:a
export PYTHONPATH=$PYTHONPATH:b
project='A B'
export N_GPUS=${N_GPUS:-$((2 * (1 + 1)))}
engine="vllm" # or sglang
if [ "$engine" = sglang ]; then
    engine=sglang
    chat=True
fi
home=${HOME}/data
files="['$home/a.parquet', '${home}/b.parquet']"
length=$(((1024 * 2) + 1))
NAME=${NAME:-"${project}/$(date +%s)"}
DATA=(
    data.train_files="$files"
    data.max_prompt_length=${length}
)
ray job submit --runtime-env=env.yaml -- python3 -m verl.trainer.main_ppo --config-name='ppo_trainer' \
    "${DATA[@]}" \
    algorithm.adv_estimator=grpo \
    # data.shuffle=False \
    data.return_raw_chat=$chat \
    trainer.logger='["console","wandb"]' \
    actor_rollout_ref.rollout.name=$engine \
    +actor_rollout_ref.actor.optim.lr=1e-6 \
    ++trainer.experiment_name="$NAME" \
    actor_rollout_ref.ref.strategy='${actor_rollout_ref.actor.strategy}' \
    actor_rollout_ref.actor.strategy=fsdp2 \
    trainer.n_gpus_per_node=$N_GPUS trainer.default_local_dir=$CKPTS/x $@ 2>&1 | tee log.txt
"""

PROGRAM = """
import torch
from trl import GRPOConfig, GRPOTrainer
raise SystemExit("a file that is translated must not run")
room = 1024
prompt_tokens = 256
name = "org/model"
dataset = load_dataset("org/rows", "main", split="train").map(lambda row: row)
config = GRPOConfig(
    "outputs",
    max_completion_length=room - prompt_tokens,
    max_prompt_length=prompt_tokens * 2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    num_generations=4,
    max_steps=50,
    warmup_ratio=0.1,
    model_init_kwargs={"dtype": torch.bfloat16},
    chat_template_kwargs={"enable_thinking": False},
    top_p=0.9,
    run_name=f"run-{name}",
    callbacks=[print],
)
trainer = GRPOTrainer(
    model=name, reward_funcs=[score], args=config, train_dataset=dataset, peft_config=LoraConfig(r=8, lora_alpha=16)
)
"""


def test_a_script_is_read_with_its_variables_and_without_running_it(tmp_path: Path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    framework, found = read_settings(path)
    assert framework == "verl" and found == {
        "config-name": "ppo_trainer",
        "data.train_files": ["~/data/a.parquet", "~/data/b.parquet"],
        "data.max_prompt_length": 2049,
        "algorithm.adv_estimator": "grpo",
        "data.return_raw_chat": True,
        "trainer.logger": ["console", "wandb"],
        f"{ROLLOUT}.name": "vllm",
        f"{ACTOR}.optim.lr": 1e-6,
        "trainer.experiment_name": "A B/UNKNOWN",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        f"{ACTOR}.strategy": "fsdp2",
        "trainer.n_gpus_per_node": 4,
        "trainer.default_local_dir": "$CKPTS/x",
    }


def test_a_python_script_is_read_as_text_and_counted_in_prompts(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    framework, found = read_settings(path)
    assert framework == "TRL" and found["max_prompt_length"] == 512 and found["lora_r"] == 8
    assert isinstance(found["run_name"], Code) and isinstance(found["reward_funcs"], list)
    made = translate_settings(framework, found, {"rows": None, "num_processes": 2})
    expected = {
        "model.path": "org/model",
        "model.lora.rank": 8,
        "model.lora.enabled": True,
        "data.path": "org/rows",
        "data.subset": "main",
        "data.split": "train",
        "data.chat_template_kwargs.enable_thinking": False,
        "rollout.sampling.max_new_tokens": 768,
        "loop.prompts_per_step": 32,  # 8 x 2 devices x 8 steps / 4 answers
        "train.updates_per_step": 2,
        "loop.num_steps": 25,
        "train.scheduler.warmup_steps": 5,
        "train.scheduler.kind": "linear",  # TRL's default
        "run.folder": "outputs",
    }
    assert {key: made.here.get(key) for key in expected} == expected
    assert "biases every ratio" in made.reasons["top_p"] and "rollout.sampling.top_p" not in made.here
    assert {"callbacks", "run_name", "reward_funcs", "model_init_kwargs"} <= made.reasons.keys()
    assert "data.map" in made.reasons["dataset.map"] and made.there["dataset.map"] == "lambda row: row"
    path.write_text("rows = load().map(lambda row: row)")
    with pytest.raises(ConfigError, match="has no setting of verl, TRL"):
        read_settings(path)


def test_what_needs_the_devices_or_the_rows_names_the_option():
    there = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_generations": 16}
    there |= {"dataset_name": "org/rows", "warmup_ratio": 0.1}

    def of(devices: int, rows: int | None):
        made = translate_settings("TRL", there, {"rows": rows, "num_processes": devices})
        return render(made, "train.py"), made

    text, made = of(1, None)
    assert "prompts_per_step: 1 " in text and "rounded up from 0.25: check --devices" in text
    assert "--rows" in made.reasons["warmup_ratio"]
    text, made = of(8, 200)  # 300 steps
    assert made.here["train.scheduler.warmup_steps"] == 30 and "rounded" not in text


@pytest.mark.parametrize(
    "text", ["'a' * 10**9", "'a' * 999999999", "[0] * 999999999", "'%999999999d' % 1", "n * n", "1 + " * 1000 + "1"]
)
def test_an_expression_that_takes_memory_or_time_stays_code(text: str):
    assert type(computed(text, {"n": 10**15})) is Code
    assert computed(f"2 * 3 if 1 < 2 else {text}", {"n": 10**15}) == 6


LOADED = "def shaped(row): return {'prompt': row['question']}\n" + "rows = load_dataset("
FILES = {"data.path": "a.jsonl", "data.eval_path": "b.jsonl", "data.split": None, "data.eval_split": None}


@pytest.mark.parametrize(
    ("loaded", "train", "held_out", "here"),
    [
        ("'json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})", "rows['train']", "rows['test']", FILES),
        ("'json', data_files='a.jsonl', split='train')", "rows", "load_dataset('json', data_files='b.jsonl')", FILES),
        (
            "'json', data_files='a.jsonl', split='train').train_test_split(0.1)",
            "rows['train']",
            "rows['test']",  # not evaluated on the rows of training
            {"data.path": "a.jsonl", "data.eval_path": None},
        ),
        (
            "'org/rows', 'main')\nrows = rows.map(lambda row: {'prompt': row['question']})",
            "rows['train']",
            "rows['test'].map(shaped)",
            {"data.path": "org/rows", "data.subset": "main", "data.eval_path": "org/rows", "data.eval_split": "test"},
        ),
        ("'org/rows', split='all')", "read()", "None", {"data.path": "org/rows", "data.split": "all"}),
    ],
)
def test_rows_are_those_that_the_trainer_gets(loaded: str, train: str, held_out: str, here: dict, tmp_path: Path):
    path = tmp_path / "train.py"
    end = f"\nGRPOTrainer('m', f, args=GRPOConfig('o'), train_dataset={train}, eval_dataset={held_out})"
    path.write_text(
        f"other = load_dataset('x', 'y')\n{LOADED}{loaded}{end}" if train == "rows" else LOADED + loaded + end
    )
    made = translate_settings(*read_settings(path), {"rows": None, "num_processes": 1})
    assert {key: made.here.get(key) for key in here} == here
    assert "PLACEHOLDER" in render(made, "train.py")  # of the reward, which gets lists there


VERL = {
    "data.train_batch_size": 512,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.optim.lr_warmup_steps": 10,
    f"{ROLLOUT}.n": 16,
    f"{ROLLOUT}.top_k": -1,
    "trainer.total_epochs": 2,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 2,
    "data.max_response_length": 3072,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ACTOR}.fsdp_config.fsdp_size": 4,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.max_num_gen_batches": 10,
    "data.gen_batch_size": 1536,
    f"{ROLLOUT}.enforce_eager": True,
    f"{ROLLOUT}.max_num_batched_tokens": 8192,
    "data.train_files": ["a/x.parquet", "b/x.parquet"],
}
PRIME_RL = {
    "orchestrator.batch_size": 128,
    "orchestrator.rollouts_per_example": 16,
    "trainer_gpu_ids": [6, 7],
    "seq_len": 4096,
}


@pytest.mark.parametrize(
    ("framework", "there", "here"),
    [
        (
            "verl",
            VERL,
            {
                "train.updates_per_step": 16,
                "train.scheduler.warmup_steps": 160,  # verl counts steps, meshrl optimizer steps
                "rollout.sampling.top_k": 0,
                "loop.num_steps": 30,
                "cluster.num_train_ranks": 16,
                "cluster.executor": "ray",
                "algo.aggregation": "seq_mean_token_mean",
                "train.sharding_strategy": "HYBRID_SHARD",
                "train.mesh.dp_replicate": 4,
                "loop.max_replaced_groups": 14848,
                "rollout.vllm.args": ["--enforce-eager", "--max-num-batched-tokens=8192"],
                "data.sources.a.path": "a/x.parquet",
                "train.optimizer.betas": [0.9, 0.999],  # verl's default
            },
        ),
        ("verl", {"trainer.n_gpus_per_node": 4}, {"cluster.num_train_ranks": 4, "cluster.executor": None}),
        ("verl", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "low_var_kl"}, {"algo.kl.estimator": "k3"}),
        ("verl", {f"{ACTOR}.kl_loss_coef": 0.1, f"{ACTOR}.use_kl_loss": False}, {"algo.kl.coef": None}),
        ("prime-rl", PRIME_RL, {"loop.prompts_per_step": 8, "cluster.num_train_ranks": 2, "loop.kind": "fully_async"}),
        ("verl", {"trainer.default_local_dir": "$OUT/x"}, {"run.folder": None}),
        ("verl", {"data.train_files": "a.parquet"}, {"loop.num_epochs": 30, "loop.num_steps": None}),
        (
            "TRL",
            {"dataset_name": "a.jsonl", "warmup_ratio": 0.1},
            {"loop.num_epochs": 3, "train.scheduler.warmup_steps": 2242},
        ),
        ("TRL", {"loss_type": "cispo", "epsilon_high": 5.0}, {"algo.loss.kind": "cispo", "algo.loss.clip_high": None}),
        ("TRL", {"save_steps": 0.5, "max_steps": 20}, {"loop.save_every_steps": 10}),
    ],
)
def test_values_are_those_of_meshrl_in_its_units(framework: str, there: dict, here: dict):
    made = translate_settings(framework, there, {"rows": 7473, "num_processes": 1})
    assert {key: made.here.get(key) for key in here} == here


def test_a_translated_config_is_written_once_and_is_explained(write: Callable[..., Path], capfd):
    home = write("").parent
    row = {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}
    (home / "rows.jsonl").write_text((json.dumps(row) + "\n") * 64)
    (home / "my_score.py").write_text("def score(data_source, solution_str, ground_truth): return 1.0")
    script = write(
        f"python3 -m verl.trainer.main_ppo data.train_files={home}/rows.jsonl trainer.total_epochs=3 "
        f"data.train_batch_size=16 {ACTOR}.ppo_mini_batch_size=8 {ROLLOUT}.n=4 "
        f"actor_rollout_ref.model.path={home}/tiny "
        "data.max_prompt_length=64 data.max_response_length=32 trainer.n_gpus_per_node=2 critic.optim.lr=1e-5 a.b=1 "
        f"custom_reward_function.name=score custom_reward_function.path={home}/my_score.py",
        "run.sh",
    )
    out = home / "my.yaml"
    assert main(["translate", str(script), "--out", str(out)]) == 0
    assert "my.yaml --explain" in capfd.readouterr().out
    text = out.read_text()
    assert "num_epochs: 3" in text and "kind: my_score:score" in text and f"module_folder: {home}" in text
    assert "no critic" in text and "critic.optim.lr = 1e-05" in text and "a.b = 1" in text
    assert load_run(out, starts=False).config.loop.num_steps == 12  # 3 x 64 rows / 16
    with pytest.raises(ConfigError, match=r"my\.yaml"):
        translate_file(script, out, None, 1)
    with pytest.raises(ConfigError, match="has no setting of verl, TRL, prime-rl"):
        read_settings(out)


def test_every_setting_of_published_recipes_is_a_key_or_a_comment_with_a_reason():
    for recipe, made in translations().items():
        named = {name for names in made.names.values() for name in names} | made.reasons.keys()
        assert made.there.keys() <= named and all(made.reasons.values()), recipe
        try:
            load_run_config(nested(made.here), starts=False)
        except WrongConfig as error:
            assert all(problem.keys[0] in PATH_KEYS for problem in error.problems), (recipe, str(error))
    assert len(translations()) >= 30
    for framework, least in {"verl": 0.67, "TRL": 0.62, "prime-rl": 0.7}.items():
        _, _, mapped, _, unknown = shares(framework)
        assert mapped >= least and unknown <= 0.02, framework


def test_the_configs_of_the_examples_are_valid_where_their_files_are():
    configs = sorted((ROOT / "examples" / "grpo_trainer" / "config").glob("*.yaml"))
    for config in (path for path in configs if "sft" not in path.name):
        try:
            load_run_config(config, starts=False)
        except WrongConfig as error:
            assert all(problem.keys[0] in PATH_KEYS for problem in error.problems), str(error)
    assert load_run_config(ROOT / "examples/grpo_trainer/config/dapo.yaml", starts=False).config.rows_per_update == 512


def test_every_row_of_the_table_can_be_translated():
    keys = every_key()
    for setting in settings():
        names = {name for own in setting.names.values() for name in own}
        assert set(setting.defaults) | setting.unwritten <= names and (not setting.rule or setting.rule in RULES), (
            setting
        )
        for result in setting.values.values():
            results = (
                [*result.values()] if isinstance(result, dict) else result if isinstance(result, list) else [result]
            )
            assert isinstance(result, dict) or len(results) <= len(setting.here), setting
            assert not isinstance(result, dict) or all(locate(keys, key)[0] for key in result), setting
            for text in (each for each in results if isinstance(each, str) and each.startswith("=")):
                ast.parse(text[1:].strip(), mode="eval")


def test_names_with_line_breaks_write_no_keys(tmp_path: Path):
    (tmp_path / "a.yaml").write_text('"trainer.x\\nmodel:\\n  path: evil # ": 1\ndata:\n  train_batch_size: 8\n')
    framework, there = read_settings(tmp_path / "a.yaml")
    lines = render(translate_settings(framework, there, {}), "na\nme: 1").splitlines()
    assert not [line for line in lines if "evil" in line and not line.startswith("#")] and "me: 1" not in lines

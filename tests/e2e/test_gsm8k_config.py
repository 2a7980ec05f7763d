"""The GSM8K examples run as documented, with the rows in examples/data and a tiny model."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.config.load import load_run_config, load_sft_config
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.reward.kinds import make_grader

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ROWS = EXAMPLES / "data" / "gsm8k"
CONFIGS = EXAMPLES / "grpo_trainer" / "config"
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
HERE = ["cluster.executor=inline", "cluster.num_train_ranks=1", "model.dtype=float32"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with runs/gsm8k as after the preparing scripts, with a smaller model."""
    work = tmp_path_factory.mktemp("work")
    data = work / "runs" / "gsm8k"
    runpy.run_path(str(EXAMPLES / "data_preprocess" / "gsm8k.py"))["write"](data, ROWS)
    build = runpy.run_path(str(EXAMPLES / "gsm8k_from_nothing.py"))["build"]
    build(data, data / "start", vocab_size=400, num_key_value_heads=1, **TINY)
    return work


@pytest.mark.slow
def test_gsm8k_training_runs_from_random_weights_to_a_model_with_reward_curve_and_evaluation(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(work)
    short = ["sft.num_steps=1", "sft.rows_per_step=2", "train.scheduler.warmup_steps=0", "run.name=sft"]
    assert main(["sft", str(CONFIGS / "gsm8k_sft_from_nothing.yaml"), *HERE, *short]) == 0
    overrides = ["loop.num_steps=2", "loop.prompts_per_step=2", "loop.samples_per_prompt=2", "data.eval_limit=4"]
    overrides += ["rollout.sampling.max_new_tokens=8", "model.path=runs/gsm8k/sft/checkpoints/step_000001/model"]
    capfd.readouterr()
    assert main(["train", str(CONFIGS / "gsm8k_tiny_cpu.yaml"), *HERE, *overrides, "run.name=grpo"]) == 0
    printed = capfd.readouterr()
    assert re.search(r"left out [1-9]\d* training prompts over 256 tokens", printed.out + printed.err)
    folder = work / "runs" / "gsm8k" / "grpo"
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == len(result["reward_curve"]) == 2
    assert [evaluation["step"] for evaluation in result["evals"]] == [0, 2]
    logs = [list(read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")) for step in (1, 2)]
    for log in logs:
        assert len(log) == 4
        for entry in log:
            assert set(entry.trajectory.rewards) == {"answer", "form"}
            assert "#### " in entry.trajectory.prompt.answer
    assert AutoModelForCausalLM.from_pretrained(result["model"]).config.model_type == "qwen2"


def test_the_rl_config_loads_the_last_model_of_the_sft_config(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    sft = load_sft_config(CONFIGS / "gsm8k_sft_from_nothing.yaml").config
    made = Path(sft.run.folder) / sft.run.name / "checkpoints" / f"step_{sft.sft.num_steps:06d}" / "model"
    made.parent.mkdir(parents=True)
    made.symlink_to(work / "runs" / "gsm8k" / "start")
    config = load_run_config(CONFIGS / "gsm8k_tiny_cpu.yaml").config
    assert Path(config.model.path).samefile(made)
    assert config.loop.num_steps >= 20 and config.cluster.num_train_ranks == 2
    assert (config.loop.prompts_per_step, config.loop.samples_per_prompt) == (8, 8)
    assert config.rollout.sampling.max_new_tokens == 256


@pytest.mark.parametrize(
    ("completion", "answer", "form"),
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", 1.0, 1.0),
        ("#### 1,072\n", 0.0, 1.0),
        ("so it is 72", 0.0, 0.0),
        ("#### 72 clips", 1.0, 0.0),
        ("#### 7\n#### 72", 1.0, 0.0),
        ("#### ", 0.0, 0.0),
    ],
)
def test_the_rewards_are_for_a_right_answer_and_with_a_small_weight_for_its_form(
    work: Path, monkeypatch: pytest.MonkeyPatch, completion: str, answer: float, form: float
) -> None:
    monkeypatch.chdir(work)
    model = f"model.path={work}/runs/gsm8k/start"
    terms = load_run_config(CONFIGS / "gsm8k_tiny_cpu.yaml", [model]).config.reward.terms
    reference = json.loads((ROWS / "train.jsonl").read_text().splitlines()[0])["answer"]
    grade = {name: make_grader(name, term.kind, term.args) for name, term in terms.items()}
    payload = {"completion": completion, "answer": reference, "prompt": {}, "messages": [], "stop_reason": "stop"}
    assert {name: grader({**payload, "num_tokens": 9}) for name, grader in grade.items()} == {
        "answer": answer,
        "form": form,
    }
    assert terms["form"].weight < terms["answer"].weight / 5
    assert next(iter(terms)) == "answer"  # the term that evaluations report


def test_every_published_solution_in_the_repository_has_the_rewarded_form() -> None:
    import yaml

    config = yaml.safe_load((CONFIGS / "gsm8k_tiny_cpu.yaml").read_text())
    grader = make_grader("form", "format", config["reward"]["terms"]["form"]["args"])
    rows = [json.loads(line) for name in ("train", "test") for line in (ROWS / f"{name}.jsonl").open()]
    assert len(rows) == 48
    assert all(grader({"completion": row["answer"], "answer": None}) == 1.0 for row in rows)


def test_preprocessing_does_not_change_the_published_rows_and_their_licence(work: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "LICENSE"):
        assert (work / "runs" / "gsm8k" / name).read_bytes() == (ROWS / name).read_bytes()
    assert "32 rows of train, 16 rows of test" in (work / "runs" / "gsm8k" / "README.md").read_text()


def preprocess(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "data_preprocess" / "gsm8k.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_preprocessing_without_a_network_explains_what_to_do(tmp_path: Path) -> None:
    done = preprocess("--out", str(tmp_path / "out"), HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "openai/gsm8k" in done.stderr and "--from FOLDER" in done.stderr
    assert not (tmp_path / "out").exists()


def test_preprocessing_refuses_a_wrong_row_and_names_its_file_and_line(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes((ROWS / f"{name}.jsonl").read_bytes())
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write('{"question": "1+1?", "answer": "2"}\n')
    done = preprocess("--from", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "test.jsonl:17" in done.stderr and "'#### 72'" in done.stderr
    assert not (tmp_path / "out").exists()


def run_7b(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("MODEL", "DATA", "OUT", "NNODES")}
    env = clean | {"MESHRL": str(Path(sys.executable).parent / "meshrl")} | environment
    script = EXAMPLES / "grpo_trainer" / "run_qwen2-7b_math_fsdp.sh"
    return subprocess.run([str(script), *arguments, "--explain"], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_7b_run_is_explained_from_any_folder_without_its_model_and_data(tmp_path: Path) -> None:
    done = run_7b(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "path: Qwen/Qwen2-7B-Instruct" in done.stdout and "path: openai/gsm8k" in done.stdout
    assert "dp_replicate 1 x dp_shard 8 x ulysses 1 x tp 1" in done.stdout


@pytest.mark.slow
def test_the_7b_script_uses_its_environment_variables_and_overrides(tmp_path: Path) -> None:
    folder = tmp_path / "my out's: data"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_bytes((ROWS / name).read_bytes())
    done = run_7b(
        tmp_path, "train.optimizer.lr=2e-6", GPUS_PER_NODE="4", DATA=str(folder), OUT=str(folder), MODEL="Qwen/Other"
    )
    assert done.returncode == 0, done.stderr
    words = [" ".join(line.split(" # ")[0].split()) for line in done.stdout.splitlines()]
    wanted = ["dp_shard: 4", "lr: 2e-06", "path: Qwen/Other", f'path: "{folder}/train.jsonl"', f'folder: "{folder}"']
    assert set(wanted) <= set(words)
    assert "of 32 rows" in done.stdout


@pytest.mark.slow
def test_with_several_nodes_the_7b_script_uses_a_ray_cluster(tmp_path: Path) -> None:
    done = run_7b(tmp_path, NNODES="4")
    assert done.returncode == 0, done.stderr
    words = [" ".join(line.split(" # ")[0].split()) for line in done.stdout.splitlines()]
    assert {"executor: ray", "nodes: 4", "num_train_ranks: 32", "dp_shard: 32"} <= set(words)

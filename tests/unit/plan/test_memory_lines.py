"""The lines of memory that `--explain` prints, and the figures in the comments of the 7B configs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from meshrl.cli import main
from meshrl.config.load import load_sft_config
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.model.costs import model_memory
from meshrl.model.limits import model_numbers
from meshrl.plan.explain import explain, memory_lines
from meshrl.plan.run_plan import make_plan
from meshrl.run.inputs import load_run

CONFIGS = Path(__file__).parents[3] / "examples" / "grpo_trainer" / "config"
QWEN2_7B = {
    **{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "max_position_embeddings": 32768,
}

QWEN2_5_32B = QWEN2_7B | {
    **{"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64},
    **{"num_attention_heads": 40, "num_key_value_heads": 8},
}
LLAMA_3_1_70B = QWEN2_7B | {
    **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
}


def folder_of(facts: dict[str, object], folder: Path) -> Path:
    """--explain reads config.json alone."""
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder_of(QWEN2_7B, tmp_path)


def printed(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#   (\S.*?)  +(.*)$", text, re.MULTILINE))


def described(config: RunConfig | SftRunConfig) -> str:
    memory = model_memory(config.model, config.train, config.cluster.num_train_ranks)
    return memory_lines(make_plan(config, model_numbers(config.model.path), memory=memory))


def lines_of(name: str, model: Path, *overrides: str) -> dict[str, str]:
    loaded = load_run(CONFIGS / name, [f"model.path={model}", *overrides], starts=False)
    return printed(described(loaded.config))


def test_explain_needs_the_config_json_of_a_folder_or_of_the_hubs_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Nothing else of the model, and no hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--made--up" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--made--up" / "refs").mkdir()
    (tmp_path / "models--made--up" / "refs" / "main").write_text("1")
    folder_of(QWEN2_7B, snapshot)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text("data: {path: rows.jsonl}\nloop: {num_steps: 1}\n")
    texts = []
    for path in (str(model), "made/up"):
        assert (
            main(["train", str(tmp_path / "run.yaml"), "--explain", f"model.path={path}", "model.dtype=bfloat16"]) == 0
        )
        texts.append(capsys.readouterr().out)
        assert printed(texts[-1])["sampler's weights"].startswith("15.2 GB")
    assert f"# note: model.path: {model} has no weights (*.safetensors)" in texts[0]
    assert "# first prompt: can't be shown" in texts[1] and "it has no tokens but special ones" in texts[1]
    assert "has no weights" not in texts[1] and yaml.safe_load(texts[1])["model"]["path"] == "made/up"


def comments_of(name: str) -> tuple[int, str, int, str]:
    """(total, parts) in training, and in sampling, as the comment states them."""
    text = " ".join(line.strip("# ") for line in (CONFIGS / name).read_text().splitlines() if line.startswith("#"))
    found = re.search(r"training, (\d+) of 80: (.*) sampling, (\d+) of 80: (.*)", text)
    assert found is not None
    return int(found[1]), found[2], int(found[3]), found[4]


@pytest.mark.parametrize("engine", ["", "_vllm"])
def test_the_comments_of_the_7b_configs_hold(model: Path, engine: str):
    """Each figure equals that of --explain, and each total is the sum of its parts."""
    name = f"qwen2-7b_gsm8k_fsdp{engine}.yaml"
    lines, (training, parts, sampling, others) = lines_of(name, model), comments_of(name)
    gb = {label: float(re.sub("at most ", "", text).split()[0]) for label, text in lines.items() if "GB" in text}
    for part in (parts, others):
        for word, label in (
            *(("masters", "weights"), ("gradients", "gradients"), ("moments", "moments")),
            *(("reference", "reference"), ("sampler's weights", "sampler's weights")),
        ):
            for figure in re.findall(rf"{word} (\d+\.\d+)", part):
                assert float(figure) == gb[label], word
    state = gb["weights"] + gb["moments"] + gb["reference"]
    assert training == round(gb["sum"])
    assert lines["sampler's weights"] == "15.2 GB, on accelerators freed while the trainer works"
    if engine:
        assert sampling == round(state + 0.5 * 80)
        assert 0.5 * 80 - gb["sampler's weights"] - 22.5 == pytest.approx(2.3)
        assert "what its weights leave of 50% of the device; 57,344 bytes" in lines["sampler's cache"]
    else:
        assert "at most 22.5 GB (256 rows, together 393,216 tokens x 57,344 bytes)" in lines["sampler's cache"]
        assert f"{128 * 1536 * 57344 / 1e9:.1f} for the 128 rows" in others.replace(" #   ", " ")
        assert sampling == round(state + gb["sampler's weights"] + gb["sampler's cache"])


def test_the_comment_about_a_micro_batch_holds(model: Path):
    """In bf16 with activation checkpointing: what may exist in addition to weights, gradients and moments."""
    lines, (_, parts, _, _) = lines_of("qwen2-7b_gsm8k_fsdp.yaml", model), comments_of("qwen2-7b_gsm8k_fsdp.yaml")
    sizes = {
        "for inputs of blocks": "activations",
        "within a block": "within a block",
        "for logits": "logits",
        "for embedding and head": "embedding, head",
        "for two blocks": "blocks in use",
    }
    assert [float(lines[label].split()[0]) for label in sizes.values()] == [
        float(re.search(rf"(\d+\.\d) {words}", parts)[1]) for words in sizes
    ]
    assert parts.startswith(f"masters {lines['weights'].split()[0]}, ") and "17.2 for a micro-batch" in parts
    assert of_a_micro_batch(lines) == pytest.approx(17.2, abs=0.06)


def of_a_micro_batch(lines: dict[str, str]) -> float:
    """GB."""
    labels = ("activations", "within a block", "logits", "embedding, head", "blocks in use")
    units = {"GB": 1.0, "MB": 1e-3}
    return sum(
        float(number) * units[unit] for number, unit in (lines[label].replace(",", "").split()[:2] for label in labels)
    )


@pytest.mark.parametrize(
    ("name", "facts", "mesh"),
    [
        ("qwen2-7b_gsm8k_tp4_vllm", QWEN2_7B, "dp_replicate 1 x dp_shard 2 x ulysses 1 x tp 4"),
        ("qwen2-7b_gsm8k_4x8_vllm", QWEN2_7B, "dp_replicate 4 x dp_shard 2 x ulysses 1 x tp 4"),
        ("qwen2.5-32b_gsm8k_4x8_vllm", QWEN2_5_32B, "dp_replicate 1 x dp_shard 4 x ulysses 2 x tp 4"),
        ("llama3.1-70b_gsm8k_8x8_vllm", LLAMA_3_1_70B, "dp_replicate 1 x dp_shard 8 x ulysses 1 x tp 8"),
    ],
)
def test_the_comments_of_the_configs_with_tensor_parallelism_hold(
    tmp_path: Path, name: str, facts: dict[str, int], mesh: str
):
    loaded = load_run(CONFIGS / f"{name}.yaml", [f"model.path={folder_of(facts, tmp_path)}"], starts=False)
    resolved = explain(loaded)
    assert f" {mesh}\n" in re.sub(" +", " ", resolved) and "path: Qwen/Qwen2-7B" not in resolved
    lines, (training, parts, sampling, others) = printed(described(loaded.config)), comments_of(f"{name}.yaml")
    gb = {label: float(text.split()[0]) for label, text in lines.items() if text.split()[1].startswith("GB")}
    labels = ("weights", "gradients", "moments", "reference")
    masters, gradients, moments, reference, weights = (gb[label] for label in (*labels, "sampler's weights"))
    written = f"masters {masters}, gradients {gradients}, AdamW's moments {moments}, reference {reference}, and"
    assert parts.startswith(written)
    micro_batch = float(re.search(r"(\d+\.\d) for a micro-batch", parts)[1])
    assert of_a_micro_batch(lines) == pytest.approx(micro_batch, abs=0.06)
    assert training == round(gb["sum"])
    assert others.startswith(f"masters {masters}, moments {moments}, reference {reference}, and 40 for vLLM: ")
    assert f" of the weights {weights}, and its" in others
    assert sampling == round(masters + moments + reference + 0.5 * 80)
    assert loaded.config.rollout.vllm.gpu_memory_utilization == 0.5


def test_separate_samplers_and_servers_have_lines_of_their_own(model: Path):
    name = "qwen2-7b_gsm8k_fsdp_vllm.yaml"
    split = ["cluster.num_train_ranks=4", "cluster.num_rollout_ranks=4", "rollout.mesh.infer_tp=2"]
    size = "rollout.vllm.kv_cache_bytes=28672000"
    lines = lines_of(name, model, *split, size, "train.optimizer_offload=true")
    assert lines["weights"] == "7.6 GB, sharded over 4"
    assert lines["moments"] == "15.2 GB, in host memory; the optimizer step has at most 537 MB of them on the device"
    assert lines["sampler's weights"] == "7.6 GB"
    assert lines["sampler's cache"] == "28.7 MB, 1,000 tokens"


def test_the_limit_of_the_embedded_engines_cache_has_its_bytes_and_its_rows(model: Path):
    name, key = "qwen2-7b_gsm8k_fsdp.yaml", "rollout.embedded.kv_cache_bytes"
    lines = lines_of(name, model, f"{key}=11274289152")
    size = "at most 11.3 GB, 50% of 256 rows, together 393,216 tokens x 57,344 bytes; rows wait when it is full"
    assert lines["sampler's cache"] == f"{size}, freed while the trainer works"
    lines = lines_of(name, model, f"{key}=99999999999")
    assert lines["sampler's cache"].startswith(
        "at most 22.5 GB (256 rows, together 393,216 tokens x 57,344 bytes), freed"
    )
    lines = lines_of(name, model)
    assert "57,344 bytes), or 80% of the free memory of an accelerator, freed" in lines["sampler's cache"]


def test_a_step_has_no_more_rows_than_answers(model: Path):
    """An evaluation may have more, or fewer; in an asynchronous run the answers of several steps run at a time."""
    name, small = "qwen2-7b_gsm8k_fsdp.yaml", ("loop.prompts_per_step=8", "loop.samples_per_prompt=8")
    size = "tokens x 57,344 bytes), or 80% of the free memory of an accelerator"
    few_rows = f"at most 5.6 GB (64 rows, together 98,304 {size}"
    for more, text in (
        (("data.eval_limit=16", "loop.eval_samples=2"), f"{few_rows}, freed"),
        (("data.eval_limit=32", "loop.eval_samples=4"), f"{few_rows}; in evaluations at most 11.3 GB, freed"),
        ((), f"{few_rows}; in evaluations at most 22.5 GB, freed"),
        (("data.eval_path=null",), f"{few_rows}, freed"),
    ):
        assert text in lines_of(name, model, *small, *more)["sampler's cache"]
    ranks = ("cluster.num_train_ranks=4", "cluster.num_rollout_ranks=4")
    lines = lines_of(name, model, *small, *ranks, "loop.kind=fully_async")
    assert f"at most 22.5 GB (256 rows, together 393,216 {size}" in lines["sampler's cache"]


def test_what_a_run_does_not_have_or_release_has_no_line(model: Path, tmp_path: Path):
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    sft = {"path": str(tmp_path / "chat.jsonl"), "num_steps": 1, "rows_per_step": 2, "max_row_tokens": 64}
    content = {"model": {"path": str(model), "dtype": "bfloat16"}, "sft": sft, "train": {"master_dtype": "bfloat16"}}
    loaded = load_sft_config(content, starts=False)
    text = described(loaded.config)
    assert printed(text) == {
        "weights": "15.2 GB, sharded over 1",
        "gradients": "15.2 GB",
        "moments": "30.5 GB",
        "activations": "28.4 MB, inputs of blocks and head, 128 tokens",
        "within a block": "28.6 MB",
        "logits": "233.6 MB",
        "sum": "61.2 GB, in training",
    }
    assert "# disk: at most 60.9 GB: states 45.7 GB (1 x 45.7 GB; written" in text
    lines = lines_of("qwen2-7b_gsm8k_fsdp.yaml", model, "algo.kl.coef=0")
    assert "reference" not in lines
    lines = lines_of("qwen2-7b_gsm8k_fsdp.yaml", model, "rollout.release_memory=false")
    assert lines["sampler's weights"] == "15.2 GB"
    assert lines["sampler's cache"].endswith(", freed while the trainer works")


def test_an_evaluation_has_no_more_rows_than_its_file(model: Path, tmp_path: Path):
    rows = tmp_path / "heldout.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n' * 80)
    small = ("loop.prompts_per_step=8", "loop.samples_per_prompt=8", f"data.eval_path={rows}")
    lines = lines_of("qwen2-7b_gsm8k_fsdp.yaml", model, *small, "loop.eval_samples=1")
    assert "in evaluations at most 7.5 GB" in lines["sampler's cache"]
    bound = f"rollout.embedded.kv_cache_bytes={72 * 1536 * 57344}"
    lines = lines_of("qwen2-7b_gsm8k_fsdp.yaml", model, *small, "loop.eval_samples=1", bound)
    assert "in evaluations at most 6.3 GB" in lines["sampler's cache"]

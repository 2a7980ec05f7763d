"""The lines of memory that `--explain` prints, and the figures in the comments of the 7B configs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrl.config.load import load_sft_config
from meshrl.model.limits import text_config
from meshrl.plan.decisions import stored_numbers
from meshrl.plan.explain import explain
from meshrl.run.inputs import load_run
from meshrl.tools.memory import describe_memory

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
    """A folder with no weights: --explain reads config.json alone."""
    (folder / "config.json").write_text(json.dumps(facts))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder_of(QWEN2_7B, tmp_path)


def printed(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#   (\S.*?)  +(.*)$", text, re.MULTILINE))


def lines_of(name: str, model: Path, *overrides: str) -> dict[str, str]:
    loaded = load_run(CONFIGS / name, [f"model.path={model}", *overrides], starts=False)
    return printed(describe_memory(loaded.config))


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
            *(("masters", "weights"), ("gradients", "gradients"), ("moments", "moments of AdamW")),
            *(("reference", "reference"), ("sampler's weights", "sampler's weights")),
        ):
            for figure in re.findall(rf"{word} (\d+\.\d+)", part):
                assert float(figure) == gb[label], word
    state = gb["weights"] + gb["moments of AdamW"] + gb["reference"]
    assert lines["sampler's weights"] == "15.2 GB, on accelerators freed while the trainer works"
    assert training == round(state + gb["gradients"] + 17)
    if engine:
        assert sampling == round(state + 0.5 * 80)
        assert 0.5 * 80 - gb["sampler's weights"] - 22.5 == pytest.approx(2.3)
        assert "what its weights leave of 50% of the device; 57,344 bytes" in lines["sampler's cache"]
    else:
        assert "at most 22.5 GB (256 rows x 1,536 tokens x 57,344 bytes)" in lines["sampler's cache"]
        assert f"{128 * 1536 * 57344 / 1e9:.1f} for the 128 rows" in others.replace(" #   ", " ")
        assert sampling == round(state + gb["sampler's weights"] + gb["sampler's cache"])


def test_the_comment_about_a_micro_batch_holds(model: Path):
    """In bf16 with activation checkpointing: what may exist in addition to weights, gradients and moments."""
    facts, tokens = text_config(str(model)), 16384
    width, vocabulary = facts.hidden_size, facts.vocab_size
    heads = facts.num_key_value_heads * width // facts.num_attention_heads
    block = 2 * width * (width + heads) + 3 * width * facts.intermediate_size  # parameters
    sizes = {
        "for inputs of blocks": facts.num_hidden_layers * tokens * width * 2,
        "within a block": stored_numbers(facts) * tokens * 2,
        "for logits": 3 * 4 * 2**28,  # train.logprob_chunk_tokens
        "for embedding and head": 2 * (2 * vocabulary * width * 2),
        "for two blocks": block * (2 * 2 + 2 + 4),  # both gathered; gradients of one in bf16, of another to be reduced
    }
    _, parts, _, _ = comments_of("qwen2-7b_gsm8k_fsdp.yaml")
    for words, num_bytes in sizes.items():
        assert f"{num_bytes / 1e9:.1f} {words}" in parts
    assert 16 < sum(sizes.values()) / 1e9 < 17


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
    train, resolved = loaded.config.train, explain(loaded)
    assert f" {mesh}\n" in re.sub(" +", " ", resolved) and "path: Qwen/Qwen2-7B" not in resolved
    lines, (training, parts, sampling, others) = printed(describe_memory(loaded.config)), comments_of(f"{name}.yaml")
    gb = {label: float(text.split()[0]) for label, text in lines.items() if text.split()[1].startswith("GB")}
    labels = ("weights", "gradients", "moments of AdamW", "reference")
    masters, gradients, moments, reference, weights = (gb[label] for label in (*labels, "sampler's weights"))
    written = f"masters {masters}, gradients {gradients}, AdamW's moments {moments}, reference {reference}, and at most"
    assert parts.startswith(written)
    micro_batch = int(re.search(r"(\d+) for a micro-batch", parts)[1])
    assert bound_of_a_micro_batch(facts, train.max_tokens_per_microbatch, train.mesh.tp) <= micro_batch
    assert training == round(masters + gradients + moments + reference + micro_batch)
    assert others.startswith(f"masters {masters}, moments {moments}, reference {reference}, and 40 for vLLM: ")
    assert f" of the weights {weights}, and its" in others
    assert sampling == round(masters + moments + reference + 0.5 * 80)
    assert loaded.config.rollout.vllm.gpu_memory_utilization == 0.5


def bound_of_a_micro_batch(facts: dict[str, int], tokens: int, tp: int) -> float:
    """GB, as in the test above; within a block, each rank of tp stores at most what it would store alone."""
    width, numbers = facts["hidden_size"], stored_numbers(SimpleNamespace(**facts, head_dim=None))
    heads = facts["num_key_value_heads"] * width // facts["num_attention_heads"]
    block = 2 * width * (width + heads) + 3 * width * facts["intermediate_size"]
    inputs, words = facts["num_hidden_layers"] * tokens * width * 2, 8 * facts["vocab_size"] * width
    return (inputs / tp + numbers * tokens * 2 + 3 * 4 * 2**28 + words / tp + 10 * block / tp) / 1e9


def test_separate_samplers_and_servers_have_lines_of_their_own(model: Path):
    name = "qwen2-7b_gsm8k_fsdp_vllm.yaml"
    split = ["cluster.num_train_ranks=4", "cluster.num_rollout_ranks=4", "rollout.mesh.infer_tp=2"]
    size = "rollout.vllm.kv_cache_bytes=28672000"
    lines = lines_of(name, model, *split, size, "train.optimizer_offload=true")
    assert lines["weights"] == "7.6 GB, sharded over 4"
    assert lines["moments of AdamW"] == "15.2 GB, in host memory except in the optimizer step"
    assert lines["sampler's weights"] == "7.6 GB"
    assert lines["sampler's cache"] == "28.7 MB, 1,000 tokens"


def test_the_limit_of_the_embedded_engines_cache_has_its_bytes_and_its_rows(model: Path):
    name, key = "qwen2-7b_gsm8k_fsdp.yaml", "rollout.embedded.kv_cache_bytes"
    lines = lines_of(name, model, f"{key}=11274289152")
    size = "at most 11.3 GB, 128 of 256 rows x 1,536 tokens x 57,344 bytes; the other rows wait"
    assert lines["sampler's cache"] == f"{size}, freed while the trainer works"
    lines = lines_of(name, model, f"{key}=99999999999")
    assert lines["sampler's cache"].startswith("at most 22.5 GB (256 rows x 1,536 tokens x 57,344 bytes), freed")
    lines = lines_of(name, model)
    assert "57,344 bytes), or 80% of the free memory of an accelerator, freed" in lines["sampler's cache"]


def test_a_step_has_no_more_rows_than_answers(model: Path):
    """An evaluation may have more, or fewer; in an asynchronous run the answers of several steps run at a time."""
    name, small = "qwen2-7b_gsm8k_fsdp.yaml", ("loop.prompts_per_step=8", "loop.samples_per_prompt=8")
    size = "1,536 tokens x 57,344 bytes), or 80% of the free memory of an accelerator"
    more_rows = f"at most 5.6 GB (64 rows x {size}; in evaluations at most"
    for more, text in (
        (("data.eval_limit=16", "loop.eval_samples=2"), f"at most 5.6 GB (64 rows x {size}, freed"),
        (("data.eval_limit=32", "loop.eval_samples=4"), f"{more_rows} 11.3 GB (128 rows), freed"),
        ((), f"{more_rows} 22.5 GB (256 rows), freed"),
        (("data.eval_path=null",), f"at most 5.6 GB (64 rows x {size}, freed"),
    ):
        assert text in lines_of(name, model, *small, *more)["sampler's cache"]
    ranks = ("cluster.num_train_ranks=4", "cluster.num_rollout_ranks=4")
    lines = lines_of(name, model, *small, *ranks, "loop.kind=fully_async")
    assert f"at most 22.5 GB (256 rows x {size}" in lines["sampler's cache"]


def test_what_a_run_does_not_have_or_release_has_no_line(model: Path, tmp_path: Path):
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    sft = {"path": str(tmp_path / "chat.jsonl"), "num_steps": 1, "rows_per_step": 2, "max_row_tokens": 64}
    loaded = load_sft_config({"model": {"path": str(model)}, "sft": sft, "train": {"master_dtype": "bfloat16"}})
    text = describe_memory(loaded.config)
    assert printed(text) == {
        "weights": "15.2 GB, sharded over 1",
        "gradients": "15.2 GB",
        "moments of AdamW": "30.5 GB",
    }
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
    assert "in evaluations at most 7.0 GB (80 rows)" in lines["sampler's cache"]
    bound = f"rollout.embedded.kv_cache_bytes={72 * 1536 * 57344}"
    lines = lines_of("qwen2-7b_gsm8k_fsdp.yaml", model, *small, "loop.eval_samples=1", bound)
    assert "in evaluations at most 6.3 GB (72 rows)" in lines["sampler's cache"]

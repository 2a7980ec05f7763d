"""The memory of ranks by phase: what `--explain` and `meshrl plan` print, and the comments of the examples' configs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from meshrl.cli import main
from meshrl.model.costs import run_memory
from meshrl.plan.explain import explain, memory_lines
from meshrl.plan.memory import PHASES, PlannedRun, RankMemory, fits, traffic, verdict
from meshrl.plan.search import step_s
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
QWEN2_5_1_5B = QWEN2_7B | {
    **{"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    **{"vocab_size": 151936, "tie_word_embeddings": True},
}
QWEN3_235B = {
    **{"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536},
    **{"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960},
}
OF_EXAMPLES = {  # config -> config.json, mesh
    "qwen2.5-1.5b_gsm8k_1x24gb": (QWEN2_5_1_5B, "dp_replicate 1 x dp_shard 1 x ulysses 1 x tp 1"),
    "qwen2.5-7b_lora_gsm8k_1x24gb": (QWEN2_7B, "dp_replicate 1 x dp_shard 1 x ulysses 1 x tp 1"),
    "qwen2.5-7b_gsm8k_1x80gb": (QWEN2_7B, "dp_replicate 1 x dp_shard 1 x ulysses 1 x tp 1"),
    "qwen2.5-32b_gsm8k_8x80gb": (QWEN2_5_32B, "dp_replicate 1 x dp_shard 8 x ulysses 1 x tp 1"),
    "qwen3-235b-a22b_gsm8k_64x80gb": (QWEN3_235B, "dp_replicate 1 x dp_shard 7 x ulysses 1 x tp 8"),
    "qwen2-7b_gsm8k_fsdp": (QWEN2_7B, "dp_replicate 1 x dp_shard 8 x ulysses 1 x tp 1"),
    "qwen2-7b_gsm8k_fsdp_vllm": (QWEN2_7B, "dp_replicate 1 x dp_shard 8 x ulysses 1 x tp 1"),
    "qwen2-7b_gsm8k_tp4_vllm": (QWEN2_7B, "dp_replicate 1 x dp_shard 2 x ulysses 1 x tp 4"),
    "qwen2-7b_gsm8k_4x8_vllm": (QWEN2_7B, "dp_replicate 4 x dp_shard 2 x ulysses 1 x tp 4"),
    "qwen2.5-32b_gsm8k_4x8_vllm": (QWEN2_5_32B, "dp_replicate 1 x dp_shard 4 x ulysses 2 x tp 4"),
    "llama3.1-70b_gsm8k_8x8_vllm": (LLAMA_3_1_70B, "dp_replicate 1 x dp_shard 8 x ulysses 1 x tp 8"),
}
GB = 10**9


def folder_of(facts: dict[str, Any], folder: Path) -> Path:
    """A plan reads config.json alone."""
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN2_7B, tmp_path_factory.mktemp("model"))


def planned(model: Path, *overrides: str, name: str = "qwen2-7b_gsm8k_fsdp", size: int | None = None) -> list[Any]:
    """[job, rank, ...] on GPUs."""
    loaded = load_run(CONFIGS / f"{name}.yaml", [f"model.path={model}", *overrides], starts=False)
    job, ranks = run_memory(loaded.config, "cuda", size)
    return [job, *ranks]


@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_the_verdict_in_the_comment_of_a_config_is_that_of_the_plan(name: str, tmp_path: Path):
    facts, mesh = OF_EXAMPLES[name]
    size = 24 if name.endswith("24gb") else 80
    _, *ranks = planned(folder_of(facts, tmp_path), name=name, size=size * GB)
    rank = max(ranks, key=lambda rank: rank.total(rank.peak))
    line = f"# Memory of each GPU (`meshrl plan CONFIG --gpu-memory {size}GB`):\n#   {verdict(rank, size * GB)}\n"
    assert line in (CONFIGS / f"{name}.yaml").read_text()
    assert fits(rank, size * GB)
    resolved = explain(load_run(CONFIGS / f"{name}.yaml", [f"model.path={tmp_path}"], starts=False))
    assert f" {mesh}\n" in re.sub(" +", " ", resolved)


def test_every_config_with_a_verdict_is_tested():
    commented = {path.stem for path in CONFIGS.glob("*.yaml") if "meshrl plan CONFIG" in path.read_text()}
    assert commented == OF_EXAMPLES.keys()


def test_a_phase_has_the_parts_that_exist_in_it(model: Path):
    """GB of Qwen2-7B, bf16 over fp32 masters on eight ranks."""
    _, rank = planned(model)
    share = 30.462466 / 8
    for part, size in {"masters": share, "moments": 2 * share}.items():
        own = {phase: value / GB for phase, value in rank.device[part].items()}
        assert own == pytest.approx({phase: size for phase in PHASES if part == "masters" or phase != "load"})
    assert rank.device["gradients"] == {"train": pytest.approx(share * GB), "optimizer": pytest.approx(share * GB)}
    assert rank.device["sampler's weights"].keys() == {"sync", "rollout"}  # rollout.release_memory
    assert rank.device["sampler's cache"] == {"rollout": 393_216 * 57_344}
    assert rank.device["activations"].keys() == rank.device["gradients in use"].keys() == {"train"}
    assert rank.device["blocks in use"] == dict.fromkeys(("annotate", "train"), 2 * 466_115_584)  # and the next one
    assert rank.total("train") == sum(own.get("train", 0) for own in rank.device.values())
    assert rank.peak == "rollout" and rank.largest("rollout") == ("sampler's cache", 393_216 * 57_344)


def test_the_groups_that_are_gathered_are_planned(model: Path):
    """An embedding and a head of 1.09 GB in bf16, of which the head's gradient is reduced in fp32; without groups of
    their own both exist all the time, with the gradient. Blocks of 466 MB are merged up to the limit."""
    (job, rank), (joint, larger) = planned(model), planned(model, "train.fsdp_group_bytes=1200000000")
    end, block = 152064 * 3584 * 2, 466_115_584
    assert (job.memory.own_embedding, job.memory.own_head, job.memory.block) == (end, end, block)
    text = "gathered by FSDP2 in groups: embedding 1.1 GB, 28 x 1 block 466.1 MB, head 1.1 GB"
    assert rank.notes["blocks in use"] == text
    norm = job.memory.root
    assert rank.device["embedding, head"] == {"annotate": end + norm, "train": norm}
    assert rank.device["gradients in use"] == {"train": 3 * block + 2 * end}
    assert (joint.memory.own_embedding, joint.memory.own_head, joint.memory.block) == (0, 0, 2 * block)
    assert larger.device["embedding, head"] == dict.fromkeys(("annotate", "train"), 2 * end + norm)
    assert larger.device["gradients in use"] == {"train": 6 * block + end}
    ahead = planned(model, "train.fsdp_prefetch=3")[1]
    assert ahead.device["blocks in use"] == dict.fromkeys(("annotate", "train"), 4 * block)
    kept = planned(model, "train.sharding_strategy=SHARD_GRAD_OP")[1]
    assert kept.device["embedding, head"] == dict.fromkeys(("annotate", "train"), 2 * end + norm)
    short = "train.max_tokens_per_microbatch=128", "data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=64"
    few = planned(model, "model.lora.enabled=true", *short)[1]  # the head is larger than two blocks and their insides
    slopes, adapters = 2 * 128 * 152064, few.device["blocks in use"]["train"] // 2 - block
    assert few.device["within a block"]["train"] == 2 * end + slopes - block - adapters


def test_the_logits_of_a_cpu_are_planned(model: Path):
    """Those of answers that may be stored for the backward pass, 2^27, and without one those of a chunk, 2^25."""
    short = "data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=64", "model.lora.enabled=true"
    of_cpu = f"model.path={model}", "model.dtype=float32", "train.logprob_chunk_tokens=null", *short
    found = []
    for tokens in (256, 1024):
        keys = [*of_cpu, f"train.max_tokens_per_microbatch={tokens}"]
        config = load_run(CONFIGS / "qwen2-7b_gsm8k_fsdp.yaml", keys, starts=False).config
        job, (rank,) = run_memory(config, "cpu")
        found.append(rank.device["within a block"])
    (head, block), few = (job.memory.own_head, job.memory.block), 256 * 152064 * 4
    assert head == 152064 * 3584 * 4
    assert found[0] == {"annotate": head + (4 << 25) - 2 * block, "train": 2 * head + few - block}
    assert found[1]["train"] == 2 * head + (4 << 27) - block


def freed(model: Path, *keys: str) -> dict[str, float]:
    """GB by phase that these overrides save."""
    (_, before), (_, after) = planned(model), planned(model, *keys)
    return {phase: (before.total(phase) - after.total(phase)) / GB for phase in PHASES}


def test_what_is_moved_to_the_host_leaves_the_phases_that_do_not_need_it(model: Path):
    """Two pieces of 256 MiB of the moments are back in the optimizer step."""
    _, rank = planned(model, "train.optimizer_offload=true", "train.param_offload=true")
    assert rank.device["moments"] == {"optimizer": 512 << 20}
    assert rank.host["moments"].keys() == set(PHASES)
    assert rank.host["masters"].keys() == rank.host["reference"].keys() == {"rollout"}
    saved = freed(model, "train.param_offload=true")  # masters and reference, and no moments
    assert saved == pytest.approx({phase: 5.7117 if phase == "rollout" else 0 for phase in PHASES}, abs=1e-3)
    saved = freed(model, "train.optimizer_offload=true")
    assert saved["train"] == pytest.approx(7.6156, abs=1e-3) and saved["load"] == 0
    assert saved["optimizer"] == pytest.approx(7.6156 - 0.5369, abs=1e-3)


def test_recomputed_blocks_store_their_inputs_alone(model: Path):
    keys = "train.activation_checkpointing=false", "train.max_tokens_per_microbatch=16384"
    (job, *_), (_, rank) = planned(model), planned(model, *keys)
    assert planned(model)[1].device["activations"]["train"] == 31 * job.memory.activations.hidden
    assert rank.device["activations"]["train"] == job.memory.activations.stored


def test_what_a_rank_sends_grows_with_the_micro_batches(model: Path):
    """FSDP2 gathers and reduces all weights once for each: 2 x 15.2 and, in fp32, 30.5 GB, of which it sends 7/8."""
    job, _ = planned(model)
    number = 13  # 128 rows of 1,536 tokens, ten in a micro-batch
    blocks, root = job.memory.blocks, job.memory.root + job.memory.own_embedding + job.memory.own_head
    assert traffic(job) == {
        "FSDP2": pytest.approx(number * (2 * blocks + root + 2 * (blocks + root)) * 7 / 8, rel=1e-3)
    }
    twice, _ = planned(model, "train.max_tokens_per_microbatch=8192")
    assert traffic(twice)["FSDP2"] == pytest.approx(2 * traffic(job)["FSDP2"], rel=0.1)
    assert planned(model, "train.mesh.tp=2")[0].memory.shape.heads == 28
    assert traffic(planned(model, "train.mesh.tp=2")[0]).keys() == {"FSDP2", "tp"}
    assert traffic(planned(model, "model.lora.enabled=true")[0]) == {}


def test_with_adapters_alone_gradients_and_moments_are_theirs(model: Path):
    _, rank = planned(model, "model.lora.enabled=true")
    assert rank.device["moments"]["train"] == 2 * rank.device["gradients"]["train"] < 0.1 * GB
    assert "reference" not in rank.device  # the policy without its adapters
    assert "gradients in use" not in rank.device
    assert rank.host["staged checkpoint"]["save"] == 3 * rank.device["gradients"]["train"]  # has no frozen weights


LORA = ("model.lora.enabled=true", "model.lora.rank=16", "cluster.num_train_ranks=1")
BASE = 15.231e9


def test_a_base_that_trainer_and_sampler_share_counts_once(model: Path):
    """The sampler has adapters of its own, in bf16. Nothing of the base leaves with param_offload, and one rank has no
    transfers. Where the rank has two copies, the note has the reason."""
    for more in ((), ("train.param_offload=true",)):
        job, rank = planned(model, *LORA, *more)
        adapters = job.memory.trained
        assert rank.device["masters"]["train"] == pytest.approx(BASE + adapters, rel=1e-3)
        assert rank.device["sampler's weights"] == {"sync": adapters // 2, "rollout": adapters // 2}
        left = adapters if more else 0
        assert rank.device["masters"]["rollout"] == rank.device["masters"]["train"] - left
        assert rank.host.get("masters", {}) == ({"rollout": left} if left else {})
        assert "sync windows" not in rank.device
        assert rank.notes["sampler's weights"] == "adapters; the base is among the masters"
    for keys, reason in {
        ("cluster.num_train_ranks=2",): "each of several train ranks has a shard",
        ("cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1"): "samplers are ranks of their own",
    }.items():
        *_, rank = planned(model, *LORA, *keys)
        assert rank.device["sampler's weights"]["rollout"] == pytest.approx(BASE + adapters / 2, rel=1e-3)
        assert reason in rank.notes["sampler's weights"] and "sync windows" in rank.device


def test_a_delta_of_adapters_needs_a_copy_of_them_alone(model: Path):
    job, rank = planned(model, *LORA, "rollout.sync_mode=delta")
    assert set(rank.device["weights sent last"].values()) == {job.memory.trained // 2}


def test_ranks_that_sample_alone_have_a_memory_of_their_own(model: Path):
    split = ["cluster.num_train_ranks=4", "cluster.num_rollout_ranks=4", "rollout.mesh.infer_tp=2"]
    keys = [*split, "rollout.vllm.kv_cache_bytes=28672000"]
    _, trainer, sampler = planned(model, *keys, name="qwen2-7b_gsm8k_fsdp_vllm")
    assert sampler.what == "rank that samples" and "masters" not in sampler.device
    assert sampler.device["sampler's weights"]["rollout"] == pytest.approx(15.231e9 / 2, rel=1e-3)
    assert sampler.device["sampler's cache"]["rollout"] == 28672000
    assert not any("sampler" in part for part in trainer.device)


def test_the_embedded_engine_takes_what_is_left_for_its_cache(model: Path):
    (_, rank), (_, small) = planned(model, size=80 * GB), planned(model, size=40 * GB)
    assert rank.device["sampler's cache"] == {"rollout": 393_216 * 57_344}
    others = small.total("rollout") - small.device["sampler's cache"]["rollout"]
    assert small.device["sampler's cache"]["rollout"] == int(0.8 * (40 * GB - others))
    assert "33% of 256 rows" in small.notes["sampler's cache"]
    _, limited = planned(model, "rollout.embedded.kv_cache_bytes=11274289152")
    assert limited.notes["sampler's cache"].startswith(
        "50% of 256 rows, together 393,216 tokens x 57,344 bytes; rows wait"
    )


def test_a_server_takes_its_share_or_what_it_needs_at_least(model: Path):
    name = "qwen2-7b_gsm8k_fsdp_vllm"
    _, unknown = planned(model, name=name)
    assert unknown.unknown["server"] == "it takes 50% of the device" and "server" not in unknown.device
    (_, rank), (_, small) = planned(model, name=name, size=80 * GB), planned(model, name=name, size=24 * GB)
    assert rank.device["server"]["rollout"] == 40 * GB
    assert small.device["server"]["rollout"] == small.device["server"]["sync"] > 15.2 * GB  # its weights and one row


def test_the_verdict_has_the_stated_error_as_its_margin(model: Path):
    rank = RankMemory("rank")
    rank.add("masters", 90 * GB, ["train"])
    rank.add("moments", 10 * GB)
    sizes = {108: "fits", 106: "may not fit", 94: "may not fit", 92: "does not fit"}
    assert {size: verdict(rank, size * GB).split(":")[0] for size in sizes} == sizes
    assert verdict(rank, 120 * GB) == (
        "fits: train needs 100.0 GB of 120.0 GB, 20.0 GB are left; most of it: masters 90.0 GB"
    )


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
        assert re.search(r"^#   sampler's weights +15\.23 ", texts[-1], re.MULTILINE)
    assert f"# note: model.path: {model} has no weights (*.safetensors)" in texts[0]
    assert "# first prompt: can't be shown" in texts[1] and "it has no tokens but special ones" in texts[1]
    assert "has no weights" not in texts[1] and yaml.safe_load(texts[1])["model"]["path"] == "made/up"


def test_the_lines_of_explain_are_comments_with_a_row_for_each_part(model: Path):
    job, rank = planned(model)
    assert isinstance(job, PlannedRun)
    lines = memory_lines(job, [rank]).splitlines()
    assert all(line.startswith("# ") for line in lines)
    assert re.sub(" +", " ", lines[1]).split() == ["#", *PHASES]
    found = {line[4:34].strip(): line[34:].split() for line in lines}
    assert found["masters"] == ["3.81"] * 7 and found["together"][4] == f"{rank.total('train') / GB:.2f}"
    assert "# disk: at most" in lines[-1]


def plan(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> tuple[int, str]:
    code = main(["plan", str(CONFIGS / "qwen2-7b_gsm8k_fsdp.yaml"), f"model.path={model}", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_command_names_changes_that_make_a_run_fit(model: Path, capsys: pytest.CaptureFixture[str]):
    code, text = plan(capsys, model, "--gpu-memory", "33GB", "--json")
    facts = json.loads(text)
    assert code == 0 and facts["fits"] is False and facts["ranks"][0]["rank"] == "train rank"
    chosen = next(change for change in facts["changes"] if change["fits"])
    code, text = plan(capsys, model, "--gpu-memory", "33GB", "--json", *chosen["keys"])
    again = json.loads(text)
    assert again["fits"] is True and max(again["ranks"][0]["bytes"].values()) == chosen["bytes"]
    code, text = plan(capsys, model, "--gpu-memory", "33GB")
    assert "train rank: may not fit: rollout needs 32.5 GB of 33.0 GB" in text
    assert f"  {' '.join(chosen['keys'])}" in text


def test_the_fastest_meshes_and_modes_that_fit_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of two layers on two ranks. Each planned by itself needs the same bytes."""
    model = folder_of(QWEN2_7B | {"num_hidden_layers": 2}, tmp_path)
    of_run = "--gpus", "2", "--gpu-memory", "45GB"
    code, text = plan(capsys, model, *of_run, "--search", "--json")
    found = json.loads(text)["changes"]
    assert code == 0 and len(found) == 5 and all(change["fits"] for change in found)
    seconds = [float(change["cost"].removesuffix(" s")) for change in found]
    assert seconds == sorted(seconds)
    again = json.loads(plan(capsys, model, *of_run, "--json", *found[0]["keys"])[1])
    assert again["fits"] is True and max(again["ranks"][0]["bytes"].values()) == found[0]["bytes"]
    lines = plan(capsys, model, *of_run, "--search")[1].splitlines()
    assert lines[-6].startswith("the fastest that fit; predicted seconds of an optimizer step: FLOPs")
    assert " ".join(found[0]["keys"]) in lines[-5] and lines[-5].endswith(found[0]["cost"])
    assert "no mesh and mode fits" in plan(capsys, model, "--gpus", "2", "--gpu-memory", "9GB", "--search")[1]


def test_the_predicted_time_is_that_of_the_products_or_of_the_bytes(model: Path):
    """Of 1,024 rows of 1,536 tokens on eight GPUs: six products of 7.07e9 weights, and attention, at 400 TFLOP/s."""
    twice, once, cut = (
        planned(model, *keys)[0]
        for keys in ((), ["train.activation_checkpointing=false"], ["train.mesh.tp=2", "train.mesh.ulysses=2"])
    )
    attention = 6 * 28 * 3584 * 2 * 768.5  # of a token's query with half of the row
    assert step_s(once) == pytest.approx(1024 * 1536 / 8 * (6 * 7.0708e9 + attention) / 4e14, rel=0.01)
    assert step_s(twice) == pytest.approx(4 / 3 * step_s(once))
    sent = traffic(cut)
    assert step_s(cut) == pytest.approx(step_s(twice) + (sent["ulysses"] + sent["tp"]) / 3e11)
    bound = replace(once, memory=replace(once.memory, flops=0.0))
    assert step_s(bound) == pytest.approx(traffic(once)["FSDP2"] / 3e11)


def test_more_gpus_hold_less_each(model: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {}
    for count in ("8", "64"):
        _, text = plan(capsys, model, "--gpus", count, "--json")
        sizes[count] = json.loads(text)["ranks"][0]["device"]["masters"]["train"]
    assert sizes["8"] == pytest.approx(8 * sizes["64"], rel=0.01)


def test_a_mesh_that_only_the_given_gpus_fill_is_planned(model: Path, capsys: pytest.CaptureFixture[str]):
    assert plan(capsys, model, "train.mesh.tp=16")[0] == 2
    code, text = plan(capsys, model, "train.mesh.dp_shard=16", "--gpus", "16")
    assert code == 0 and "masters: sharded over 16" in text


def test_where_no_change_is_enough_the_last_line_is_what_else_helps(model: Path, capsys: pytest.CaptureFixture[str]):
    _, text = plan(capsys, model, "--gpu-memory", "2GB")
    assert text.splitlines()[-1].startswith("no change of these keys is enough: use more GPUs (--gpus N)")
    assert "no change" not in plan(capsys, model, "--gpu-memory", "33GB")[1]


def test_a_rank_has_the_phases_of_its_work(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    sft = tmp_path / "sft.yaml"
    sft.write_text(f"model: {{path: {model}}}\nsft: {{path: rows.jsonl, num_steps: 1, max_row_tokens: 512}}\n")
    assert main(["plan", str(sft)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["load", "train", "optimizer", "save"]
    assert main(["plan", str(sft), "--schedule", "--from", "run"]) == 2
    assert "SFT does not sample" in capsys.readouterr().err
    _, trainer, sampler = planned(model, "cluster.num_train_ranks=7", "cluster.num_rollout_ranks=1")
    assert trainer.phases == PHASES and sampler.phases == ("load", "sync", "rollout")
    assert all(own.keys() <= set(sampler.phases) for own in sampler.device.values())


def test_a_verdict_names_what_it_does_not_count():
    rank = RankMemory("rank", unknown={"activations": "its experts compute with values"})
    rank.add("masters", GB)
    assert verdict(rank, 2 * GB).endswith("masters 1.0 GB; not counted, as unknown: activations")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "80"], "'80' is not a size with its unit, such as 80GB or 80GiB"),
        (["--gpus", "4", "cluster.num_train_ranks=4"], "two ways to write one number; give only one"),
        (["--gpus", "0"], "--gpus is 0; it must be 1 or more"),
        (["--json", "--schedule"], "Leave one out"),
        (["--search", "--gpu-memory", "80GB", "--schedule"], "Leave one out"),
        (["--search"], "--search needs the memory of each GPU"),
        (["--schedule"], "--schedule needs the times and lengths of a run"),
        (["--from", "runs/a"], "they are for it only: --from RUN"),
        (["--gpus", "6", "train.mesh.tp=4"], "train.mesh"),
        (["--gpus", "6", "cluster.nodes=4", "cluster.executor=ray"], "cluster.nodes"),
    ],
)
def test_what_can_not_be_planned_is_refused(
    arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
):
    try:
        code, text = plan(capsys, model, *arguments)
    except SystemExit as end:
        code, text = int(end.code or 0), capsys.readouterr().err
    assert code == 2 and message in text

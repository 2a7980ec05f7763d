"""Each rank reads only its own rows of a model's files, with the same result to the bit as a full load."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import STRATEGIES, engine_over
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from tiny_models import tiny_lm

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import ConfigError
from meshrl.core.types import POLICY, REFERENCE, RoleSpec
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.facts import model_facts
from meshrl.model.folder import stored_tensors
from meshrl.model.hub_names import tied_names
from meshrl.model.recipe import (
    DTYPES,
    Recipe,
    cast_parameters,
    fill,
    load_causal_lm,
    materialize,
    parallelize,
    skeleton,
    verify,
)
from meshrl.model.stream import BUCKET_BYTES, LoadedWeights
from meshrl.parallel.fsdp import local_shard
from meshrl.parallel.mesh import build_mesh
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.train.engine import TrainEngine

UNEVEN: dict[str, Any] = dict(  # 4 divides no dim; with a dim of 5 the last of four ranks is empty
    vocab_size=61, hidden_size=30, intermediate_size=5, num_attention_heads=3, num_key_value_heads=1
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "gemma2": ("gemma2", {}),
    "mistral": ("mistral", {}),
    "uneven": ("qwen2", {"tie_word_embeddings": True, **UNEVEN}),
}


def _saved(path: Path, family: str, dtype: torch.dtype = torch.float32, files: int = 1, **changes: Any) -> Path:
    """A folder of a model with random values in all tensors, also in norms and biases."""
    lm = tiny_lm(family, **changes)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.1 * torch.randn_like(p))
    size = sum(p.numel() * dtype.itemsize for p in lm.parameters())
    cast_parameters(lm, dtype).save_pretrained(path, max_shard_size=size // files + 1)
    return path


def _by_transformers(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The full model, loaded by Transformers."""
    from transformers import AutoModelForCausalLM

    attention.register()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.NAME)
    return cast_parameters(lm, dtype)


def _differences(
    rank: int, world: int, folder: Path, model: dict[str, Any], train: dict[str, Any], role: RoleSpec
) -> tuple[list[str], int]:
    """Names of what differs between a streamed engine and one over a full load, and the size of the smallest shard."""
    cfg = TrainConfig(**train)
    mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    got = TrainEngine.build(ModelConfig(path=str(folder), **model), cfg, mesh, role)
    stored = DTYPES[cfg.master_dtype if role == POLICY else model["dtype"]]
    want = engine_over(_by_transformers(folder, stored), world, train)
    pairs = [
        *zip(got.model.lm.named_parameters(), want.model.lm.named_parameters(), strict=True),
        *zip(got.model.lm.named_buffers(), want.model.lm.named_buffers(), strict=True),
    ]
    wrong = [
        name
        for (name, one), (same, other) in pairs
        if name != same or one.dtype != other.dtype or not torch.equal(local_shard(one), local_shard(other))
    ]
    if tied_names(got.model.lm) != tied_names(want.model.lm):
        wrong.append("ties")
    if got.optimizer and {id(p) for g in got.optimizer.param_groups for p in g["params"]} != {
        id(p) for p in got.model.parameters()
    }:
        wrong.append("the optimizer's parameters")
    if got.model.lm.generation_config.to_dict() != want.model.lm.generation_config.to_dict():
        wrong.append("generation_config")
    return wrong, min(local_shard(p).numel() for p in got.model.parameters())


@pytest.mark.parametrize(("world", "model"), [(2, name) for name in MODELS] + [(1, "qwen2 tied"), (4, "uneven")])
def test_a_streamed_model_equals_transformers_model_to_the_bit(pool, tmp_path, world, model):
    """Parameters, buffers, dtypes and ties, also on ranks with little or nothing of a tensor."""
    family, changes = MODELS[model]
    answers = pool.run(_differences, world, _saved(tmp_path, family, **changes), {"dtype": "float32"}, {}, POLICY)
    assert [wrong for wrong, _ in answers] == [[]] * world
    assert (min(smallest for _, smallest in answers) == 0) == (world == 4)


@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_every_sharding_strategy_reads_its_own_shards(pool, tmp_path, strategy):
    folder = _saved(tmp_path, "qwen2", tie_word_embeddings=True, **UNEVEN)
    train = {"sharding_strategy": strategy, **STRATEGIES[strategy]}
    answers = pool.run(_differences, 4, folder, {"dtype": "float32"}, train, POLICY)
    assert [wrong for wrong, _ in answers] == [[]] * 4


@pytest.mark.parametrize(
    ("written", "files", "train", "role"),
    [
        ("bfloat16", 3, {}, POLICY),
        ("float16", 1, {"master_dtype": "bfloat16"}, POLICY),
        ("float32", 2, {}, REFERENCE),
    ],
)
def test_files_of_any_dtype_and_number_fill_masters_and_references(pool, tmp_path, written, files, train, role):
    """Bf16 files to fp32 masters, fp16 files to bf16 masters, fp32 files to a reference in compute dtype."""
    folder = _saved(tmp_path, "llama", DTYPES[written], files)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (files > 1)
    answers = pool.run(_differences, 2, folder, {"dtype": "bfloat16"}, train, role)
    assert [wrong for wrong, _ in answers] == [[]] * 2


EXPERTS: dict[str, Any] = dict(
    **dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2),
    **dict(num_attention_heads=4, num_key_value_heads=2, n_routed_experts=5, num_experts_per_tok=2, n_group=1),
    **dict(topk_group=1, first_k_dense_replace=1, initializer_range=0.2, pad_token_id=0, bos_token_id=1),
)


def test_a_rank_reads_the_experts_it_holds(pool, tmp_path):
    """The files hold each expert's matrices separately, the model joins those of a layer; 2 ranks share 5 experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", eos_token_id=2, **EXPERTS))
    with torch.no_grad():
        for tensor in [*lm.parameters(), *(b for n, b in lm.named_buffers() if n.endswith("correction_bias"))]:
            tensor.add_(0.1 * torch.randn_like(tensor))
    lm.save_pretrained(tmp_path)
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in stored_tensors(tmp_path)[0]
    answers = pool.run(_differences, 2, tmp_path, {"dtype": "float32"}, {}, POLICY)
    assert [wrong for wrong, _ in answers] == [[]] * 2


def test_a_model_that_only_transformers_can_load_is_loaded_in_full_and_is_equal(pool, tmp_path):
    """Config.json ties two tensors that differ in the file, so the trained model has two."""
    folder = _saved(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.randn(64, 32)}, folder / "model.safetensors", {"format": "pt"})
    assert isinstance(model_facts(folder).weights, LoadedWeights)
    answers = pool.run(_differences, 2, folder, {"dtype": "bfloat16"}, {}, POLICY)
    assert [wrong for wrong, _ in answers] == [[]] * 2


def _through_a_small_bucket(rank: int, world: int, folder: Path, bucket_bytes: int) -> bool:
    model = _through_bucket(folder, world, bucket_bytes)
    want = engine_over(_by_transformers(folder, torch.float32), world).model
    return all(torch.equal(local_shard(p), local_shard(q)) for p, q in zip(model.parameters(), want.parameters()))


def _through_bucket(folder: Path, world: int, bucket_bytes: int) -> CausalModel:
    recipe, facts = Recipe(mesh=build_mesh((1, world, 1, 1), "cpu")), model_facts(folder)
    model = skeleton(facts, recipe)
    parallelize(model, recipe)
    materialize(model, recipe.device)
    facts.weights.fill(model.lm, bucket_bytes)
    return model


@pytest.mark.parametrize("bucket_bytes", [8, 1000])
def test_tensors_larger_than_the_bucket_are_read_in_pieces(pool, tmp_path, bucket_bytes):
    """Pieces end inside a row, and inside a bucket."""
    folder = _saved(tmp_path, "llama", torch.bfloat16, vocab_size=31)
    assert pool.run(_through_a_small_bucket, 2, folder, bucket_bytes) == [True, True]


# ---- models that we would compute differently are refused, without a full copy


def _counted_on(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    ids = args[0] if args else kwargs["input_ids"]
    return args, {**kwargs, "position_ids": torch.arange(ids.shape[1])[None]}


def _compared(rank: int, world: int, folder: Path, fault: str, compute: str) -> str:
    recipe = Recipe(mesh=build_mesh((1, world, 1, 1), "cpu"), compute_dtype=DTYPES[compute])
    facts = model_facts(folder)
    model = skeleton(facts, recipe)
    parallelize(model, recipe)
    materialize(model, recipe.device)
    fill(model, facts)
    before = {name: local_shard(p).clone() for name, p in model.named_parameters()}
    if fault == "leak":  # as by a recurrent state over the pack
        facts.lm.model.norm.register_forward_hook(lambda module, args, out: out + out.mean(1, keepdim=True))
    if fault == "position":  # counted over the pack, as in a model that computes its own positions
        facts.lm.base_model.register_forward_pre_hook(_counted_on, with_kwargs=True)
    if fault == "head":  # an operation between hidden states and logits that our head does not have
        facts.lm.lm_head.register_forward_hook(lambda module, args, out: out.tanh())
    try:
        verify(model, facts, recipe)
        result = "same"
    except ConfigError as error:
        result = str(error)
    TrainEngine(model, recipe.mesh, TrainConfig(), REFERENCE, recipe).require_independent_rows()
    assert all(torch.equal(before[name], local_shard(p)) for name, p in model.named_parameters())
    return result


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 4])
def test_a_sharded_model_with_transformers_scores_is_accepted(pool, tmp_path, world, compute):
    """In fp32 for any compute dtype; the comparison uses the shards, also uneven ones, and does not change
    them."""
    folder = _saved(tmp_path, "qwen2", **UNEVEN)
    assert pool.run(_compared, world, folder, "none", compute) == ["same"] * world


@pytest.mark.parametrize(
    ("family", "fault", "reason"),
    [
        ("llama", "leak", "gives packed rows"),
        ("qwen3_moe", "leak", "gives packed rows"),
        ("gpt2", "position", "gives packed rows"),
        ("llama", "head", "gives a single row"),
    ],
)
def test_a_sharded_model_that_scores_differently_is_refused(pool, tmp_path, family, fault, reason):
    results = pool.run(_compared, 2, _saved(tmp_path, family), fault, "bfloat16")
    assert all(reason in text and "nats from Transformers' own" in text for text in results)


def _built(rank: int, world: int, folder: Path) -> str:
    mesh = build_mesh((1, world, 1, 1), "cpu")
    try:
        TrainEngine.build(ModelConfig(path=str(folder)), TrainConfig(), mesh, POLICY)
    except ConfigError as error:
        return str(error)
    return "built"


def test_build_compares_the_scores(pool, tmp_path):
    """A family whose attention our packed forward does not compute: its tokens see later ones."""
    tiny_lm("bert").save_pretrained(tmp_path)
    assert all("nats from Transformers' own" in text for text in pool.run(_built, 2, tmp_path))


# ---- host memory

_BUCKET = 8 << 20
_ALLOWANCE = 12 << 20  # module objects, headers and buffers of gloo; seen: less than 2
_PRODUCTS = 16 << 20  # copies of a matrix for a product, in an embedded engine; seen: 8
_M_MMAP_THRESHOLD = -3  # of malloc.h


def _written(path: Path, family: str, **changes: Any) -> Path:
    """A folder of a wide model in bf16, in two files."""
    with torch.device("meta"):
        lm = tiny_lm(family, **changes)
    lm.config.save_pretrained(path)
    tensors, file_of = list(lm.state_dict().items()), {}
    for number, half in enumerate((tensors[::2], tensors[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: torch.full(t.shape, 0.01, dtype=torch.bfloat16) for name, t in half}, path / file)
        file_of |= dict.fromkeys((name for name, _ in half), file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return path


def _memory_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def _return_freed_matrices() -> None:
    """Make malloc return them to the system at once, in place of holes in the heap that may not fit the next ones."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20) == 1


def _growth(rank: int, world: int, folder: Path, warm_up: Path, full: bool) -> tuple[int, int]:
    """(growth of this process at its peak, in bytes; bytes of its shard)."""
    _return_freed_matrices()
    _through_a_small_bucket(rank, world, warm_up, _BUCKET)  # memory of imports and of a first process group
    before = _memory_bytes("VmRSS")
    if full:
        load_causal_lm(folder)
        return _memory_bytes("VmHWM") - before, 0
    model = _through_bucket(folder, world, _BUCKET)
    shard = sum(local_shard(p).numel() * p.element_size() for p in model.parameters())
    return _memory_bytes("VmHWM") - before, shard


def _growth_of_sampler(rank: int, world: int, folder: Path, warm_up: Path) -> tuple[int, int, int]:
    """(growth of this process at its peak; bytes of an embedded engine's weights; of its largest block in fp32)."""
    dtype, cpu = DTYPES["bfloat16"], torch.device("cpu")
    build_embedded_engine(ModelConfig(path=str(warm_up)), RolloutConfig(), cpu, "tiny", ())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else it would reuse the memory of earlier loads
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory_bytes("VmRSS")
    engine = build_embedded_engine(ModelConfig(path=str(folder)), RolloutConfig(), cpu, "wide", ())
    growth, model = _memory_bytes("VmHWM") - before, engine._runner.model
    assert {p.dtype for p in model.parameters()} == {dtype}
    block = max(sum(p.numel() for p in block.parameters()) for block in model.layers)
    return growth, sum(p.nbytes for p in model.parameters()), block * torch.float32.itemsize


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures through /proc")
def test_loading_takes_host_memory_for_the_shard_and_one_bucket(tmp_path):
    """The peak of a load by two ranks of a model with tensors of several buckets; a full load takes more. An embedded
    engine takes its weights in the compute dtype, and one block in fp32 for the comparison with Transformers."""
    wide = dict(vocab_size=8000, hidden_size=2048, intermediate_size=2048, num_attention_heads=16, head_dim=128)
    folder = _written(tmp_path / "wide", "llama", tie_word_embeddings=False, **wide)
    warm_up = _saved(tmp_path / "tiny", "llama")
    fresh = RankPool(2)
    try:
        streamed = fresh.run(_growth, 2, folder, warm_up, False)
        ((growth_of_full_load, _),) = fresh.run(_growth, 1, folder, warm_up, True)
        ((growth_of_sampler, weights, block),) = fresh.run(_growth_of_sampler, 1, folder, warm_up)
    finally:
        fresh.close()
    limit = weights + max(block, BUCKET_BYTES) + _PRODUCTS + _ALLOWANCE
    assert growth_of_sampler <= limit, f"{growth_of_sampler:,} bytes; {weights:,} of weights, {block:,} of a block"
    for growth, shard in streamed:
        assert shard > 100 << 20
        assert growth <= shard + _BUCKET + _ALLOWANCE, f"{growth:,} bytes for a shard of {shard:,}"
        assert growth_of_full_load > shard + _BUCKET + _ALLOWANCE, "the limit would not detect a full load"

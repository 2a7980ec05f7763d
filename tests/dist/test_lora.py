"""LoRA in the train engine: gradients, what leaves it, its reference model, checkpoints (P6, P9, P18)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import LORA, engine_over, partitioned, random_partition, unsharded, worst
from test_checkpoint_reshard import save
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import ConfigError
from meshrl.model.lora import adapters_of, add_adapters, is_adapter, merged, named_weights, scatter_adapters
from meshrl.parallel.boxes import LocalBox
from meshrl.parallel.fsdp import whole
from meshrl.parallel.mesh import build_mesh, resolve_shape
from meshrl.train.checkpoint_files import state_folder
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
UNEVEN: dict[str, Any] = dict(vocab_size=67, hidden_size=30, intermediate_size=5, num_attention_heads=3)
UNEVEN |= dict(num_key_value_heads=1)


def adapted(dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """A tiny model whose adapters do something."""
    lm = tiny_qwen2(dtype, **changes)
    add_adapters(lm, LORA, dtype, "tiny")
    scatter_adapters(lm)
    return lm


def _samples() -> Any:
    return weigh(random_samples(1, [12, 3, 40, -6, 7, 21]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_gradient_of_adapters_is_the_unsharded_models_and_nothing_else_has_one(pool, world, dtype):
    """P1, with ranks that hold no row of an A of three."""
    samples, loss = _samples(), make_policy_loss(AlgoConfig())
    want = unsharded(adapted(dtype), samples, loss)
    assert all("lora_" in name for name in want["grads"]) and len(want["grads"]) == 2 * 2 * 7
    partition = random_partition(np.random.default_rng(world), len(samples), world, 2)
    train = {"activation_checkpointing": world == 2}
    for got in pool.run(partitioned, world, adapted, {"dtype": dtype}, samples, partition, loss, train):
        distance, name = worst(got["grads"], want["grads"])
        assert distance < TOLERANCE[dtype], f"{name} is {distance:.2e} of its norm off"


@pytest.mark.parametrize(
    "train",
    [
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", "mesh": {"dp_replicate": 2, "dp_shard": 2}},
    ],
    ids=lambda train: train["sharding_strategy"],
)
def test_every_sharding_strategy_gives_the_same_gradient_and_the_same_sum(pool, train):
    """P13: and what a server gets is W + s B A on each rank that sends."""
    samples, loss = _samples(), make_policy_loss(AlgoConfig())
    want = unsharded(adapted(), samples, loss)
    partition = random_partition(np.random.default_rng(4), len(samples), 4, 2)
    for got in pool.run(partitioned, 4, adapted, {}, samples, partition, loss, train):
        distance, name = worst(got["grads"], want["grads"])
        assert distance < 1e-5, f"{name} is {distance:.2e} of its norm off"
    sums = _merged_by_peft()
    for rows, gathered in pool.run(_rows, 4, torch.float32, train):
        for name, p in sums.items():
            torch.testing.assert_close(gathered[name], p, atol=1e-6, rtol=1e-5, msg=name)
            if train["sharding_strategy"] == "NO_SHARD":
                torch.testing.assert_close(rows[name], p.reshape(-1), atol=1e-6, rtol=1e-5, msg=name)


def _trained(rank: int, world: int, path: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Two steps from a folder: what was scored before and after, with and without adapters; all weights."""
    cfg = TrainConfig()
    mesh = build_mesh(resolve_shape(cfg.mesh, world, cfg.sharding_strategy), "cpu")
    engine = TrainEngine.build(ModelConfig(path=str(path), dtype=dtype, lora=LORA), cfg, mesh, "policy")
    samples = _samples()
    batches = [pack([s], [i]) for i, s in enumerate(samples)]

    def scored(adapted: bool) -> dict[int, np.ndarray]:
        return engine.forward(batches, adapter=adapted)[0]

    def weights() -> dict[str, torch.Tensor]:
        return {name: whole(p.detach()).clone() for name, p in named_weights(engine.model.lm)}

    told = {"first": scored(True), "first_reference": scored(False), "start": weights()}
    for _ in range(2):
        engine.forward_backward(batches, make_policy_loss(AlgoConfig()))
        engine.optim_step(0.05)
    told |= {"last": scored(True), "last_reference": scored(False), "end": weights()}
    told["memory"] = engine.memory()
    told["optimizer"] = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    engine.export(out)
    return told


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    tiny_qwen2(**UNEVEN).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def of_one_rank(pool, uneven, tmp_path_factory) -> dict[str, Any]:
    return pool.run(_trained, 1, uneven, tmp_path_factory.mktemp("out"), "float32")[0]


@pytest.mark.parametrize(
    ("world", "dtype"),
    [(1, "float32"), (2, "float32"), (4, "float32"), (2, "bfloat16")],
    ids=["1-fp32", "2-fp32", "4-fp32", "2-bf16"],
)
def test_adapters_train_the_base_stays_and_without_them_it_is_the_reference(
    pool, uneven, of_one_rank, tmp_path, world, dtype
):
    """P6: the KL is 0 at step 0. Two steps later the base is the folder's to the bit, in the compute dtype. Adapters
    begin with the same values on any number of ranks."""
    answers = pool.run(_trained, world, uneven, tmp_path, dtype)
    begun = {n: t for n, t in answers[0]["start"].items() if is_adapter(n)}
    assert len(begun) == 28 and all(torch.equal(t, of_one_rank["start"][n]) for n, t in begun.items())
    file = {n: p.to(getattr(torch, dtype)) for n, p in tiny_qwen2(**UNEVEN).named_parameters()}
    for told in answers:
        base = {name: t for name, t in told["end"].items() if not is_adapter(name)}
        assert base.keys() == file.keys()
        for name, want in file.items():
            assert base[name].dtype == want.dtype and torch.equal(base[name], want), name
        moved = {n: t for n, t in told["end"].items() if is_adapter(n)}
        assert len(moved) == 28 == told["optimizer"] and all(t.dtype == torch.float32 for t in moved.values())
        assert all(not torch.equal(t, told["start"][n]) for n, t in moved.items()), "never delivered"
        for i, row in told["first"].items():
            assert np.array_equal(row, told["first_reference"][i])
            assert np.array_equal(row, told["last_reference"][i])
        assert any(not np.array_equal(row, told["last"][i]) for i, row in told["first"].items())
        assert all(torch.equal(t, answers[0]["end"][n]) for n, t in told["end"].items())
    assert all(
        bool((t == 0).all()) == n.endswith("lora_B.weight") for n, t in answers[0]["start"].items() if "lora" in n
    )


def test_an_exported_folder_is_the_merged_model_and_its_adapter_is_one_that_peft_loads(pool, tmp_path):
    """P9: both by strangers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny_qwen2().save_pretrained(tmp_path / "model")
    told = pool.run(_trained, 2, tmp_path / "model", tmp_path / "out", "float32")[0]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = torch.from_numpy(_samples()[2].tokens.astype(np.int64))[None]
    with torch.no_grad():
        before = base(tokens).logits
        peft = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
        torch.testing.assert_close(peft(tokens).logits, merged(tokens).logits, atol=2e-5, rtol=1e-4)
        assert (before - merged(tokens).logits).abs().max() > 0.01
    one = peft.merge_and_unload()
    for (name, got), (_, want) in zip(merged.named_parameters(), one.named_parameters(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5, msg=name)
    assert told["memory"]["optimizer"] < told["memory"]["params"]


def _rows(
    rank: int, world: int, dtype: torch.dtype, train: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's merged rows, read in odd numbers of elements, and the full tensors that an export gathers."""
    engine = engine_over(adapted(**UNEVEN), world, train, dtype)
    rows = {}
    for name, boxes in engine.weights(merged=True).held.items():
        elements = [box.elements for box in boxes]
        cuts = [(own, [*range(0, own.numel(), 37), own.numel()]) for own in elements]
        read = [own[a:b].reshape(-1) for own, at in cuts for a, b in itertools.pairwise(at)]
        rows[name] = torch.cat(read) if read else torch.empty(0)
    lm, full = engine.model.lm, {}
    adapters = adapters_of(lm)
    for name, p in named_weights(lm):
        if not is_adapter(name):
            box = LocalBox((0,) * p.dim(), whole(p.detach()).float())
            full[name] = merged(adapters[name])(box)[:].view(p.shape) if name in adapters else box.tensor
    return rows, full


def _merged_by_peft() -> dict[str, torch.Tensor]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    lm = adapted(**UNEVEN)
    for module in lm.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    return {name.replace(".base_layer", ""): p.detach() for name, p in lm.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_merged_rows_are_those_of_pefts_own_merge_wherever_they_are_cut(pool, world):
    want = _merged_by_peft()
    answers = pool.run(_rows, world, torch.float32, {})
    for _, gathered in answers:
        assert gathered.keys() == want.keys()
        for name, p in want.items():
            torch.testing.assert_close(gathered[name], p, atol=1e-6, rtol=1e-5, msg=name)
    for rows, _ in answers:
        assert rows.keys() == want.keys()
    for name, p in want.items():
        joined = torch.cat([rows[name] for rows, _ in answers])
        torch.testing.assert_close(joined, p.reshape(-1), atol=1e-6, rtol=1e-5, msg=name)


def _resumed(rank: int, world: int, path: Path, folder: Path, begin: bool) -> dict[str, torch.Tensor]:
    cfg = TrainConfig()
    mesh = build_mesh(resolve_shape(cfg.mesh, world, cfg.sharding_strategy), "cpu")
    engine = TrainEngine.build(ModelConfig(path=str(path), dtype="float32", lora=LORA), cfg, mesh, "policy")
    if begin:
        engine.forward_backward([pack([s], [0]) for s in _samples()], make_policy_loss(AlgoConfig()))
        engine.optim_step(0.05)
        save(engine, folder)
    else:
        engine.load(folder)
    return {name: whole(p.detach()).clone() for name, p in named_weights(engine.model.lm)}


def test_a_checkpoint_has_the_adapters_alone_and_brings_them_back_on_other_ranks(pool, tmp_path):
    """P25, and what `meshrl convert` makes of it."""
    from safetensors import safe_open

    tiny_qwen2().save_pretrained(tmp_path / "model")
    args = (tmp_path / "model", state_folder(tmp_path, 1))
    saved = pool.run(_resumed, 2, *args, True)[0]
    names: set[str] = set()
    for file in args[1].glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    kept = {name.partition("@")[0] for name in names}
    assert any("lora_B" in name for name in kept) and not any("embed_tokens" in name for name in kept), kept
    for world in (1, 4):
        for tensors in pool.run(_resumed, world, *args, False):
            for name, t in tensors.items():
                assert torch.equal(t, saved[name]), name


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["lm_head"], "is called lm_head"),
        (["embed_tokens"], "is called embed_tokens"),
        (["q_proj", "v_porj"], "is called v_porj.*There are down_proj, gate_proj"),
        (["q_proj", "all-linear"], "is called all-linear.*alone"),
        ([], "is called nothing"),
    ],
)
def test_a_target_that_is_no_linear_layer_is_refused_beside_others_that_are(targets, told):
    with pytest.raises(ConfigError, match=told):
        add_adapters(tiny_qwen2(tie=False), LoraConfig(enabled=True, targets=targets), torch.float32, "tiny")


def test_of_a_mixture_the_experts_and_routers_stay_as_they_are():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2)
    config = Qwen3MoeConfig(**shape, num_experts=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    lm = Qwen3MoeForCausalLM(config)
    add_adapters(lm, LoraConfig(enabled=True, rank=2), torch.float32, "tiny")
    adapted_layers = {name.split(".")[-3] for name, _ in named_weights(lm) if name.endswith("lora_A.weight")}
    assert adapted_layers == {"q_proj", "k_proj", "v_proj", "o_proj"}

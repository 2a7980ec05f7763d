"""LoRA in the train engine: gradients, sent and exported weights, reference model, checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import LORA, engine_over, partitioned, random_partition, unsharded, worst
from safetensors import safe_open
from safetensors.torch import load_file
from test_checkpoint_reshard import save
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import ConfigError
from meshrl.core.types import POLICY
from meshrl.model.lora import adapters_of, add_adapters, is_adapter, merged, named_weights, randomize_adapters
from meshrl.parallel.fsdp import full_tensor
from meshrl.parallel.mesh import build_mesh
from meshrl.train.checkpoint_files import state_folder
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
UNEVEN: dict[str, Any] = dict(vocab_size=67, hidden_size=30, intermediate_size=5, num_attention_heads=3)
UNEVEN |= dict(num_key_value_heads=1)


def with_adapters(dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """A tiny model with random adapters."""
    lm = tiny_qwen2(dtype, **changes)
    add_adapters(lm, LORA, dtype, "tiny")
    randomize_adapters(lm)
    return lm


def _samples() -> Any:
    """Of these, plain Transformers' gradients in fp32 are within 3e-6 of those in fp64; those of others not within
    1e-4."""
    return weigh(random_samples(5, [12, 3, 40, -6, 7, 21]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_only_adapters_have_gradients_and_they_equal_the_unsharded_models(pool, world, dtype):
    """Also with ranks that hold none of the three rows of an A."""
    samples, loss = _samples(), make_policy_loss(AlgoConfig())
    want = unsharded(with_adapters(dtype), samples, loss)
    assert all("lora_" in name for name in want["grads"]) and len(want["grads"]) == 2 * 2 * 7
    partition = random_partition(np.random.default_rng(world), len(samples), world, 2)
    train = {"activation_checkpointing": world == 2}
    for got in pool.run(partitioned, world, with_adapters, {"dtype": dtype}, samples, partition, loss, train):
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
def test_every_sharding_strategy_gives_the_same_gradient_and_merged_weights(pool, train):
    """A server gets W + s B A from each rank that sends."""
    samples, loss = _samples(), make_policy_loss(AlgoConfig())
    want = unsharded(with_adapters(), samples, loss)
    partition = random_partition(np.random.default_rng(4), len(samples), 4, 2)
    for got in pool.run(partitioned, 4, with_adapters, {}, samples, partition, loss, train):
        distance, name = worst(got["grads"], want["grads"])
        assert distance < 1e-5, f"{name} is {distance:.2e} of its norm off"
    sums = _merged_by_peft()
    for rows, gathered in pool.run(_rows, 4, torch.float32, train):
        for name, p in sums.items():
            torch.testing.assert_close(gathered[name], p, atol=1e-6, rtol=1e-5, msg=name)
            if train["sharding_strategy"] == "NO_SHARD":
                torch.testing.assert_close(rows[name], p.reshape(-1), atol=1e-6, rtol=1e-5, msg=name)


def _trained(rank: int, world: int, path: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Two steps from a folder: scores before and after, with and without adapters, and all weights."""
    cfg = TrainConfig()
    mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    engine = TrainEngine.build(ModelConfig(path=str(path), dtype=dtype, lora=LORA), cfg, mesh, POLICY)
    samples = _samples()
    batches = [pack([s], [i]) for i, s in enumerate(samples)]

    def scored(adapter: bool) -> dict[int, np.ndarray]:
        return engine.forward(batches, adapter=adapter)

    def weights() -> dict[str, torch.Tensor]:
        return {name: full_tensor(p.detach()).clone() for name, p in named_weights(engine.model.lm)}

    results = {"first": scored(True), "first_reference": scored(False), "start": weights()}
    for _ in range(2):
        engine.forward_backward(batches, make_policy_loss(AlgoConfig()))
        engine.optim_step(0.05)
    results |= {"last": scored(True), "last_reference": scored(False), "end": weights()}
    results["memory"] = engine.memory()
    results["optimizer"] = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    results["share"] = engine.export(out)
    return results


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
def test_only_adapters_are_trained_and_without_them_the_model_is_the_reference(
    pool, uneven, of_one_rank, tmp_path, world, dtype
):
    """The KL is 0 at step 0. After two steps the base model still equals the folder to the bit, in the compute
    dtype. Adapters start with the same values on any number of ranks."""
    answers = pool.run(_trained, world, uneven, tmp_path, dtype)
    begun = {n: t for n, t in answers[0]["start"].items() if is_adapter(n)}
    assert len(begun) == 28 and all(torch.equal(t, of_one_rank["start"][n]) for n, t in begun.items())
    file = {n: p.to(getattr(torch, dtype)) for n, p in tiny_qwen2(**UNEVEN).named_parameters()}
    for result in answers:
        base = {name: t for name, t in result["end"].items() if not is_adapter(name)}
        assert base.keys() == file.keys()
        for name, want in file.items():
            assert base[name].dtype == want.dtype and torch.equal(base[name], want), name
        moved = {n: t for n, t in result["end"].items() if is_adapter(n)}
        assert len(moved) == 28 == result["optimizer"] and all(t.dtype == torch.float32 for t in moved.values())
        assert all(not torch.equal(t, result["start"][n]) for n, t in moved.items()), "not updated"
        for i, row in result["first"].items():
            assert np.array_equal(row, result["first_reference"][i])
            assert np.array_equal(row, result["last_reference"][i])
        assert any(not np.array_equal(row, result["last"][i]) for i, row in result["first"].items())
        assert all(torch.equal(t, answers[0]["end"][n]) for n, t in result["end"].items())
    assert all(
        bool((t == 0).all()) == n.endswith("lora_B.weight") for n, t in answers[0]["start"].items() if "lora" in n
    )


def test_an_exported_folder_is_the_merged_model_and_peft_loads_its_adapter(pool, tmp_path):
    """Loaded by Transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny_qwen2().save_pretrained(tmp_path / "model")
    result = pool.run(_trained, 2, tmp_path / "model", tmp_path / "out", "float32")[0]
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
    assert result["memory"]["optimizer"] < result["memory"]["params"]


@pytest.mark.slow
def test_an_export_in_bf16_states_the_share_of_the_adapters_change_that_it_has(pool, uneven, tmp_path):
    """Compared with the projection by peft's files, on one rank and on four."""
    shares = []
    for world in (1, 4):
        out = tmp_path / str(world)
        results = pool.run(_trained, world, uneven, out, "bfloat16")
        (share,) = {result["share"] for result in results}
        before, after = (load_file(folder / "model.safetensors") for folder in (uneven, out))
        adapter = load_file(out / "adapter" / "adapter_model.safetensors")
        projection = square = 0.0
        for name in (name for name in adapter if "lora_A" in name):
            change = LORA.scale * adapter[name.replace("lora_A", "lora_B")].double() @ adapter[name].double()
            weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
            got = after[weight].double() - before[weight].bfloat16().double()
            projection, square = projection + float((got * change).sum()), square + float(change.square().sum())
        assert share == pytest.approx(projection / square, rel=1e-3)
        with safe_open(out / "model.safetensors", "pt") as opened:
            assert opened.metadata()["lora_merged_share"] == f"{share:.4f}"
        shares.append(share)
    assert 0 < shares[0] != 1 and shares[0] == pytest.approx(shares[1], abs=0.02)


def _rows(
    rank: int, world: int, dtype: torch.dtype, train: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's merged rows, read in chunks of 37 elements, and the full tensors that an export gathers."""
    engine = engine_over(with_adapters(**UNEVEN), world, train, dtype)
    rows = {}
    for name, boxes in engine.weights(merged=True).sources.items():
        elements = [box.elements for box in boxes]
        cuts = [(own, [*range(0, own.numel(), 37), own.numel()]) for own in elements]
        read = [own[a:b].reshape(-1) for own, at in cuts for a, b in itertools.pairwise(at)]
        rows[name] = torch.cat(read) if read else torch.empty(0)
    lm, full = engine.model.lm, {}
    adapters = adapters_of(lm)
    for name, p in named_weights(lm):
        if not is_adapter(name):
            values = full_tensor(p.detach()).float()
            box = (0,) * p.dim(), tuple(p.shape)
            full[name] = merged(adapters[name])(values, box, range(2))(0, len(p)) if name in adapters else values
    return rows, full


def _merged_by_peft() -> dict[str, torch.Tensor]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    lm = with_adapters(**UNEVEN)
    for module in lm.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    return {name.replace(".base_layer", ""): p.detach() for name, p in lm.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_merged_weights_equal_pefts_own_merge_for_any_cuts(pool, world):
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
    mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    engine = TrainEngine.build(ModelConfig(path=str(path), dtype="float32", lora=LORA), cfg, mesh, POLICY)
    if begin:
        engine.forward_backward([pack([s], [0]) for s in _samples()], make_policy_loss(AlgoConfig()))
        engine.optim_step(0.05)
        save(engine, folder)
    else:
        engine.load(folder)
    return {name: full_tensor(p.detach()).clone() for name, p in named_weights(engine.model.lm)}


@pytest.mark.parametrize("world", [1, 4])
def test_a_checkpoint_has_only_the_adapters_and_restores_them_on_other_ranks(pool, tmp_path, world):
    """Also what `meshrl convert` reads."""
    tiny_qwen2().save_pretrained(tmp_path / "model")
    args = (tmp_path / "model", state_folder(tmp_path, 1))
    saved = pool.run(_resumed, 2, *args, True)[0]
    names: set[str] = set()
    for file in args[1].glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    saved_names = {name.partition("@")[0] for name in names}
    assert any("lora_B" in name for name in saved_names), saved_names
    assert not any("embed_tokens" in name for name in saved_names), saved_names
    for tensors in pool.run(_resumed, world, *args, False):
        for name, t in tensors.items():
            assert torch.equal(t, saved[name]), name


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        (["lm_head"], "has lm_head, but"),
        (["embed_tokens"], "has embed_tokens, but"),
        (["q_proj", "v_porj"], "has v_porj, but.*are down_proj, gate_proj"),
        (["q_proj", "all-linear"], "has all-linear, but.*all-linear instead of them"),
        ([], "has no name"),
    ],
)
def test_a_target_that_is_no_linear_layer_is_refused(targets, complaint):
    with pytest.raises(ConfigError, match=complaint):
        add_adapters(tiny_qwen2(tie=False), LoraConfig(enabled=True, targets=targets), torch.float32, "tiny")

"""LoRA on the joint tensors of experts: equal to peft's own adapters of parameters, and to the unsharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import EXPERTS_LORA, TOLERANCE, check, partitioned, random_partition, unsharded
from test_checkpoint_reshard import save
from tiny_models import tiny_lm, tiny_mixture, tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import CheckpointError, ConfigError
from meshrl.core.types import POLICY
from meshrl.model.causal import CausalModel
from meshrl.model.lora import (
    Adapter,
    add_adapters,
    is_adapter,
    merged,
    named_weights,
    randomize_adapters,
    without_adapters,
)
from meshrl.model.tensor_parallel import cut_model
from meshrl.parallel.exchange import Axis
from meshrl.parallel.mesh import build_mesh
from meshrl.parallel.tp import TensorParallel
from meshrl.train.checkpoint_files import state_folder
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

LOSS = make_policy_loss(AlgoConfig())
MIXTURES = {
    "gate and up in one tensor of files each": ("qwen3_moe", {"num_experts": 4, "tie_word_embeddings": False}),
    "transposed, with biases": ("gpt_oss", {}),
    "shared experts and a dense layer": ("deepseek_v3", {}),
}
JOINT = ("gate_up_proj", "down_proj")


def adapted(dtype: torch.dtype = torch.float32, targets: list[str] | None = None) -> torch.nn.Module:
    """The mixture with random adapters."""
    lm = tiny_mixture(dtype)
    cfg = EXPERTS_LORA if targets is None else EXPERTS_LORA.model_copy(update={"targets": targets})
    add_adapters(lm, cfg, dtype, "tiny")
    randomize_adapters(lm)
    return lm


def adapters_by_peft(lm: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """peft's own wrapper of each joint tensor, by the tensor's name."""
    from peft.tuners.lora.layer import ParamWrapper

    return {
        f"{name.replace('.base_layer', '')}.{module.parameter_name}": module
        for name, module in lm.named_modules()
        if isinstance(module, ParamWrapper)
    }


@pytest.mark.parametrize("mixture", MIXTURES)
def test_logits_and_gradients_equal_pefts_own_adapters_of_parameters(mixture):
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    family, changes = MIXTURES[mixture]
    ours, theirs = (tiny_lm(family, **changes) for _ in range(2))
    add_adapters(ours, LoraConfig(enabled=True, rank=2, alpha=3, targets=["experts"]), torch.float32, "tiny")
    randomize_adapters(ours)
    config = PeftConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=[f"experts.{name}" for name in JOINT])
    inject_adapter_in_model(config, theirs)
    weights, pairs = dict(named_weights(ours)), adapters_by_peft(theirs)
    assert len(pairs) in (2, 4) and len(pairs) == sum(name.endswith("lora_A.weight") for name in weights)
    for name, wrapper in pairs.items():
        for letter in ("lora_A", "lora_B"):
            getattr(wrapper, letter)["default"].weight.data.copy_(weights[f"{name}.{letter}.weight"])
    tokens = torch.arange(2, 26)[None]
    for lm in (ours, theirs):
        lm.config._attn_implementation = "eager"
        lm(tokens).logits.square().mean().backward()
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    for name, wrapper in pairs.items():
        for letter in ("lora_A", "lora_B"):
            want = getattr(wrapper, letter)["default"].weight.grad
            torch.testing.assert_close(weights[f"{name}.{letter}.weight"].grad, want, atol=1e-6, rtol=1e-4)
        assert weights[name].grad is None
    with torch.no_grad(), without_adapters(ours):
        base = ours(tokens).logits
    plain = tiny_lm(family, **changes)
    plain.config._attn_implementation = "eager"
    assert torch.equal(base, plain(tokens).logits)
    assert (ours(tokens).logits - base).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_equal_the_unsharded_models(pool, world, dtype):
    """Packed; on two ranks with activation checkpointing."""
    samples = weigh(random_samples(1, [12, 3, 40, -6, 7, 21]))
    want = unsharded(adapted(dtype), samples, LOSS)
    assert len(want["grads"]) == 2 * 2 * (4 + len(JOINT)) and all("lora_" in name for name in want["grads"])
    partition = random_partition(np.random.default_rng(world), len(samples), world, 2)
    train = {"activation_checkpointing": world == 2, "mesh": {"dp_shard": world}}
    got = pool.run(partitioned, world, adapted, {"dtype": dtype}, samples, partition, LOSS, train)
    check(got, want, dtype)


def test_gradients_under_ulysses_equal_the_unsharded_models(pool):
    samples = weigh(random_samples(1, [12, 3, 40, -6, 7, 21]))
    want = unsharded(adapted(torch.float64), samples, LOSS)
    partition = random_partition(np.random.default_rng(1), len(samples), 1, 2)
    train = {"mesh": {"ulysses": 2}}
    got = pool.run(partitioned, 2, adapted, {"dtype": torch.float64}, samples, partition, LOSS, train)
    distances = {
        name: np.linalg.norm(rank["grads"][name] - grad) / np.linalg.norm(grad)
        for rank in got
        for name, grad in want["grads"].items()
    }
    assert max(distances.values()) < TOLERANCE[torch.float64], max(distances, key=distances.__getitem__)


def _exported(rank: int, world: int, path: Path, out: Path) -> None:
    cfg = TrainConfig()
    mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    engine = TrainEngine.build(ModelConfig(path=str(path), dtype="float32", lora=EXPERTS_LORA), cfg, mesh, POLICY)
    if world == 1:
        for _ in range(2):  # in the first step no A has a gradient, because B is 0
            batches = [pack([s], [0]) for s in weigh(random_samples(1, [12, 40]))]
            engine.forward_backward(batches, LOSS)
            engine.optim_step(0.05)
        save(engine, state_folder(out, 1))
    else:
        engine.load(state_folder(out, 1))
    engine.export(out / str(world))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_peft_loads_the_exported_adapter_and_a_checkpoint_restores_it_on_other_ranks(pool, tmp_path, mixture):
    """Transformers loads the folder, which has merged weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    family, changes = MIXTURES[mixture]
    tiny_lm(family, **changes).save_pretrained(tmp_path / "model")
    for world in (1, 2):
        pool.run(_exported, world, tmp_path / "model", tmp_path / "out")
    tokens = torch.arange(2, 26)[None]
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / "out" / world, dtype=torch.float32) for world in "12")
    for (name, first), (_, second) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(first, second), name
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        before = base(tokens).logits
        peft = PeftModel.from_pretrained(base, str(tmp_path / "out" / "2" / "adapter"))
        torch.testing.assert_close(peft(tokens).logits, two(tokens).logits, atol=2e-5, rtol=1e-4)
        assert (before - two(tokens).logits).abs().max() > 0.01


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [(0, 1, 2), (0, 2, 1), (1, 2), (2, 1), (None, 1, 2), (1, None, 2)])
def test_any_rows_of_any_block_are_those_of_the_merged_tensor(dims, transposed):
    """Also of a block whose dims are in another order than the joint tensor's."""
    torch.manual_seed(0)
    weight, a = torch.randn(4, 6, 5), torch.randn(4 * 2, 6 if transposed else 5)
    b = torch.randn(5 if transposed else 6, 2 * 4)
    change = torch.einsum("erc,dre->edc" if not transposed else "erc,dre->ecd", a.view(4, 2, -1), b.view(-1, 2, 4))
    box = ((1, 2, 1), (3 if 0 in dims else 1, 3, 4))
    index = tuple(slice(at, at + size) for at, size in zip(*box, strict=True))

    def block(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor[index]
        order = [dim for dim in dims if dim is not None]
        own = own.permute([*order, *(dim for dim in range(3) if dim not in order)])
        return own.reshape([1 if dim is None else box[1][dim] for dim in dims])

    rows = merged(Adapter(a, b, 0.5, num_experts=4, is_transposed=transposed))(block(weight), box, dims)
    want = block(weight + 0.5 * change)
    for first in range(len(want)):
        for end in range(first + 1, len(want) + 1):
            torch.testing.assert_close(rows(first, end), want[first:end], atol=1e-5, rtol=1e-5)


def _loaded(rank: int, world: int, path: Path, folder: Path, targets: list[str]) -> str:
    cfg = TrainConfig()
    mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    lora = EXPERTS_LORA.model_copy(update={"targets": targets})
    engine = TrainEngine.build(ModelConfig(path=str(path), dtype="float32", lora=lora), cfg, mesh, POLICY)
    if not folder.exists():
        save(engine, folder)
        return ""
    with pytest.raises(CheckpointError) as raised:
        engine.load(folder)
    return str(raised.value)


@pytest.mark.parametrize("saved", [["all-linear"], ["all-linear", "experts"]], ids=" ".join)
def test_a_checkpoint_of_other_targets_is_refused_by_their_name(pool, tmp_path, saved):
    tiny_mixture().save_pretrained(tmp_path / "model")
    folder = state_folder(tmp_path, 1)
    pool.run(_loaded, 1, tmp_path / "model", folder, saved)
    other = ["all-linear", "experts"] if saved == ["all-linear"] else ["all-linear"]
    (error,) = pool.run(_loaded, 1, tmp_path / "model", folder, other)
    assert "experts.down_proj.lora_A.weight" in error and "model.lora.targets or model.path is not" in error


def test_experts_and_routers_get_adapters_only_if_they_are_named():
    linear = {"q_proj", "k_proj", "v_proj", "o_proj"}
    for targets, want in (
        (["all-linear"], linear),
        (["experts"], set(JOINT)),
        (["all-linear", "experts"], linear | set(JOINT)),
        (["q_proj", "experts"], {"q_proj", *JOINT}),
    ):
        names = [name for name, _ in named_weights(adapted(targets=targets)) if is_adapter(name)]
        assert {name.split(".")[-3] for name in names} == want


def test_targets_that_can_not_be_adapted_are_refused():
    with pytest.raises(ConfigError, match=r"has gate_up_proj, but.*its joint experts are named by experts"):
        adapted(targets=["gate_up_proj"])
    with pytest.raises(ConfigError, match="has experts, but 'tiny' has no joint tensors in modules named experts"):
        add_adapters(tiny_qwen2(), EXPERTS_LORA, torch.float32, "tiny")
    with pytest.raises(ConfigError, match=r"tp is 2, but model\.lora\.targets has experts, whose adapters are not cut"):
        cut_model(CausalModel(adapted()), TensorParallel(Axis(2, 0, None)))


def test_a_forward_that_raises_leaves_the_frozen_weights(monkeypatch):
    """Activation checkpointing ends the second forward of a block in this way."""
    lm: Any = adapted()
    experts = lm.model.layers[0].mlp.experts
    weights = dict(experts.named_parameters(recurse=False))
    monkeypatch.setattr(torch.nn.functional, "silu", None)
    monkeypatch.setattr(experts, "act_fn", None)
    with pytest.raises(TypeError):
        experts(torch.randn(4, lm.config.hidden_size), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
    assert all(experts._parameters[name] is p for name, p in weights.items())

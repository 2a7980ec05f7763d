"""Where FSDP2 has no ranks to shard over, the engine computes with its own copies of the parameters, as FSDP2 would."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import LORA, engine_over
from model_families import FAMILIES
from tiny_models import tiny_lm, tiny_qwen2
from tiny_samples import random_samples, weigh
from torch.distributed.fsdp import FSDPModule

from meshrl.algo.losses import sft_loss
from meshrl.config.model import ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, REFERENCE
from meshrl.model import recipe
from meshrl.model.lora import add_adapters, randomize_adapters
from meshrl.parallel.compute_dtype import compute_in
from meshrl.parallel.fsdp import full_tensor
from meshrl.parallel.mesh import build_mesh
from meshrl.train.engine import TrainEngine

BF16 = torch.bfloat16
SAMPLE = ("mixtral", "deepseek_v3", "ernie4_5_moe", "gemma3_text", "qwen3_next", "mamba2", "minimax")
BUILT = [f for f, entry in FAMILIES.items() if not entry.refused and f not in ("falcon", "gptj")]  # not by a recipe
ROWS = [[0, 1], [2], [3, 4, 5]]  # micro-batches


def _model(lora: bool, tie: bool = True) -> torch.nn.Module:
    lm = tiny_qwen2(tie=tie)
    if lora:
        add_adapters(recipe.cast_parameters(lm, BF16), LORA, torch.float32, "tiny")
        randomize_adapters(lm)
    return lm


def _step(engine: TrainEngine) -> dict[str, Any]:
    """Logprobs, gradients and the updated parameters of a step with three micro-batches."""
    samples = weigh(random_samples(1, [12, 3, 40, 7, 21, 9]))
    batches = [engine.pack([samples[i] for i in rows], rows) for rows in ROWS]
    scored = engine.forward(batches)
    result = engine.forward_backward(batches, sft_loss)
    named = dict(engine.model.lm.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    grads = {name: full_tensor(p.grad).clone() for name, p in trained.items() if p.grad is not None}
    engine.optim_step(1e-2)
    return {
        "scored": {row: torch.from_numpy(values) for row, values in scored.items()},
        "logprobs": {row: torch.from_numpy(values) for row, values in result.logprobs.items()},
        "gradients": grads,
        "parameters": {name: full_tensor(p.detach()).clone() for name, p in trained.items()},
        "frozen gradients": [name for name, p in named.items() if p.grad is not None and name not in trained],
    }


def _both(rank: int, world: int, lora: bool, settings: dict[str, Any], family: str = "") -> dict[str, Any]:
    """The step with our copies, and with FSDP2."""
    found = {}
    for name, sharded in (("copies", False), ("fsdp", True)):
        with patch.object(recipe, "is_sharded", lambda mesh, sharded=sharded: sharded):
            lm = tiny_lm(family) if family else _model(lora)
            found[name] = _step(engine_over(lm, world, settings, BF16))
    return found


def _require_same_bits(copies: dict[str, Any], fsdp: dict[str, Any]) -> None:
    assert {grad.dtype for grad in copies["gradients"].values()} == {torch.float32}
    assert copies["frozen gradients"] == []
    for part in ("scored", "logprobs", "gradients", "parameters"):
        assert copies[part].keys() == fsdp[part].keys() and copies[part]
        for name, value in fsdp[part].items():
            assert torch.equal(copies[part][name], value), f"{part} of {name}"


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_a_step_in_bf16_equals_that_of_fsdp2_to_the_bit(pool, lora, checkpointing):
    (found,) = pool.run(_both, 1, lora, {"activation_checkpointing": checkpointing})
    _require_same_bits(**found)


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in BUILT])
def test_experts_state_layers_and_windows_in_bf16_equal_fsdp2_to_the_bit(pool, family):
    (found,) = pool.run(_both, 1, False, {"activation_checkpointing": False}, family)
    _require_same_bits(**found)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA, checkpointed"])
def test_a_step_in_bf16_under_tensor_parallelism_is_near_fsdp2s(pool, lora):
    """FSDP2 would round the parameters before they are shared out, and their gradients' sums once more."""
    for found in pool.run(_both, 2, lora, {"mesh": {"tp": 2}, "activation_checkpointing": lora}):
        assert found["fsdp"]["gradients"]
        for name, want in found["fsdp"]["gradients"].items():
            got = found["copies"]["gradients"][name]
            assert got.dtype == torch.float32
            assert (got - want).norm() < 2e-2 * want.norm(), name


def _tied_in_the_comparison(rank: int, world: int, folder: Path) -> list[bool]:
    """Of a reference in bf16, which is compared in fp32: whether embedding and head are one parameter then."""
    seen = list[bool]()

    class Looks(recipe.ComparedModel):
        def forward(self, *args: Any) -> Any:
            seen.append(self.lm.lm_head.weight is self.lm.model.embed_tokens.weight)
            assert self.lm.lm_head.weight.dtype == torch.float32
            return super().forward(*args)

    with patch.object(recipe, "ComparedModel", Looks):
        cfg, mesh = TrainConfig(), build_mesh((1, 1, 1, 1), "cpu")
        TrainEngine.build(ModelConfig(path=str(folder), dtype="bfloat16"), cfg, mesh, REFERENCE)
    return seen


def test_the_comparison_at_the_start_copies_a_tied_tensor_once(pool, tmp_path):
    tiny_qwen2(tie=True).save_pretrained(tmp_path)
    assert pool.run(_tied_in_the_comparison, 1, tmp_path) == [[True]]


def _without_copies(rank: int, world: int) -> list[str]:
    mesh = build_mesh((1, 1, 1, 1), "cpu")
    cfg = TrainConfig(activation_checkpointing=False)  # it replaces the forward of each block, too
    engine = TrainEngine.wrap(_model(False), cfg, mesh, POLICY, torch.float32)
    changed = [name for name, module in engine.model.named_modules() if "forward" in vars(module)]
    return changed + [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]


def test_one_rank_computes_with_its_parameters_where_they_have_the_compute_dtype(pool):
    """Without copies, and without FSDP2."""
    assert pool.run(_without_copies, 1) == [[]]


class _Tied(torch.nn.Module):
    """Two blocks between an embedding and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        self.head.weight = self.embedding.weight
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.seen: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        self.seen = [self.embedding.weight, self.head.weight, self.head.bias, self.blocks[0].weight]
        return self.head(x)


def test_each_forward_copies_the_parameters_that_the_modules_then_have():
    """A tied parameter has one copy. After the forward the modules have their parameters again."""
    model, tokens = _Tied(), torch.arange(16)
    compute_in(BF16, model, list(model.blocks))
    masters = dict(model.named_parameters())
    first = model(tokens)
    assert first.dtype == BF16 and model.seen[0] is model.seen[1] and model.seen[0].dtype == BF16
    assert model.seen[3] is masters["blocks.0.weight"], "a block copies its own, while it computes"
    assert dict(model.named_parameters()) == masters
    first.sum().backward()
    assert {p.grad.dtype for p in masters.values()} == {torch.float32}
    with torch.no_grad():
        for p in masters.values():
            p.mul_(1.5)
    assert not torch.equal(model(tokens), first)


def test_a_copy_of_a_frozen_parameter_gets_no_gradient():
    model = _Tied()
    compute_in(BF16, model, list(model.blocks))
    model.embedding.weight.requires_grad_(False)
    model(torch.arange(16)).sum().backward()
    assert [tensor.requires_grad for tensor in model.seen] == [False, False, True, True]
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"embedding.weight"}


def test_an_error_in_a_forward_leaves_the_parameters_in_place():
    model = _Tied()
    masters = dict(model.named_parameters())
    compute_in(BF16, model, list(model.blocks))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.blocks[1](torch.ones(3, 5, dtype=BF16))
    assert dict(model.named_parameters()) == masters

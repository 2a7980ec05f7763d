"""The trainer's check of a model at start: its scores are repeatable, and packed rows do not affect each other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from harness import engine_over
from tiny_models import tiny_lm
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.core.errors import ConfigError
from meshrl.model.attention import PackedAttention
from meshrl.parallel.fsdp import full_tensor
from meshrl.train import engine as engine_module
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

STOCHASTIC = ["phimoe", "opt", "mixtral"]  # in train mode: sampled experts, skipped layers, router jitter


def _probe_result(engine: TrainEngine) -> str:
    try:
        engine.require_independent_rows()
    except ConfigError as error:
        return str(error)
    return "passed"


def _gradient(engine: TrainEngine, samples: list[Any]) -> tuple[dict[int, np.ndarray], dict[str, torch.Tensor]]:
    """Logprobs by row and full gradients of one micro-batch."""
    result = engine.forward_backward([pack(samples, range(len(samples)))], make_policy_loss(AlgoConfig()))
    grads = {name: full_tensor(p.grad).clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.model.zero_grad(set_to_none=True)
    return result.logprobs, grads


def _repeats(rank: int, world: int, family: str, dtype: torch.dtype) -> tuple[list[str], dict[str, bool]]:
    """Results of the probe without and with checkpointing, and what is equal to the bit."""
    samples = weigh(random_samples(rank, [12, 30, 7]))
    results, rows, grads = [], [], []
    for checkpointing in (False, True):
        engine = engine_over(tiny_lm(family), world, {"activation_checkpointing": checkpointing}, dtype)
        results.append(_probe_result(engine))
        scored = engine.forward([pack(samples, range(len(samples)))])
        trained = [_gradient(engine, samples) for _ in range(2)]
        rows += [scored, *(logprobs for logprobs, _ in trained)]
        grads += [gradient for _, gradient in trained]
    return results, {
        "logprobs": all(np.array_equal(rows[0][row], other[row]) for other in rows[1:] for row in rows[0]),
        "gradients": all(grads[0].keys() == other.keys() for other in grads[1:])
        and all(torch.equal(grads[0][name], other[name]) for other in grads[1:] for name in grads[0]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", STOCHASTIC)
def test_models_that_are_random_in_train_mode_are_trained_without_randomness(pool, family, dtype):
    """With a different random network in each forward, ratios are noise of up to 2.4 nats, without any error. Here
    scores and gradients repeat to the bit, also with activation checkpointing."""
    for results, equal in pool.run(_repeats, 2, family, dtype):
        assert results == ["passed", "passed"]
        assert equal == {"logprobs": True, "gradients": True}


def _noisy(rank: int, world: int) -> str:
    engine = engine_over(tiny_lm("qwen2"), world)
    layer = engine.model.layers[1]
    layer.register_forward_hook(lambda module, args, out: out + 1e-3 * torch.randn_like(out))
    return _probe_result(engine)


def test_a_model_that_scores_at_random_in_eval_mode_is_refused_at_start(pool):
    """In eval mode Transformers' own modules are not random; a model that still is gets an error."""
    (result,) = pool.run(_noisy, 1)
    assert "gives random scores" in result and "nats when one pack is scored twice" in result


LARGE: dict[str, Any] = {"hidden_size": 512, "num_experts": 32, "moe_intermediate_size": 64, "vocab_size": 512}


def _mixtures(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    return [_probe_result(engine_over(tiny_lm("qwen3_moe", seed=seed, **LARGE), world, {}, dtype)) for seed in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mixtures_of_experts_pass_the_probe(pool, dtype):
    """Neighbours change how many rows each expert multiplies, and so the rounding."""
    assert pool.run(_mixtures, 1, dtype) == [["passed"] * 6]


def _one_row(cu_seqlens: list[int], device: torch.device, parents: Any = None, mutual: Any = None) -> PackedAttention:
    """All rows of a pack as one row."""
    return PackedAttention([0, cu_seqlens[-1]], device)


def _mixed(self: PackedAttention, layer: int, x: torch.Tensor, compute: Any) -> Any:
    """The layers with a state compute all rows of a pack as one row."""
    return [out if out is None else out[0] for out in compute(x[None], None)]


def _leaking(rank: int, world: int, family: str, leak: str, dtype: torch.dtype) -> str:
    scale = 0.1 if leak == "state" else 0.02  # layers with a state multiply several small numbers
    engine = engine_over(tiny_lm(family, initializer_range=scale), world, {}, dtype)
    with pytest.MonkeyPatch.context() as patch:
        if leak == "attention":
            patch.setattr(engine_module, "PackedAttention", _one_row)
        if leak == "state":
            patch.setattr(PackedAttention, "mix", _mixed)
        if leak == "convolution":  # each token sees the one before it, even in another row
            engine.model.layers[0].register_forward_hook(
                lambda module, args, out: out + 0.5 * torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]
            )
        return _probe_result(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "leak"),
    [
        *itertools.product(["qwen2", "qwen3_moe"], ["attention", "convolution"]),
        *itertools.product(["qwen3_next", "qwen3_5_text", "lfm2", "mamba2"], ["state"]),
    ],
)
def test_a_model_whose_packed_rows_see_each_other_is_refused_at_start(pool, family, leak, dtype):
    """In the compute dtype, also for an untrained model, in which all logprobs are close to each other."""
    assert all("affect each other" in result for result in pool.run(_leaking, 2, family, leak, dtype))


def _calls(rank: int, world: int, checkpointing: bool) -> tuple[int, int]:
    """Calls of one block's MLP in the forward and in the backward pass."""
    engine = engine_over(tiny_lm("qwen2"), world, {"activation_checkpointing": checkpointing})
    calls: list[int] = []
    engine.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: calls.append(1))
    samples = weigh(random_samples(0, [12, 30]))
    engine.forward([pack(samples, [0, 1])])
    scoring = len(calls)
    engine.forward_backward([pack(samples, [0, 1])], make_policy_loss(AlgoConfig()))
    return scoring, len(calls) - scoring


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
def test_checkpointed_blocks_are_computed_twice_with_a_backward_pass(pool, checkpointing):
    assert pool.run(_calls, 2, checkpointing) == [(1, 1 + checkpointing)] * 2

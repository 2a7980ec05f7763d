"""What the trainer asks of a model before it trains it: scores that repeat, and rows that do not see each other."""

from __future__ import annotations

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
from meshrl.parallel.fsdp import whole
from meshrl.train import engine as engine_module
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

STOCHASTIC = ["phimoe", "opt", "mixtral"]  # sampled experts, skipped layers, router jitter: all in train mode alone


def _said(engine: TrainEngine) -> str:
    try:
        engine.require_independent_rows()
    except ConfigError as error:
        return str(error)
    return "taken"


def _gradient(engine: TrainEngine, samples: list[Any]) -> tuple[dict[int, np.ndarray], dict[str, torch.Tensor]]:
    """Logprobs by row and whole gradients of one micro-batch."""
    result = engine.forward_backward([pack(samples, range(len(samples)))], make_policy_loss(AlgoConfig()))
    grads = {name: whole(p.grad).clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.model.zero_grad(set_to_none=True)
    return result.logprobs, grads


def _repeats(rank: int, world: int, family: str, dtype: torch.dtype) -> tuple[list[str], dict[str, bool]]:
    """What the probe said without and with checkpointing, and what is equal to the bit."""
    samples = weigh(random_samples(rank, [12, 30, 7]))
    said, rows, grads = [], [], []
    for checkpointing in (False, True):
        engine = engine_over(tiny_lm(family), world, {"activation_checkpointing": checkpointing}, dtype)
        said.append(_said(engine))
        scored, _ = engine.forward([pack(samples, range(len(samples)))])
        trained = [_gradient(engine, samples) for _ in range(2)]
        rows += [scored, *(logprobs for logprobs, _ in trained)]
        grads += [gradient for _, gradient in trained]
    return said, {
        "logprobs": all(np.array_equal(rows[0][row], other[row]) for other in rows[1:] for row in rows[0]),
        "gradients": all(grads[0].keys() == other.keys() for other in grads[1:])
        and all(torch.equal(grads[0][name], other[name]) for other in grads[1:] for name in grads[0]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", STOCHASTIC)
def test_models_that_are_random_in_train_mode_train_the_network_that_is_sampled(pool, family, dtype):
    """P34: with a network drawn anew in each forward, ratios are noise of up to 2.4 nats, and nothing says so. Scores
    and gradients repeat to the bit, with activation checkpointing too."""
    for said, equal in pool.run(_repeats, 2, family, dtype):
        assert said == ["taken", "taken"]
        assert equal == {"logprobs": True, "gradients": True}


def _noisy(rank: int, world: int) -> str:
    engine = engine_over(tiny_lm("qwen2"), world)
    layer = engine.model.layers[1]
    layer.register_forward_hook(lambda module, args, out: out + 1e-3 * torch.randn_like(out))
    return _said(engine)


def test_a_model_that_scores_at_random_in_eval_mode_is_refused_at_start(pool):
    """P34: eval mode silences Transformers' own modules; whatever draws random numbers even there is named."""
    (said,) = pool.run(_noisy, 1)
    assert "scores at random" in said and "nats when one pack is scored twice" in said


LARGE: dict[str, Any] = {"hidden_size": 512, "num_experts": 32, "moe_intermediate_size": 64, "vocab_size": 512}


def _mixtures(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    return [_said(engine_over(tiny_lm("qwen3_moe", seed=seed, **LARGE), world, {}, dtype)) for seed in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mixtures_of_experts_are_not_taken_for_leaks(pool, dtype):
    """P35: neighbours decide how many rows each expert multiplies, and with that how a product is rounded."""
    assert pool.run(_mixtures, 1, dtype) == [["taken"] * 6]


def _one_row(cu_seqlens: list[int], device: torch.device, parents: Any = None) -> PackedAttention:
    """A whole pack as one row."""
    return PackedAttention([0, cu_seqlens[-1]], device)


def _leaking(rank: int, world: int, family: str, leak: str, dtype: torch.dtype) -> str:
    engine = engine_over(tiny_lm(family, initializer_range=0.02), world, {}, dtype)
    with pytest.MonkeyPatch.context() as patch:
        if leak == "attention":
            patch.setattr(engine_module, "PackedAttention", _one_row)
        if leak == "convolution":  # each token sees the one before it, whichever row that belongs to
            engine.model.layers[0].register_forward_hook(
                lambda module, args, out: out + 0.5 * torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]
            )
        return _said(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("leak", ["attention", "convolution"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_model_whose_packed_rows_see_each_other_is_refused_at_start(pool, family, leak, dtype):
    """P22, P35: in the dtype that it computes in, before anything is trained, and even where a model has learned
    nothing, so that all its logprobs are close to each other."""
    assert all("see each other" in said for said in pool.run(_leaking, 2, family, leak, dtype))


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


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_checkpointed_blocks_are_computed_twice_where_there_is_a_backward_pass(pool, checkpointing):
    assert pool.run(_calls, 2, checkpointing) == [(1, 1 + checkpointing)] * 2

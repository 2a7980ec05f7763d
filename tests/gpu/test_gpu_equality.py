"""The equality harness on the accelerator: the engine's gradient equals the unsharded, unpacked model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import norm_of, random_partition, unsharded, worst
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig, CorrectionConfig, KlConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, Sample
from meshrl.parallel.fsdp import full_tensor
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

pytestmark = pytest.mark.gpu

LENGTHS = [12, 3, 40, -6, 7, 7, 21, 2, 64, -2, 12, 12]
TRUNCATE = CorrectionConfig(kind="truncate")  # auto would not be the same on the CPU and on an accelerator
LOSS = make_policy_loss(AlgoConfig(entropy_coef=0.01, kl=KlConfig(coef=0.1, estimator="k3"), correction=TRUNCATE))
OFF = {torch.float64: 1e-10, torch.float32: 5e-5}  # of a tensor's norm
FSDP2 = {False: "copies", True: "FSDP2"}
SHAPE = {"hidden_size": 64}  # heads of 16, which kernels for bf16 support


def _rows(shared: bool) -> list[Sample]:
    """Random rows; or groups of four that share prompts of 9, 1 and 30 tokens."""
    if not shared:
        return weigh(random_samples(1, LENGTHS))
    rng = np.random.default_rng(0)
    out = []
    for g, prompt in enumerate((9, 1, 30)):
        tokens = rng.integers(3, 64, prompt).astype(np.int32)
        rows = random_samples(10 + g, [prompt + n for n in (1, 12, 5, 40)])
        for s in rows:
            s.tokens[:prompt] = tokens
            s.mask = np.arange(len(s)) >= prompt
            for name in ("advantages", "old_logprobs", "ref_logprobs"):
                setattr(s, name, np.where(s.mask, -rng.random(len(s)), 0).astype(np.float32))
            s.group_id, s.prefix_len = f"g{g}", prompt
        out += rows
    return weigh(out)


def _gradient(
    lm: torch.nn.Module, samples: list[Sample], mesh: Any, dtype: torch.dtype, micro: int, **settings: Any
) -> dict[str, Any]:
    """The engine's full gradients on the mesh's device, in compute dtype `dtype`, over `micro` random micro-batches."""
    cfg = TrainConfig(activation_checkpointing=micro > 1, logprob_chunk_tokens=50, **settings)
    engine = TrainEngine.wrap(lm, cfg, mesh, POLICY, dtype)
    (partition,) = random_partition(np.random.default_rng(0), len(samples), 1, micro)
    batches = [pack([samples[i] for i in rows], rows, engine.device) for rows in partition]
    result = engine.forward_backward(batches, LOSS)
    grads = {n: full_tensor(p.grad).double().cpu().numpy().copy() for n, p in engine.model.lm.named_parameters()}
    return {"grads": grads, "logprobs": result.logprobs, "norm": engine.optim_step(0.0).grad_norm}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shared", [False, True], ids=["rows", "groups"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dtype", OFF, ids=["fp64", "fp32"])
@pytest.mark.parametrize("fsdp2", FSDP2, ids=FSDP2.get, indirect=True)
def test_the_gradient_is_the_unsharded_models(fsdp2, meshes, accelerator, dtype, micro, shared, tie):
    samples = _rows(shared)
    want = unsharded(tiny_qwen2(dtype, tie, **SHAPE).to(accelerator), samples, LOSS)
    got = _gradient(tiny_qwen2(dtype, tie, **SHAPE), samples, meshes[accelerator.type], dtype, micro)
    distance, name = worst(got["grads"], want["grads"])
    assert distance < OFF[dtype], f"{name} is {distance:.2e} of its norm off"
    assert got["norm"] == pytest.approx(norm_of(want["grads"]), rel=max(OFF[dtype], 1e-6))
    for i, row in want["logprobs"].items():
        np.testing.assert_allclose(got["logprobs"][i], row, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.float32, "groups"), (torch.bfloat16, "groups"), (torch.bfloat16, "a long row")],
    ids=["fp32 groups", "bf16 groups", "a long bf16 row"],
)
def test_with_full_determinism_a_gradient_is_the_same_to_the_bit(meshes, accelerator, dtype, rows):
    """Rows for which an H200 by default uses kernels that add in an order that changes."""
    samples = weigh(random_samples(1, [5000])) if rows == "a long row" else _rows(shared=True)
    first, *others = (
        _gradient(tiny_qwen2(**SHAPE), samples, meshes[accelerator.type], dtype, 1, full_determinism=True)
        for _ in range(5)
    )
    for other in others:
        for name, grad in first["grads"].items():
            assert np.array_equal(other["grads"][name], grad), name
        assert other["norm"] == first["norm"]


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "groups"])
@pytest.mark.parametrize("fsdp2", FSDP2, ids=FSDP2.get, indirect=True)
def test_in_bf16_the_gradient_is_as_exact_as_on_the_cpu(fsdp2, meshes, accelerator, shared):
    """The limit for rounding to bf16 is the error on the CPU, whose code other tests verify."""
    samples = _rows(shared)
    want = unsharded(tiny_qwen2(torch.float64, **SHAPE), samples, LOSS)["grads"]
    off = {}
    for kind, mesh in meshes.items():
        got = _gradient(tiny_qwen2(**SHAPE), samples, mesh, torch.bfloat16, 2)["grads"]
        total = sum(float(((got[n] - want[n]) ** 2).sum()) for n in want)
        off[kind] = total**0.5 / norm_of(want)
    assert off[accelerator.type] < 1.5 * off["cpu"] + 5e-3, off


def test_neighbours_in_a_pack_change_no_logprob(meshes, accelerator):
    """The engine's probe, which refuses models with leaking rows, passes in each dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        cfg = TrainConfig(activation_checkpointing=False)
        lm = tiny_qwen2(**SHAPE)
        TrainEngine.wrap(lm, cfg, meshes[accelerator.type], POLICY, dtype).require_independent_rows()


@pytest.mark.parametrize("fsdp2", FSDP2, ids=FSDP2.get, indirect=True)
def test_training_learns_and_keeps_its_dtypes(fsdp2, meshes, accelerator):
    """Bf16 compute over fp32 masters; at lr 1e-6 these change by far less than bf16 can represent."""
    engine = TrainEngine.wrap(tiny_qwen2(**SHAPE), TrainConfig(), meshes[accelerator.type], POLICY, torch.bfloat16)
    samples = weigh(random_samples(3, [40, 21, 30]))
    for s in samples:
        s.old_logprobs, s.advantages = None, np.where(s.mask, 1, 0).astype(np.float32)
    batch = pack(samples, range(3), engine.device)
    before = {n: full_tensor(p).detach().clone() for n, p in engine.model.named_parameters()}
    engine.forward_backward([batch], LOSS)
    engine.optim_step(1e-6)
    moved = {n: float((full_tensor(p) - before[n]).abs().max()) for n, p in engine.model.named_parameters()}
    assert all(0 < m < 2e-6 for m in moved.values()), moved

    def mean_logprob() -> float:
        return float(np.mean([row[s.mask].mean() for s, row in zip(samples, engine.forward([batch]).values())]))

    first = mean_logprob()
    for _ in range(5):
        engine.forward_backward([batch], LOSS)
        engine.optim_step(1e-2)
    assert mean_logprob() > first + 0.5
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    assert {b.dtype for n, b in engine.model.named_buffers() if "inv_freq" in n} == {torch.float32}
    assert {p.device.type for p in engine.model.parameters()} == {accelerator.type}

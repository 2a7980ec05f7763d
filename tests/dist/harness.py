"""The equality harness: compares the gradient of a set of samples, for any sharding, with the unsharded model's.

`partitioned` runs in ranks and returns full gradients, metrics and the gradient norm; `unsharded` computes the same in
one process with an unpacked reference, row by row, which shares no code with the engine's packing, attention or head.
Other shardings need only another mesh shape or train config.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.config.model import LoraConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, Sample
from meshrl.model.lora import adapters_of
from meshrl.monitor.metrics import divide, merge
from meshrl.parallel.fsdp import full_tensor, local_shard
from meshrl.parallel.mesh import build_mesh
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LORA = LoraConfig(enabled=True, rank=3, alpha=6)  # for models with adapters
STRATEGIES: dict[str, dict[str, Any]] = {  # and the keys of 4 ranks that each needs
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {},
    "NO_SHARD": {},
    "HYBRID_SHARD": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
}
EXPERTS_LORA = LORA.model_copy(update={"targets": ["all-linear", "experts"]})


def engine_over(
    lm: torch.nn.Module, world: int, train: dict[str, Any] | None = None, dtype: torch.dtype | None = None
) -> TrainEngine:
    """A policy engine over `lm` on all ranks. dtype: compute dtype, by default the dtype of the weights."""
    cfg = TrainConfig(**(train or {}))
    mesh = build_mesh(cfg.mesh_shape(world), "cpu")
    adapters = adapters_of(lm).values()
    lora = (EXPERTS_LORA if any(a.num_experts for a in adapters) else LORA) if adapters else None
    return TrainEngine.wrap(lm, cfg, mesh, POLICY, dtype or next(lm.parameters()).dtype, lora=lora)


def partitioned(
    rank: int,
    world: int,
    make_model: Any,
    model_args: dict[str, Any],
    samples: list[Sample],
    partition: list[list[list[int]]],
    loss: Any,
    train: dict[str, Any],
    num_scored: int = 0,
) -> dict[str, Any]:
    """One forward_backward over the micro-batches of `partition` for this rank's data index; [] is a dummy.
    num_scored: the leading ones without a gradient. Only the first peer has metrics and logprobs."""
    engine = engine_over(make_model(**model_args), world, train)
    images = [any(samples[i].media_spans for micro in of_all for i in micro) for of_all in zip(*partition, strict=True)]
    micro_batches = zip(partition[engine.coordinates.data_index], images, strict=True)
    batches = [engine.pack([samples[i] for i in micro], micro, has_images) for micro, has_images in micro_batches]
    result = engine.forward_backward(batches, loss, num_scored=num_scored)
    grads = {n: full_tensor(p.grad).numpy().copy() for n, p in engine.model.lm.named_parameters() if p.grad is not None}
    local = sum(local_shard(p).numel() for p in engine.model.parameters())
    report = engine.optim_step(0.0)
    return {
        "grads": grads,
        "metrics": result.metrics if engine.coordinates.is_first_peer else [],
        "logprobs": result.logprobs,
        "norm": report.grad_norm,
        "local_numel": local,
    }


def unsharded(lm: torch.nn.Module, samples: list[Sample], loss: Any, logits_of: Any = None) -> dict[str, Any]:
    """Row by row with plain Transformers: logits, dense log_softmax, the loss on a batch of one row. On the model's
    device, because devices compute the cosines of rotary positions differently, in fp32 whatever the dtype. logits_of:
    (model, row) -> [T, V], of rows that are more than tokens."""
    from meshrl.core.batch import Outputs

    metrics: list[Any] = []
    wide = next(lm.parameters()).dtype == torch.float64
    lm.config._attn_implementation = "sdpa" if wide else "eager"  # sdpa has no softcap, eager's softmax is in fp32
    weight = next(lm.parameters())
    total = torch.zeros((), dtype=weight.dtype, device=weight.device)
    logprobs = {}
    for i, s in enumerate(samples):
        tokens = torch.from_numpy(s.tokens.astype(np.int64)).to(weight.device)
        logits = lm(tokens[None]).logits[0] if logits_of is None else logits_of(lm, s)
        logits = logits / float(np.float32(s.temperature))
        logq = torch.log_softmax(logits, dim=-1)
        logp, ent = logits.new_zeros(len(s)), logits.new_zeros(len(s))
        where = torch.from_numpy(s.mask.nonzero()[0]).to(weight.device)
        logp = logp.index_put((where,), logq[where - 1, tokens[where]])
        ent = ent.index_put((where,), -(logq.exp() * logq).sum(-1)[where - 1])
        value, new = loss(Outputs(logprobs=logp, entropy=ent), pack([s], [i], weight.device))
        total = total + value
        metrics.extend(new)
        logprobs[i] = logp.detach().cpu().numpy()
    total.backward()
    grads = {n: p.grad.cpu().numpy().copy() for n, p in lm.named_parameters() if p.grad is not None}
    return {"grads": grads, "metrics": metrics, "logprobs": logprobs, "norm": norm_of(grads)}


def norm_of(grads: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))


def worst(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest distance of a tensor, relative to its norm, and its name (single elements may be noise). A bias of
    keys has a gradient of 0, all of which is noise."""
    assert got.keys() == want.keys()
    least = 1e-6 * norm_of(want)
    distances = [(float(np.linalg.norm(got[n] - want[n]) / max(least, np.linalg.norm(want[n]))), n) for n in want]
    return max((math.inf if math.isnan(d) else d, n) for d, n in distances)  # a NaN would hide in max


def check(got: list[dict[str, Any]], want: dict[str, Any], dtype: torch.dtype) -> None:
    """The ranks of `partitioned` have the gradients, norms, metrics and logprobs of `unsharded`."""
    tolerance = TOLERANCE[dtype]
    for rank in got:
        distance, name = worst(rank["grads"], want["grads"])
        assert distance < tolerance, f"{name} is {distance:.2e} of its norm off"
        assert rank["norm"] == pytest.approx(norm_of(want["grads"]), rel=max(tolerance, 1e-6))
    own = [m for rank in got for m in rank["metrics"] if not m.name.startswith("router/")]  # the loss has no others
    metrics = divide(merge(own))
    reference = divide(merge(want["metrics"]))
    assert metrics.keys() == reference.keys()
    for name, value in reference.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    seen = {i: row for rank in got for i, row in rank["logprobs"].items()}
    assert seen.keys() == want["logprobs"].keys()
    for i, row in want["logprobs"].items():
        np.testing.assert_allclose(seen[i], row, atol=1e-5)


def random_partition(rng: np.random.Generator, num_rows: int, world: int, micro: int) -> list[list[list[int]]]:
    """Every row in a random micro-batch of a random rank, in random order; empty ones are dummies."""
    out: list[list[list[int]]] = [[[] for _ in range(micro)] for _ in range(world)]
    for i in rng.permutation(num_rows):
        out[rng.integers(world)][rng.integers(micro)].append(int(i))
    return out

"""AdamW, its learning rate at a step, and the global gradient norm."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from meshrl.config.train import OptimizerConfig, SchedulerConfig
from meshrl.parallel.boxes import copies_in_replica
from meshrl.parallel.fsdp import local_shard
from meshrl.parallel.timing import timed_collective


def build_optimizer(model: torch.nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay only for matrices, never for norms and biases. The learning
    rate is 0 until the first optimizer step sets it."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    return _AdamW(groups, lr=0.0, betas=cfg.betas, eps=cfg.eps, fused=True)


class _AdamW(torch.optim.AdamW):
    """Its step computes with this rank's shards, because each element is updated by itself. For lists of DTensors,
    PyTorch would plan the placements of all for seconds in the first step (benchmarks/optimizer_step.py). The states
    are DTensors, as the parameters."""

    def _init_group(self, group: Any, *lists: list[torch.Tensor]) -> Any:
        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return has_complex


def learning_rate(step: int, num_steps: int, peak: float, cfg: SchedulerConfig) -> float:
    """Learning rate of optimizer step `step` (0-based) of num_steps."""
    if step < cfg.warmup_steps:
        return peak * (step + 1) / (cfg.warmup_steps + 1)
    if cfg.kind == "constant":
        return peak
    done = (step - cfg.warmup_steps) / max(1, num_steps - cfg.warmup_steps)
    fall = 1 - done if cfg.kind == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * max(0.0, fall))


@torch.no_grad()  # else DTensor makes an autograd node for each shard that it gives
def clip_gradients(model: torch.nn.Module, max_norm: float, group: Any = None) -> float:
    """Scale all gradients so that their global norm is at most max_norm (0 = no clipping). Returns the norm before
    that, equal on every rank. group: the ranks of one replica of the model; several may hold the same shard."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for p in model.parameters():
        if p.grad is not None:
            by_copies.setdefault(copies_in_replica(p), []).append(local_shard(p.grad))
    squares = [torch.nn.utils.get_total_norm(grads, foreach=True).square() / n for n, grads in by_copies.items()]
    norm = torch.stack(squares).sum() if squares else local_shard(next(model.parameters())).new_zeros(())
    if group is not None:
        with timed_collective("all_reduce", norm, group.size()):
            dist.all_reduce(norm, group=group)
    total = float(norm.sqrt_())
    if 0 < max_norm < total + 1e-6 < math.inf:
        torch._foreach_mul_([grad for grads in by_copies.values() for grad in grads], max_norm / (norm + 1e-6))
    return total

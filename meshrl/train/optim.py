"""AdamW, also with its moments in host memory, its learning rate at a step, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from meshrl.config.train import OptimizerConfig, SchedulerConfig
from meshrl.core.device import queues, synchronize
from meshrl.parallel.boxes import copies_in_replica
from meshrl.parallel.fsdp import local_shard
from meshrl.parallel.timing import timed_collective
from meshrl.plan.decisions import PIECE_BYTES
from meshrl.train.offload import host_zeros

_ALIGNED = 64  # elements: a slice that starts at a multiple of it is computed as in the full tensor, to the bit


def build_optimizer(model: torch.nn.Module, cfg: OptimizerConfig, on_host: bool = False) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay only for matrices, never for norms and biases. The learning
    rate is 0 until the first optimizer step sets it. on_host: whether its moments are in host memory."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    kind = _AdamWInPieces if on_host else _AdamW
    return kind(groups, lr=0.0, betas=cfg.betas, eps=cfg.eps, fused=True)


class _AdamW(torch.optim.AdamW):
    """Its step computes with this rank's shards, because each element is updated by itself. For lists of DTensors,
    PyTorch would plan the placements of all for seconds in the first step (benchmarks/optimizer_step.py). The states
    are DTensors, as the parameters."""

    def _init_group(self, group: Any, *lists: list[torch.Tensor]) -> Any:
        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return has_complex


class _Slice(NamedTuple):
    """A range of elements of one parameter: [N] each, on the device and on the host."""

    param: torch.Tensor
    grad: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor]
    step: torch.Tensor  # float32[], on the host, of the parameter

    @property
    def num_bytes(self) -> int:
        return 2 * -(-len(self.param) // _ALIGNED) * _ALIGNED * self.param.element_size()


class _AdamWInPieces(torch.optim.AdamW):
    """Its states are in host memory, DTensors as the parameters. The moments are copied to the device, updated and
    copied back in pieces of at most PIECE_BYTES: those of several parameters, or of a slice of one. Each element is
    updated by itself, so the results are those of `_AdamW` to the bit."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pieces = [(group, piece) for group in self.param_groups for piece in self._pieces(group)]
        if not pieces:
            return
        device, sizes = pieces[0][1][0].param.device, [sum(part.num_bytes for part in piece) for _, piece in pieces]
        turns = sizes[::2], sizes[1::2]
        memory = [torch.empty(max(turn, default=0), dtype=torch.uint8, device=device) for turn in turns]
        with queues(device) as both:
            for number, (group, piece) in enumerate(pieces):
                with both[number % 2]:
                    _update(group, piece, memory[number % 2])
        synchronize(device)  # the host reads its moments when it saves

    def _pieces(self, group: dict[str, Any]) -> Iterator[list[_Slice]]:
        """Make the states of parameters that have none, count the step, and cut."""
        piece, free = list[_Slice](), PIECE_BYTES
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state |= {"step": torch.zeros(()), "exp_avg": host_zeros(p), "exp_avg_sq": host_zeros(p)}
            state["step"] += 1
            tensors = [local_shard(t).view(-1) for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
            block = 2 * _ALIGNED * tensors[0].element_size()
            while len(tensors[0]):
                if free < block:
                    yield piece
                    piece, free = [], PIECE_BYTES
                at = free // block * _ALIGNED
                param, grad, *moments = (t[:at] for t in tensors)
                piece.append(_Slice(param, grad, (moments[0], moments[1]), state["step"]))
                free -= piece[-1].num_bytes
                tensors = [t[at:] for t in tensors]
        if piece:
            yield piece


def _update(group: dict[str, Any], piece: list[_Slice], memory: torch.Tensor) -> None:
    """memory: uint8[at least the piece's bytes], on the device."""
    on_device, end = list[torch.Tensor](), 0
    on_host = [moment for part in piece for moment in part.moments]
    for moment in on_host:
        on_device.append(memory[end : end + moment.nbytes].view(moment.dtype))
        on_device[-1].copy_(moment, non_blocking=True)
        end += -(-len(moment) // _ALIGNED) * _ALIGNED * moment.element_size()
    adamw(
        [part.param for part in piece],
        [part.grad for part in piece],
        on_device[::2],
        on_device[1::2],
        [],
        [torch.full((), float(part.step) - 1, device=memory.device) for part in piece],  # it adds 1
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
    )
    for moment, updated in zip(on_host, on_device, strict=True):
        moment.copy_(updated, non_blocking=True)


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

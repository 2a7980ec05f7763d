"""AdamW, also with its moments in host memory, in 8 bits, or with bfloat16 masters; its learning rate at a step, and
the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.adamw import adamw

from meshrl.config.train import OptimizerConfig, SchedulerConfig
from meshrl.core.device import queues, synchronize
from meshrl.parallel.boxes import LocalBox, boxes, copies_in_replica, element_keys
from meshrl.parallel.fsdp import local_shard
from meshrl.parallel.timing import timed_collective
from meshrl.plan.decisions import MOMENT_BLOCK, PIECE_BYTES, has_8bit_moments
from meshrl.train.offload import zeros_of

_ALIGNED = 64  # elements: a slice that starts at a multiple of it is computed as in the full tensor, to the bit
_CHUNK = 1 << 20  # elements that `_CompactAdamW` updates at a time
_POWER = 5  # of a code of 8 bits: small values get more codes than with a linear scale
SCALE = "_scale"  # ends the name of the scales of a moment in 8 bits


def build_optimizer(model: torch.nn.Module, cfg: OptimizerConfig, on_host: bool = False) -> AdamW:
    """AdamW over the trainable parameters; weight decay only for matrices, never for norms and biases. The learning
    rate is 0 until the first optimizer step sets it. on_host: whether its moments are in host memory."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    kind: type[AdamW] = _AdamWInPieces if on_host else _AdamW
    if cfg.kind == "adamw_8bit" or any(p.dtype == torch.bfloat16 for p in params):
        kind = _CompactAdamW
    optimizer = kind(groups, lr=0.0, betas=cfg.betas, eps=cfg.eps, fused=True)
    optimizer.on_host, optimizer.is_8bit = on_host, cfg.kind == "adamw_8bit"
    return optimizer


class AdamW(torch.optim.AdamW):
    on_host = is_8bit = False

    def empty_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step. A moment in 8 bits is uint8 codes of the parameter's shape
        [..., C] and float32 scales [..., ceil(C / MOMENT_BLOCK)]."""
        is_counted_here = self.on_host or isinstance(self, _CompactAdamW)
        state = {"step": torch.zeros((), device="cpu" if is_counted_here else local_shard(p).device)}
        for name in ("exp_avg", "exp_avg_sq"):
            if self.is_8bit and has_8bit_moments(p.shape, p.numel()):
                state[name] = zeros_of(p, self.on_host, torch.uint8)
                state[name + SCALE] = zeros_of(p, self.on_host, torch.float32, -(-p.shape[-1] // MOMENT_BLOCK))
            else:
                state[name] = zeros_of(p, self.on_host)
        return state

    def _counted(self, group: dict[str, Any]) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        """The parameters that have a gradient, with their states, in which this step is counted."""
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state |= self.empty_state(p)
                state["step"] += 1
                yield p, state


class _AdamW(AdamW):
    """Its step computes with this rank's shards, because each element is updated by itself. For lists of DTensors,
    PyTorch would plan the placements of all for seconds in the first step (benchmarks/optimizer_step.py). The states
    are DTensors, as the parameters."""

    def _init_group(self, group: Any, *lists: list[torch.Tensor]) -> Any:
        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return has_complex


Tensors = list[torch.Tensor]


class _Slice(NamedTuple):
    """A range of elements of one parameter: [N] each, on the device and on the host."""

    param: torch.Tensor
    grad: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor]
    step: torch.Tensor  # float32[], on the host, of the parameter

    @property
    def num_bytes(self) -> int:
        return 2 * -(-len(self.param) // _ALIGNED) * _ALIGNED * self.param.element_size()


class _AdamWInPieces(AdamW):
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
        piece, free = list[_Slice](), PIECE_BYTES
        for p, state in self._counted(group):
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
    steps = [part.step for part in piece]
    _adamw(group, [part.param for part in piece], [part.grad for part in piece], on_device[::2], on_device[1::2], steps)
    for moment, updated in zip(on_host, on_device, strict=True):
        moment.copy_(updated, non_blocking=True)


def _adamw(
    group: dict[str, Any], params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, steps: Tensors
) -> None:
    """Update parameters and moments in place. steps: with this one."""
    before = [torch.full((), float(step) - 1, device=params[0].device) for step in steps]  # it adds 1
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
    beta1, beta2 = group["betas"]
    adamw(params, grads, means, squares, [], before, fused=True, amsgrad=False, beta1=beta1, beta2=beta2, **settings)


class _CompactAdamW(AdamW):
    """With moments in 8 bits, or bfloat16 masters and moments. Each chunk is updated in float32 and stored again, and
    what is stored does not depend on how ranks cut a parameter: a block of 8 bits is of one row, and bfloat16 is
    rounded up or down by a random number of the element and the step, so that small steps are kept on average."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for group in self.param_groups:
            for p, state in self._counted(group):
                names = [name for name in state if name != "step"]
                for parts in zip(*(boxes(t) for t in (p, p.grad, *(state[name] for name in names))), strict=True):
                    for place, (_, grad), *moments in _chunks(parts):
                        held = {name: moment.tensor for name, moment in zip(names, moments, strict=True)}
                        _update_chunk(group, place, grad, held, state["step"], 3 * numbers[p])
        for p in [*numbers][:1]:
            synchronize(local_shard(p).device)  # the host reads its moments when it saves


def _chunks(parts: Sequence[LocalBox]) -> Iterator[Sequence[LocalBox]]:
    """The same box of several tensors, in parts of at most _CHUNK elements, but at least a row."""
    first = parts[0].tensor
    dim = next((dim for dim, size in enumerate(first.shape[:-1]) if size > 1), None)
    if dim is None or first.numel() <= _CHUNK:
        yield parts
        return
    size = max(1, _CHUNK * first.shape[dim] // first.numel())
    for at in range(0, first.shape[dim], size):
        here = (*parts[0].offsets[:dim], parts[0].offsets[dim] + at, *parts[0].offsets[dim + 1 :])
        yield from _chunks([LocalBox(here, t.narrow(dim, at, min(size, t.shape[dim] - at))) for _, t in parts])


def _update_chunk(
    group: dict[str, Any],
    place: LocalBox,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    step: torch.Tensor,
    salt: int,
) -> None:
    moments = {name: stored.to(grad.device, non_blocking=True) for name, stored in state.items()}
    if is_8bit := "exp_avg" + SCALE in state:
        mean = _decoded(moments["exp_avg"], moments["exp_avg" + SCALE], is_signed=True)
        square = _decoded(moments["exp_avg_sq"], moments["exp_avg_sq" + SCALE], is_signed=False).square_()
    else:
        mean, square = moments["exp_avg"], moments["exp_avg_sq"]
    # The kernel computes vectors, and the rest of a tensor by other instructions; here there is no rest.
    size = -(-grad.numel() // _ALIGNED) * _ALIGNED
    buffers, sources = torch.zeros(4, size, device=grad.device), (place.tensor, grad, mean, square)
    param, _, mean, square = (b[: grad.numel()].view(grad.shape).copy_(x) for b, x in zip(buffers, sources))
    _adamw(group, [buffers[0]], [buffers[1]], [buffers[2]], [buffers[3]], [step])
    if is_8bit:
        updated = dict(zip(("exp_avg", "exp_avg" + SCALE), _encoded(mean, is_signed=True)))
        updated |= zip(("exp_avg_sq", "exp_avg_sq" + SCALE), _encoded(square.sqrt_(), is_signed=False))
    else:
        updated = {"exp_avg": mean, "exp_avg_sq": square}
    for number, (name, value) in enumerate([("", param), *updated.items()]):
        stored = state.get(name, place.tensor)
        if stored.dtype == torch.bfloat16:
            value = _rounded(value, place, int(step) * 0x9E3779B1 + (salt + number) * 0x85EBCA6B)
        stored.copy_(value, non_blocking=True)


def _encoded(x: torch.Tensor, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8[..., C] codes and float32[..., ceil(C / MOMENT_BLOCK)] scales, the largest absolute values, of
    float32[..., C]. A code is of the _POWER-th root: exact to 2 % for the largest values of a block, and to a third for
    those of 1e-8 of them. The second moment is stored by its square root, so that it is not rounded to 0 where the
    first one is not: such an element would move many times too far."""
    blocks = F.pad(x, (0, -x.shape[-1] % MOMENT_BLOCK)).unflatten(-1, (-1, MOMENT_BLOCK))
    scale = blocks.abs().amax(-1)
    shares = blocks.abs().div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    codes = torch.bucketize(shares, _bounds(127 if is_signed else 255, x.device), out_int32=True)
    if is_signed:
        codes = codes.copysign(blocks).add_(128)
    return codes.to(torch.uint8).flatten(-2)[..., : x.shape[-1]], scale


@cache
def _bounds(num_codes: int, device: torch.device) -> torch.Tensor:
    """float32[num_codes]: where a value gets the next code. Comparisons have no rounding, unlike powers, which a CPU
    computes otherwise at the end of a tensor."""
    return torch.tensor([((code + 0.5) / num_codes) ** _POWER for code in range(num_codes)], device=device)


def _decoded(codes: torch.Tensor, scale: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """float32[..., C]"""
    roots = codes.float()
    roots = roots.sub_(128).div_(127) if is_signed else roots.div_(255)
    values = roots
    for _ in range(_POWER - 1):
        values = values * roots
    return values.mul_(scale.repeat_interleave(MOMENT_BLOCK, -1)[..., : codes.shape[-1]])


def _rounded(x: torch.Tensor, place: LocalBox, salt: int) -> torch.Tensor:
    """bfloat16 of float32, up or down with probabilities that give x on average."""
    rows, columns = element_keys(place, salt)
    noise = (rows[:, None] * columns).bitwise_right_shift_(40).bitwise_and_(0xFFFF).view(x.shape)
    return (x.view(torch.int32) + noise.int()).bitwise_and_(-0x10000).view(torch.float32).bfloat16()


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

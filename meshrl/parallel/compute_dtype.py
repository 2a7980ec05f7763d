"""Computing with copies of the parameters in another dtype, for ranks over which FSDP2 has nothing to shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Named = Sequence[tuple[torch.nn.Module, str]]  # parameters, by module and name


def compute_in(dtype: torch.dtype, root: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
    """Let each block, and root with its other parameters, compute with copies in this dtype, as FSDP2 would.

    A copy is made when a forward begins, and stays until nothing needs it: the backward pass of its block, or with
    activation checkpointing, which makes it again, the end of the block's forward. Parameters in this dtype are not
    copied. Gradients arrive in the dtype of the parameters, and are summed in it. Call it before TP cuts them.
    """
    inside: set[torch.nn.Module] = set()
    for block in blocks:
        _wrap(dtype, block, block.modules())
        inside |= set(block.modules())
    _wrap(dtype, root, [module for module in root.modules() if module not in inside])


@contextmanager
def replaced(named: Named, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """These modules have other tensors as their parameters. They need not be of the class Parameter."""
    before = [module._parameters[name] for module, name in named]
    try:
        for (module, name), tensor in zip(named, tensors, strict=True):
            module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (module, name), p in zip(named, before, strict=True):
            module._parameters[name] = p


def _wrap(dtype: torch.dtype, root: torch.nn.Module, modules: Any) -> None:
    named = [(module, name) for module in modules for name, p in module._parameters.items() if p is not None]
    if any(_needs_copy(module._parameters[name], dtype) for module, name in named):
        root.forward = partial(_with_copies, dtype, named, root.forward)


def _needs_copy(p: Any, dtype: torch.dtype) -> bool:
    return bool(p.is_floating_point() and p.dtype != dtype)


def _with_copies(dtype: torch.dtype, named: Named, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    held: list[Any] = [module._parameters[name] for module, name in named]
    distinct = {id(p): p for p in held if _needs_copy(p, dtype)}  # a tied parameter has one copy
    masters = list(distinct.values())
    if any(isinstance(p, DTensor) for p in masters):
        copies: Sequence[torch.Tensor] = [p.to(dtype) for p in masters]
    else:
        copies = _Copies.apply(dtype, *masters)
    by_master = dict(zip(distinct, copies, strict=True))
    with replaced(named, [by_master.get(id(p), p) for p in held]):
        return forward(*args, **kwargs)


class _Copies(torch.autograd.Function):
    """Copies of all tensors in another dtype, and of their gradients back, in one launch each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [p.dtype for p in masters]
        copies = _copied(masters, [dtype] * len(masters))
        ctx.mark_non_differentiable(
            *[c for c, needed in zip(copies, ctx.needs_input_grad[1:], strict=True) if not needed]
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        used = [(grad, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True) if grad is not None]
        wide = iter(_copied(*zip(*used, strict=True)) if used else ())
        return None, *(None if grad is None else next(wide) for grad in grads)


def _copied(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    copies = [torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies

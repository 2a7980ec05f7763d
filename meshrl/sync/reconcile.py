"""The comparison of names, shapes and dtypes before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from meshrl.core.errors import UnloadedParamsError
from meshrl.core.lookup import similar_names
from meshrl.sync.layout import Layout

_SHOWN = 8  # names listed for each kind of fault; the rest is counted


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype name)}: what `reconcile` compares, and what `make_layout` takes."""
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def reconcile(
    layout: Layout, params: Mapping[str, tuple[tuple[int, ...], str]], tied: Mapping[str, str] | None = None
) -> None:
    """Compare what will be sent with what the receiver has, in both directions, before anything runs.

    params: {wire name: (shape, dtype)} of the receiver's parameters. tied: its aliases -> the parameter whose memory
    they share; an alias may be in `params`, too.
    Raises: UnloadedParamsError with all faults: names never sent, names unknown to the receiver, other shapes or
    dtypes, weights that are tied in the receiver but not in the trainer.
    """
    tied = tied or {}
    sent = layout.by_name
    wire = {name: name for name in sent} | layout.tied  # every name that the sync covers -> the name sent for it
    unsent, misfits, bound = [], [], []
    for name in [*params, *(alias for alias in tied if alias not in params)]:
        shape_dtype = params.get(name) or params.get(tied.get(name, ""))
        entry = sent.get(wire.get(name, ""))
        if entry is None and wire.get(tied.get(name, "")) is None:
            unsent.append(f"{name} {_spec(shape_dtype)}{_nearest(name, wire)}")
        elif entry is not None and shape_dtype is not None and shape_dtype != (entry.shape, entry.dtype):
            misfits.append(f"{name}: sent {_spec((entry.shape, entry.dtype))}, the receiver has {_spec(shape_dtype)}")
        if name in tied and wire.get(name) and wire.get(tied[name]) and wire[name] != wire[tied[name]]:
            bound.append(f"{name}, which shares the memory of {tied[name]}")
    unknown = [
        f"{name} {_spec((sent[source].shape, sent[source].dtype))}{_nearest(name, params)}"
        for name, source in wire.items()
        if name not in params and name not in tied
    ]
    faults = [
        ("never sent; the receiver would keep its own values", unsent),
        ("sent, but the receiver has no such parameter", unknown),
        ("sent with another shape or dtype", misfits),
        ("tied in the receiver, but sent as two tensors", bound),
    ]
    if any(names for _, names in faults):
        raise UnloadedParamsError(
            f"trainer and receiver disagree on {sum(len(names) for _, names in faults)} of their parameters, so "
            "nothing was sent:\n"
            + "\n".join(f"- {title}:\n{_listed(names)}" for title, names in faults if names)
            + "\nBoth sides must be built from the same model folder. If they are, this rollout engine "
            "loads other names or dtypes for this model: try another release of it, or another rollout.engine."
        )


def _spec(shape_dtype: tuple[tuple[int, ...], str] | None) -> str:
    return "" if shape_dtype is None else f"{list(shape_dtype[0])} {shape_dtype[1]}"


def _nearest(name: str, names: Iterable[str]) -> str:
    near = similar_names(name, names, 2)
    return f" (nearest there: {', '.join(near)})" if near else ""


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(f"    {line}" for line in lines[:_SHOWN] + more)

"""Tensor parallelism: each rank of the mesh's axis `tp` computes with its cut of the matrices.

Between the modules of a block, a rank has a slice of the tokens: residuals and norms are computed once (sequence
parallelism). A module with matrices gathers its input's tokens, computes a part of its output, and the parts are summed
as they are scattered. Inside, all of it is the family's own code on local tensors, without a collective.

So whatever a rank computes with a tensor that is not cut, such as a norm or a router, is a part of its gradient, and
the parameter gets the sum over the axis: one all-reduce for all such tensors of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshrl.parallel.compute_dtype import replaced
from meshrl.parallel.exchange import Axis, gathered, sum_gradients, sum_scattered


@dataclass(frozen=True, slots=True)
class Cut:
    """How the ranks share a parameter. dim: the dim that is cut, None = each rank holds all of it. parts: as many equal
    parts of this dim are cut each by itself, such as gate and up in one tensor.

    rows: of a parameter that each rank holds, the rows [start, end) that this rank computes with; None = all.
    is_shared: each rank adds it to a sum over the axis, so each takes its share of the values."""

    dim: int | None = None
    parts: int = 1
    rows: tuple[int, int] | None = None
    is_shared: bool = False

    @property
    def placement(self) -> Placement:
        if self.dim is None:
            return Replicate()
        return Shard(self.dim) if self.parts == 1 else _StridedShard(self.dim, split_factor=self.parts)


EACH = Cut()


class TensorParallel:
    """The axis, and what it does to a model's modules. mesh: 1-D; None = only the shapes matter. is_active: False =
    each rank computes all of the model, with gathered parameters (`inactive`)."""

    def __init__(self, axis: Axis, mesh: DeviceMesh | None = None):
        self.axis, self._mesh = axis, mesh
        self._cut_of: dict[tuple[torch.nn.Module, str], Cut] = {}  # by the module and the name of its parameter
        self.is_active = True

    @contextmanager
    def inactive(self) -> Iterator[None]:
        self.is_active = False
        try:
            yield
        finally:
            self.is_active = True

    # ---- setting up

    def cut(self, module: torch.nn.Module, name: str, cut: Cut, placed: dict[int, torch.nn.Parameter]) -> None:
        """Replace a parameter, with or without values, by this rank's cut of it. placed: by the parameter that was
        replaced, so that tied ones stay tied."""
        p = module._parameters[name]
        assert p is not None
        if id(p) not in placed:
            local = p.detach()
            if cut.dim is not None:
                local = local.unflatten(cut.dim, (cut.parts, self.axis.size, -1)).select(cut.dim + 1, self.axis.index)
                local = local.flatten(cut.dim, cut.dim + 1).contiguous()
            if self._mesh is not None:
                local = DTensor.from_local(
                    local, self._mesh, [cut.placement], run_check=False, shape=p.shape, stride=p.stride()
                )
            placed[id(p)] = torch.nn.Parameter(local, requires_grad=p.requires_grad)
        module._parameters[name] = placed[id(p)]
        self._cut_of[module, name] = cut

    def is_uncut(self, module: torch.nn.Module, name: str) -> bool:
        """Whether each rank computes with all of this parameter."""
        return self._cut_of.get((module, name)) is EACH

    def use_local(self, root: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> None:
        """Let root's forward compute with the local tensors of these modules."""
        named = [(m, name) for m in modules for name, p in m._parameters.items() if p is not None]
        root.forward = partial(self._with_local, named, root.forward)

    def bound(self, module: torch.nn.Module, is_cut: bool) -> None:
        """A module that sees all tokens, and of which each rank computes a part (is_cut), or all."""
        module.forward = partial(self._between_slices, is_cut, module.forward)

    def embed(self, embedding: torch.nn.Module, rows: tuple[int, int]) -> None:
        """An embedding of which this rank has these rows."""
        padding: Any = getattr(embedding, "padding_idx", None)
        if padding is not None:  # a word without a gradient
            own: Any = padding - rows[0] if rows[0] <= padding < rows[1] else None
            embedding.padding_idx = own
        embedding.forward = partial(self._embedded, rows, embedding.forward)

    def gather_output(self, layer: torch.nn.Module) -> None:
        """The features of its output are gathered, since each rank needs all of them."""
        layer.forward = partial(self._with_all_features, layer.forward)

    def cut_input(self, layer: torch.nn.Module) -> None:
        """It gets all features, of which this rank multiplies its own."""
        layer.forward = partial(self._with_own_features, layer.forward)

    # ---- computing

    def local(self, named: Sequence[tuple[torch.nn.Module, str]]) -> list[torch.Tensor]:
        """What this rank computes with, of these parameters."""
        parameters, cuts = [module._parameters[name] for module, name in named], [self._cut_of[m, n] for m, n in named]
        tensors = [p.to_local(grad_placements=[c.placement]) for p, c in zip(parameters, cuts, strict=True)]  # type: ignore[union-attr]
        if not self.is_active:
            return [self._full(tensor, cut) for tensor, cut in zip(tensors, cuts, strict=True)]
        each = [i for i, cut in enumerate(cuts) if cut.dim is None and tensors[i].requires_grad]
        for i, tensor in zip(each, sum_gradients([tensors[i] for i in each], self.axis), strict=True):
            tensors[i] = tensor
        for i, cut in enumerate(cuts):
            if cut.rows is not None:
                tensors[i] = tensors[i][slice(*cut.rows)]
            if cut.is_shared:
                tensors[i] = tensors[i] / self.axis.size
        return tensors

    def _full(self, local: torch.Tensor, cut: Cut) -> torch.Tensor:
        if cut.dim is None:
            return local
        cuts = self.axis.gather(local[None]).unflatten(cut.dim + 1, (cut.parts, -1))  # [rank, ..., part, n, ...]
        return cuts.movedim(0, cut.dim + 1).flatten(cut.dim, cut.dim + 2)

    def _with_local(
        self, named: list[tuple[torch.nn.Module, str]], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with replaced(named, self.local(named)):
            return forward(*args, **kwargs)

    def _between_slices(self, is_cut: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_active:
            return forward(*args, **kwargs)
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = self._all_tokens(kwargs["hidden_states"])
        else:
            args = (self._all_tokens(args[0]), *args[1:])
        result = forward(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        own = sum_scattered(out[0], self.axis) if is_cut else self.axis.own(out[0])
        return (own[None], *result[1:]) if isinstance(result, tuple) else own[None]

    def _all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return gathered(hidden[0], self.axis)[None]

    def _embedded(self, rows: tuple[int, int], forward: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
        if not self.is_active:
            return forward(tokens)  # type: ignore[no-any-return]
        inside = (tokens >= rows[0]) & (tokens < rows[1])
        part = forward(torch.where(inside, tokens - rows[0], 0)) * inside[..., None]
        return sum_scattered(part[0], self.axis)[None]

    def _with_all_features(self, forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out = forward(x)
        if not self.is_active:
            return out
        features = out.movedim(-1, 0)
        return gathered(features, self.axis).movedim(0, -1)

    def _with_own_features(self, forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return forward(x.unflatten(-1, (self.axis.size, -1))[..., self.axis.index, :] if self.is_active else x)

"""Attention of tokens that are shared among the ranks of the axis `ulysses`: each has some of the tokens, and computes
some of the heads. Source: Jacobs et al., DeepSpeed Ulysses (2023).

Letters: T tokens of all ranks, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from meshrl.core.errors import ConfigError
from meshrl.model.attention import AttentionContext, AttentionSpec, Outs, StateCompute
from meshrl.parallel.exchange import Axis, swapped
from meshrl.parallel.mesh import sizes_for


def needs_all_tokens(axis: str, size: int) -> ConfigError:
    """The error for ranks that would share the tokens of a layer with a state."""
    return ConfigError(
        f"train.mesh.{axis} is {size}, but the model has layers that pass a state from token to token (linear "
        "attention, Mamba or short convolutions), and meshrl does not split their tokens among ranks. Set it to 1"
    )


class UlyssesAttention:
    """Attention of tokens whose other chunks are on the peers along `ulysses`: they swap tokens for heads, so that each
    has all tokens of some heads, and back."""

    def __init__(self, context: AttentionContext, axis: Axis):
        self.context, self.axis = context, axis

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        n, heads, shared = self.axis.size, q.shape[1], k.shape[1]
        if n not in (legal := sizes_for(heads, shared)):
            raise ConfigError(
                f"train.mesh.ulysses is {n}, but a layer has {heads} attention heads and {shared} key heads on a rank. "
                f"Use one of {', '.join(map(str, legal))}"
            )
        if shared % n:
            k, v = (x.repeat_interleave(n // shared, dim=1) for x in (k, v))
        q, k, v = (self._all_tokens(x) for x in (q, k, v))
        sinks, slopes = (x if x is None else self.axis.own(x) for x in (spec.sinks, spec.slopes))
        out = self.context.attend(layer, q, k, v, replace(spec, sinks=sinks, slopes=slopes))
        return swapped(out.unflatten(0, (n, -1)), self.axis).transpose(0, 1).flatten(1, 2)

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        raise needs_all_tokens("ulysses", self.axis.size)

    def _all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[T / n, H, D] -> [T, H / n, D]"""
        return swapped(x.unflatten(1, (self.axis.size, -1)).transpose(0, 1), self.axis).flatten(0, 1)

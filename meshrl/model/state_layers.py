"""Layers that pass a state from token to token: linear attention, Mamba, short convolutions. Like attention, they get
the past of a token from the context of the forward call, which computes its rows one by one or in batches.

StateCache is Transformers' cache of one such layer, with the tensors of the engine's rows.

The arguments for packed rows that Transformers' layers accept (cu_seqlens, seq_idx) have no effect without optional
kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from meshrl.core.errors import ConfigError
from meshrl.model.attention import ContextCache, Outs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_WRITES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}  # methods of Transformers' caches
ATTENTION_KINDS = {"full_attention", "sliding_attention", "hybrid"}  # of config.layer_types
STATE_KINDS = {"linear_attention", "conv", "hybrid"}
KINDS = ATTENTION_KINDS | STATE_KINDS | {"mlp", "moe"}


class StateLayer(torch.nn.Module):
    """The first base class of a layer with a state. Without a ContextCache it does what Transformers' layer does."""

    layer_idx: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        signature = _signature(type(self))  # type: ignore[arg-type]
        bound = signature.bind(None, *args, **kwargs).arguments
        tokens, cache = list(bound)[1], cache_argument(signature.parameters)
        if not isinstance(context := bound.get(cache), ContextCache):
            return forward(*args, **kwargs)
        own = {name: x for name, x in list(bound.items())[1:] if name != "kwargs"}  # the others are for other layers
        is_tuple, buffers = False, dict(self._buffers)

        def compute(rows: torch.Tensor, states: Any) -> Outs:
            """What is not computed for each token, such as a state, is None."""
            nonlocal is_tuple
            out = forward(**{**own, tokens: rows, cache: states})
            is_tuple = isinstance(out, tuple)
            outs = out if is_tuple else (out,)
            return [x if torch.is_tensor(x) and x.shape[:2] == rows.shape[:2] else None for x in outs]

        try:  # tables of decays, which stay in fp32, are multiplied in the dtype of the tokens
            self._buffers.update({n: b if b is None else b.to(own[tokens].dtype) for n, b in buffers.items()})
            outs = [x if x is None else x[None] for x in context.context.mix(self.layer_idx, own[tokens][0], compute)]
        finally:
            self._buffers.update(buffers)
        return tuple(outs) if is_tuple else outs[0]


@lru_cache
def _signature(cls: type) -> inspect.Signature:
    """Of Transformers' layer, the base class after StateLayer."""
    forward: Any = cls.__mro__[2].forward  # type: ignore[attr-defined]
    return inspect.signature(forward)


@lru_cache
def _state_class(cls: type) -> type:
    return type(cls.__name__, (StateLayer, cls), {"__module__": cls.__module__})


def cache_argument(names: Collection[str]) -> str:
    """The name of the argument that takes Transformers' cache: since 5.24 it is `cache` in all of them."""
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in names)


def state_layers(lm: torch.nn.Module) -> list[Any]:
    """The modules whose forward writes a state into Transformers' cache."""
    layers = []
    for module in lm.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if isinstance(module, StateLayer) or (code is not None and STATE_WRITES & set(code.co_names)):
            layers.append(module)
    return layers


def use_state_layers(lm: torch.nn.Module) -> bool:
    """Make StateLayers of a model's layers with a state. Returns whether it has any."""
    layers = state_layers(lm)
    for module in layers:
        if not isinstance(module, StateLayer):
            module.__class__ = _state_class(type(module))  # type: ignore[arg-type]
    return bool(layers)


def layer_kinds(config: Any) -> list[str]:
    """Of a text config; empty if it does not name them."""
    return list(getattr(config, "layer_types", None) or ())


def require_known_layers(lm: PreTrainedModel, path: object) -> None:
    """Raises: ConfigError for a kind of layer of which meshrl does not know how it keeps the past of a token."""
    config: Any = lm.config.get_text_config()
    with_state = {layer.layer_idx for layer in state_layers(lm)}
    odd = {
        kind
        for i, kind in enumerate(layer_kinds(config))
        if kind not in KINDS or (kind in STATE_KINDS) != (i in with_state)
    }
    if odd:
        raise ConfigError(
            f"model.path {str(path)!r} is a {config.model_type} with layers of kind {', '.join(sorted(odd))}, and "
            "meshrl does not know how they keep the past of a token. Choose a model without them"
        )


States = dict[str, torch.Tensor]  # of the rows of a batch, the first dim


class StateCache(Cache):
    """The cache to which one layer writes its states. states: of the tokens before, updated in place; None = none."""

    def __init__(self, layer: int, states: States | None = None):
        own = LinearAttentionLayer()
        for name, state in (states or {}).items():
            getattr(own, name)[0] = state
            getattr(own, f"is_{name}_initialized")[0] = own.has_previous_state[0] = True
        if states and "conv_states" in states:
            own.conv_kernel_size[0] = states["conv_states"].shape[-1]
        super().__init__(layers=[own] * (layer + 1))

    @property
    def states(self) -> States:
        both = {name: getattr(self.layers[0], name)[0] for name in ("conv_states", "recurrent_states")}
        return {name: state for name, state in both.items() if state is not None}

    # A family with a cache class of its own has these two instead of update_recurrent_state.
    def get_linear_cache(self, layer: int) -> torch.Tensor | None:
        return self.states.get("recurrent_states")

    def set_linear_cache(self, layer: int, state: torch.Tensor) -> None:
        self.update_recurrent_state(state, layer)

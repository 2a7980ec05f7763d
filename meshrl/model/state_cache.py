"""Transformers' cache of one layer with a state, whose tensors are those of the engine's rows."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

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

"""The bytes of a block's activations that a trace without values gives, compared with those that a graph holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import FAMILIES, SAMPLE, config_of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from meshrl.config.model import LoraConfig
from meshrl.core.errors import ConfigError
from meshrl.model.activations import trace
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.facts import without_values
from meshrl.model.lora import add_adapters
from meshrl.model.own_attention import _slopes
from meshrl.parallel.checkpointing import checkpoint_blocks
from meshrl.plan.memory import Activations

TOKENS, ROW = 256, 128
LOADED = [family for family, entry in FAMILIES.items() if not entry.refused]
BY_VALUES = {  # these families compute an expert's tokens one expert after another
    "longcat_flash": "aten.nonzero.default",
    "jetmoe": "aten._local_scalar_dense.default",
}


def build(family: str, dtype: torch.dtype = torch.float32, lora: bool = False) -> CausalModel:
    model = CausalModel(without_values(config_of(family), "auto", dtype))
    if lora:
        add_adapters(model.lm, LoraConfig(enabled=True, rank=2), torch.float32, "tiny")
    return model


def traced_bytes(*args: Any, **kwargs: Any) -> Activations:
    with torch.device("meta"):
        model = build(*args, **kwargs)
    return trace(model, TOKENS, ROW, has_kernel=False)


def held(model: CausalModel) -> list[int]:
    """Bytes that the graph of each block holds after a forward pass, without its parameters and without what all blocks
    get, such as rotations."""
    known = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    own, at = [dict[int, torch.UntypedStorage]() for _ in model.layers], [-1]

    def begin(index: int, args: Any, kwargs: Any) -> None:
        given = [x for x in tree_iter((args[1:], {**kwargs, "hidden_states": None})) if isinstance(x, torch.Tensor)]
        known.update(x.untyped_storage()._cdata for x in given)
        at[0] = index

    def store(x: torch.Tensor) -> torch.Tensor:
        if at[0] >= 0 and x.untyped_storage()._cdata not in known:
            own[at[0]][x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    for i, block in enumerate(model.layers):
        block.register_forward_pre_hook(lambda _, args, kwargs, i=i: begin(i, args, kwargs), with_kwargs=True)
        block.register_forward_hook(lambda *_: at.__setitem__(0, -1))
    with saved_tensors_hooks(store, lambda x: x):
        positions = torch.arange(ROW).repeat(TOKENS // ROW)
        model.hidden(positions % 50, positions, PackedAttention([*range(0, TOKENS + 1, ROW)], torch.device("cpu")))
    return [sum(storage.nbytes() for storage in of_block.values()) for of_block in own]


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in LOADED])
def test_a_trace_has_the_bytes_that_the_graph_of_a_family_holds(family: str):
    if family in BY_VALUES:
        with pytest.raises(ConfigError, match=f"unknown: .*{BY_VALUES[family]}"):
            traced_bytes(family)
        return
    traced = traced_bytes(family)
    assert traced.stored == pytest.approx(sum(held(build(family))), rel=0.02)
    assert traced.backward >= max(held(build(family)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_adapters_store_what_both_products_read(dtype: torch.dtype):
    """A frozen weight needs no input, but its adapter does, in its own dtype."""
    model = build("qwen2", dtype, lora=True)
    model.lm.enable_input_require_grads()  # as for every block but the first one
    assert traced_bytes("qwen2", dtype, lora=True).stored == pytest.approx(sum(held(model)), rel=0.02)


@pytest.mark.parametrize("mode", ["submodule", "selective"])
def test_what_a_block_computes_again_is_not_stored(mode: str):
    model = build("qwen2")
    checkpoint_blocks(model.layers, mode)
    with torch.device("meta"):
        without_tensors = build("qwen2")
    traced = trace(without_tensors, TOKENS, ROW, False, mode)
    stored = (
        sum(held(model)) if mode == "submodule" else traced.stored
    )  # selective stores results in a place of its own
    assert traced.stored == pytest.approx(stored, rel=0.02)
    assert traced.stored < 0.8 * traced_bytes("qwen2").stored


def test_every_2_stores_the_inputs_of_each_second_block_alone():
    model, complete = build("qwen2"), held(build("qwen2"))
    checkpoint_blocks(model.layers, "every_2")
    few = held(model)
    assert few[1::2] == complete[1::2] and all(own < 0.1 * other for own, other in zip(few[::2], complete[::2]))


def test_a_kernel_for_packed_rows_stores_operands_result_and_log_sums():
    """With ALiBi, for which there is none, all scores."""
    with torch.device("meta"):
        models = [build(family, torch.bfloat16) for family in ("qwen2", "bloom") for _ in range(2)]
    by_kernel, here, no_kernel, products = (trace(m, TOKENS, ROW, i % 2 == 0) for i, m in enumerate(models))
    assert by_kernel.stored < here.stored and no_kernel == products
    assert type(_slopes(4, torch.device("cpu"))) is torch.Tensor  # what a module stores for later calls has values

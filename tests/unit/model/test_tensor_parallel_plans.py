"""The plan of every family that meshrl trains: it is refused, or each matrix of a module that is cut is cut, too."""

from __future__ import annotations

import re

import pytest
import torch
from model_families import FAMILIES, config_of

from meshrl.core.errors import ConfigError
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.tensor_parallel import cut_model
from meshrl.parallel.exchange import Axis
from meshrl.parallel.tp import TensorParallel

# Matrices that each rank multiplies by all tokens: routers and gates, and the way into latent attention.
EACH = re.compile(r"(router|gate|wg|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|proj_[ab])\.weight$")


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.refused])
def test_each_matrix_of_a_module_that_is_cut_is_cut_or_known(family: str):
    """Otherwise its output would be part of the sum as often as there are ranks."""
    from transformers import AutoModelForCausalLM

    attention.register()
    name = "eager" if family in attention.OWN_CODE else attention.NAME
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config_of(family), attn_implementation=name)
    model = CausalModel(lm)
    before = {name: p.shape for name, p in lm.named_parameters()}
    try:
        cut_model(model, TensorParallel(Axis(2, 1, None)))
    except ConfigError as refused:
        assert ("pass a state" if model.has_states else "has no plan to cut the layers") in str(refused)
        return
    for block in model.layers:
        for child_name, child in block.named_children():
            shapes = {name: p.shape for name, p in child.named_parameters()}
            path = next(name for name, module in lm.named_modules() if module is child)
            uncut = [name for name, shape in shapes.items() if shape == before[f"{path}.{name}"]]
            if len(uncut) < len(shapes):
                matrices = [name for name in uncut if len(shapes[name]) > 1 and not name.endswith("bias")]
                assert [name for name in matrices if not EACH.search(name)] == [], child_name
                norms = [name for name in uncut if name.endswith("norm.weight")]
                assert "attn" in child_name or norms == [], "a norm of a part is not a part of the norm"

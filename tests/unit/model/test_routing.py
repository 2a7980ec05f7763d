"""The routers of each family of mixtures: found, widened, and made to select given experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import FAMILIES
from tiny_models import tiny_lm, tiny_qwen2

from meshrl.core.errors import ConfigError
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.recipe import cast_parameters
from meshrl.model.routing import require_routing
from meshrl.model.verify import require_replay
from meshrl.parallel.checkpointing import checkpoint_blocks

CPU = torch.device("cpu")
TOKENS = torch.arange(40) * 7 % 60 + 1
WITHOUT = ("jetmoe", "jamba")  # their routers do not return (logits, scores, selected experts); jamba's do since 5.24
NOT_REPLAYED = {"phimoe": "do not choose by torch.topk"}
MIXTURES = [
    family
    for family, entry in FAMILIES.items()
    if (not entry.refused and any("expert" in key for key in entry.config)) or family == "mellum"
]


def _hidden(model: CausalModel) -> torch.Tensor:
    with torch.no_grad():
        return model.hidden(TOKENS, torch.arange(len(TOKENS)), PackedAttention([0, len(TOKENS)], CPU))


def _experts_inputs(model: CausalModel, names: tuple[str, ...] = ("experts",)) -> list[tuple[torch.Tensor, ...]]:
    """What the modules of experts get in one forward: hidden states, selected experts, and their scores."""
    seen: list[Any] = []
    experts = [m for name, m in model.lm.named_modules() if name.rpartition(".")[2] in names]
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args)) for m in experts]
    _hidden(model)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("family", [f for f in MIXTURES if f not in WITHOUT])
def test_every_router_is_counted_and_its_selection_recorded(family):
    model = CausalModel(tiny_lm(family).requires_grad_(False))
    before, want = _hidden(model), _experts_inputs(model)
    routing = require_routing(model.routing, family, "")
    routing.records = True
    routing.begin(torch.full((len(TOKENS),), 3), None, counts=True)
    assert torch.equal(_hidden(model), before)
    assert len(want) == len(routing.routers)
    recorded, sums = routing.recorded(), routing.sums
    assert sums is not None
    for number, (_, selected, _) in enumerate(want):
        assert torch.equal(recorded[:, number].long(), selected)
        counts = torch.bincount(selected.flatten(), minlength=sums.selected.shape[1])
        assert torch.equal(sums.selected[number], 3 * counts)
    torch.testing.assert_close(sums.probabilities.sum(-1), torch.full((len(want),), 120.0))


def test_a_recomputed_forward_counts_nothing():
    model = CausalModel(tiny_lm("qwen3_moe"))
    checkpoint_blocks(list(model.layers), True)
    routing = require_routing(model.routing, "", "")
    routing.begin(torch.ones_like(TOKENS), None, counts=True)
    hidden = model.hidden(TOKENS, torch.arange(len(TOKENS)), PackedAttention([0, len(TOKENS)], CPU))
    routing.end()
    assert routing.sums is not None
    counts = routing.sums.selected.clone()
    hidden.sum().backward()
    assert torch.equal(routing.sums.selected, counts) and int(counts.sum()) == 2 * 2 * len(TOKENS)


@pytest.mark.parametrize("family", [f for f in MIXTURES if f not in WITHOUT and f not in NOT_REPLAYED])
def test_routers_select_given_experts_with_their_own_scores(family):
    """With the experts of other tokens for every second token, and their own choice for the others."""
    model = CausalModel(tiny_lm(family).requires_grad_(False))
    require_replay(model, family)
    routing = require_routing(model.routing, family, "")
    routing.records = True
    _hidden(model)
    routes = routing.recorded().flip(0)
    routes[::2] = -1
    routing.begin(None, routes)
    inputs = _experts_inputs(model)
    assert len(inputs) == len(routing.routers)
    for number, (_, selected, scores) in enumerate(inputs):
        assert torch.equal(selected[1::2], routes[1::2, number].long()) and (selected >= 0).all()
        assert scores.shape == selected.shape and (scores != 0).all()


@pytest.mark.parametrize("family", NOT_REPLAYED)
def test_routers_that_can_not_replay_are_refused(family):
    model = CausalModel(tiny_lm(family).requires_grad_(False))
    with pytest.raises(ConfigError, match=NOT_REPLAYED[family]):
        require_replay(model, family)


def test_group_limited_scores_can_not_be_replayed():
    """The scores of experts outside of the groups that the router chooses are 0."""
    changes = dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)
    model = CausalModel(tiny_lm("deepseek_v2", **changes).requires_grad_(False))
    with pytest.raises(ConfigError, match="can't be made to select"):
        require_replay(model, "")


@pytest.mark.parametrize("family", [f for f in MIXTURES if f not in WITHOUT])
def test_a_router_in_fp32_computes_with_fp32_logits_and_leaves_its_parameters(family):
    model = CausalModel(cast_parameters(tiny_lm(family), torch.bfloat16).requires_grad_(False))
    routing, seen = require_routing(model.routing, family, ""), list[tuple[torch.Tensor, ...]]()
    routing.dtype = torch.float32
    for router in routing.routers:
        router.register_forward_hook(lambda _, args, out: seen.append(out))
    before = {name: p.dtype for name, p in model.named_parameters()}
    assert _hidden(model).isfinite().all() and len(seen) == len(routing.routers)
    assert {out[routing.logits_at].dtype for out in seen} == {torch.float32}
    assert {name: p.dtype for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("family", ["jetmoe", "qwen2"])
def test_a_model_without_known_routers_is_refused_for_keys_that_need_them(family):
    model = CausalModel(tiny_qwen2() if family == "qwen2" else tiny_lm(family))
    with pytest.raises(ConfigError, match=r"Use model\.router_dtype=auto"):
        require_routing(model.routing, family, "model.router_dtype=auto")

"""Expected learning rates, weight decay, and the global norm in one process."""

from __future__ import annotations

import math

import pytest
import torch

from meshrl.config.train import OptimizerConfig, SchedulerConfig
from meshrl.train.optim import build_optimizer, clip_gradients, learning_rate


@pytest.mark.parametrize(
    ("cfg", "want"),
    [
        ({"kind": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"kind": "constant", "warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"kind": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"kind": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2}, [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4]),
        ({"kind": "cosine", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ({"kind": "cosine", "min_lr_ratio": 1.0}, [1, 1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_learning_rates_of_six_steps(cfg, want):
    got = [learning_rate(step, 6, 2e-6, SchedulerConfig(**cfg)) for step in range(6)]
    assert got == pytest.approx([2e-6 * x for x in want], rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_after_the_last_step_the_learning_rate_stays_at_its_minimum(kind):
    """A run that continues after its planned end must not have a negative learning rate."""
    cfg = SchedulerConfig(kind=kind, min_lr_ratio=0.1)
    assert [learning_rate(step, 5, 1.0, cfg) for step in (5, 6, 9)] == pytest.approx([0.1, 0.1, 0.1])


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    for p in model.parameters():
        p.data.normal_()
        p.grad = torch.zeros_like(p)
    return model


def test_only_matrices_have_weight_decay():
    model = _model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.5))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    for name, p in model.named_parameters():
        want = before[name] * (1 - 0.1 * 0.5) if p.ndim == 2 else before[name]
        assert torch.allclose(p, want, rtol=1e-6, atol=0), name


def test_frozen_parameters_are_in_no_group():
    model = _model()
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize(("max_norm", "scale"), [(2.0, 0.4), (10.0, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_to_the_norm_and_the_norm_before_is_returned(max_norm, scale):
    model = _model()
    model[0].bias.grad[0], model[1].weight.grad[1] = 3.0, 4.0
    assert clip_gradients(model, max_norm) == pytest.approx(5.0)
    assert [float(model[0].bias.grad[0]), float(model[1].weight.grad[1])] == pytest.approx(
        [3 * scale, 4 * scale], rel=1e-5
    )


def test_a_norm_that_is_not_finite_scales_nothing():
    """Dividing by it would turn every gradient into NaN."""
    model = _model()
    model[0].bias.grad[0], model[1].weight.grad[1] = float("inf"), 4.0
    assert not math.isfinite(clip_gradients(model, 1.0))
    assert float(model[1].weight.grad[1]) == 4.0

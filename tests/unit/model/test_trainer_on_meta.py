"""What the trainer's forward and backward pass call on an accelerator, without one: on meta tensors."""

from __future__ import annotations

import pytest
import torch
from meta_device import META, DeviceCalls
from tiny_models import tiny_qwen2

from meshrl.model import attention
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.recipe import cast_parameters

ROWS = [0, 5, 12, 20]  # a prompt of five tokens, and two answers to it
PARENTS = [-1, 0, 0]
LAYERS = 2


@pytest.fixture(autouse=True)
def varlen_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_varlen_kernels", lambda device: True)


def _step(dtype: torch.dtype) -> tuple[CausalModel, torch.Tensor, DeviceCalls]:
    lm = cast_parameters(tiny_qwen2(hidden_size=64, num_hidden_layers=LAYERS), dtype).to(META).eval()
    model = CausalModel(lm)
    tokens = torch.empty(ROWS[-1], dtype=torch.int64, device=META)
    scored = torch.empty(15, dtype=torch.int64, device=META)
    with DeviceCalls() as calls:
        context = PackedAttention(ROWS, META, PARENTS)
        ones = torch.ones(len(scored), device=META)
        logprobs, entropy = model(tokens, tokens, context, scored, scored, ones, 2048, True, {})
        (logprobs.sum() + entropy.sum()).backward()
    return model, logprobs, calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_step_of_a_layer_waits_for_the_device(dtype: torch.dtype) -> None:
    """A read in each layer, or for each row, would leave the device idle between kernels."""
    model, logprobs, calls = _step(dtype)
    assert calls.num_reads == 0
    assert logprobs.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def test_bf16_rows_take_one_varlen_kernel_a_layer_and_an_fp32_head() -> None:
    """A pack that fell back to padded rows, or a head whose products are rounded to bf16, would only be slower or
    less exact: no error would show it."""
    _, _, calls = _step(torch.bfloat16)
    assert len(calls.named("_varlen_attn.default")) == len(calls.named("_varlen_attn_backward")) == LAYERS
    assert not calls.named("scaled_dot_product")
    half = (torch.bfloat16, torch.bfloat16)
    assert [call[1:] for call in calls.named("mm.dtype")] == [(half, torch.float32)]

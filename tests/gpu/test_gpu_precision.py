"""Logits are the fp32 results of their matrix product, and logprobs have the precision of fp32."""

from __future__ import annotations

import pytest
import torch

from meshrl.model.folder import not_finite
from meshrl.model.logprob import Head, token_logprobs
from meshrl.sync.digest import as_bytes, digest_bytes

pytestmark = pytest.mark.gpu

N, D, V = 300, 896, 5000


def _head_and_hidden(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return (torch.randn(V, D, generator=g) / D**0.5).to(dtype), torch.randn(N, D, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_product_of_16_bit_matrices_is_not_rounded_to_16_bits(accelerator, dtype):
    weight, hidden = _head_and_hidden(dtype)
    want = hidden.double() @ weight.double().T
    got = Head(weight.to(accelerator)).logits(hidden.to(accelerator))
    assert got.dtype == torch.float32
    off = (got.double().cpu() - want).abs().mean()
    rounded = ((hidden.to(accelerator) @ weight.to(accelerator).T).double().cpu() - want).abs().mean()
    assert off < 1e-5 < rounded


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_logprobs_entropies_and_gradients_are_those_of_fp64(accelerator, dtype, softcap):
    """Chunked, at two temperatures, compared with a dense computation from the same 16-bit numbers."""
    weight, hidden = _head_and_hidden(dtype)
    g = torch.Generator().manual_seed(1)
    targets = torch.randint(0, V, (N,), generator=g)
    temperature = torch.where(torch.arange(N) % 2 == 0, 1.0, 0.7)
    found = []
    for device, kind in ((accelerator, dtype), (torch.device("cpu"), torch.float64)):
        w, x = (t.to(device, kind, copy=True).requires_grad_() for t in (weight, hidden))
        if kind == torch.float64:
            z = x @ w.T
            z = z if softcap is None else torch.tanh(z / softcap) * softcap
            logq = torch.log_softmax(z / temperature[:, None], -1)
            logp, ent = logq[torch.arange(N), targets], -(logq.exp() * logq).sum(-1)
        else:
            head = Head(w, None, 1.0, softcap)
            args = (x, head, targets.to(device), temperature.to(device))
            logp, ent = token_logprobs(*args, chunk_tokens=70, entropy=True)
            assert logp.dtype == torch.float32
        (logp.sum() + 0.1 * ent.sum()).backward()
        found.append([t.detach().double().cpu() for t in (logp, ent, x.grad, w.grad)])
    (logp, ent, dx, dw), (want_logp, want_ent, want_dx, want_dw) = found
    assert (logp - want_logp).abs().max() < 1e-4
    assert (ent - want_ent).abs().max() < 1e-4
    off = 1e-2 if dtype == torch.bfloat16 else 1e-4
    assert (dx - want_dx).norm() < off * want_dx.norm()
    assert (dw - want_dw).norm() < off * want_dw.norm()


@pytest.mark.parametrize("shape", [(7,), (300, 401), (3, 70_001), (1 << 20,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_digest_is_the_same_on_all_devices(accelerator, dtype, shape):
    """Trainer and sampler may hold the same weights on different devices."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest_bytes("sum64", as_bytes(x.to(accelerator))) == digest_bytes("sum64", as_bytes(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_values_that_are_not_finite_are_found_on_the_device(accelerator, dtype, bad):
    """In the first and the last element, among many other values; 1e30 is out of the range of fp16."""
    tensors = {str(n): torch.randn(n, device=accelerator, dtype=dtype) for n in (1, 7, 5000, 300_000)}
    assert not_finite(tensors, torch.float16) == []
    tensors["7"][0] = tensors["300000"][-1] = bad
    assert not_finite(tensors, torch.float16) == ["7", "300000"]

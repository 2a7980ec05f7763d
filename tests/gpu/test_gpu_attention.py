"""Packed attention on the accelerator, compared with its definition in fp64: values, gradients, no leaks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from meshrl.core.device import has_long_row_kernels
from meshrl.model.attention import KERNELS, LONG_ROW, AttentionSpec, PackedAttention
from meshrl.model.attention_kernels import sdpa_attention

pytestmark = pytest.mark.gpu

LENGTHS = [1, 300, 2, 17, 300, 3, 900, 1, 64, 5, 0, 17, 20]
ROWS = ([0, *itertools.accumulate(LENGTHS)], [-1] * len(LENGTHS))
PIECES = [(200, -1), (1, 0), (37, 0), (0, 0), (400, 0), (130, -1), (3, -1), (50, 6), (5, 6)]  # (tokens, continues)
FAMILIES = ([0, *itertools.accumulate(n for n, _ in PIECES)], [parent for _, parent in PIECES])
SPECS = {
    "all": AttentionSpec(0.125),
    "window": AttentionSpec(0.125, window=40),
    "softcap": AttentionSpec(0.125, softcap=5.0),
}
OFF = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}  # of the norm


def _qkv(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, h, size, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads)]


def _definition(
    pack: tuple[list[int], list[int]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
):
    cu, parents = pack
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    outs = []
    for (a, b), parent in zip(itertools.pairwise(cu), parents, strict=True):
        before = range(cu[parent], cu[parent + 1]) if parent >= 0 else range(0)
        seen = torch.tensor([*before, *range(a, b)], dtype=torch.int64, device=q.device)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[seen]) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        positions = torch.arange(len(seen), device=q.device)
        behind = positions[len(seen) - (b - a) :, None] - positions
        hidden = (behind < 0) | (behind >= (spec.window or len(seen) + 1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[seen]))
    return torch.cat(outs)


def _run(function, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients, in fp64 on the CPU."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    g = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=g).to(out))
    return [x.detach().double().cpu() for x in (out, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize(
    ("dtype", "use_varlen"),
    [(torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False), (torch.float32, False)],
    ids=["bf16 one call", "fp16 one call", "bf16 buckets", "fp32 buckets"],
)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("pack", [ROWS, FAMILIES], ids=["rows", "families"])
@pytest.mark.parametrize("heads", [(14, 2, 64), (4, 4, 128)], ids=str)
def test_values_and_gradients_are_those_of_the_definition(accelerator, heads, pack, spec, dtype, use_varlen):
    """With and without query heads that share a key head. Buckets compute what the kernel does not support."""
    qkv = [x.to(accelerator) for x in _qkv(pack[0][-1], *heads, dtype)]
    want = _run(lambda q, k, v: _definition(pack, q, k, v, spec), [x.double() for x in qkv])
    packed = PackedAttention(pack[0], accelerator, pack[1])
    packed.use_varlen &= use_varlen
    got = _run(lambda q, k, v: packed.attend(0, q, k, v, spec), qkv)
    for name, one, other in zip(("output", "dq", "dk", "dv"), got, want, strict=True):
        off = float((one - other).norm() / other.norm())
        assert off < OFF[dtype], f"{name} is {off:.2e} of its norm off"


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("pack", [ROWS, FAMILIES], ids=["rows", "families"])
def test_each_implementation_has_the_values_and_gradients_of_the_definition(accelerator, pack, spec, name):
    qkv = [x.to(accelerator) for x in _qkv(pack[0][-1], 14, 2, 64, torch.bfloat16)]
    want = _run(lambda q, k, v: _definition(pack, q, k, v, spec), [x.double() for x in qkv])
    packed = PackedAttention(pack[0], accelerator, pack[1])
    got = _run(lambda q, k, v: packed.attend(0, q, k, v, replace(spec, implementation=name)), qkv)
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() < OFF[torch.bfloat16] * other.norm()


@pytest.fixture
def hopper(accelerator: torch.device) -> torch.device:
    if not has_long_row_kernels(accelerator):
        pytest.skip("cuDNN's kernels are not used on this accelerator")
    return accelerator


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [(14, 2, 64), (4, 4, 128), (12, 2, 128)], ids=str)
def test_rows_of_cudnn_have_the_values_and_gradients_of_the_definition(hopper, heads, dtype):
    pack = ([0, *itertools.accumulate(n for n in LENGTHS if n)], [-1] * (len(LENGTHS) - 1))
    qkv, spec = [x.to(hopper) for x in _qkv(pack[0][-1], *heads, dtype)], SPECS["all"]
    want = _run(lambda q, k, v: _definition(pack, q, k, v, spec), [x.double() for x in qkv])
    got = _run(lambda q, k, v: KERNELS["cudnn"](PackedAttention(pack[0], hopper), q, k, v, spec), qkv)
    for name, one, other in zip(("output", "dq", "dk", "dv"), got, want, strict=True):
        off = float((one - other).norm() / other.norm())
        assert off < OFF[dtype], f"{name} is {off:.2e} of its norm off"


def test_cudnn_computes_long_rows_as_the_kernel_for_packed_rows_does(hopper):
    """A row does not depend on its neighbour, to the bit."""
    cu = [0, LONG_ROW, 2 * LONG_ROW + 1000]
    packed, qkv = PackedAttention(cu, hopper), [x.to(hopper) for x in _qkv(cu[-1], 12, 2, 128, torch.bfloat16)]
    out = packed.attend(0, *qkv, SPECS["all"])
    assert packed.used[0] == ("cudnn", "")
    flash = packed.attend(0, *qkv, replace(SPECS["all"], implementation="flash"))
    assert (out - flash).norm() < OFF[torch.bfloat16] * flash.norm()
    alone = PackedAttention([0, LONG_ROW], hopper).attend(0, *(x[:LONG_ROW] for x in qkv), SPECS["all"])
    assert torch.equal(out[:LONG_ROW], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("use_varlen", [True, False], ids=["one call", "buckets"])
def test_a_row_does_not_depend_on_its_neighbours(accelerator, dtype, use_varlen):
    """To the bit."""
    cu = ROWS[0]
    packed = PackedAttention(cu, accelerator)
    packed.use_varlen &= use_varlen
    qkv = [x.to(accelerator) for x in _qkv(cu[-1], 14, 2, 64, dtype)]
    a, b = cu[4], cu[5]
    changed = [torch.cat([x[:a] * 3, x[a:b], x[b:] - 1]) for x in qkv]
    one, other = (packed.attend(0, *x, SPECS["all"])[a:b] for x in (qkv, changed))
    assert torch.equal(one, other)


def test_the_kernel_for_packed_rows_is_used_where_it_is_supported(accelerator, monkeypatch):
    """bf16 rows do not use SDPA, which chooses a kernel again for each shape."""
    packed = PackedAttention(FAMILIES[0], accelerator, FAMILIES[1])
    if not packed.use_varlen:
        pytest.skip("PyTorch has no kernel for packed rows on this accelerator; buckets compute the same")
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    qkv = [x.to(accelerator) for x in _qkv(FAMILIES[0][-1], 14, 2, 64, torch.bfloat16)]
    assert packed.attend(0, *qkv, SPECS["all"]).isfinite().all()


def test_buckets_of_equal_rows_reach_a_fused_kernel(accelerator):
    """Also with query heads that share a key head. With only one kernel allowed, SDPA raises if it can't use it."""
    if accelerator.type != "cuda":
        pytest.skip(f"{accelerator.type} has kernels of its own")
    packed = PackedAttention([0, 128, 256], accelerator)
    qkv = [x.to(accelerator) for x in _qkv(256, 14, 2, 64, torch.bfloat16)]
    fused = partial(sdpa_attention, kernels=[SDPBackend.FLASH_ATTENTION])
    assert packed.in_rows(fused, *qkv, SPECS["all"]).isfinite().all()

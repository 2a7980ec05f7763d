"""The arguments for the kernel for packed rows, compared with the buckets; the kernel itself needs a GPU.

PyTorch's function is replaced by its definition, with the signatures of two versions.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from meshrl.model import attention
from meshrl.model.attention import AttentionSpec, PackedAttention

CPU = torch.device("cpu")
ROWS = ([0, 5, 5, 6, 30, 41], None)
FAMILIES = ([0, 9, 10, 10, 22, 25, 40, 43], [-1, 0, 0, 0, -1, 4, 4])  # prompts of 9 and 3 tokens; an empty answer


def defined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn without enable_gqa (PyTorch 2.11), in fp64: the last query of a segment
    is aligned with its last key, and query i sees keys [i - left, i + right] (-1 = all)."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    outs = []
    pairs = zip(itertools.pairwise(cu_seq_q.tolist()), itertools.pairwise(cu_seq_k.tolist()), strict=True)
    for (a, b), (c, d) in pairs:
        k, v = (x[c:d].double().repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[a:b].double(), k) * scale
        behind = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        left, right = window_size
        hidden = (behind < -right) | (behind > (left if left >= 0 else d))
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outs).to(query.dtype)


def defined_with_gqa(*args: Any, enable_gqa: bool = False, **kwargs: Any) -> torch.Tensor:
    """The same with the signature of PyTorch 2.13."""
    assert enable_gqa or args[0].shape[1] == args[1].shape[1]
    return defined(*args, **kwargs)


@pytest.fixture(params=[defined, defined_with_gqa], ids=["2.11", "2.13"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", request.param)
    attention._varlen_kernel.cache_clear()
    yield
    attention._varlen_kernel.cache_clear()


def _qkv(tokens: int, kv_heads: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, h, 8, generator=g).bfloat16() for h in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(0.3), AttentionSpec(0.3, window=4), AttentionSpec(0.3, window=500)],
    ids=["all", "window", "wide"],
)
@pytest.mark.parametrize("pack", [ROWS, FAMILIES], ids=["rows", "families"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_one_call_equals_the_buckets(kernel, pack, spec, kv_heads):
    """Rows see only themselves and their parents; gradients are equal, too."""
    cu, parents = pack
    found = []
    for use_varlen in (True, False):
        packed = PackedAttention(cu, CPU, parents)
        packed.use_varlen = use_varlen
        qkv = [x.requires_grad_() for x in _qkv(cu[-1], kv_heads)]
        out = packed.attend(0, *qkv, spec)
        out.float().square().sum().backward()
        found.append([out, *(x.grad for x in qkv)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("spec", "dtype", "size"),
    [
        (AttentionSpec(0.3, softcap=2.0), torch.bfloat16, 8),
        (AttentionSpec(0.3), torch.float32, 8),
        (AttentionSpec(0.3), torch.bfloat16, 12),
        (AttentionSpec(0.3), torch.bfloat16, 264),
    ],
    ids=["softcap", "fp32", "odd head", "wide head"],
)
def test_the_buckets_compute_what_the_kernel_does_not_support(monkeypatch, spec, dtype, size):
    def refuses(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the kernel was called")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", refuses)
    attention._varlen_kernel.cache_clear()
    packed = PackedAttention([0, 3, 7], CPU)
    packed.use_varlen = True
    q = torch.ones(7, 2, size, dtype=dtype)
    assert packed.attend(0, q, q, q, spec).shape == q.shape
    attention._varlen_kernel.cache_clear()


def test_a_cpu_has_no_such_kernel():
    assert not PackedAttention([0, 3], CPU).use_varlen

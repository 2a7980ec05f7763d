"""Packs of long rows, which a kernel computes row by row; cuDNN's kernel itself needs a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshrl.model.attention import KERNELS, LONG_ROW, AttentionSpec, PackedAttention
from meshrl.model.attention_kernels import sdpa_attention
from meshrl.rollout.embedded.cached_attention import PrefillAttention
from meshrl.rollout.embedded.kv_cache import KVPool, Places

CPU = torch.device("cpu")


def _qkv(tokens: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, h, 8, generator=g, requires_grad=True) for h in (4, 2, 2)]


@pytest.mark.parametrize("cu", [[0, 1, 206, 506], [0, 128]], ids=["padded", "one row"])
def test_row_by_row_equals_the_buckets(cu):
    """Values and gradients, also of rows that are padded."""
    found = []
    for by_row in (True, False):
        pack, qkv, spec = PackedAttention(cu, CPU), _qkv(cu[-1]), AttentionSpec(0.3)
        out = pack.row_by_row(sdpa_attention, *qkv, spec) if by_row else pack.attend(0, *qkv, spec)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in qkv)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_kernel_sees_few_lengths():
    """Rows of all lengths between two powers of two have at most 16, and each is at most a sixteenth longer."""
    seen = set()

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert q.shape[2] == k.shape[2] == v.shape[2] < n * 17 / 16 + 1
        seen.add(q.shape[2])
        return q

    for n in range(8193, 16385, 37):
        pack, x = PackedAttention([0, n], CPU), torch.ones(n, 1, 1)
        assert len(pack.row_by_row(kernel, x, x, x, AttentionSpec(1.0))) == n
    assert len(seen) == 16


@pytest.fixture
def kernels_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are called, in place of the kernels."""
    called: list[str] = []
    for name in KERNELS:
        monkeypatch.setitem(KERNELS, name, lambda *args, name=name: called.append(name))
    return called


@pytest.mark.parametrize(
    ("lengths", "parents", "spec", "size", "kernel"),
    [
        ([LONG_ROW, 2 * LONG_ROW], None, AttentionSpec(0.3), 64, "cudnn"),
        ([LONG_ROW, LONG_ROW], [-1, -1], AttentionSpec(0.3, window=LONG_ROW), 128, "cudnn"),
        ([LONG_ROW, LONG_ROW - 1], None, AttentionSpec(0.3), 64, "flash"),
        ([LONG_ROW, LONG_ROW], [-1, 0], AttentionSpec(0.3), 64, "flash"),
        ([LONG_ROW], None, AttentionSpec(0.3, window=100), 64, "flash"),
        ([LONG_ROW], None, AttentionSpec(0.3), 136, "flash"),
        ([LONG_ROW], None, AttentionSpec(0.3, implementation="flash"), 64, "flash"),
        ([LONG_ROW], None, AttentionSpec(0.3, softcap=3.0), 64, "padded"),
    ],
    ids=["rows", "wide window", "short row", "parents", "window", "wide head", "asked", "softcap"],
)
@pytest.mark.parametrize("has_cudnn", [True, False])
def test_long_rows_are_those_of_cudnn(kernels_called, lengths, parents, spec, size, kernel, has_cudnn):
    pack = PackedAttention([0, *itertools.accumulate(lengths)], CPU, parents)
    pack.use_varlen, pack.use_cudnn = True, has_cudnn
    q = torch.empty(1, 2, size, dtype=torch.bfloat16)
    pack.attend(0, q, q, q, spec)
    assert kernels_called == ["flash" if kernel == "cudnn" and not has_cudnn else kernel]


@pytest.mark.parametrize(("length", "kernel"), [(LONG_ROW, "cudnn"), (5, "flash")])
def test_a_sampler_computes_prompts_by_the_same_kernels(kernels_called, length, kernel):
    pool, places = KVPool(length, lambda: 1), torch.stack([torch.zeros(length), torch.arange(length)]).long()
    pack = PrefillAttention([length], CPU, pool, Places(lambda: places))
    pack.use_varlen = pack.use_cudnn = True
    q = torch.empty(1, 2, 64, dtype=torch.bfloat16)
    pack.attend(0, q, q, q, AttentionSpec(0.3))
    assert kernels_called == [kernel]

"""Products with copies of weights in other layouts are those with the weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshrl.model import prepack
from meshrl.model.prepack import TRANSPOSED_ELEMENTS, prepacked

SIZES = {"small": (100, 37), "at the limit": (1024, TRANSPOSED_ELEMENTS >> 10), "large": (1153, 250)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_product_with_a_copy_is_that_with_the_weight(size, dtype):
    """For any number of rows, one copy; with and without a bias; from views of other tensors."""
    draw = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in (size, size[:1]))
    product = prepacked(weight)
    if dtype == torch.float64:
        assert product is None
        return
    if product is None:
        pytest.skip("this CPU has no copies in this dtype")
    for rows in (0, 1, 2, 7, 16, 63, 64, 65, 200):
        x = torch.randn(rows, 2 * size[1], generator=draw).to(dtype)[:, ::2]
        for added in (None, bias):
            want = F.linear(x.double(), weight.double(), None if added is None else added.double())
            tolerance = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-2, atol=0.2)
            torch.testing.assert_close(product(x, added).double(), want, **tolerance)


@pytest.mark.parametrize("without", [[], ["mkl"], ["mkl", "mkldnn"]], ids=["MKL", "oneDNN", "neither"])
def test_builds_of_torch_without_a_library_use_the_next_one(without, monkeypatch):
    if not torch.backends.mkl.is_available():
        pytest.skip("this build of torch has no MKL")
    for name in without:
        monkeypatch.setattr(getattr(torch.backends, name), "is_available", lambda: False)
    weight, x = torch.randn(1153, 250), torch.randn(9, 250)
    product = prepacked(weight)
    assert (product is None) == ("mkldnn" in without)
    if product is not None:
        assert product.func is (prepack._by_onednn if without else prepack._by_mkl)
        torch.testing.assert_close(product(x, None), x @ weight.T, rtol=1e-5, atol=1e-4)

"""Copies of weights in the layout in which a CPU multiplies few rows fastest. A copy is invalid as soon as the weight
changes.

- Small fp32 weights are transposed to [in, out]: for 1 to 64 rows and 128 -> 832 a product takes 6 to 67 us, with the
  layout of MKL 8 to 59 us, with that of oneDNN 32 to 90 us (two cores with AVX512). Up to 32 rows the first is
  the fastest.
- Large fp32 ones get the layout of MKL, which otherwise makes it in each product. All products of SmolLM2-135M for 4 to
  64 rows take 0.85 to 0.98 of the time with weights up to 2^20 elements transposed and larger ones in the layout of
  oneDNN (both in benchmarks/results/prepacked_products_20261127.log).
- bf16 ones, and fp32 ones without MKL, are reordered for oneDNN, which otherwise reorders them in each product: for 4
  rows and 256 -> 1536 in bf16, 44 us in the place of 124 us, with the same result to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

TRANSPOSED_ELEMENTS = 1 << 18  # of an fp32 weight, at most
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # of x [N, in] and a bias: x @ weight.T + bias


def prepacked(weight: torch.Tensor) -> Product | None:
    """The product with a copy of weight [out, in], without a gradient; None if none would be faster."""
    if weight.device.type != "cpu":
        return None
    weight = weight.detach()
    if weight.dtype == torch.float32:
        if weight.numel() <= TRANSPOSED_ELEMENTS:
            return partial(_transposed, weight.T.contiguous())
        if torch.backends.mkl.is_available():
            return partial(_by_mkl, torch.ops.mkl._mkl_reorder_linear_weight(weight, 64), weight)
    if not torch.backends.mkldnn.is_available():
        return None
    is_supported = weight.dtype == torch.float32
    if weight.dtype == torch.bfloat16:
        is_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return partial(_by_onednn, torch.ops.mkldnn._reorder_linear_weight(weight, None)) if is_supported else None


def _transposed(copy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, copy) if bias is None else torch.addmm(bias, x, copy)


def _by_mkl(copy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The layout does not depend on the number of rows; the operation reads the weight itself if it is given another
    number than that of x."""
    return torch.ops.mkl._mkl_linear(x, copy, weight, bias, len(x))


def _by_onednn(copy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, copy, bias, "none", [], "")

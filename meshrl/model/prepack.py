"""Copies of weights in the layout in which a CPU multiplies few rows fastest. A copy is invalid as soon as the weight
changes.

- Small fp32 weights are transposed to [in, out]: for 8 rows and 128 -> 832 a product takes 11 us, 21 us with the weight
  as it is and 27 us with oneDNN's layout (one core with AVX512).
- Large ones and bf16 are reordered for oneDNN, which otherwise reorders the weight in each product: for 4 rows and
  256 -> 1536 in bf16, 44 us in the place of 124 us, with the same result to the bit.
"""

from __future__ import annotations

import torch

TRANSPOSED_ELEMENTS = 1 << 20  # of an fp32 weight; a larger one is multiplied faster by oneDNN on several threads


def prepacked(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of weight [out, in] for `linear`; None if none would be faster."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype == torch.float32 and weight.numel() < TRANSPOSED_ELEMENTS:
        return weight.detach().T.contiguous()
    if not torch.backends.mkldnn.is_available():
        return None
    is_supported = weight.dtype == torch.float32
    if weight.dtype == torch.bfloat16:
        is_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None) if is_supported else None


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [N, in] -> [N, out] with the copy of a weight."""
    if packed.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return torch.mm(x, packed) if bias is None else torch.addmm(bias, x, packed)

"""The digest that identifies the base model of adapters: of a tensor, independent of its sharding."""

from __future__ import annotations

import pytest
import torch

from meshrl.parallel.boxes import LocalBox
from meshrl.train.state import box_digest


def _digest(tensor: torch.Tensor, count: int = 1, dim: int = 0) -> int:
    """The digest of a tensor that is cut into `count` boxes along a dim."""
    total, at = torch.zeros((), dtype=torch.int64), 0
    for part in tensor.chunk(count, dim) if tensor.dim() else [tensor]:
        total += box_digest(LocalBox(tuple(at if d == dim else 0 for d in range(tensor.dim())), part))
        at += part.shape[dim] if tensor.dim() else 0
    return int(total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (13, 6), (3, 5, 4)])
def test_the_digests_of_boxes_add_up_to_the_digest_of_the_tensor(shape, dtype):
    """Otherwise a resume with another sharding would be refused."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for dim in range(len(shape)):
        assert {_digest(tensor, count, dim) for count in (1, 2, 3, 4)} == {_digest(tensor)}


def test_changed_and_swapped_elements_change_the_digest():
    """Otherwise a resume could silently continue on another base model."""
    tensor = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    seen = {_digest(tensor)}
    for index in ((0, 0, 0), (5, 4, 3), (2, 3, 1)):
        other = tensor.clone()
        other[index] += 1e-3
        seen.add(_digest(other))
    seen |= {_digest(tensor.flip(dim)) for dim in range(3)}
    seen.add(_digest(tensor.roll(1, 0)))
    assert len(seen) == 8

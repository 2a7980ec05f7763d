"""The digest by which adapters recognise their base: of a tensor, whatever boxes it is held as."""

from __future__ import annotations

import pytest
import torch

from meshrl.parallel.boxes import LocalBox
from meshrl.train.state import box_digest


def _digest(tensor: torch.Tensor, count: int = 1, dim: int = 0) -> int:
    """Of the tensor as so many boxes along a dim."""
    total, at = torch.zeros((), dtype=torch.int64), 0
    for part in tensor.chunk(count, dim) if tensor.dim() else [tensor]:
        total += box_digest(LocalBox(tuple(at if d == dim else 0 for d in range(tensor.dim())), part))
        at += part.shape[dim] if tensor.dim() else 0
    return int(total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (13, 6), (3, 5, 4)])
def test_the_digests_of_boxes_add_up_to_that_of_the_tensor(shape, dtype):
    """A resume with another layout would be refused."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for dim in range(len(shape)):
        assert {_digest(tensor, count, dim) for count in (1, 2, 3, 4)} == {_digest(tensor)}


def test_one_changed_element_and_two_that_changed_places_are_seen():
    """Another base would be trained on without a word."""
    tensor = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    seen = {_digest(tensor)}
    for index in ((0, 0, 0), (5, 4, 3), (2, 3, 1)):
        other = tensor.clone()
        other[index] += 1e-3
        seen.add(_digest(other))
    seen |= {_digest(tensor.flip(dim)) for dim in range(3)}
    seen.add(_digest(tensor.roll(1, 0)))
    assert len(seen) == 8

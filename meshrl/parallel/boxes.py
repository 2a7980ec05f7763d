"""Which boxes of a tensor this rank holds. Only this file knows how DTensor, FSDP2 and TP cut a tensor.

A box is a range of indices in every dim of the full tensor. With FSDP2 a rank holds one box, of a fused tensor that TP
splits it holds several: of 8 rows, gate (0 to 3) and up (4 to 7), rank 0 of 2 holds rows 0, 1, 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import Shard, _StridedShard

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, shape
Ranges = list[tuple[int, int]]  # (start, end) of indices, in the order of the shard
_places: WeakKeyDictionary[DeviceMesh, dict[int, tuple[tuple[int, ...], tuple[int, ...]]]] = WeakKeyDictionary()


class LocalBox(NamedTuple):
    """A box of the full tensor, and its values: a view of this rank's shard, outside of autograd."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        return self.offsets, tuple(self.tensor.shape)


Values = Callable[[torch.Tensor], torch.Tensor]


def boxes(tensor: torch.Tensor, readable: Values = torch.Tensor.detach) -> list[LocalBox]:
    """What this rank holds of a tensor, in as few boxes as possible, ordered by offsets. A tensor that is not sharded
    is one box; an empty shard has no box. readable: from a shard to one with its values, if it may be released."""
    if not isinstance(tensor, DTensor):
        return [LocalBox((0,) * tensor.dim(), readable(tensor.detach()))] if tensor.numel() else []
    local = tensor.to_local().detach()
    mesh = tensor.device_mesh
    shape, held = _cuts_of_shard(tuple(tensor.shape), tensor.placements, *_place(mesh))
    if shape != tuple(local.shape):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)}, placed as {tensor.placements} on {mesh}, "
            f"has a shard of shape {tuple(local.shape)}, but its placements mean {shape}"
        )
    local = readable(local)
    return [LocalBox(offsets, local if index is None else local[index]) for offsets, index in held]


def element_keys(local: LocalBox, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[rows], int64[columns]: odd pseudo-random numbers of the last dim and of all others, which depend on the
    index in the full tensor, and so not on how ranks cut it."""
    shape, device = local.tensor.shape or (1,), local.tensor.device
    offsets = local.offsets or (0,)
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (at, size) in enumerate(zip(offsets[:-1], shape[:-1], strict=True)):
        rows = rows[..., None] + _keys(at, size, (dim + 1 << 40) + salt, device)
    return (rows.reshape(-1) | 1).expand(prod(shape[:-1])), _keys(offsets[-1], shape[-1], salt, device)


def _keys(start: int, count: int, salt: int, device: torch.device) -> torch.Tensor:
    mixed = (torch.arange(start, start + count, device=device) + salt) * 0x1E3779B97F4A7C15
    return (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9 | 1


def _place(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The size of each axis, and this rank's index along it, which a DeviceMesh would compute again for each tensor."""
    by_rank, rank = _places.setdefault(mesh, {}), mesh.get_rank()
    if rank not in by_rank:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"rank {rank} is not part of {mesh}, so it holds no boxes of a tensor there")
        by_rank[rank] = tuple(mesh.shape), tuple(coordinate)
    return by_rank[rank]


@lru_cache(maxsize=4096)
def _cuts_of_shard(
    shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[slice, ...] | None]]]:
    """The shape of a shard, and the offsets of its boxes with their indices in it; None = the box is the shard. The
    many tensors of one shape share this."""
    held = held_ranges(shape, placements, sizes, coordinate)
    cuts = []
    for ranges in product(*[_with_starts(ranges) for ranges in held]):
        index = tuple(slice(at, at + stop - start) for at, start, stop in ranges)
        cuts.append((tuple(start for _, start, _ in ranges), index))
    shard = tuple(sum(stop - start for start, stop in ranges) for ranges in held)
    return shard, [(cuts[0][0], None)] if len(cuts) == 1 else sorted(cuts, key=lambda box: box[0])


def index_of(box: Box, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """The index of a box in its tensor, or in the box of the tensor that starts at `origin`."""
    dims = zip(*box, origin or (0,) * len(box[0]), strict=True)
    return tuple(slice(at - first, at - first + size) for at, size, first in dims)


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes of a tensor share."""
    offsets = tuple(map(max, one[0], other[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    shape = tuple(end - at for at, end in zip(offsets, ends, strict=True))
    return (offsets, shape) if all(size > 0 for size in shape) else None


def replica(tensor: torch.Tensor) -> tuple[int, int]:
    """(index, number) of this rank among the ranks that hold the same boxes of a sharded tensor. The boxes of all ranks
    with one index make up the tensor exactly once: the mesh of a tensor has all ranks."""
    index, count = 0, 1
    for mesh, axis, at in _copies(tensor):
        index, count = index * mesh.size(axis) + at, count * mesh.size(axis)
    return index, count


def copies_in_replica(tensor: torch.Tensor) -> int:
    """How many ranks of one replica of the model hold each box of a tensor: those of tp, if it does not cut it."""
    axes = [(mesh.mesh_dim_names, mesh.size(axis), axis) for mesh, axis, _ in _copies(tensor)]
    return prod(size for names, size, axis in axes if names is not None and names[axis] == "tp")


def send_to_copies(tensor: torch.Tensor) -> None:
    """Give the values of the first copy to all ranks that hold the same boxes (a collective)."""
    for mesh, axis, _ in _copies(tensor):
        local = tensor.to_local().detach()  # type: ignore[attr-defined]
        dist.broadcast(local, group=mesh.get_group(axis), group_src=0)


def _copies(tensor: torch.Tensor) -> list[tuple[DeviceMesh, int, int]]:
    """(mesh, axis, this rank's index) of the axes along which ranks hold the same boxes; none for an empty shard."""
    if not isinstance(tensor, DTensor) or not tensor.to_local().numel():
        return []
    mesh = tensor.device_mesh
    axes = zip(tensor.placements, *_place(mesh), strict=True)
    return [(mesh, axis, at) for axis, (p, size, at) in enumerate(axes) if p.is_replicate() and size > 1]


def owners(tensor: DTensor, near: int) -> dict[int, list[Box]]:
    """Global rank -> its boxes, for the ranks of one replica of the tensor: the replica of rank `near`."""
    mesh, shape, by_rank = tensor.device_mesh, tuple(tensor.shape), {}
    (home,) = (mesh.mesh == near).nonzero().tolist()
    for coordinate in product(*[range(size) for size in mesh.shape]):
        axes = zip(coordinate, home, tensor.placements, strict=True)
        if all(at == same for at, same, placement in axes if placement.is_replicate()):
            held = held_ranges(shape, tensor.placements, tuple(mesh.shape), coordinate)
            by_rank[int(mesh.mesh[coordinate])] = sorted(
                (tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))
                for ranges in product(*held)
            )
    return by_rank


def held_ranges(
    shape: tuple[int, ...], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> list[Ranges]:
    """For each dim, the indices held by the rank at this coordinate of a mesh of these sizes."""
    held: list[Ranges] = [[(0, size)] if size else [] for size in shape]
    for axis in _order_of_cuts(placements, sizes):
        placement, size, rank = placements[axis], sizes[axis], coordinate[axis]
        assert isinstance(placement, Shard | _StridedShard)
        dim = placement.dim
        groups = [held[dim]]
        if isinstance(placement, _StridedShard) and _shards_to_the_right(placements, sizes, axis) == 1:
            splits = int(placement.split_factor)
            groups = [_chunk(held[dim], splits, i) for i in range(splits)]
        held[dim] = _joined([r for group in groups for r in _chunk(group, size, rank)])
    return held


def _order_of_cuts(placements: Sequence[Placement], sizes: Sequence[int]) -> list[int]:
    """The sharded axes of the mesh in the order in which they cut: from left to right, but FSDP2 cuts the shards of TP,
    whose axis is to its right. torch marks this by a _StridedShard with as many splits as TP has ranks."""
    first: list[int] = []
    last: list[int] = []
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"a tensor placed as {placements} is not reduced yet; only shards and replicas have boxes")
        if placement.is_replicate():
            continue
        right = _shards_to_the_right(placements, sizes, axis)
        if not isinstance(placement, _StridedShard) or right == 1:
            first.append(axis)
        elif placement.split_factor == right:
            last.append(axis)
        else:
            raise ValueError(f"a tensor placed as {placements} on a mesh of {tuple(sizes)} is cut in an unknown order")
    return first + last[::-1]


def _shards_to_the_right(placements: Sequence[Placement], sizes: Sequence[int], axis: int) -> int:
    """The number of shards into which the axes to the right of this one cut the same dim."""
    dim, right = placements[axis].dim, zip(placements[axis + 1 :], sizes[axis + 1 :])  # type: ignore[attr-defined]
    return prod(size for p, size in right if isinstance(p, Shard | _StridedShard) and p.dim == dim)


def _chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    """Chunk `index` of `count`, as torch.chunk cuts: all but the last ones have the same length."""
    total = sum(stop - start for start, stop in ranges)
    low, chunk = -(-total // count) * index, []
    high = low + -(-total // count)
    for start, stop in ranges:
        begin, end = max(start, start + low), min(stop, start + high)
        if begin < end:
            chunk.append((begin, end))
        low, high = low - (stop - start), high - (stop - start)
    return chunk


def _joined(ranges: Ranges) -> Ranges:
    """Merge adjacent ranges."""
    joined: Ranges = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _with_starts(ranges: Ranges) -> list[tuple[int, int, int]]:
    """(index in the shard, start, end) of each range."""
    with_starts, at = [], 0
    for start, stop in ranges:
        with_starts.append((at, start, stop))
        at += stop - start
    return with_starts

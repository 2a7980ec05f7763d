"""Boxes compared with the shards that torch's own functions make, without other ranks: a fake process group has any
rank.

The values of a tensor are its flat indices, so the values of a box show where it belongs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshrl.parallel.boxes import boxes, held_ranges, index_of, owners, replica
from meshrl.parallel.mesh import forget_meshes


@contextmanager
def _mesh(rank: int, *sizes: int) -> Iterator[DeviceMesh]:
    """The mesh on this rank. DTensor's caches must be cleared, because the next rank's mesh differs only in the
    rank."""
    world = torch.Size(sizes).numel()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
    finally:
        forget_meshes()
        dist.destroy_process_group()


def _numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _check(tensor: torch.Tensor, full: torch.Tensor, count: torch.Tensor) -> None:
    """Every box is a view with the full tensor's values at its offsets, and all boxes make up the shard. Counts
    elements."""
    local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor
    found = boxes(tensor)
    assert sum(box.tensor.numel() for box in found) == local.numel()
    for offsets, values in found:
        index = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))
        assert torch.equal(values, full[index]), (tensor.placements, offsets)
        assert values.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        if replica(tensor)[0] == 0:
            count[index] += 1


def test_ranges_of_fsdp_over_tp_are_chunks_of_chunks_for_any_number_of_rows():
    """Torch's own offset of such a shard is wrong if tp does not divide the rows. FSDP2 cuts the shards of TP,
    both by torch.chunk."""
    for dp, tp, rows in product(range(1, 9), range(1, 9), range(1, 65)):
        placements = [_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0)]
        chunk = -(-rows // tp)
        for column in range(tp):
            left = range(rows)[chunk * column : chunk * (column + 1)]
            small = -(-len(left) // dp)
            for row in range(dp):
                expected = left[small * row : small * (row + 1)]
                (found,) = held_ranges((rows,), placements, (dp, tp), (row, column))
                assert found == ([(expected.start, expected.stop)] if expected else [])


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_boxes_of_fsdp_over_tp_are_its_shards(dp, tp):
    full = {f"rows{n}": _numbered(n, 2).float() for n in (1, 2, 5, 8, 13, 64)}
    counts = {name: torch.zeros_like(t) for name, t in full.items()}
    for rank in range(dp * tp):
        with _mesh(rank, dp, tp) as mesh:
            module = torch.nn.Module()
            for name, t in full.items():
                sharded = distribute_tensor(t, mesh["tp"], [Shard(0)], src_data_rank=None)
                module.register_parameter(name, torch.nn.Parameter(sharded))
            fully_shard(module, mesh=mesh["dp"])
            for name, p in module.named_parameters():
                _check(p, full[name], counts[name])
    assert all(bool((count == 1).all()) for count in counts.values())


FUSED = _StridedShard(0, split_factor=2)
PLACED: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [  # sizes of the mesh, shape, placements
    *[((4,), (n, 3), [Shard(0)]) for n in (0, 1, 3, 5, 8)],
    *[((4,), (3, n), [Shard(1)]) for n in (1, 5, 8)],
    *[(mesh, (7, 5), [Shard(0), Shard(1)]) for mesh in ((2, 2), (3, 2), (4, 2))],
    *[(mesh, (7, 5, 3), [Shard(1), Shard(0)]) for mesh in ((2, 2), (3, 2), (4, 2))],
    *[(mesh, (13, 2), [Shard(0), Shard(0)]) for mesh in ((2, 2), (3, 2), (4, 2))],
    *[(mesh, (5, 4), [Replicate(), Shard(0)]) for mesh in ((2, 2), (4, 2))],
    *[(mesh, (5, 4), [Shard(1), Replicate()]) for mesh in ((2, 2), (4, 2))],
    *[((tp,), (rows, 3), [FUSED]) for tp in (2, 3, 4) for rows in (2, 8, 12, 13)],
    *[(mesh, (8, 6), [Shard(1), FUSED]) for mesh in ((2, 2), (3, 2), (4, 2))],
    ((2,), (), [Replicate()]),
]


@pytest.mark.parametrize(("sizes", "shape", "placements"), PLACED)
def test_boxes_are_what_distribute_tensor_leaves(sizes, shape, placements):
    full = _numbered(*shape)
    count = torch.zeros_like(full)
    for rank in range(torch.Size(sizes).numel()):
        with _mesh(rank, *sizes) as mesh:
            _check(distribute_tensor(full, mesh, placements, src_data_rank=None), full, count)
    assert bool((count == 1).all())


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_boxes_of_fsdp_over_a_fused_tensor_that_tp_splits_are_its_shards(dp):
    full = _numbered(16, 3).float()
    count = torch.zeros_like(full)
    for rank in range(dp * 2):
        with _mesh(rank, dp, 2) as mesh:
            module = torch.nn.Module()
            split = distribute_tensor(full, mesh["tp"], [FUSED], src_data_rank=None)
            module.register_parameter("gate_up", torch.nn.Parameter(split))
            fully_shard(module, mesh=mesh["dp"])
            _check(module.gate_up, full, count)
    assert bool((count == 1).all())


def test_a_fused_tensor_that_tp_splits_leaves_two_boxes():
    for rank, rows in enumerate(([0, 4], [2, 6])):
        with _mesh(rank, 2) as mesh:
            found = boxes(distribute_tensor(_numbered(8, 3), mesh, [FUSED], src_data_rank=None))
            assert [(box.offsets, tuple(box.tensor.shape)) for box in found] == [((row, 0), (2, 3)) for row in rows]


def test_adjacent_ranges_are_one_box():
    with _mesh(0, 1) as mesh:
        assert len(boxes(distribute_tensor(_numbered(8, 3), mesh, [FUSED], src_data_rank=None))) == 1


def test_a_tensor_that_is_not_sharded_is_one_box_and_an_empty_one_none():
    full = torch.nn.Parameter(torch.ones(3, 2))
    ((offsets, values),) = boxes(full)
    assert offsets == (0, 0) and not values.requires_grad and values.data_ptr() == full.data_ptr()
    assert boxes(torch.tensor(1.0))[0].offsets == () and boxes(torch.empty(0, 3)) == []


def test_a_tensor_that_is_not_reduced_yet_has_no_boxes():
    with _mesh(0, 2) as mesh, pytest.raises(ValueError, match="is not reduced yet"):
        boxes(DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False))


def test_placements_that_disagree_with_the_shard_are_refused():
    with _mesh(0, 2) as mesh, pytest.raises(ValueError, match="has a shard of shape"):
        wrong = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False, shape=(9, 2), stride=(2, 1))
        boxes(wrong)


def test_an_unknown_order_of_cuts_is_refused():
    with _mesh(0, 2, 2) as mesh, pytest.raises(ValueError, match="cut in an unknown order"):
        placements = [_StridedShard(0, split_factor=3), Shard(0)]
        boxes(DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False, shape=(8, 2), stride=(2, 1)))


@pytest.mark.parametrize(("sizes", "placements"), [((2, 2), [Replicate(), Shard(0)]), ((3, 2), [Shard(1), Shard(0)])])
def test_the_owners_of_a_tensor_are_one_replica_and_hold_it_once(sizes, placements):
    with _mesh(1, *sizes) as mesh:
        tensor = distribute_tensor(_numbered(5, 4), mesh, placements, src_data_rank=None)
        mine = [local.box for local in boxes(tensor)]
        for near in range(mesh.size()):
            found, count = owners(tensor, near), torch.zeros(5, 4)
            assert near in found and found.get(1, mine) == mine
            for held in found.values():
                for box in held:
                    count[index_of(box)] += 1
            assert bool((count == 1).all())
        assert replica(tensor) == ((0, 2) if sizes == (2, 2) else (0, 1))


def test_boxes_keep_no_mesh_alive():
    """A mesh that outlives its use keeps the threads of its process groups."""
    with _mesh(0, 11) as mesh:  # no other test has one that equals it
        boxes(distribute_tensor(_numbered(22, 2), mesh, [Shard(0)], src_data_rank=None))
        left = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert left() is None

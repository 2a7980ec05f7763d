"""What a rank is in the mesh, for all meshes of up to eight ranks, without other ranks: a fake process group has any
rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshrl.cluster.weight_sync import sync_order
from meshrl.parallel.boxes import boxes
from meshrl.parallel.mesh import build_mesh, forget_meshes, fsdp_mesh, replica_group
from meshrl.plan.ranks import Coordinates, coordinates
from meshrl.sync.delivery import Address
from meshrl.sync.layout import Box, SyncHeader, make_layout
from meshrl.sync.transaction import SyncState

SHAPES = [shape for shape in product(range(1, 9), repeat=4) if prod(shape) <= 8]
TENSORS = {  # shape, and the dim that TP cuts
    "columns": ((8, 3), 0),
    "rows": ((5, 8), 1),
    "norm": ((7,), None),
    "few": ((1, 2), None),
}


@contextmanager
def mesh_of(shape: tuple[int, ...], rank: int) -> Iterator[DeviceMesh]:
    """The mesh on this rank. DTensor's caches must be cleared, because the next rank's mesh differs only in the
    rank."""
    dist.init_process_group("fake", rank=rank, world_size=prod(shape), store=FakeStore())
    try:
        yield build_mesh(shape, "cpu")
    finally:
        forget_meshes()
        dist.destroy_process_group()


def held(shape: tuple[int, ...], rank: int) -> list[Box]:
    """The boxes of a rank, after TP and FSDP2 have sharded the tensors."""
    with mesh_of(shape, rank) as mesh:
        module = torch.nn.Module()
        for name, (size, dim) in TENSORS.items():
            full = torch.zeros(size)
            if shape[3] > 1 and (dim is None or size[dim] % shape[3] == 0):
                full = distribute_tensor(full, mesh["tp"], [Replicate() if dim is None else Shard(dim)])
            module.register_parameter(name, torch.nn.Parameter(full))
        of_replica = [
            r for r in range(prod(shape)) if coordinates(shape, r).replica == coordinates(shape, rank).replica
        ]
        in_order = sorted(of_replica, key=lambda r: coordinates(shape, r).sender)
        assert dist.get_process_group_ranks(replica_group(mesh)) == in_order
        fully_shard(module, mesh=fsdp_mesh(mesh))
        return [
            Box(name, box.offsets, tuple(box.tensor.shape)) for name, p in module.named_parameters() for box in boxes(p)
        ]


@pytest.mark.parametrize("shape", [s for s in SHAPES if prod(s) == 8 or max(s) == 3 or prod(s) == 4], ids=str)
def test_each_sender_holds_what_the_layout_sends_from_it(shape: tuple[int, ...]):
    """Otherwise a rank is asked for boxes of another rank, or two ranks have one number and one of them never sends."""
    ranks = range(prod(shape))
    at = {rank: coordinates(shape, rank) for rank in ranks}
    own = {rank: held(shape, rank) for rank in ranks}
    first = sorted((rank for rank in ranks if at[rank].replica == 0), key=lambda rank: at[rank].sender)
    layout = make_layout({n: (size, "float32") for n, (size, _) in TENSORS.items()}, [own[rank] for rank in first])
    states = {
        rank: SyncState(sender=at[rank].sender, replica=at[rank].replica, address=Address(host=f"rank {rank}", port=1))
        for rank in ranks
    }
    header = SyncHeader(version=1, layout_hash=layout.hash)
    for rank in ranks:
        assert set(layout.senders[at[rank].sender]) <= set(own[rank])
        order = sync_order(header, "c", rank, states, list(ranks))
        peers = {other for other in ranks if at[other].replica == at[rank].replica} - {rank}
        assert {address.host for address in order.senders.values()} == {f"rank {peer}" for peer in peers}
        assert order.senders.keys() == set(range(len(layout.senders))) - {at[rank].sender}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coordinates_follow_the_order_of_the_ranks_in_the_mesh(shape: tuple[int, ...]):
    by_place = np.arange(prod(shape)).reshape(shape)
    found: dict[int, Coordinates] = {
        int(by_place[place]): coordinates(shape, int(by_place[place])) for place in np.ndindex(shape)
    }
    for place in np.ndindex(shape):
        own = found[int(by_place[place])]
        assert own.data_index == np.ravel_multi_index(place[:2], shape[:2]) and own.num_data == prod(shape[:2])
        assert own.is_first_peer == (place[2:] == (0, 0)) and own.num_peers == prod(shape[2:])
        assert own.replica == place[0] and own.num_senders == prod(shape[1:])
        assert own.sender == np.ravel_multi_index(place[1:], shape[1:])
    of_first = [own.data_index for _, own in sorted(found.items()) if own.is_first_peer]
    assert of_first == list(range(prod(shape[:2])))

"""What each rank of a run is: whether it trains and samples, on which machine, and its coordinates in the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """What one train rank is in the mesh. All code that depends on this reads it here, never from the mesh's axes.

    data_index: which of num_data parts of the samples it works on. num_peers ranks, its peers, work on the same part;
    they differ only along ulysses and tp, and the first peer reports for all. replica: which complete copy of the
    weights it belongs to; sender: its number among the num_senders ranks of this copy, which hold different parts.
    loss_scale: the number of ranks over which FSDP averages gradients, by which each rank multiplies its sum.
    ulysses, tp: its place among the peers along these axes, and their numbers.
    """

    data_index: int
    num_data: int
    num_peers: int
    is_first_peer: bool
    replica: int
    sender: int
    num_senders: int
    loss_scale: int
    ulysses: int
    num_ulysses: int
    tp: int
    num_tp: int


def coordinates(shape: Sequence[int], rank: int) -> Coordinates:
    """Those of a global rank in a mesh of this shape, in which ranks count along the last axis first."""
    num_peers, num_senders = prod(shape[2:]), prod(shape[1:])
    return Coordinates(
        data_index=rank // num_peers,
        num_data=prod(shape[:2]),
        num_peers=num_peers,
        is_first_peer=rank % num_peers == 0,
        replica=rank // num_senders,
        sender=rank % num_senders,
        num_senders=num_senders,
        loss_scale=prod(shape[:3]),
        ulysses=rank // shape[3] % shape[2],
        num_ulysses=shape[2],
        tp=rank % shape[3],
        num_tp=shape[3],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """machine: machines have equally many ranks, in the order of the ranks. local_rank: the position among the ranks of
    its machine. samples: whether it has a sampler; one on the devices of several ranks belongs to the first of them.
    coordinates: of a rank that trains.

    Example: rank 3 of 2 train ranks and 4 sampler ranks with tp 2 on one machine does not train and has no sampler; its
    device is one of those of the sampler of rank 2.
    """

    rank: int
    machine: int
    local_rank: int
    trains: bool
    samples: bool
    coordinates: Coordinates | None


def rank_plan(
    rank: int, num_train: int, num_rollout: int, sampler_tp: int | None, num_machines: int, shape: Sequence[int]
) -> RankPlan:
    """num_train: ranks that train, the first ones. num_rollout: ranks after them that only sample; 0 = the train ranks
    sample, too. sampler_tp: ranks of one sampler; None = no rank samples. shape: of the train ranks' mesh."""
    per_machine = (num_train + num_rollout) // num_machines
    trains, first = rank < num_train, num_train if num_rollout else 0
    return RankPlan(
        rank=rank,
        machine=rank // per_machine,
        local_rank=rank % per_machine,
        trains=trains,
        samples=sampler_tp is not None and rank >= first and (rank - first) % sampler_tp == 0,
        coordinates=coordinates(shape, rank) if trains else None,
    )

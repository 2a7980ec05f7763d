"""The keys of cluster.*, the phases of a run, and their checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from meshrl.config.base import EVALUATED, OF_SAMPLING, NotInSft, OnlyWith, Slice, Unless
from meshrl.config.case import Case, Problem

_Seconds = Annotated[float | None, Field(gt=0)]
_INLINE = Unless("cluster.executor", "inline", "cluster.executor is inline: the only rank is this process")
_OfRanks = Annotated[_Seconds, _INLINE]  # the other deadlines also end a call that blocks the controller
_OfRl = Annotated[_Seconds, NotInSft("SFT has no such phase")]
_OfRlRanks = Annotated[_OfRl, _INLINE]


class Deadlines(Slice):
    """Seconds for each phase of a run, by the phase's name."""

    start: _OfRanks = None
    """seconds in which the ranks' processes start and import torch"""
    load: _OfRanks = None
    """seconds in which the ranks connect and load models, or a checkpoint"""
    rollout: _OfRl = None
    """seconds for one answer of a sampler, including the time of its request in queues; they begin again with each
    token that the sampler computes, so that a long answer has no limit"""
    reward: _OfRl = None
    """seconds for all gradings of one step; reward.timeout_s also limits each grading"""
    annotate: _OfRlRanks = None
    """seconds for one pass of the reference, or of the policy for old logprobs, counted as for train"""
    train: _Seconds = None
    """seconds for forward and backward of one optimizer step; they begin again with each micro-batch, except where
    executor is inline, and in the extra pass for train.router_aux_loss_coef"""
    optim: _OfRanks = None
    """seconds for the optimizer's update of the parameters"""
    sync: _OfRl = None
    """seconds for one sync of the weights: all transfers and their proofs"""
    checkpoint: _Seconds = None
    """seconds for copying a training state to host memory, and for writing it"""
    export: _Seconds = None
    """seconds for writing the model"""
    eval: Annotated[_OfRl, EVALUATED] = None
    """seconds for one answer to a held-out prompt, counted as for rollout"""
    report: _OfRlRanks = None
    """seconds in which the ranks report a step's memory use"""
    end: _OfRanks = None
    """seconds in which the ranks free their resources and end"""


class ClusterConfig(Slice):
    executor: Literal["inline", "processes", "ray"] = "processes"
    """processes = one process for each rank, on this machine or on the machines where torchrun starts them; ray = one
    actor for each rank, on the machines of a Ray cluster; inline = everything in this process, for debugging"""
    num_train_ranks: int = Field(1, ge=1, le=100_000)
    """FSDP2 ranks, one for each device (or share of the CPU)"""
    num_rollout_ranks: Annotated[int, OF_SAMPLING] = Field(0, ge=0, le=100_000)
    """ranks that only sample; 0 = the train ranks sample too"""
    nodes: int = Field(1, ge=1)
    """machines that executor ray uses, each with the same number of ranks; under torchrun leave it at 1"""
    address: Annotated[str | None, OnlyWith("cluster.executor", "ray")] = None
    """Ray cluster to run on, as host:port; local = a new cluster for this run only; null = RAY_ADDRESS if it is set,
    else the cluster that runs on this machine, else local if one node is enough"""
    timeout_s: float = Field(600.0, gt=0)
    """seconds that a phase may take if its key in cluster.deadlines is null; a rank that misses a deadline has failed
    (see cluster.max_restarts), and the error names rank and phase"""
    deadlines: Deadlines = Deadlines()
    """deadlines of single phases, in seconds; null = cluster.timeout_s"""
    max_restarts: Annotated[int, _INLINE] = Field(3, ge=0)
    """a run may replace this number of failed ranks that only sample, and may restart this number of times from its
    last checkpoint after a failure of train ranks; the next failure ends the run"""

    def deadline_s(self, phase: str) -> float:
        """Seconds that a phase may take. phase: the name of a field of Deadlines."""
        own_s: float | None = self.deadlines.model_dump()[phase]
        return self.timeout_s if own_s is None else own_s


def machine_problems(case: Case) -> Iterator[Problem]:
    """Problems of cluster.*: of the executor, and of the machines that it uses."""
    cluster = case.config.cluster
    ranks = cluster.num_train_ranks + cluster.num_rollout_ranks
    if cluster.executor == "inline":
        for name, needed in (("num_train_ranks", 1), ("num_rollout_ranks", 0)):
            if getattr(cluster, name) != needed:
                key = f"cluster.{name}"
                text = f"inline runs everything in this process: {name} must be {needed}. Or use executor: processes."
                yield Problem((key, "cluster.executor"), text, void=(key,))
    if cluster.executor != "ray":
        if cluster.nodes > 1:
            text = "several machines need executor: ray. Or start the run with torchrun, and leave nodes out."
            yield Problem(("cluster.nodes", "cluster.executor"), text, void=("cluster.nodes",))
        return
    if case.starts and importlib.util.find_spec("ray") is None:
        yield Problem(("cluster.executor",), "ray is not installed: pip install 'meshrl[ray]', on every machine.")
    if cluster.address == "local" and cluster.nodes > 1:
        pair = ("cluster.address", "cluster.nodes")
        yield Problem(pair, "a local Ray has one machine. Give the cluster's host:port.", void=pair)
    if ranks % cluster.nodes:
        keys = ("cluster.nodes", "cluster.num_train_ranks", "cluster.num_rollout_ranks")
        text = f"every machine has the same number of ranks, but {cluster.nodes} machines do not divide {ranks} ranks."
        yield Problem(keys, text)

"""A run that torchrun (or srun with the same environment variables) started on every machine at once.

Rank 0's process is the controller, and starts rank 0 as its child. The other processes are the node agents of their
ranks: they read the controller's address from torchrun's own store, connect, and serve until the controller ends them.
Every process that reaches the store can read and write it, so the run's token is not in it, and the address has a
proof (process/run_token.py). They read and check their config, but the ranks get the controller's config.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.node_agent import NodeAgent
from meshrl.cluster.remote import RemoteExecutor
from meshrl.config.rollout import split_replica
from meshrl.core.errors import ConfigError
from meshrl.process.connect import LOOPBACK, interface_of
from meshrl.process.run_token import RunToken, read_announcement
from meshrl.process.spawn import ignore_interrupts

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether torchrun started this process as one of several of a run."""
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def is_restarted() -> bool:
    """Whether torchrun (--max-restarts) or Slurm (a requeue) has started this run again, and not its user."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def is_follower() -> bool:
    """Whether this process is the node agent of a rank, and another process is the controller."""
    return is_launched() and int(os.environ["RANK"]) > 0


def follow(folder: Path) -> int:
    """Be the node agent of this process's rank until the run ends. Returns the exit code. folder: run.folder.

    Waits for: the controller, which publishes its address when it has loaded its config. Ctrl-C, SIGTERM and SIGHUP
    reach all processes of a run and the controller handles them, so this process ignores them once it has the address.

    Raises: MeshrlError when the store or the file with the token has been written by a process outside the run.
    """
    address, token = read_announcement(_launch_store().get(_key()), _key(), folder)
    ignore_interrupts()
    return NodeAgent(address, token, int(os.environ["RANK"])).serve()


class TorchrunExecutor(RemoteExecutor):
    """The controller's side, in the process of rank 0."""

    def __init__(self, specs: Sequence[WorkerSpec], folder: Path):
        """folder: run.folder, in which the run's token is made. Raises: ConfigError when the number of processes
        differs from the config's number of ranks, or a replica would be on two machines; errors of RunToken."""
        started, asked = int(os.environ["WORLD_SIZE"]), specs[0].num_ranks
        if started != asked:
            raise ConfigError(
                f"torchrun started {started} processes, but cluster.num_train_ranks + cluster.num_rollout_ranks = "
                f"{asked}. Make them equal: nnodes x nproc-per-node is the number of ranks"
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        rollout, num_train = specs[0].rollout, specs[0].num_train_ranks
        if rollout is not None and (text := split_replica(rollout, num_train, asked, local)):
            raise ConfigError(f"torchrun started {local} processes on this machine, but {text}")
        super().__init__([dataclasses.replace(spec, nodes=started // local) for spec in specs])
        self._launch_store: dist.Store | None = None
        self.can_restart_trainers = False  # torchrun does this with its --max-restarts
        self._run_token = RunToken(folder)  # last: from now on `close` has to remove its file
        self.token = self._run_token.key

    async def find_machines(self) -> str:
        """There is nothing to find: torchrun runs on the machines, and rank 0 is on the machine with the address
        MASTER_ADDR."""
        return LOOPBACK if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] else os.environ["MASTER_ADDR"]

    async def start_agents(self, address: tuple[str, int]) -> set[int]:
        """Publish the address: the agents run already, and wait for it."""
        self._launch_store = _launch_store()  # a reference: without torchrun's agent, the store is in this process
        self._launch_store.set(_key(), self._run_token.announcement(_key(), address))
        return {spec.rank for spec in self.specs if spec.rank > 0}

    async def await_agents(self, ranks: Sequence[int]) -> None:
        """Wait for the agents; rank 0 then uses the network interface on which the last of them has connected."""
        await super().await_agents(ranks)
        self._run_token.remove()
        self.address = self._agents[max(ranks)].reached_at
        self.interface = interface_of(self.address) or self.interface

    async def close(self) -> None:
        """End all ranks and node agents, and remove the file with the token if an error left it."""
        self._run_token.remove()
        await super().close()


def _launch_store() -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT: in torchrun's agent under torchrun, else in rank 0's process."""
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _key() -> str:
    """The store's key; each restart by torchrun has its own."""
    return f"meshrl/controller/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

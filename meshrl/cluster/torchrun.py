"""A run that torchrun, or srun by the same variables, started on every machine at once.

Rank 0's process is the controller, and starts rank 0 as its child. The others are the node agents of their ranks: they
read the controller's address and the run's token from torchrun's own store, connect, and serve until the controller
ends them. Their config is read and checked, but the ranks get the controller's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Sequence

import torch.distributed as dist

from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.node_agent import serve
from meshrl.cluster.remote import RemoteExecutor
from meshrl.core.errors import ConfigError
from meshrl.process.connect import interface_of

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether this process is one of several of a run."""
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def is_follower() -> bool:
    """Whether it is the node agent of a rank, and another process is the controller."""
    return is_launched() and int(os.environ["RANK"]) > 0


def follow() -> int:
    """Be the node agent of this process's rank to the end of the run. Returns the exit code.

    Waits for: the controller, which publishes its address when it has loaded its config. Ctrl-C and SIGTERM reach all
    processes of a run, and the controller decides what they mean, so they are ignored here once it is known.
    """
    controller = json.loads(_launch_store().get(_key()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address = controller["host"], controller["port"]
    return serve(address, bytes.fromhex(controller["token"]), int(os.environ["RANK"]))


class TorchrunExecutor(RemoteExecutor):
    """The controller's side, in the process of rank 0."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        """Raises: ConfigError when torchrun started another number of processes than the config has ranks."""
        started, asked = int(os.environ["WORLD_SIZE"]), specs[0].num_ranks
        if started != asked:
            raise ConfigError(
                f"torchrun started {started} processes, but cluster.num_train_ranks + cluster.num_rollout_ranks = "
                f"{asked}. Make them equal: nnodes x nproc-per-node is the number of ranks"
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        super().__init__([dataclasses.replace(spec, nodes=started // local) for spec in specs])
        self._launch_store: dist.Store | None = None
        self.can_restart_trainers = False  # torchrun's own --max-restarts is for that

    async def find_machines(self) -> str:
        """torchrun has found them; rank 0 is on the machine that it calls master."""
        return os.environ["MASTER_ADDR"]

    async def start_agents(self, address: tuple[str, int]) -> set[int]:
        """They run already, and wait for this address."""
        self._launch_store = _launch_store()  # kept: where torchrun's agent does not run it, this process does
        controller = {"host": address[0], "port": address[1], "token": self.token.hex()}
        self._launch_store.set(_key(), json.dumps(controller))
        return {spec.rank for spec in self.specs if spec.rank > 0}

    async def await_agents(self, ranks: Sequence[int]) -> None:
        """Rank 0 uses the interface on which the last of them has connected."""
        await super().await_agents(ranks)
        own = self._agents[max(ranks)].reached_at
        self.interface = interface_of(own) or self.interface
        self.specs = [dataclasses.replace(self.specs[0], address=own), *self.specs[1:]]


def _launch_store() -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT: the agent's under torchrun, else rank 0's."""
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _key() -> str:
    """A group that torchrun has restarted has a key of its own."""
    return f"meshrl/controller/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

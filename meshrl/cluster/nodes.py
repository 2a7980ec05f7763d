"""What the machines of a cluster report of themselves, and the speed of the network between them, for `meshrl doctor
--nodes`: one process on each machine, started by torchrun or srun."""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from meshrl.cluster.remote import is_launched
from meshrl.core.device import dist_backend, local_device, synchronize
from meshrl.core.errors import ConfigError
from meshrl.process.connect import interface_of

CONNECT_S = 60
SENT_BYTES, NUM_SENT = 64 << 20, 3  # the first transfer opens the connection and is not timed
HOW = (
    "--nodes needs one process on each machine: on each of them `torchrun --nnodes N --node-rank I --nproc-per-node 1 "
    "--master-addr HOST --master-port 29500 -m meshrl doctor --nodes`, with the address of the first one as HOST"
)


def compare_nodes(own: dict[str, Any]) -> dict[str, Any]:
    """Collective over one process on each machine. own: facts of this machine, as JSON can write them.

    Returns rank: of this machine; error: why they do not reach each other, then nothing else; machines: the facts of
    each, by rank; clocks_s: their clocks at nearly the same time; speeds: bytes/s from each machine to the next, by the
    backend with which ranks of these devices communicate.

    Raises: ConfigError if the process was not started as one of several.
    """
    if not is_launched():
        raise ConfigError(HOW)
    rank, timeout = int(os.environ["RANK"]), datetime.timedelta(seconds=CONNECT_S)
    device = local_device(int(os.environ.get("LOCAL_RANK", "0")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        with suppress(OSError):
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        if interface := interface_of(probe.getsockname()[0]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        store, rank, num = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(dist_backend(device), store=store, rank=rank, world_size=num, timeout=timeout)
        store.set(f"doctor/{rank}", json.dumps(own, default=str))
        machines = [json.loads(store.get(f"doctor/{each}")) for each in range(num)]
        clock, speeds = torch.zeros(num, dtype=torch.float64), torch.zeros(num, dtype=torch.float64)
        dist.barrier()
        clock[rank] = time.time()
        for source in range(num):
            speeds[source] = _speed(source, (source + 1) % num, rank, device)
        for numbers in clock, speeds:
            dist.all_reduce(numbers)
        dist.barrier()  # the store is in the process of the first machine
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:  # torch's errors of stores and process groups
        return {"rank": rank, "error": str(error).strip().splitlines()[0]}
    return {
        "rank": rank,
        "error": "",
        "machines": machines,
        "clocks_s": clock.tolist(),
        "speeds": speeds.tolist(),
    }


def _speed(source: int, target: int, rank: int, device: torch.device) -> float:
    """Bytes/s of a tensor from one rank to another; 0 in ranks other than the target. All ranks call it."""
    sent, seconds = torch.ones(SENT_BYTES, dtype=torch.uint8, device=device), 0.0
    for number in range(NUM_SENT):
        start = time.perf_counter()
        if rank == source:
            dist.send(sent, target)
        elif rank == target:
            dist.recv(sent, source)
        synchronize(device)
        seconds += (time.perf_counter() - start) * (number > 0)
    dist.barrier()
    return SENT_BYTES * (NUM_SENT - 1) / seconds if rank == target else 0.0

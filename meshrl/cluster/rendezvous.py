"""The store in which the train ranks form their process group: a file on one machine, TCP across machines."""

from __future__ import annotations

import datetime

import torch.distributed as dist

_SCHEME = "tcp://"


def create_store(host: str) -> tuple[dist.TCPStore, str]:
    """A store in this process at a free port, which exists as long as the object; and its rendezvous text.

    host: the address at which the ranks reach this machine.
    """
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{_SCHEME}{host}:{store.port}"


def open_store(rendezvous: str, num_ranks: int, timeout_s: float) -> dist.Store:
    """The store that a rendezvous text names: a TCP address, or else a file."""
    if not rendezvous.startswith(_SCHEME):
        return dist.FileStore(rendezvous, num_ranks)
    host, port = master(rendezvous)
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def master(rendezvous: str) -> tuple[str, int]:
    """(host, port) of a TCP rendezvous."""
    host, _, port = rendezvous.removeprefix(_SCHEME).rpartition(":")
    return host, int(port)

"""The stores in which ranks form process groups. They have no authentication."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from meshrl.process.connect import listening_socket

DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)  # of torch


def listening_store(host: str, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> dist.TCPStore:
    """A store of torch.distributed in this process, on a free port. torch's own socket would listen on all
    interfaces. host: the address at which other ranks reach this machine.
    """
    sock = listening_socket(host)
    port = sock.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=sock.detach()
    )

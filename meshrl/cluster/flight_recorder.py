"""torch.distributed's flight recorder, which stores the last collectives of a rank, for the diagnosis of a rank that
does not answer. Nothing has to be set: it records 2,000 collectives unless TORCH_FR_BUFFER_SIZE has another number."""

from __future__ import annotations

import contextlib

from meshrl.process.leases import LeasedFolder


class FlightRecorder:
    """Serves this process's records on a socket that only this user can reach, as long as this object exists. Threads
    of torch answer: they need neither the GIL nor the main thread, which may wait for the device."""

    def __init__(self) -> None:
        self._folder = LeasedFolder()
        self.socket = str(self._folder.path / "records")
        # A build of torch without the server, or a path that is too long: then the diagnosis has no records.
        with contextlib.suppress(ImportError, RuntimeError):
            from torch._C._distributed_c10d import _WorkerServer

            self._server = _WorkerServer(self.socket)

"""A pool of rank processes for the entire test session: torch is imported once, not for each rank or test.

`pool.run(fn, world, *args)` calls the module-level function fn(rank, world, *args) in `world` processes that form a
gloo process group, and returns their results in rank order. An error in a rank is raised here with its traceback.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from meshrl.cluster.worker import RANK


def _serve(rank: int, conn: Any, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from meshrl.parallel.mesh import forget_meshes

    torch.set_num_threads(1)
    gc.freeze()  # a garbage collection would touch all objects of the imported modules, and so copy their pages
    while True:
        try:
            task = conn.recv()
        except EOFError:
            return
        fn, world, args, store_file = task
        try:
            store = dist.FileStore(store_file, world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            conn.send((True, fn(rank, world, *args)))
        except BaseException:
            conn.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_meshes()  # the threads of a process group end with its last reference
            gc.collect()


class RankPool:
    def __init__(self, size: int, timeout_s: float = 100.0):
        self.size, self.timeout_s = size, timeout_s
        self._workers: list[tuple[Any, Any]] = []

    def _start(self, count: int) -> None:
        """Start ranks until there are `count`; a rank that no test needs is never started."""
        ctx = mp.get_context("forkserver")
        ctx.set_forkserver_preload(list(RANK.preload))
        for rank in range(len(self._workers), count):
            ours, theirs = ctx.Pipe()
            p = ctx.Process(target=_serve, args=(rank, theirs, list(sys.path)), daemon=True)
            p.start()
            theirs.close()
            self._workers.append((p, ours))

    def run(self, fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        if world > self.size:
            raise ValueError(f"world {world} is larger than the pool of {self.size}")
        self._start(world)
        waiting = {conn: rank for rank, (_, conn) in enumerate(self._workers[:world])}
        results: list[Any] = [None] * world
        with tempfile.TemporaryDirectory() as folder:
            for conn in waiting:
                conn.send((fn, world, args, str(Path(folder) / "store")))
            end = time.monotonic() + self.timeout_s
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
                if not ready:
                    self.close()
                    raise TimeoutError(f"ranks {list(waiting.values())} of {world} did not return from {fn.__name__}")
                for conn in ready:
                    rank = waiting.pop(conn)
                    try:
                        ok, results[rank] = conn.recv()
                    except EOFError:
                        ok, results[rank] = False, "its process ended"
                    if not ok:
                        self.close()  # the others may wait in a collective for ever
                        raise AssertionError(f"rank {rank} of {world} in {fn.__name__}:\n{results[rank]}")
        return results

    def close(self) -> None:
        for process, conn in self._workers:
            conn.close()
            process.kill()
            process.join()
        self._workers.clear()

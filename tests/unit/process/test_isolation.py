"""Programs of a model in isolation: what they can't do, and how they end."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import threading
from pathlib import Path

import psutil
import pytest
from isolation_cases import ATTACKS, Attack
from waiting import wait_until

from meshrl.core.errors import ConfigError
from meshrl.process.isolation import KINDS, PROGRAMS, Ended, Isolation, Limits

KEY = "agent.args.sandbox"
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


DISK_BYTES = (1 << 24) + 4096 * (os.getpid() % 1000)  # in the command line of this module's sandboxes alone


@pytest.fixture(scope="module")
def isolation() -> Isolation:
    return Isolation("bubblewrap", KEY, Limits(disk_bytes=DISK_BYTES))


def nothing_is_left() -> bool:
    return not any(str(DISK_BYTES) in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


@needs_bubblewrap
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "_"))
def test_a_program_does_no_harm(attack: Attack, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "SECRET")
    (tmp_path / "file").write_text("a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        text = attack.text.replace("PORT", port).replace("FOLDER", str(tmp_path))
        wall_s = 2.0 if attack.fault.startswith("it was killed after 2") else 60.0
        ended = isolation.run_python(text, wall_s)
    assert attack.printed in ended.output and ended.fault == attack.fault, ended
    assert (attack.printed or not ended.output) and "wrote" not in ended.output, ended
    assert wait_until(nothing_is_left)  # the kernel ends the processes of a namespace with its first one
    assert os.listdir(tmp_path) == ["file"]


@needs_bubblewrap
def test_programs_that_run_at_once_have_limits_of_their_own(isolation: Isolation):
    text = (
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        time.sleep(0.5)\n        os._exit(0)\n"
    )
    text += "print('all')"
    ended = list[Ended]()
    threads = [threading.Thread(target=lambda: ended.append(isolation.run_python(text, 60.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [Ended("all\n", "")] * 4


@needs_bubblewrap
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("print('é', 6 * 7)", Ended("é 42\n", "")),
        ("import sys\nprint(1, flush=True)\nsys.exit(3)", Ended("1\n", "exit code 3")),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", Ended("", "SIGSEGV")),
        ("import sys\nsys.stdout.buffer.write(bytes([255]))", Ended("\ufffd", "")),
        ("print('\ud83d')", Ended("?\n", "")),
        ("x = 1  # " + "x" * 200_000 + "\nprint(x)", Ended("1\n", "")),
    ],
    ids=["output", "exit_code", "signal", "binary", "surrogate", "long"],
)
def test_output_and_end_of_a_program_are_returned(text: str, expected: Ended, isolation: Isolation):
    assert isolation.run_python(text, 60.0) == expected


def test_without_isolation_the_limits_of_a_process_remain():
    plain = Isolation("none", KEY, Limits(wall_s=60.0))
    assert "MemoryError" in plain.run_python("bytearray(1 << 34)").output
    assert plain.run_python("while True:\n    print('x' * 1000)").fault == "it was killed after 65536 bytes of output"
    assert plain.run_python("import time\ntime.sleep(60)", 0.5).fault == "it was killed after 0.5 s"
    assert plain.run_python("import os\nprint(sorted(os.environ))").output in ("['LC_CTYPE', 'PATH']\n", "['PATH']\n")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bubblewarp", r"is 'bubblewarp'; allowed: bubblewrap, docker:IMAGE, .*none; did you mean 'bubblewrap'"),
        ("docker", r"is 'docker'; allowed: "),
        ("none:image", r"is 'none:image'; allowed: "),
        (3, r"is 3; allowed: "),
    ],
)
def test_an_unknown_kind_is_refused(kind: str, expected: str):
    with pytest.raises(ConfigError, match=rf"agent\.args\.sandbox {expected}"):
        Isolation(kind, KEY)


@pytest.mark.parametrize("name", PROGRAMS)
def test_where_programs_can_not_be_isolated_they_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind = name if name == "bubblewrap" else f"{name}:image"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"{PROGRAMS[name]} is not installed.*with `none`, programs have your rights"
    ):
        Isolation(kind, KEY)
    stand_in = tmp_path / PROGRAMS[name]
    stand_in.write_text("#!/bin/sh\necho no namespaces here; exit 1\n")
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ConfigError, match=rf"{name} can't isolate a program here: exit code 1 no namespaces here"):
        Isolation(kind, KEY)


@pytest.mark.parametrize("name", ["docker", "podman", "apptainer"])
def test_a_container_has_no_network_and_the_limits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its client is a stand-in, which runs what follows the image."""
    stand_in, asked = tmp_path / name, tmp_path / "asked"
    stand_in.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\n[ "$1" = kill ] && exit\nwhile [ "$1" != image ]; do shift; done\nshift 2\n'
        f'exec {sys.executable} "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    isolation = Isolation(f"{name}:image", KEY, Limits(memory_bytes=1 << 30, num_processes=7))
    assert isolation.run_python("print(1)") == Ended("1\n", "")
    words = asked.read_text().splitlines()[-1].split()
    wanted = {"--memory": str(1 << 30), "--pids-limit": "7", "--network": "none"}
    if name != "apptainer":
        wanted |= {"--cap-drop": "ALL", "--security-opt": "no-new-privileges", "--user": "65534:65534"}
        assert {"--read-only", "--rm"} < {*words} and "cpu=30" in words
    assert {flag: words[words.index(flag) + 1] for flag in wanted} == wanted
    assert isolation.run_python("import time\ntime.sleep(60)", 0.5).fault == "it was killed after 0.5 s"
    if name != "apptainer":  # a container outlives its client
        run, kill = (line.split() for line in asked.read_text().splitlines()[-2:])
        assert kill == ["kill", run[run.index("--name") + 1]]


def test_every_kind_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    assert all(f"`{name}" in page for name in KINDS)

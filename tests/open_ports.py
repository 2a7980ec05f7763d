"""What processes listen on, in the words of the tables of docs/security.md, for tests that compare the two."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

PAGE = Path(__file__).parents[1] / "docs" / "security.md"


def table(first_column: str) -> list[list[str]]:
    """The rows of the page's table whose first column has this name."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^\| {first_column} \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def listed(executor: str) -> set[tuple[str, str]]:
    """(kind of process, where) of each row of the page about this executor."""
    return {(process, where) for name, process, where, _ in table("executor") if name == executor}


def _kind(process: psutil.Process, layout: str) -> str:
    """The table's name of a process."""
    command = " ".join(process.cmdline())
    if "meshrl.cluster.worker" in command:
        return "rank"
    if "torch.distributed.run" in command:
        return "torchrun"
    if "ray::NodeAgent" in command:
        return "node agent"
    if "gated_run.py" in command:
        return "controller" if process.environ().get("RANK", "0") == "0" else "node agent"
    return "Ray" if layout == "ray" and "meshrl.process" not in command else command[:100]


def listening(process: psutil.Process, layout: str) -> Iterator[tuple[str, str]]:
    try:
        kind = _kind(process, layout)
        for each in process.net_connections(kind="all"):
            if each.family == socket.AF_UNIX:
                if each.laddr:  # a socket pair has no name
                    yield kind, "Unix socket"
            elif each.status == psutil.CONN_LISTEN:
                address = each.laddr.ip.removeprefix("::ffff:")
                everywhere = {"0.0.0.0": "all interfaces", "::": "all interfaces"}
                is_loopback = address == "::1" or address.startswith("127.")
                yield kind, "127.0.0.1" if is_loopback else everywhere.get(address, "the machine's address")
    except psutil.NoSuchProcess:  # such as a child of Ray's that collects facts of the machine
        return

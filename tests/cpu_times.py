"""A pytest plugin that measures the CPU time of each test, with that of all processes that it starts:

    PYTHONPATH=tests CPU_TIMES=times.jsonl python -m pytest -p cpu_times -n 3 -m "not slow and not gpu"
    python tests/cpu_times.py times.jsonl > benchmarks/results/test_cpu_times_DATE.json

On a machine with other work, and on one whose cores share their arithmetic units, CPU times are longer, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

_before = 0.0


def _seconds() -> float:
    """Of this process and all below it, with those that have ended and were waited for."""
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def _record(name: str) -> None:
    global _before
    now = _seconds()
    with open(os.environ["CPU_TIMES"], "a") as file:
        file.write(json.dumps([name, round(now - _before, 2)]) + "\n")
    _before = now


def pytest_collection_finish() -> None:
    _record("imports")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    ran = yield
    _record(item.nodeid)
    return ran


if __name__ == "__main__":
    files: dict[str, dict[str, float]] = {}
    for name, seconds in map(json.loads, Path(sys.argv[1]).read_text().splitlines()):
        file = files.setdefault(name.partition("::")[0], {"tests": 0, "cpu_s": 0.0})
        file["tests"] += 1
        file["cpu_s"] = round(file["cpu_s"] + seconds, 2)
    ordered = dict(sorted(files.items(), key=lambda each: -each[1]["cpu_s"]))
    print(json.dumps({"cpu_s": round(sum(each["cpu_s"] for each in files.values())), "files": ordered}, indent=1))

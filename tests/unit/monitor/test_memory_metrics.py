from __future__ import annotations

import subprocess
import sys

from meshrl.monitor.metrics import memory_metrics


def test_the_processes_of_a_run_are_counted_and_named_by_their_command_line():
    """A process that is not part of meshrl is named other."""
    code = "x = bytearray(48 << 20); print('ready', flush=True); input()"
    ends = ["meshrl.cluster.worker", "5", "6", "rank_27"], ["meshrl.reward.worker", "7"], ["another"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes) for arguments in ends]
    for child in children:
        child.stdout.readline()
    metrics = memory_metrics()
    for child in children:
        child.communicate(b"\n")
    sizes = {m.name: m.sum for m in metrics}
    for name in ("rank_27", "reward", "other"):
        assert sizes[f"memory/rss_bytes/{name}"] > 48 << 20
    assert sizes["memory/rss_bytes/controller"] > 0
    assert sizes["memory/rss_bytes"] == sum(v for n, v in sizes.items() if n != "memory/rss_bytes")
    assert {(m.unit, m.reduce) for m in metrics} == {("bytes", "max")}  # of several calls in a step, the largest value
    names = {m.name for m in memory_metrics(own_name="rank_1")}
    assert "memory/rss_bytes/rank_1" in names and "memory/rss_bytes/rank_27" not in names

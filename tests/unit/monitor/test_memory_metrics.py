from __future__ import annotations

import subprocess
import sys

from meshrl.monitor.metrics import memory_metrics


def test_children_are_counted_and_named():
    code = "x = bytearray(48 << 20); print('ready', flush=True); input()"
    arguments = ["meshrl.cluster.worker", "5", "6", "rank_27"]
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    sizes = {m.name: m.sum for m in memory_metrics()}
    child.communicate(b"\n")
    assert sizes["memory/rss_bytes/rank_27"] > 48 << 20
    assert sizes["memory/rss_bytes"] == sum(v for n, v in sizes.items() if n != "memory/rss_bytes")
    assert sizes["memory/rss_bytes/controller"] > 0
    assert "memory/rss_bytes/rank_27" not in {m.name for m in memory_metrics()}


def test_a_process_that_is_not_part_of_meshrl_is_named_other():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    names = {m.name for m in memory_metrics()}
    child.communicate(b"\n")
    assert "memory/rss_bytes/other" in names


def test_a_rank_reports_itself_under_its_own_name():
    assert "memory/rss_bytes/rank_1" in {m.name for m in memory_metrics(own_name="rank_1")}


def test_memory_is_in_bytes_and_keeps_its_peak_within_a_step():
    assert {(m.unit, m.reduce) for m in memory_metrics()} == {("bytes", "max")}


def test_workers_are_known_by_their_command_line():
    code = "print('ready', flush=True); input()"
    ends = ["meshrl.cluster.worker", "5", "6", "rank_3"], ["meshrl.reward.worker", "7"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes) for arguments in ends]
    for child in children:
        child.stdout.readline()
    names = {m.name for m in memory_metrics()}
    for child in children:
        child.communicate(b"\n")
    assert {"memory/rss_bytes/rank_3", "memory/rss_bytes/reward"} <= names

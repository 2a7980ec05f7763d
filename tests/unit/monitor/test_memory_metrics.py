from __future__ import annotations

import subprocess
import sys

from meshrl.monitor.memory import memory_metrics


def test_children_are_counted_and_named():
    """P32"""
    before = {m.name for m in memory_metrics()}  # other tests may have left children
    code = "x = bytearray(48 << 20); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    sizes = {m.name: m.sum for m in memory_metrics({child.pid: "train_rank_0"})}
    unnamed = {m.name: m.sum for m in memory_metrics()}
    child.communicate(b"\n")
    assert sizes["memory/rss_bytes/train_rank_0"] > 48 << 20
    assert sizes["memory/rss_bytes"] == sum(v for n, v in sizes.items() if n != "memory/rss_bytes")
    assert {"memory/rss_bytes", "memory/rss_bytes/controller"} <= before
    assert set(sizes) == before | {"memory/rss_bytes/train_rank_0"}
    assert unnamed["memory/rss_bytes/other"] > 48 << 20
    gone = {m.name for m in memory_metrics({child.pid: "train_rank_0"})}
    assert "memory/rss_bytes/train_rank_0" not in gone


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

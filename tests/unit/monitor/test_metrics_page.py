"""Every logged metric is explained, and every explained metric is logged."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from meshrl.monitor.glossary import SECTIONS, meaning_of

ROOT = Path(__file__).parents[3]
AREAS = "run|reward|eval|rollout|loss|correction|train|router|proof|sync|first_sync|time|memory|checkpoint|group"
NAME = re.compile(rf"({AREAS}|monitor|perf)/[a-z0-9_/]*")
EXPLAINED = [name for _, _, entries in SECTIONS for entry in entries for name in entry.names]


def names_in_code() -> tuple[set[str], set[str], set[str]]:
    """(complete metric names, beginnings of computed ones, all texts) in the string literals of meshrl, except the
    report's."""
    begun, texts = set(), set()
    for path in (ROOT / "meshrl").rglob("*.py"):
        if path.name == "glossary.py" or path.is_relative_to(ROOT / "meshrl" / "tools"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                begun |= {node.values[0].value} if NAME.fullmatch(node.values[0].value) else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                texts.add(node.value)
    return {text for text in texts if NAME.fullmatch(text)}, begun, texts


def test_every_metric_is_explained():
    complete, begun, _ = names_in_code()
    unexplained = {name for name in complete if not meaning_of(name) and not meaning_of(f"{name}/p50")}
    unexplained |= {f"{begin}<...>" for begin in begun if not any(name.startswith(f"{begin}<") for name in EXPLAINED)}
    assert len(complete) > 20 and not unexplained


def test_every_explained_metric_exists():
    complete, begun, texts = names_in_code()

    def exists(name: str) -> bool:
        if any(name.startswith(begin) and name.removeprefix(begin) in texts for begin in begun):
            return True  # such as loss/<measurement>, with the measurements in a dict
        plain, computed, _ = name.partition("<")
        return plain.rstrip("/") in complete if not computed else plain in begun or plain.rstrip("/") in complete

    assert [name for name in EXPLAINED if not exists(name)] == []
    assert len(EXPLAINED) == len(set(EXPLAINED))


def test_a_name_finds_its_own_entry_and_unit():
    found = meaning_of("eval/num_failed")
    assert found is not None and found.unit == "attempts" and found.label == "failed attempts"
    assert meaning_of("sync/latency_s") != meaning_of("sync/wait_s")  # the exact name before the pattern
    assert meaning_of("reward/term/format") and not meaning_of("reward/nothing")

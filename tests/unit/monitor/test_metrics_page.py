from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
AREAS = ("reward", "eval", "rollout", "loss", "train", "proof", "sync", "time", "memory", "group")
NAME = re.compile(rf"({'|'.join(AREAS)})/[a-z0-9_/]*")


def names_in_code() -> tuple[set[str], set[str]]:
    """(whole metric names, beginnings of computed ones) among the texts of meshrl."""
    whole, begun = set(), set()
    for path in (ROOT / "meshrl").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                begun |= {node.values[0].value} if NAME.fullmatch(node.values[0].value) else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                whole |= {node.value} if NAME.fullmatch(node.value) else set()
    return whole, begun


def names_on_page() -> set[str]:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return {name for name in re.findall(r"`([^`\s]+)`", page) if NAME.match(name)}


def test_every_metric_is_explained():
    whole, begun = names_in_code()
    page = names_on_page()
    unexplained = {n for n in whole if not any(p == n or p.startswith(f"{n}/p") for p in page)}
    unexplained |= {f"{b}<...>" for b in begun if not any(p.startswith(f"{b}<") for p in page)}
    assert len(whole) > 20 and not unexplained


def test_every_explained_metric_exists():
    whole, begun = names_in_code()
    gone = set()
    for name in names_on_page():
        plain = name.split("<")[0]
        known = plain in whole or any(plain.startswith(b) for b in begun) or re.sub(r"/p\d\d$", "", plain) in whole
        if not known and not name.endswith("*"):
            gone.add(name)
    assert not gone

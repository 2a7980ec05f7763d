"""One standard word for one thing: the words that code, help, errors and docs do not use, and what they say instead.

A name is split at underscores and capitals, so that `kept_rows` and `KeptRows` contain `kept`. There are no exceptions.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from source_tree import ROOT, name_of, python_files, syntax

EVERYWHERE = {  # in prose and in names
    r"tells?|told|telling": "report, return, state, pass",
    r"says|said": "state, print, report",
    r"who|whom|whoever": "which, that, the process that",
    r"nobody|somebody|anybody|everybody": "none, no process, any rank, users",
    r"lend|lends|lent|lending": "release (memory), share",
    r"mend|mends|mended|mending|amend|amends|amended": "fix, repair, retry, restart, replace",
    r"desk|desks": "admission, gate, queue",
    r"stand down|stands down|stood down|stand_down": "invalidate, drain",
    r"moved out|moved_out|called off|called_off": "drained, preempted, cancelled",
    r"evidence|last words|last_words": "diagnosis, diagnostics, output",
    r"dial|dials|dialled|hang up|hangs up|hang_up": "connect, disconnect, close",
    r"outgoing": "sender, sent",
    r"lean": "fast decoder, small",
    r"whole|wholly": "full, complete, entire, all of",
    r"twin|twins": "placeholder, copy, counterpart",
    r"torn": "truncated, incomplete",
    r"haste|hasty|in_haste": "urgent, at once",
    r"beside": "next to, with, in addition to",
    r"patience|patient": "deadline, time limit",
    r"arrival|arrivals": "read-back, what was received",
    r"stranger|strangers": "another process, a process outside the run",
    r"alas|heal|heals|witness|borrow|borrows|borrowed|heir": "a standard term",
    r"dissolves?|vouch|vouches": "a standard term",
    r"anew": "again, new",
    r"whence|wherein|thereof|hitherto|lest": "a plain sentence",
}
IN_NAMES = {  # of variables, functions, classes, modules, config keys and metrics
    r"kept": "saved, merged, retained",
    r"adapted|unadapted": "merged, with_adapter, base_layer",
    r"owned": "lease",
    r"watch|watched|watching": "monitor, watchdog",
    r"torn|lent|told|twin": "a standard term",
    r"plan": "batch_plan, memory_plan",
}
TEXTS = ("README.md", "CONTRIBUTING.md", "docs", "meshrl", "examples", "benchmarks", "scripts", "tests")
SUFFIXES = {".py", ".md", ".json", ".yaml", ".toml", ".sh", ".css", ".js"}
SELF = "tests/policy/test_words.py"


def words_of(name: str) -> str:
    """A name's words, in lower case between spaces: RankBoxes and rank_boxes are " rank boxes "."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", name)
    return f" {apart.lower()} "


def texts() -> list[Path]:
    found = [path for text in TEXTS for path in ([ROOT / text] if text.endswith(".md") else (ROOT / text).rglob("*"))]
    return sorted(path for path in found if path.suffix in SUFFIXES and "results" not in path.parts)


def test_no_text_uses_a_word_that_has_a_standard_term():
    lists = list(
        EVERYWHERE
    )  # one pattern with a group for each list: to search for each by itself takes 25 times as long
    groups = "|".join(f"(?P<list_{number}>{words})" for number, words in enumerate(lists))
    first = "".join({word[0] for words in lists for word in words.replace("(", "").split("|")})  # most words fail by it
    pattern = re.compile(rf"(?<![A-Za-z])(?=[{first}])(?:{groups})(?![A-Za-z])", re.IGNORECASE)
    faults = []
    for path in texts():
        if name_of(path) == SELF:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in pattern.finditer(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)):
                standard = EVERYWHERE[lists[int(str(match.lastgroup).removeprefix("list_"))]]
                faults.append(f"{name_of(path)}:{number}: {match[0]!r}, write: {standard}: {line.strip()[:100]}")
    assert faults == []


@cache
def names(path: Path) -> list[tuple[str, int]]:
    """(name, line) of everything that a file of Python names."""
    found = [(path.stem, 0)]
    for node in ast.walk(syntax(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append((node.name, node.lineno))
        elif isinstance(node, ast.arg):
            found.append((node.arg, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.attr, node.lineno))
    return found


@pytest.mark.parametrize("words", IN_NAMES)
def test_no_name_uses_a_word_that_has_a_standard_term(words: str):
    exact = words == "plan"  # with a word before it, it is clear which plan
    pattern = re.compile(rf"^ (?:{words}) $" if exact else rf" (?:{words}) ")
    faults = [
        f"{name_of(path)}:{line}: {name}"
        for path in python_files("meshrl")
        for name, line in names(path)
        if pattern.search(words_of(name))
    ]
    assert faults == [], f"write: {IN_NAMES[words]}"

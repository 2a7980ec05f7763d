"""The incidents of incidents.yaml, and the page docs/incidents.md from them and from results.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "mutants"))
from fault import Fault, plant  # noqa: E402 - found by the line above

RESULTS = HERE / "results.json"


class Incident(NamedTuple):
    """One public bug, and how it is planted.

    source: owner/name#number. seen: what people saw. planted: how it is made here, in words. edits: [place, change] as
    in tests/mutants/fault.py. options: overrides of the tiny run, with and without the bug; where: the schedule in
    words. only_planted: overrides of the planted run alone. starts: overrides of each start, for a run that is resumed.
    test: a test that fails with the edits, for what no run notices. without_checks: edits that turn off further checks
    than those in the table, for the curves. stands_still: without its check the run has no end. expected: parts of
    what is recorded.
    """

    name: str
    kind: str
    source: str
    seen: str
    planted: str
    expected: Sequence[str]
    where: str = "colocated"
    edits: Sequence[Sequence[str]] = ()
    options: Sequence[str] = ()
    only_planted: Sequence[str] = ()
    starts: Sequence[Sequence[str]] = ((),)
    test: str = ""
    without_checks: Sequence[Sequence[str]] = ()
    stands_still: bool = False

    def faults(self, with_checks: bool = True) -> list[Fault]:
        edits = self.edits if with_checks else [*self.edits, *_table()["checks"], *self.without_checks]
        return [Fault(self.name, place, change, self.test) for place, change in edits]


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load((HERE / "incidents.yaml").read_text(encoding="utf-8"))
    return table


def incidents() -> list[Incident]:
    return [Incident(**each) for each in _table()["incidents"]]


def planted_files(faults: list[Fault], root: Path) -> dict[str, str]:
    """The code of each file that the faults change. Raises LookupError as `plant`."""
    files: dict[str, str] = {}
    for fault in faults:
        source = files.get(fault.file) or (root / fault.file).read_text(encoding="utf-8")
        files[fault.file] = plant(fault, source)
    return files


def page() -> str:
    """The text of docs/incidents.md."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    tables = []
    for kind in dict.fromkeys(each.kind for each in incidents()):
        tables += [f"\n## {kind}\n", "| what people saw | noticed by | when | curves |", "| --- | --- | --- | --- |"]
        for each in incidents():
            if each.kind == kind:
                result = results[each.name]
                saw = f"**{each.name}** ([{each.source}]({_url(each)})). {each.seen}"
                tables.append(_row(saw, result["noticed"], result["when"], result["curves"]))
    planted = [_row(each.name, each.planted, each.where, results[each.name]["message"]) for each in incidents()]
    text = (HERE / "page.md").read_text(encoding="utf-8")
    return text.format(**_counts(results), tables="\n".join(tables), planted="\n".join(planted))


def _url(each: Incident) -> str:
    name, _, number = each.source.partition("#")
    return f"https://github.com/{name}/issues/{number}"


def _row(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _counts(results: dict[str, Any]) -> dict[str, int]:
    of_page = [results[each.name] for each in incidents()]
    return {
        "total": len(of_page),
        "before": sum(each["when"].startswith("before") for each in of_page),
        "later": sum(each["when"].startswith("during") for each in of_page),
        "by_test": sum(each["noticed"].startswith("the test") for each in of_page),
        "unnoticed": sum(each["noticed"] == "not noticed" for each in of_page),
        "shown": sum(each["curves"].startswith("yes") for each in of_page),
    }

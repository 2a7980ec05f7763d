"""The last step of h200.sh: the results of its parts as one table and one JSON line. Needs no GPU.

    python benchmarks/gpu_table.py --parts FOLDER --tests tests.xml --results FOLDER

Exit code 1: a test failed, or a part wrote no figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import Report

PARTS = ("gpu_train", "gpu_rollout", "gpu_step")
HEAD = (
    "| figure | value | prediction | of GEMM | of sheet | over roofline |",
    "| --- | ---: | ---: | ---: | ---: | ---: |",
)


def read_tests(path: Path) -> dict[str, Any]:
    """Counts, and each failure with its message, from pytest's JUnit file. A missing file counts as one failure."""
    if not path.exists():
        return {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0, "failures": {"pytest": "wrote no report"}}
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    failures, skipped = {}, 0
    for case in suite.iter("testcase"):
        broken = next((x for kind in ("failure", "error") if (x := case.find(kind)) is not None), None)
        if broken is not None:
            failures[f"{case.get('classname')}::{case.get('name')}"] = (broken.get("message") or "")[:1000]
        skipped += case.find("skipped") is not None
    total = int(suite.get("tests", 0))
    passed = total - len(failures) - skipped
    took = float(suite.get("time", 0))
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "seconds": took, "failures": failures}


def read_parts(folder: Path) -> dict[str, Any]:
    """The newest record of each part. A part that was ended early has none."""
    found = {part: sorted(folder.glob(f"{part}_*.json")) for part in PARTS}
    return {part: json.loads(paths[-1].read_text(encoding="utf-8")) for part, paths in found.items() if paths}


def rows(
    figures: dict[str, float], predictions: dict[str, float], gemm_predictions: Mapping[str, float] = {}
) -> list[str]:
    """One line for each figure, with its interval in parentheses, its prediction, the share of the data sheet's rate
    that was reached (of sheet), and its inverse (over roofline): the time over what the data sheet's rates allow.
    gemm_predictions: by the FLOP/s of a measured matrix product, for the share of that (of GEMM)."""
    lines = []
    for name, value in figures.items():
        if name.endswith(("_low", "_high")):
            continue
        ends = [figures.get(f"{name}{end}") for end in ("_low", "_high")]
        interval = f" ({ends[0]:.4g} .. {ends[1]:.4g})" if None not in ends else ""
        work = name.removesuffix("_released")  # the same work
        bound, of_gemm = predictions.get(work), gemm_predictions.get(work)
        share, gemm_share = (share_of(name, value, each) for each in (bound, of_gemm))
        gemm_text = f"{gemm_share:.1%}" if gemm_share else ""
        reached = f"{bound:.4g} | {gemm_text} | {share:.1%} | {1 / share:.1f}" if share else " | | | "
        lines.append(f"| {name} | {value:.4g}{interval} | {reached} |")
    return lines


def share_of(name: str, value: float, bound: float | None) -> float:
    """The share of the bound that a figure reaches; 0 without a bound."""
    return 0.0 if not bound else value / bound if is_rate(name) else bound / value


def is_rate(name: str) -> bool:
    """Whether more is better: a rate, a ratio or a share, not a duration."""
    return "per_s" in name or name.startswith(("mfu", "ratio"))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", type=Path, required=True, help="folder with the parts' records")
    p.add_argument("--tests", type=Path, required=True, help="JUnit file of tests/gpu")
    p.add_argument("--results", type=Path, help="folder for the complete record (default benchmarks/results)")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--smoke", action="store_true", help="keep the record out of benchmarks/results")
    args = p.parse_args()
    tests, parts = read_tests(args.tests), read_parts(args.parts)
    report = Report("h200", args)
    facts = [part["raw"]["device"] for part in parts.values()]
    report.raw |= {"device": facts[0] if facts else {}, "tests": tests, **parts}
    for kind in ("passed", "failed", "skipped"):
        report.figures[f"tests_{kind}"] = float(tests[kind])
    predictions, of_gemm, sheets = dict[str, float](), dict[str, float](), set[str]()
    for part in parts.values():
        report.figures |= part["figures"]
        predictions |= part["raw"]["predictions"]
        of_gemm |= part["raw"].get("gemm_predictions", {})
        sheets.add(part["raw"]["data_sheet"])
        report.bars += part["bars"]
    report.raw["predictions"] = predictions
    versions = {name: part["machine"].get(name) for part in parts.values() for name in ("torch", "transformers")}
    device = report.raw["device"].get("name", "no device")
    report.print_line(f"\n{device}, {versions}\npredictions: by the data sheet of {', '.join(sheets) or 'no device'}\n")
    report.print_line("\n".join([*HEAD, *rows(report.figures, predictions, of_gemm)]))
    missing = [part for part in PARTS if part not in parts]
    for name, message in tests["failures"].items():
        report.print_line(f"FAILED {name}: {message.splitlines()[0] if message else ''}")
    for part in missing:
        report.print_line(f"MISSING {part}: it failed or was ended at its time limit; see its output above")
    report.figures["parts_missing"] = float(len(missing))
    report.finish()
    sys.exit(1 if missing or tests["failed"] else 0)


if __name__ == "__main__":
    main()

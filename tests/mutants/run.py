"""Mutation testing: insert one fault at a time into a copy of the package; the test that it names must fail, or
not end (some faults are deadlocks).

    python tests/mutants/run.py [--list] [--only WORDS] [-j JOBS]

Exit code 0: every fault is caught, the named tests pass without a fault, and every fault still matches the code.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

from fault import Fault, plant
from faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("meshrl", "tests", "docs", "examples", "pyproject.toml")
LIMIT_S = 300.0  # for one call of pytest with a fault; a single test has TEST_LIMIT_S
CLEAN_LIMIT_S = 3600.0  # for the call that runs the tests of all faults
TEST_LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Verdict:
    """caught: the test failed, or did not end. shown: the name of that test, or the reason why it did not fail."""

    name: str
    caught: bool
    shown: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the faults and the test that catches each")
    parser.add_argument("--only", action="append", metavar="WORDS", help="only faults with these words in their name")
    parser.add_argument(
        "-j", "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="faults that are tested in parallel"
    )
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.only or any(words in f.name for words in args.only)]
    if not faults:
        sys.exit(f"no fault has a name with {args.only}; --list lists all faults")
    if args.list:
        for f in faults:
            print(f.name, f.place, f.change, f.test, sep="\n    ")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return _try_all(faults, [_copy(Path(folder) / str(i)) for i in range(args.jobs)])


def _copy(folder: Path) -> Path:
    """A copy of the package, its tests and docs, which shadows the installed package for processes that run in it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    for path in {folder / f.file for f in FAULTS}:  # as `plant` writes them: no fault is caught by a missing comment
        path.write_text(ast.unparse(ast.parse(path.read_text(encoding="utf-8"))), encoding="utf-8")
    # With hashes: time stamps have a resolution of a second, so the bytecode of a file could be older than its fault.
    compileall.compile_dir(folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    code = "import meshrl.core.types as m; print(m.__file__)"
    used = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=_environment(folder), capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(used).resolve().is_relative_to(folder.resolve()):
        sys.exit(f"Python imports {used} instead of the copy in {folder}, so no fault would be tested")
    return folder


def _environment(folder: Path) -> dict[str, str]:
    # No new bytecode, because it would be validated by time stamps.
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _try_all(faults: Sequence[Fault], copies: Sequence[Path]) -> int:
    began = time.monotonic()
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def with_copy(function, *args):
        copy = free.get()
        try:
            return function(copy, *args)
        finally:
            free.put(copy)

    width = max(len(f.name) for f in faults)

    def show(word: str, v: Verdict) -> None:
        print(f"{word}  {v.name:<{width}}  {v.seconds:5.1f} s  {v.shown}", flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        clean = pool.submit(with_copy, _clean, sorted({f.test for f in faults}))
        missed = []
        for future in [pool.submit(with_copy, _try, f) for f in faults]:
            verdict = future.result()
            show("caught" if verdict.caught else "MISSED", verdict)
            missed += [] if verdict.caught else [verdict.name]
        unmutated = clean.result()
    show("passed" if unmutated.caught else "FAILED", unmutated)
    print(f"{len(faults) - len(missed)} of {len(faults)} faults caught in {time.monotonic() - began:.0f} s")
    return 1 if missed or not unmutated.caught else 0


def _clean(copy: Path, tests: Sequence[str]) -> Verdict:
    """Run all named tests without a fault. They must pass; otherwise their failures with a fault mean nothing."""
    code, output, seconds = _pytest(copy, tests, CLEAN_LIMIT_S)
    failed = re.findall(r"^(?:FAILED|ERROR):? .*", output, re.MULTILINE)
    return Verdict("without any fault", code == 0, "; ".join(failed) or _last_line(output), seconds)


def _try(copy: Path, fault: Fault) -> Verdict:
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    try:
        planted = plant(fault, text)
        compile(planted, fault.file, "exec")
    except (LookupError, SyntaxError) as error:
        return Verdict(fault.name, False, str(error), 0.0)
    try:
        path.write_text(planted, encoding="utf-8")
        code, output, seconds = _pytest(copy, [fault.test], LIMIT_S)
    finally:
        path.write_text(text, encoding="utf-8")
    failed = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    if code == 1 and failed:
        return Verdict(fault.name, True, failed[0], seconds)
    if code == -1:
        return Verdict(fault.name, True, f"no end within {LIMIT_S:g} s", seconds)
    errors = re.findall(r"^ERROR:? .*", output, re.MULTILINE)
    shown = f"pytest ended with exit code {code}: {(errors or [_last_line(output)])[0]}"
    return Verdict(fault.name, False, shown, seconds)


def _pytest(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[int, str, float]:
    """Run pytest. Returns the exit code (-1: it exceeded the limit), the output and the seconds."""
    began = time.monotonic()
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-o", f"timeout={TEST_LIMIT_S}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env=_environment(copy),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = -1
    return code, output, time.monotonic() - began


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())

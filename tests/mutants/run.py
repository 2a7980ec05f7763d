"""Plant one fault at a time in a copy of the package; each must turn one of its named tests red.

    python tests/mutants/run.py [--list] [--only WORDS] [-j JOBS]

Ends with 0 when every fault is caught, the named tests are green without any, and every fault still fits the code.
"""

from __future__ import annotations

import argparse
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

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("meshrl", "tests", "pyproject.toml")
LIMIT_S = 300.0  # of one call of pytest for a fault; a single test has TEST_LIMIT_S
CLEAN_LIMIT_S = 3600.0  # of the call that runs the tests of all faults
TEST_LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Verdict:
    """caught: a named test failed. shown: that test, or what went wrong instead."""

    name: str
    caught: bool
    shown: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the faults and the tests that catch them")
    parser.add_argument("--only", action="append", metavar="WORDS", help="only faults with this in their name")
    parser.add_argument("-j", "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="faults tried at one time")
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.only or any(words in f.name for words in args.only)]
    if not faults:
        sys.exit(f"no fault is named {args.only}; --list names them all")
    if args.list:
        for f in faults:
            print(f"{f.name}\n    {f.file}\n    " + "\n    ".join(f.tests))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return _try_all(faults, [_copy(Path(folder) / str(i)) for i in range(args.jobs)])


def _copy(folder: Path) -> Path:
    """A copy of the package and its tests, which shadows the installed package for whoever runs in it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    # With hashes: by time stamps of a second, the bytecode of a file would outlive a fault planted within that second.
    compileall.compile_dir(folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    code = "import meshrl.core.types as m; print(m.__file__)"
    used = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=_environment(folder), capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(used).resolve().is_relative_to(folder.resolve()):
        sys.exit(f"the copy in {folder} is not what Python imports: {used} is; nothing would be tested")
    return folder


def _environment(folder: Path) -> dict[str, str]:
    # No new bytecode: it would be checked by time stamps.
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _try_all(faults: Sequence[Fault], copies: Sequence[Path]) -> int:
    began = time.monotonic()
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def borrowing(task, *args):
        copy = free.get()
        try:
            return task(copy, *args)
        finally:
            free.put(copy)

    width = max(len(f.name) for f in faults)

    def show(word: str, v: Verdict) -> None:
        print(f"{word}  {v.name:<{width}}  {v.seconds:5.1f} s  {v.shown}", flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        clean = pool.submit(borrowing, _clean, sorted({test for f in faults for test in f.tests}))
        missed = []
        for future in [pool.submit(borrowing, _try, f) for f in faults]:
            verdict = future.result()
            show("caught" if verdict.caught else "MISSED", verdict)
            missed += [] if verdict.caught else [verdict.name]
        unmutated = clean.result()
    show("green " if unmutated.caught else "RED   ", unmutated)
    print(f"{len(faults) - len(missed)} of {len(faults)} faults caught in {time.monotonic() - began:.0f} s")
    return 1 if missed or not unmutated.caught else 0


def _clean(copy: Path, tests: Sequence[str]) -> Verdict:
    """All named tests on the package as it is: green, or what they say of a fault means nothing."""
    code, output, seconds = _pytest(copy, tests, CLEAN_LIMIT_S)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)
    return Verdict("without any fault", code == 0, "; ".join(failed) or _last_line(output), seconds)


def _try(copy: Path, fault: Fault) -> Verdict:
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        shown = f"rotten: its text stands {text.count(fault.old)} times in {fault.file}; write it anew"
        return Verdict(fault.name, False, shown, 0.0)
    try:
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        code, output, seconds = _pytest(copy, fault.tests, LIMIT_S)
    finally:
        path.write_text(text, encoding="utf-8")
    failed = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    if code == 1 and failed:
        return Verdict(fault.name, True, failed[0], seconds)
    errors = re.findall(r"^ERROR .*", output, re.MULTILINE)
    return Verdict(fault.name, False, f"pytest ended with {code}: {(errors or [_last_line(output)])[0]}", seconds)


def _pytest(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[int, str, float]:
    """Exit code (-1: over the limit), output, seconds."""
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

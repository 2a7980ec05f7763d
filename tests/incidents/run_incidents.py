"""Plant each incident, run a tiny run with it, and record what notices it: make incidents. Writes results.json.

python tests/incidents/run_incidents.py [--only WORDS] [-j JOBS]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from incidents import RESULTS, Incident, incidents, planted_files

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("meshrl", "tests", "docs", "examples", "pyproject.toml")
LIMIT_S = 400.0  # for one process
SEEDS = range(1, 6)  # of the clean runs with whose curves the planted one is compared
SEED = 0  # of the planted run
DEVIATIONS = 3.0
BASE = ("cluster.executor=inline", "loop.num_steps=12", "algo.correction=off")
LONGEST_MESSAGE = 240
_Outcome = dict[str, Any]


class Copy:
    """A copy of the package, in which one incident at a time is planted."""

    def __init__(self, folder: Path):
        self.folder, self._runs = folder, 0
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)

    def with_edits(self, files: dict[str, str], *command: str) -> tuple[int, str]:
        """Run a command of Python with these texts in the place of the files. Returns the exit code (-1: it exceeded
        the limit) and the output."""
        before = {name: (self.folder / name).read_text(encoding="utf-8") for name in files}
        try:
            for name, text in files.items():
                (self.folder / name).write_text(text, encoding="utf-8")
            return self._python(*command)
        finally:
            for name, text in before.items():
                (self.folder / name).write_text(text, encoding="utf-8")

    def _python(self, *command: str) -> tuple[int, str]:
        path = os.pathsep.join(str(self.folder / name) for name in (".", "tests", "tests/incidents"))
        env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        process = subprocess.Popen(
            [sys.executable, *command], cwd=self.folder, env=env, text=True, start_new_session=True, **pipes
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -1, process.communicate()[0]

    def run(self, each: Incident, seeds: Sequence[int], files: dict[str, str], planted: bool) -> list[_Outcome]:
        """What the tiny run of the incident does with these seeds."""
        self._runs += 1
        out = self.folder / f"out_{self._runs}"
        out.mkdir()
        options = [*BASE, *each.options, *(each.only_planted if planted else ())]
        spec = {"parts": [[*options, *start] for start in each.starts], "seeds": list(seeds)}
        code, output = self.with_edits(files, "tests/incidents/one_run.py", str(out), json.dumps(spec))
        results = [out / f"{seed}.json" for seed in seeds]
        if not all(path.is_file() for path in results):
            raise RuntimeError(f"{each.name}: the process ended with exit code {code}:\n{output[-3000:]}")
        outcomes = [json.loads(path.read_text()) for path in results]
        shutil.rmtree(out)
        return outcomes


class Clean:
    """The clean runs of each set of options, made once."""

    def __init__(self) -> None:
        self._made: dict[str, list[_Outcome]] = {}
        self._locks: dict[str, threading.Lock] = {}

    def of(self, each: Incident, copy: Copy) -> list[_Outcome]:
        """The run with the seed of the planted one, and those with other seeds."""
        key = json.dumps([each.options, each.starts])
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._made:
                self._made[key] = copy.run(each, [SEED, *SEEDS], {}, planted=False)
                for outcome in self._made[key]:
                    assert outcome["error"] is None, f"{each.name}: the clean run ended: {outcome['error']}"
            return self._made[key]


def judge(each: Incident, copy: Copy, clean: Clean) -> dict[str, str]:
    """The row of results.json."""
    of_clean = clean.of(each, copy)
    same, others = of_clean[0], of_clean[1:]
    [planted] = copy.run(each, [SEED], planted_files(each.faults(), copy.folder), planted=True)
    noticed, message = _noticed(planted, same)
    when = _when(noticed, planted, same)
    if noticed == "not noticed" and each.test:
        code, output = copy.with_edits(planted_files(each.faults(), copy.folder), *_pytest(each.test))
        assert code == 1 and f"FAILED {each.test.partition('[')[0]}" in output, f"{each.name}: {output[-3000:]}"
        noticed = f"the test `{each.test.rpartition('::')[2]}`"
    if each.stands_still:
        curves = "they stop, without a reason"
    else:
        if planted["error"] is not None:
            [planted] = copy.run(each, [SEED], planted_files(each.faults(with_checks=False), copy.folder), planted=True)
        curves = _curves(planted, others)
    return {"noticed": noticed, "when": when, "curves": curves, "message": message}


def _pytest(test: str) -> list[str]:
    return ["-m", "pytest", "-x", "-q", "-n", "0", "--tb=no", "-rfE", "-p", "no:cacheprovider", test]


def _noticed(planted: _Outcome, same: _Outcome) -> tuple[str, str]:
    """What notices it, in a few words, and its message."""
    if planted["error"] is not None:
        kind, _, text = planted["error"].partition(": ")
        return f"`{kind}`", _short(text)
    known = {_without_numbers(note) for note in same["notes"]}
    routine = ("run ", "first prompt", "ready ", "disk: ", "wrote ", "saved ", "done: ", "decided: ", "attention ")
    of_start = next((i for i, note in enumerate(planted["notes"]) if note.startswith("ready ")), 0)
    for i, note in enumerate(planted["notes"]):
        if _without_numbers(note) not in known and not note.startswith(routine):
            return "a note at the start" if i < of_start else "a note", _short(note.removeprefix("note: "))
    if new := [(name, text) for name, text in planted["limits"].items() if name not in same["limits"]]:
        return f"the limit of `{new[0][0]}`", _short("; ".join(f"{name}: {text}" for name, text in new))
    return "not noticed", ""


def _without_numbers(note: str) -> str:
    return re.sub(r"\d[\d.]*", "N", note)


def _short(text: str) -> str:
    text = re.sub(r"\s+", " ", re.sub(r"/\S*/(?=[\w.]+)", "", text.strip()))
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE].rpartition(" ")[0] + " ..."


def _when(noticed: str, planted: _Outcome, same: _Outcome) -> str:
    """The step in which the run ended, and the number of wrong updates before."""
    pairs = zip(planted["weights"], same["weights"])
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(planted["weights"]), len(same["weights"])))
    num_wrong = len(planted["weights"]) - first
    if noticed == "a note at the start":
        return "before the first wrong update: the start, and the run continues"
    if noticed == "a note":
        return f"during the run, which continues; {num_wrong} wrong updates"
    at = f"step {len(planted['reward']) + 1}" if planted["starts"] else "the start"
    if planted["error"] is None:
        return f"no step; {num_wrong} wrong updates" if num_wrong else "no step; no wrong update"
    return f"before the first wrong update: {at}" if not num_wrong else f"after {num_wrong} wrong updates: {at}"


def _curves(planted: _Outcome, others: Sequence[_Outcome]) -> str:
    """Whether the curves alone show it, by the rule that the page states."""
    if planted["error"] is not None:
        return f"the run ends without these checks, too: {planted['error'].partition(':')[0]}"
    texts, is_shown = [], False
    for name in ("reward", "loss"):
        late = [_late(outcome[name]) for outcome in others]
        value, mean, deviation = _late(planted[name]), statistics.fmean(late), statistics.stdev(late)
        is_shown |= not abs(value - mean) <= DEVIATIONS * deviation  # also for NaN
        texts.append(f"{name} {value:.2g}, clean {mean:.2g} ± {deviation:.1g}")
    return f"{'yes' if is_shown else 'no'}: {'; '.join(texts)}"


def _late(values: Sequence[float]) -> float:
    return statistics.fmean(values[len(values) // 2 :]) if values else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="WORDS", help="only incidents with these words in the name")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="incidents that run in parallel")
    args = parser.parse_args()
    chosen = [each for each in incidents() if not args.only or any(words in each.name for words in args.only)]
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    clean, failed = Clean(), 0
    with tempfile.TemporaryDirectory(prefix="incidents-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = [Copy(Path(folder) / str(i)) for i in range(args.jobs)]
        free = list(copies)

        def one(each: Incident) -> None:
            nonlocal failed
            copy = free.pop()
            try:
                row = results[each.name] = judge(each, copy, clean)
                is_expected = all(text in f"{row['noticed']} {row['message']} {row['when']}" for text in each.expected)
                failed += not is_expected
                print("expected  " if is_expected else "UNEXPECTED", each.name, row, sep="\n    ", flush=True)
            except (RuntimeError, LookupError, AssertionError) as error:
                failed += 1
                print(f"FAILED     {each.name}\n{error}", flush=True)
            finally:
                free.append(copy)

        list(pool.map(one, chosen))
    ordered = {each.name: results[each.name] for each in incidents() if each.name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(chosen) - failed} of {len(chosen)} incidents as expected; now: make fix")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())

"""`meshrl doctor`: this machine, alone or against a config, in a line for each check; and a step of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshrl.core.terminal import counted, printable
from meshrl.tools.doctor.checks import FAIL, OK, WARN, DoctorLine, judge

SELF_TEST_S = 180
STYLES = {OK: "green", WARN: "bold yellow", FAIL: "bold red"}


def doctor(
    source: str | None, overrides: Sequence[str], as_json: bool, with_self_test: bool, with_nodes: bool
) -> tuple[str, int]:
    """The text to print, and the exit code: 1 if a line is FAIL. with_nodes: this is one of several machines, of which
    the first prints what all have found. Raises: ConfigError (with_nodes)."""
    from meshrl.tools.doctor.facts import config_facts, machine_facts

    config = None if source is None else config_facts(source, overrides)
    facts = machine_facts(Path((config or {}).get("folder", "runs")))
    tested = self_test(facts["device"], len(facts["devices"])) if with_self_test else None
    facts |= {"config": config, "self_test": tested, "nodes": None}
    if with_nodes:
        from meshrl.cluster.nodes import compare_nodes

        facts["nodes"] = compare_nodes(facts)
        if facts["nodes"]["rank"] > 0 and not facts["nodes"]["error"]:
            return "", 0
    lines = judge(facts)
    code = int(any(line.status == FAIL for line in lines))
    if as_json:
        return json.dumps({"lines": [line._asdict() for line in lines], "facts": facts}, indent=1, default=str), code
    return view(lines, with_self_test), code


def view(lines: Sequence[DoctorLine], has_self_test: bool) -> str:
    """A table for the terminal, coloured unless NO_COLOR is set, with the summary as its last line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        text = Text(printable(line.text))
        if line.status != OK:
            text.append(f"\n→ {printable(line.remedy)}", STYLES[line.status].split()[-1])
        table.add_row(Text(line.status, STYLES[line.status]), printable(line.name), text)
    counts, is_terminal = Counter(line.status for line in lines), sys.stdout.isatty()
    summary = f"{counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL: "
    if counts[FAIL]:
        summary += f"a run will fail here until {'this is' if counts[FAIL] == 1 else 'these are'} repaired"
    else:
        summary += "meshrl runs here" + ("" if has_self_test else "; --self-test makes a step with two ranks")
    console = Console(force_terminal=is_terminal, width=None if is_terminal else 120)
    with console.capture() as printed:
        console.print(table)
    return "\n".join([*(line.rstrip() for line in printed.get().splitlines()), "", summary])


def self_test(device: str, num_devices: int) -> tuple[str, str]:
    """(error or "", what was done): one step of GRPO of a tiny random model, on two ranks, or one for one device."""
    from meshrl.tools.doctor.tiny_task import write_task

    ranks, start = min(2, num_devices) if num_devices else 2, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshrl", "train", str(write_task(Path(folder), ranks))]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SELF_TEST_S)
        except subprocess.TimeoutExpired:
            return f"a step of {counted(ranks, 'rank')} did not end within {SELF_TEST_S} s", ""
    if done.returncode:
        return " ".join(done.stderr.strip().splitlines()[-6:]) or f"exit code {done.returncode}", ""
    text = f"sampled, graded, trained and synced a step on {counted(ranks, 'rank')} of type {device}"
    return "", f"{text} in {time.monotonic() - start:.0f} s"

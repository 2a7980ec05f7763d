"""Does the quickstart learn for every seed?

    python benchmarks/quickstart_seeds.py                  # seeds 0 to 19, and the control for seeds 0 to 2

Runs examples/quickstart/quickstart.py for each seed, one after the other, as `make quickstart SEED=N` does, and the
control (`--shuffle-rewards`) for the first `--controls` of them. The recipe was chosen with seeds from 100 on.

num_seeds_learned    seeds with a greedy held-out accuracy of 0.9 or more after the RL; the bar is 19 of 20
before_min, _max     held-out accuracy after the warm-up, over all seeds
control_after_max    the highest accuracy after training with randomly permuted rewards
wall_s_max           seconds of the slowest run, without the installation; no bar if other processes load the machine
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, Report, median, parser

QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.py"
LEARNED, START, CONTROL, WALL_S = 0.90, (0.10, 0.35), 0.45, 240.0
IDLE_LOAD = 0.5  # a higher load average means that other processes use the machine


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.add_argument("--num-seeds", type=int, default=20, help="seeds 0 to N - 1 (default 20)")
    p.add_argument("--first-seed", type=int, default=0, help="start at another seed (default 0)")
    p.add_argument("--controls", type=int, default=3, help="seeds that also run with permuted rewards (default 3)")
    args = p.parse_args()
    if args.smoke:
        args.num_seeds, args.controls = 1, 1
    report = Report("quickstart_seeds", args)
    seeds = range(args.first_seed, args.first_seed + args.num_seeds)
    extra = ("--smoke",) if args.smoke else ()
    report.print_line("| seed | rewards | before | after | wall s | CPU s | peak GB |")
    report.print_line("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    runs = [run(report, seed, *extra) for seed in seeds]
    controls = [run(report, seed, "--shuffle-rewards", *extra) for seed in seeds[: args.controls]]

    learned = sum(found["eval_after"] >= LEARNED for found in runs)
    before = [found["eval_before"] for found in runs]
    walls = [found["wall_s"] for found in runs]
    report.figure("num_seeds", len(runs))
    report.figure("after_min", min(found["eval_after"] for found in runs))
    report.figure("wall_s_median", median(walls))
    report.bar("num_seeds_learned", report.figure("num_seeds_learned", learned), at_least=math.ceil(0.95 * len(runs)))
    report.bar("before_min", report.figure("before_min", min(before)), at_least=START[0])
    report.bar("before_max", report.figure("before_max", max(before)), at_most=START[1])
    report.figure("wall_s_max", max(walls))
    if report.load_before <= IDLE_LOAD:
        report.bar("wall_s_max", max(walls), at_most=WALL_S)
    else:
        report.print_line(f"bar wall_s_max: not measured, the load average was {report.load_before} before the start")
    if controls:
        highest = max(found["eval_after"] for found in controls)
        report.bar("control_after_max", report.figure("control_after_max", highest), at_most=CONTROL)
    report.raw = {"runs": runs, "controls": controls}
    report.finish()


def run(report: Report, seed: int, *extra: str) -> dict[str, Any]:
    """Run one quickstart. Returns its report.json. The exit code is ignored: a low accuracy is a result here."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(QUICKSTART), "--seed", str(seed), "--out", folder, *extra]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        path = Path(folder) / f"{'control' if '--shuffle-rewards' in extra else 'seed'}_{seed}" / "report.json"
        if not path.is_file():
            raise SystemExit(
                f"seed {seed} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        found: dict[str, Any] = json.loads(path.read_text())
    del found["model"]  # it was in the temporary folder
    kind = "permuted" if "--shuffle-rewards" in extra else "real"
    report.print_line(
        f"| {seed} | {kind} | {found['eval_before']:.3f} | {found['eval_after']:.3f} | {found['wall_s']:.0f} | "
        f"{found['cpu_s']:.0f} | {found['peak_rss_bytes'] / 1e9:.2f} |"
    )
    return found


if __name__ == "__main__":
    main()

"""How well does `meshrl plan --schedule` predict the other schedules from colocated runs?

    python benchmarks/schedule_prediction.py               # 3 workloads, 5 rounds; half an hour on two idle cores

The task is that of countdown.py. A round of a workload makes a colocated run, predicts one_step_off and fully_async
from its files alone, and then makes both runs, with the same prompts and a learning rate of almost 0: else each run
would learn other lengths of answers, which differed by a third. All runs have one train rank and one sampler
rank; in the colocated run they work in turn. Other work on the machine would slow down the runs in which both work, so
a run waits until the machine is idle (at most --wait-s), and the CPU time of other processes during a run is recorded.

error_KIND_WORKLOAD      |predicted / measured - 1| of the step time, from medians over the rounds; the bar is 0.15
ratio_KIND_WORKLOAD      predicted / measured in the same round: median and interval
colocated_WORKLOAD       the same for the colocated run itself: how well the model repeats its own inputs
others_cores             median number of cores that other processes used during a run; above 0.15 there are no bars
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import countdown
from measure import Report, median, paired_ratio, parser

from meshrl.config.load import load_run_config
from meshrl.monitor.sinks import read_metrics
from meshrl.tools.schedule.advise import setup_of
from meshrl.tools.schedule.inputs import measured
from meshrl.tools.schedule.step_time import predict

KINDS = ("colocated", "one_step_off", "fully_async")
HERE = Path(__file__).resolve().parent
BAR, IDLE_CORES = 0.15, 0.15
FIRST = 2  # steps that are not counted
# name -> (prompts, samples, max_new_tokens, max_staleness of fully_async)
WORKLOADS = {"long_tail": (16, 16, 256, 2), "short": (24, 16, 48, 1), "few_prompts": (8, 32, 256, 1)}
SMOKE = {"smoke": (4, 2, 16, 2)}


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--num-steps", type=int, default=14, help="steps of each run (default 14)")
    p.add_argument("--warm-steps", type=int, default=150, help="SFT steps of the model, if --model is not given")
    p.add_argument("--wait-s", type=float, default=60.0, help="how long a run waits for an idle machine (default 60)")
    p.add_argument("--only", choices=WORKLOADS, help="measure one workload")
    args = p.parse_args()
    workloads = {args.only: WORKLOADS[args.only]} if args.only else WORKLOADS
    if args.smoke:
        workloads, args.num_steps, args.warm_steps, args.rounds, args.wait_s = SMOKE, 6, 12, 1, 0.0
    report = Report("schedule_prediction", args)
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    try:
        model = args.model or countdown.warm_model(folder / "warm", "smoke" if args.smoke else "0.9M", args.warm_steps)
        others: list[float] = []
        found: dict[tuple[str, str], list[dict[str, float]]] = {(w, k): [] for w in workloads for k in KINDS}
        for number in range(args.rounds):
            for name in workloads:
                for kind, times in compare(model, folder, workloads[name], args, number).items():
                    found[name, kind].append(times)
                    others.append(times["others_cores"])
                    report.print_line(f"round {number + 1} {name} {kind}: " + ", ".join(_shown(times)))
        report_errors(report, found, report.figure("others_cores", median(others)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish()


def compare(
    model: Path, folder: Path, workload: tuple[int, int, int, int], args: Any, number: int
) -> dict[str, dict[str, float]]:
    """One round: for each kind the predicted and the measured seconds of a step."""
    prompts, samples, max_new_tokens, staleness = workload
    data = folder / "rows.jsonl"
    rows = countdown.rows(prompts * args.num_steps, seed=number)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        loop: dict[str, Any] = {"kind": kind, "prompts_per_step": prompts, "samples_per_prompt": samples}
        if kind == "fully_async":
            loop["max_staleness"] = staleness
        settings = countdown.settings(
            model, folder / "runs", f"{kind}-{number}-{time.time_ns()}", args.num_steps, **loop
        )
        settings["cluster"] = {"num_train_ranks": 1, "num_rollout_ranks": 1}
        settings["rollout"]["sampling"]["max_new_tokens"] = max_new_tokens
        settings["data"]["path"] = str(data)
        settings["train"]["optimizer"]["lr"] = 1e-9
        settings["reward"] = {"terms": {"count": {"kind": "countdown:reward"}}}
        settings["run"]["seed"] = number
        wait_until_idle(args.wait_s)
        used = others_cores()
        run = train(settings, folder / "config.yaml")
        busy = used()
        if kind == "colocated":
            inputs = measured(run)
        config = load_run_config(folder / "config.yaml").config
        setup = setup_of(config, inputs, args.num_steps)
        predicted = predict(setup, FIRST)
        last = max(FIRST + 1, args.num_steps - 1 - setup.loop.staleness)  # as in predict
        ends = [line.time for line in read_metrics(run / "metrics.jsonl")[0] if "train/num_tokens" in line.metrics]
        real_s = (ends[last - 1] - ends[FIRST - 1]) / (last - FIRST)
        found[kind] = {"predicted_s": predicted.step_s, "measured_s": real_s, "others_cores": busy}
    return found


def train(settings: dict[str, Any], path: Path) -> Path:
    """Run `meshrl train` in a process of its own, so that all of its CPU time is known. Returns the run's folder."""
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = [sys.executable, "-m", "meshrl", "train", str(path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return Path(settings["run"]["folder"]) / str(settings["run"]["name"])


def report_errors(report: Report, found: dict[tuple[str, str], list[dict[str, float]]], others: float) -> None:
    report.raw["rounds"] = {f"{name}/{kind}": rounds for (name, kind), rounds in found.items()}
    for (name, kind), rounds in found.items():
        predicted, real = ([times[key] for times in rounds] for key in ("predicted_s", "measured_s"))
        report.figure(f"measured_s_{kind}_{name}", median(real))
        if kind == "colocated":
            report.figure(f"colocated_{name}", paired_ratio(predicted, real))
            continue
        report.figure(f"ratio_{kind}_{name}", paired_ratio(predicted, real))
        error = f"error_{kind}_{name}"
        if others > IDLE_CORES:
            report.not_measured(error, f"other processes used {others:.2f} cores", at_most=BAR)
        else:
            report.bar(error, report.figure(error, abs(median(predicted) / median(real) - 1)), at_most=BAR)


def _shown(times: dict[str, float]) -> list[str]:
    return [f"{name} {value:.3f}" for name, value in times.items()]


def _cpu_s() -> tuple[float, float]:
    """(all processes of the machine, this one and its ended children): seconds of CPU time."""
    usage = [resource.getrusage(part) for part in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(one.ru_utime + one.ru_stime for one in usage)
    stat = Path("/proc/stat")
    if not stat.exists():
        return own, own
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, stat.read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / 100, own


def others_cores() -> Callable[[], float]:
    """A function that returns the mean number of cores that other processes used since this call."""
    (everything, own), began = _cpu_s(), time.monotonic()

    def used() -> float:
        all_now, own_now = _cpu_s()
        return max(0.0, (all_now - everything - (own_now - own)) / (time.monotonic() - began))

    return used


def wait_until_idle(limit_s: float) -> None:
    """Wait until other processes use almost no CPU time for a second, for limit_s at most."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        used = others_cores()
        time.sleep(1)
        if used() < IDLE_CORES:
            return


if __name__ == "__main__":
    sys.exit(main())

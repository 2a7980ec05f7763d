"""Make sick and healthy runs, and record which rules of health.json find something: make clinic. Writes results.json.

python tests/clinic/run_clinic.py [--seed SEED] [--only WORDS] [-j JOBS] [--keep FOLDER] [--streams FILE]
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from clinic import RESULTS, SEED, Case, cases  # noqa: E402 - found by the line above

from meshrl.monitor.health import RULES, Health  # noqa: E402
from meshrl.monitor.sinks import MetricsLine, read_metrics  # noqa: E402

ROOT = HERE.parents[1]
NUM_STEPS = 30
BASE = (
    *("cluster.executor=inline", "cluster.num_train_ranks=1", "run.resume=never", f"loop.num_steps={NUM_STEPS}"),
    *("loop.prompts_per_step=8", "loop.save_every_steps=0", "reward.num_workers=1"),
    *("data.eval_path=null", "rollout.max_context_tokens=64", "train.scheduler.warmup_steps=0"),
)
HELD_OUT = ("loop.save_best=false", "loop.eval_every_steps=6", "data.eval_limit=120", "loop.eval_term=answer")


def warm_up(folder: Path, seed: int) -> None:
    """A tiny model that has learned to double numbers, most of them without carrying, and its prompts."""
    import subprocess

    start, recipe = folder / "start", ROOT / "examples" / "quickstart"
    subprocess.run([sys.executable, recipe / "task.py", "--out", start, "--seed", str(seed)], check=True)
    rows = (start / "train.jsonl").read_text().splitlines(keepends=True)
    (start / "few.jsonl").write_text("".join(rows[:400]))  # reading all of them takes longer than a run
    options = [*_SFT, "sft.num_steps=200", f"run.seed={seed}", f"model.path={start}", f"sft.path={start}/warmup.jsonl"]
    _run(recipe / "sft.yaml", folder, "sft", *options)


_SFT = ("cluster.executor=inline", "cluster.num_train_ranks=1", "run.resume=never", "sft.eval_path=null")


def _freeze() -> None:
    """In each process: collections of garbage at the ends of runs then skip what is imported."""
    import gc

    import meshrl.run.start  # noqa: F401

    gc.freeze()


def _name(case: Case) -> str:
    return f"seed_{case.seed}"


def make_run(folder: Path, case: Case) -> str:
    """Make the run of a case. Returns its error."""
    start = folder / "start"
    (warm,) = folder.glob("sft/checkpoints/step_*/model")
    if case.sft:
        options = [*_SFT, "sft.num_steps=60", f"model.path={start}", f"sft.path={start}/warmup.jsonl"]
        recipe = "sft.yaml"
    else:
        options = [*BASE, f"model.path={warm}", f"data.path={start}/few.jsonl", f"reward.terms={{{case.reward}}}"]
        options += [*HELD_OUT, f"data.eval_path={start}/heldout.jsonl"] if case.held_out else []
        recipe = "grpo.yaml"
    if case.drift:
        _drift(case.drift)
    error = ""
    try:
        _run(
            ROOT / "examples" / "quickstart" / recipe,
            folder,
            _name(case),
            *options,
            *case.options,
            f"run.seed={case.seed}",
        )
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        if case.drift:
            _drift(0.0)
    return error


def _drift(rate: float) -> None:
    """From now on the sampler's logprobs are off by about this much, in nats, times the step; 0 = as they are."""
    from meshrl.rollout.embedded import engine, sampler

    calls = itertools.count()

    def draw(*args: Any) -> sampler.Drawn:
        drawn = sampler.draw(*args)
        return sampler.Drawn(drawn.tokens, drawn.logprobs - rate * next(calls) / 7, drawn.extras)

    engine.draw = draw if rate else sampler.draw


def _run(recipe: Path, folder: Path, name: str, *options: str) -> None:
    from meshrl.config.load import load_run_config, load_sft_config
    from meshrl.run import start
    from meshrl.run.inputs import Objects
    from meshrl.tools.report.page import write_report

    options, quiet = (f"run.folder={folder}", f"run.name={name}", *options), Objects(quiet=True)
    if recipe.stem == "sft":
        start.sft(load_sft_config(recipe, options), write_report, quiet)
    else:
        start.train(load_run_config(recipe, options), write_report, quiet)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", metavar="WORDS", default="")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of the runs, each made once")
    parser.add_argument("--streams", type=Path, metavar="FILE", help="write tests/fixtures/health_streams.json")
    args = parser.parse_args()
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    folder = args.keep or Path(tempfile.mkdtemp(prefix="clinic-"))
    folder.mkdir(exist_ok=True)
    if not (folder / "sft").is_dir():
        warm_up(folder, args.seed)
    chosen = [case for case in cases(args.seed) if args.only in case.name]
    todo = [case for case in chosen if not case.edit and not (folder / _name(case) / "result.json").is_file()]
    errors, began = dict[str, str](), time.monotonic()
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), _freeze) as pool:
        for case, error in zip(todo, pool.map(partial(make_run, folder), todo)):
            errors[case.name] = error
            print(f"{time.monotonic() - began:.0f} s  {case.name} {error}", flush=True)
    healthy = [case for case in cases(args.seed) if not (case.rule or case.sft)]
    results, streams, num_wrong = dict[str, Any](), dict[str, Any](), 0
    for case in chosen:
        lines = edited(folder, healthy, case) if case.edit else lines_of(folder, case)
        found = {finding.rule.name: finding.since for finding in Health(lines).findings}
        is_right = case.rule in found if case.rule else not found
        num_wrong += not is_right
        print("          " if is_right else "UNEXPECTED", case.name, found, errors.get(case.name, ""), flush=True)
        error = {"error": errors[case.name]} if errors.get(case.name) else {}
        results[case.name] = {"seed": case.seed, "found": found, **error}
        name = case.rule or f"healthy {sum(key.startswith('healthy') for key in streams) + 1}"
        if is_right and (name not in streams or not case.rule):
            streams[name] = stream(lines)
    if args.streams:
        healthy_ones = [key for key in streams if key.startswith("healthy")][4:]  # four are enough for a unit test
        few = {key: values for key, values in streams.items() if key not in healthy_ones}
        args.streams.write_text(json.dumps(few, indent=None, separators=(",", ":")).replace("},", "},\n") + "\n")
    print(f"{len(chosen) - num_wrong} of {len(chosen)} runs as expected, in {time.monotonic() - began:.0f} s")
    if args.seed == SEED and not args.only:
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print("now: make fix")
    return 0


def lines_of(folder: Path, case: Case) -> list[MetricsLine]:
    path = folder / _name(case) / "metrics.jsonl"
    return read_metrics(path)[0] if path.is_file() else []  # a run that was refused


def stream(lines: Sequence[MetricsLine]) -> dict[str, list[float | None]]:
    """The metrics that rules read, each with a value for each line, null where it has none."""
    patterns = [c.metric for rule in RULES for conditions in rule.when for c in conditions]
    patterns += ["eval/standard_error", "reward/min", "reward/max"]
    names = {n for line in lines for n in line.metrics if any(fnmatch.fnmatch(n, pattern) for pattern in patterns)}
    columns = {n: [line.metrics.get(n, math.nan) for line in lines] for n in sorted(names)}
    shown = {n: [None if math.isnan(v) else float(f"{v:.4g}") for v in column] for n, column in columns.items()}
    return {n: column for n, column in shown.items() if any(column) or n in ("reward/min", "train/grad_norm")}


def edited(folder: Path, healthy: Sequence[Case], case: Case) -> list[MetricsLine]:
    """The lines of a healthy run, with the changes of the case to one metric: step = times the factor from the middle
    on; ramp = times the factor in each step, once more in each."""
    lines = lines_of(folder, healthy[case.seed % len(healthy)])
    metric, shape, factor = case.edit
    steps = [line for line in lines if metric in line.metrics]
    for i, line in enumerate(steps):
        line.metrics[metric] *= factor**i if shape == "ramp" else factor if 2 * i >= len(steps) else 1.0
    return lines


if __name__ == "__main__":
    sys.exit(main())

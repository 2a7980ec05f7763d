"""What overlapping costs in learning: the quickstart's task under each schedule, with and without the correction.

    python benchmarks/schedule_learning.py

For each seed, the quickstart's model is warmed up as in the quickstart, and then trained by GRPO with its config under
each schedule, for the same number of samples. accuracy_*: of greedy answers to the held-out problems at the end, as a
mean over the seeds. The bar is for the default correction: the accuracy may be at most 0.02 below that of colocated.
At the end all runs may have reached the task's maximum, so two figures show how fast they learned: accuracy_early_*,
after EARLY_STEPS steps, and reward_*, the mean reward of all samples of the training.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import ROOT, Report, parser

import meshrl

QUICKSTART = ROOT / "examples" / "quickstart"
SPLIT = ("cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "colocated": (),
    "one_step_off": ("loop.kind=one_step_off", *SPLIT),
    "fully_async_1": ("loop.kind=fully_async", "loop.max_staleness=1", *SPLIT),
    "fully_async_2": ("loop.kind=fully_async", "loop.max_staleness=2", *SPLIT),
    "fully_async_4": ("loop.kind=fully_async", "loop.max_staleness=4", *SPLIT),
}
EARLY_STEPS = 12
SMOKE_SFT = ("sft.num_steps=2", "train.scheduler.warmup_steps=0")
SMOKE_RL = ("loop.num_steps=2", "loop.prompts_per_step=4", "data.eval_limit=8", "train.scheduler.warmup_steps=0")


def warm_model(seed: int, folder: Path, smoke: bool) -> Path:
    """The quickstart's model after its warm-up."""
    start = folder / "start"
    subprocess.run([sys.executable, str(QUICKSTART / "task.py"), "--out", str(start), "--seed", str(seed)], check=True)
    overrides = [f"model.path={start}", f"sft.path={start}/warmup.jsonl", f"run.folder={folder}", f"run.seed={seed}"]
    run = meshrl.sft(QUICKSTART / "sft.yaml", [*overrides, *(SMOKE_SFT if smoke else ())], quiet=True)
    return Path(run.summary["model"])


def train(name: str, seed: int, model: Path, folder: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    data = [f"data.path={folder}/start/train.jsonl", f"data.eval_path={folder}/start/heldout.jsonl"]
    own = [f"model.path={model}", f"run.folder={folder}", f"run.name={name}", f"run.seed={seed}", *data]
    every = f"loop.eval_every_steps={EARLY_STEPS}"
    run = meshrl.train(QUICKSTART / "grpo.yaml", [*own, every, *overrides], quiet=True)
    accuracy = {e["step"]: e["mean_at_k"] for e in run.summary["evals"]}

    def mean(metric: str) -> float:
        values = run.metrics.get(metric, [])
        return float(np.mean(values)) if values else 0.0

    return {
        "accuracy": accuracy[max(accuracy)],
        "accuracy_early": accuracy[min(max(accuracy), EARLY_STEPS)],
        "reward": float(np.mean(run.metrics["reward/mean"])),
        "staleness_p95": mean("rollout/staleness_versions/p95"),
        "effective_sample_size": mean("correction/effective_sample_size"),
    }


def main() -> None:
    p = parser(__doc__, rounds=3)
    p.add_argument("--only", nargs="+", choices=list(SCHEDULES), help="only these schedules")
    args = p.parse_args()
    if args.smoke:
        args.rounds, args.only = 1, ["colocated", "fully_async_1"]
    sys.path.insert(0, str(ROOT))  # the reward is in examples/
    report = Report("schedule_learning", args)
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(args.rounds):
        folder = Path(tempfile.mkdtemp(prefix=f"learning-{seed}-"))
        model = warm_model(seed, folder, args.smoke)
        contenders = [(s, kind) for s in args.only or SCHEDULES for kind in ("auto", "off")]
        random.Random(seed).shuffle(contenders)
        for schedule, correction in contenders:
            if schedule == "colocated" and correction == "off":
                continue  # the same as auto
            name = schedule if correction == "auto" else f"{schedule}_uncorrected"
            options = (*SCHEDULES[schedule], f"algo.correction={correction}", *(SMOKE_RL if args.smoke else ()))
            result = train(name, seed, model, folder, options)
            found.setdefault(name, []).append(result)
            shown = ", ".join(f"{what} {value:.3f}" for what, value in result.items())
            report.print_line(f"seed {seed} {name}: {shown}")
    report.raw["runs"] = found
    for name in sorted(found):
        for what in ("accuracy", "accuracy_early", "reward", "staleness_p95", "effective_sample_size"):
            report.figure(f"{what}_{name}", float(np.mean([r[what] for r in found[name]])))
        accuracies = [r["accuracy"] for r in found[name]]
        report.figure(f"spread_{name}", max(accuracies) - min(accuracies))
    for name in sorted(found):
        if name != "colocated" and not name.endswith("_uncorrected"):
            below = report.figures["accuracy_colocated"] - report.figures[f"accuracy_{name}"]
            report.bar(f"accuracy_below_colocated_{name}", below, at_most=0.02)
    report.finish()


if __name__ == "__main__":
    main()

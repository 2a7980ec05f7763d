"""Fully asynchronous against colocated, when a few answers are ten times as long as the others.

    python benchmarks/async_rl.py

The task is in countdown.py: the prompt decides how long the right answer is, and 5 % of the prompts ask for an answer
ten times as long as the median. Both contenders train the same warmed-up model on the same prompts, on two cores:

    colocated       loop.kind colocated in its faster layout: two ranks with one core each, or one rank with both
    fully_async     one train rank and one sampler with one core each, loop.oversampling 0

They take turns in complete runs, for several seeds. samples_per_s: scored answers that were trained, from the end of
the third step to the end of the run. reward: the mean over the last quarter of the steps; it must be equal within the
spread over the seeds. The answers of fully_async may be at most 5 % shorter than those of colocated: with a learning
rate of 3e-4 the model forgot long answers, and each contender in its own way (always 256 tokens, or 20). A step of
colocated waits for its longest answer while most rows of its decoding are empty.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import countdown
import numpy as np
from measure import Report, median, paired_ratio, parser

import meshrl

FIRST = 2  # steps that are not measured
LEARNING_RATE = 3e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "colocated_2": {"loop": {"kind": "colocated"}, "cluster": {"num_train_ranks": 2}},
    "colocated_1": {"loop": {"kind": "colocated"}, "cluster": {"num_train_ranks": 1}},
    "fully_async": {"loop": {"kind": "fully_async"}, "cluster": {"num_train_ranks": 1, "num_rollout_ranks": 1}},
}
SHOWN = (
    "run/train_idle",
    "run/rollout_idle",
    "rollout/staleness_versions/p50",
    "rollout/staleness_versions/p95",
    "rollout/groups_dropped",
    "correction/effective_sample_size",
    "proof/checked_fraction",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
    "time/wait_s",
)


def run(layout: str, model: Path, folder: Path, seed: int, args: Any) -> dict[str, Any]:
    """A complete run. Returns samples per second, the final reward, and means over the measured steps."""
    config = countdown.settings(
        model,
        Path(tempfile.mkdtemp(dir=folder)),
        layout,
        args.steps,
        prompts_per_step=args.prompts,
        samples_per_prompt=args.samples,
        **LAYOUTS[layout]["loop"],
    )
    config["cluster"] = LAYOUTS[layout]["cluster"]
    config["run"]["seed"] = seed
    config["train"]["optimizer"]["lr"] = LEARNING_RATE
    if layout == "fully_async":
        config["loop"]["max_staleness"] = args.max_staleness
    rows = countdown.rows(args.prompts * args.steps, seed)
    found = meshrl.train(config, data=rows, rewards={"countdown": countdown.reward}, quiet=True)
    lines = [line for line in found.lines if "reward/mean" in line.metrics]
    seconds = lines[-1].time - lines[FIRST].time
    rewards = [line.metrics["reward/mean"] for line in lines]
    last = lines[-max(1, args.steps // 4) :]
    measured = [line.metrics for line in lines[FIRST + 1 :]]
    ages = [m.get("rollout/staleness_versions/p95", 0.0) for m in measured]
    return {
        "samples_per_s": len(measured) * args.prompts * args.samples / seconds,
        "reward": float(np.mean(rewards[-len(last) :])),
        "length_mean": float(np.mean([line.metrics["rollout/length_mean_tokens"] for line in lines])),
        "length_mean_at_the_end": float(np.mean([line.metrics["rollout/length_mean_tokens"] for line in last])),
        "length_max": float(np.mean([line.metrics["rollout/length_max_tokens"] for line in lines])),
        "rewards": rewards,
        "histogram_of_p95_staleness": np.bincount(np.rint(ages).astype(int)).tolist(),
        **{name: float(np.mean([m.get(name, 0.0) for m in measured])) for name in SHOWN},
    }


def main() -> None:
    p = parser(__doc__, rounds=3)
    p.add_argument("--shape", default="0.9M", choices=list(countdown.SHAPES), help="of the model (default 0.9M)")
    p.add_argument("--prompts", type=int, default=24, help="prompts of a step (default 24)")
    p.add_argument("--samples", type=int, default=2, help="answers to a prompt (default 2)")
    p.add_argument("--steps", type=int, default=120, help="steps of a run (default 120)")
    p.add_argument("--warm-up", type=int, default=250, help="steps of the supervised warm-up (default 250)")
    p.add_argument("--max-staleness", type=int, default=4, help="of fully_async (default 4)")
    args = p.parse_args()
    if args.smoke:
        args.shape, args.steps, args.prompts, args.warm_up, args.rounds = "smoke", 5, 2, 2, 1
    report = Report("async_rl", args)
    folder = Path(tempfile.mkdtemp(prefix="async-rl-"))
    model = args.model or countdown.warm_model(folder / "warm", args.shape, args.warm_up)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    for seed in range(args.rounds):
        for layout in list(LAYOUTS) if seed % 2 == 0 else list(LAYOUTS)[::-1]:
            result = run(layout, model, folder, seed, args)
            found[layout].append(result)
            shown = ", ".join(f"{k.partition('/')[2] or k} {v:.3g}" for k, v in result.items() if isinstance(v, float))
            report.print_line(f"seed {seed} {layout}: {shown}; {result['histogram_of_p95_staleness']}")
    report.raw["runs"] = found
    speeds = {name: [r["samples_per_s"] for r in runs] for name, runs in found.items()}
    rewards = {name: [r["reward"] for r in runs] for name, runs in found.items()}
    fastest = max(("colocated_1", "colocated_2"), key=lambda name: median(speeds[name]))
    for name, runs in found.items():
        report.figure(f"samples_per_s_{name}", median(speeds[name]))
        for key in ("reward", "length_mean", "length_mean_at_the_end", "length_max"):
            report.figure(f"{key}_{name}", float(np.mean([r[key] for r in runs])))
    report.print_line(f"the faster colocated layout: {fastest}")
    speed_up = report.figure("speed_up", paired_ratio(speeds["fully_async"], speeds[fastest]))
    difference = float(np.mean(rewards[fastest]) - np.mean(rewards["fully_async"]))
    lengths = [np.mean([r["length_mean"] for r in found[name]]) for name in ("fully_async", fastest)]
    length_ratio = report.figure("length_of_fully_async_to_colocated", float(lengths[0] / lengths[1]))
    spread = max(np.ptp(rewards[fastest]), np.ptp(rewards["fully_async"]))
    report.figure("reward_below_colocated", difference)
    report.figure("reward_spread_over_seeds", float(spread))
    for name in SHOWN:
        report.figure(f"fully_async_{name}", float(np.mean([r[name] for r in found["fully_async"]])))
    if args.shape == "5M":
        report.print_line("no bar: at 5M the trainer is the slower side")
    else:
        report.bar("speed_up", speed_up, at_least=2.0)
        report.bar("length_of_fully_async_to_colocated", length_ratio, at_least=0.95)
        report.bar("reward_below_colocated", difference, at_most=max(0.02, float(spread)))
    report.finish()


if __name__ == "__main__":
    main()

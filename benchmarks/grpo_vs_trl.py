"""GRPO from end to end: meshrl against TRL's GRPOTrainer, with the same model, prompts and settings.

    python benchmarks/grpo_vs_trl.py --model MODEL --data train.jsonl            # speed and memory, three pairs
    python benchmarks/grpo_vs_trl.py --model MODEL --data train.jsonl --curve    # and 60 steps of each: the reward
    python benchmarks/grpo_vs_trl.py --model MODEL --data train.jsonl --probe    # find the fastest settings here
    python benchmarks/grpo_vs_trl.py --model MODEL --data train.jsonl --even-start --dtype float32 --steps 2

Same in both: prompts and their order, chat template, 8 prompts x 8 answers of at most 256 tokens, rewards, advantage,
loss, optimizer, learning rate, compute dtype, fp32 masters, threads. Each trainer has its fastest settings on this
machine (README.md lists those that were tried). A pair is one run of each trainer, one right after the other; the first
step of a run is a warm-up and not counted. Without --model and --data, stand_in.py makes a model with random weights.

length_difference: of the tokens of a sample, which must be equal for samples/s to be comparable.
first_step_difference: of the share of weights that the first step changed by lr: both must train fp32 weights.
ratio_samples_per_s: meshrl over TRL; all_scored: of further runs of meshrl, in which each answer without a gradient is
scored, too; no_forward_fraction: the answers that are not. ratio_peak_memory: meshrl over TRL, PSS of the process tree.
reward_gap: distance of the two reward curves, mean over the second half of the steps (see `gap`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from first_step import share_moved
from measure import ROOT, Report, median, paired_ratio, parser
from runs import OPTIMIZER, TrainingRun, TrainingTask, objective, rows_for, run_meshrl, run_trl
from stand_in import stand_in

from meshrl.model.recipe import load_causal_lm
from meshrl.train.checkpoint_files import state_folder
from meshrl.train.state import load_model

# By default TRL's paged generation takes half of the memory and reads all of it in each step. 16 requests at a time are
# fastest, because its attention on a CPU compares each request with the tokens of all running requests.
PAGED = {"page_size": 32, "num_blocks": 512, "max_batch_tokens": 1024, "max_requests_per_batch": 16}
TRL_BEST: dict[str, Any] = {"micro_batch": 16, "num_ranks": 2, "continuous_batching": PAGED}
MESHRL_BEST = {"num_ranks": 2}
# Of a model whose matrix products take most of the time: plain `generate` in TRL, and in meshrl one process with both
# threads. TRL needs a third less time with two processes (results/grpo_vs_trl_probe_real_model_20261125.json).
LARGE_MODEL_BYTES = 200e6
TRL_LARGE: dict[str, Any] = {"micro_batch": 4, "num_ranks": 2, "continuous_batching": None}
MESHRL_LARGE = {"num_ranks": 1}
SAME_REWARD = 0.03  # difference between two seeds of one trainer after 60 steps; a right answer has reward 1


def main() -> None:
    p = parser(__doc__, rounds=3)
    p.add_argument("--data", type=Path, help="GSM8K's train.jsonl, or its folder; default: the rows in examples/data")
    p.add_argument("--steps", type=int, default=12, help="steps of a run; the first is not counted (default 12)")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="compute dtype of both")
    p.add_argument("--curve", action="store_true", help="also run 60 steps of each, for the reward curves")
    p.add_argument("--even-start", action="store_true", help="reward answers that begin with an even character")
    p.add_argument("--probe", action="store_true", help="only try settings of each trainer, without a comparison")
    p.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python", help="TRL's environment")
    args = p.parse_args()
    if not args.trl_python.exists():
        p.error(f"{args.trl_python} does not exist; benchmarks/README.md describes how to install TRL in .venv-trl")
    if args.smoke:
        args.rounds, args.steps = 1, 3
    report = Report("grpo_vs_trl", args)
    args.objective = objective(args.model, args.even_start)
    args.model, args.data = stand_in(args.model, args.data, args.smoke)
    with tempfile.TemporaryDirectory(prefix="grpo-vs-trl-") as folder:
        if args.probe:
            probe(report, args, Path(folder))
        else:
            compare(report, args, Path(folder))


def compare(report: Report, args: Any, folder: Path) -> None:
    """Pairs of short runs; with --curve also one pair of long runs."""
    compare_first_step(report, args, folder / "first_step")
    task = make_task(args, folder, args.steps)
    pairs: list[tuple[TrainingRun, TrainingRun]] = []
    all_scored: list[tuple[TrainingRun, TrainingRun]] = []
    for i in range(args.rounds):
        pairs.append(pair(replace(task, seed=i), args, folder / str(i), first_trl=i % 2 == 1))
        record(report, f"pair_{i}", pairs[-1], task)
        ours, _ = best_settings(args)
        everything = run_meshrl(replace(task, seed=i), folder / str(i) / "all_scored", **ours, scores_all=True)
        all_scored.append((everything, pairs[-1][1]))
        report.raw[f"pair_{i}_all_scored"] = {**asdict(everything), "cpu": None}
    speed = report.figure("ratio_samples_per_s", ratio_of(pairs, lambda r: r.samples_per_s(samples(task))))
    report.figure("ratio_samples_per_s_all_scored", ratio_of(all_scored, lambda r: r.samples_per_s(samples(task))))
    steps = [step for ours, _ in pairs for step in ours.steps[1:]]
    report.figure("no_forward_fraction", median([s.metrics.get("train/no_forward_fraction", 0.0) for s in steps]))
    report.figure("ratio_tokens_per_s", ratio_of(pairs, TrainingRun.tokens_per_s))
    memory = report.figure("ratio_peak_memory", ratio_of(pairs, lambda r: r.peak_pss_bytes))
    for name, side in (("meshrl", 0), ("trl", 1)):
        report.figure(f"samples_per_s_{name}", median([p[side].samples_per_s(samples(task)) for p in pairs]))
        report.figure(f"tokens_per_s_{name}", median([p[side].tokens_per_s() for p in pairs]))
        report.figure(f"peak_memory_bytes_{name}", max(p[side].peak_pss_bytes for p in pairs))
        report.figure(f"peak_rss_bytes_{name}", max(p[side].peak_rss_bytes for p in pairs))
    report.bar("ratio_samples_per_s", speed, at_least=3.0)
    report.bar("ratio_peak_memory", memory, at_most=1.0)
    compare_lengths(report, pairs, samples(task))
    if args.curve:
        pairs = [pair(make_task(args, folder, 6 if args.smoke else 60), args, folder / "curve", first_trl=False)]
        record(report, "curve", pairs[0], task)
    value, noise = gap(pairs)
    report.figure("reward_gap_noise", noise)
    report.bar("reward_gap", report.figure("reward_gap", value), at_most=noise)
    report.finish(headline=("ratio_samples_per_s", "ratio_peak_memory", "reward_gap"))


def compare_lengths(report: Report, pairs: Sequence[tuple[TrainingRun, TrainingRun]], samples_per_step: int) -> None:
    """Tokens of a sample on both sides, over all steps: with other lengths, samples/s would compare different work."""
    ours, theirs = (
        sum(step.tokens for p in pairs for step in p[side].steps)
        / (samples_per_step * sum(len(p[side].steps) for p in pairs))
        for side in (0, 1)
    )
    report.figure("tokens_per_sample_meshrl", ours)
    report.figure("tokens_per_sample_trl", theirs)
    report.bar("length_difference", report.figure("length_difference", abs(ours / theirs - 1)), at_most=0.05)


def compare_first_step(report: Report, args: Any, folder: Path) -> None:
    """A run of one step of each: the share of the weights that it changed by lr, at the learning rate of GSM8K."""
    folder.mkdir()
    runs = pair(replace(make_task(args, folder, 1), optimizer=OPTIMIZER), args, folder, first_trl=False)
    report.raw |= {f"first_step_{name}": {**asdict(run), "cpu": None} for name, run in zip(("meshrl", "trl"), runs)}
    before, after = (load_causal_lm(args.model, dtype=torch.float32) for _ in range(2))
    load_model(state_folder(folder / "meshrl" / "run" / "checkpoints", 1), "policy", after)
    ours = share_moved(before.parameters(), after.parameters(), OPTIMIZER["lr"])
    theirs = runs[1].steps[0].metrics["share_moved"]
    report.figure("first_step_share_moved_meshrl", ours)
    report.figure("first_step_share_moved_trl", theirs)
    report.bar("first_step_difference", report.figure("first_step_difference", abs(ours - theirs)), at_most=0.05)


def make_task(args: Any, folder: Path, steps: int) -> TrainingTask:
    small = dict(prompts_per_step=2, samples_per_prompt=4, max_new_tokens=16) if args.smoke else {}
    num_rows = steps * small.get("prompts_per_step", 8)
    return TrainingTask(
        model=str(args.model.resolve()),
        data=str(rows_for(args.model, args.data, num_rows, folder / f"rows_{steps}.jsonl")),
        **args.objective,
        dtype=args.dtype,
        num_steps=steps,
        threads=args.threads,
        **small,
    )


def samples(task: TrainingTask) -> int:
    return task.prompts_per_step * task.samples_per_prompt


def pair(task: TrainingTask, args: Any, folder: Path, first_trl: bool) -> tuple[TrainingRun, TrainingRun]:
    """(meshrl's run, TRL's run), in either order."""
    ours, theirs = best_settings(args)
    theirs = fitting(theirs, task)
    if first_trl:
        trl = run_trl(task, folder / "trl", args.trl_python, theirs)
        return run_meshrl(task, folder / "meshrl", **ours), trl
    return run_meshrl(task, folder / "meshrl", **ours), run_trl(task, folder / "trl", args.trl_python, theirs)


def best_settings(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fastest settings of meshrl and of TRL for this model."""
    is_large = sum(file.stat().st_size for file in args.model.glob("*.safetensors")) > LARGE_MODEL_BYTES
    return (MESHRL_LARGE, TRL_LARGE) if is_large else (MESHRL_BEST, TRL_BEST)


def fitting(settings: dict[str, Any], task: TrainingTask) -> dict[str, Any]:
    """TRL's settings with at most as many rows in a micro-batch as a rank has in a step."""
    return {**settings, "micro_batch": min(settings["micro_batch"], samples(task) // settings["num_ranks"])}


def record(report: Report, name: str, runs: tuple[TrainingRun, TrainingRun], task: TrainingTask) -> None:
    for trainer, run in zip(("meshrl", "trl"), runs, strict=True):
        report.raw[f"{name}_{trainer}"] = {**asdict(run), "cpu": None}
        report.print_line(
            f"{name} {trainer}: {run.samples_per_s(samples(task)):.2f} samples/s, {run.tokens_per_s():.0f} tokens/s, "
            f"{run.peak_pss_bytes / 2**20:.0f} MiB, reward {run.steps[0].reward:.3f} .. {run.steps[-1].reward:.3f}"
        )


def ratio_of(pairs: Sequence[tuple[TrainingRun, TrainingRun]], figure: Any) -> Any:
    return paired_ratio([figure(ours) for ours, _ in pairs], [figure(theirs) for _, theirs in pairs])


def gap(pairs: Sequence[tuple[TrainingRun, TrainingRun]]) -> tuple[float, float]:
    """(distance of the reward curves, the distance that noise explains).

    Both trainers get the same prompts in the same step, so a step's mean rewards differ only because of the policies
    and the sampling. The distance is the mean difference over the second half of the steps. The noise is three standard
    errors of it, and at least SAME_REWARD, the difference that two seeds of one trainer can have.
    """
    differences = np.array(
        [
            ours.steps[i].reward - theirs.steps[i].reward
            for ours, theirs in pairs
            for i in range(len(ours.steps) // 2, len(ours.steps))
        ]
    )
    error = differences.std(ddof=1) / len(differences) ** 0.5
    return float(abs(differences.mean())), float(max(SAME_REWARD, 3 * error))


def probe(report: Report, args: Any, folder: Path) -> None:
    """Samples/s of each trainer with different settings, in --dtype. One run each: ignore differences of 5 %."""
    task = make_task(args, folder, args.steps)
    tries: list[dict[str, Any]] = [
        {"micro_batch": rows, "num_ranks": ranks, "continuous_batching": None}
        for ranks in (1, 2)
        for rows in (8, 16, 32)
    ]
    tries += [{"micro_batch": 16, "num_ranks": ranks, "continuous_batching": PAGED} for ranks in (1, 2)]
    for i, settings in enumerate(tries[:1] if args.smoke else tries):
        run = run_trl(task, folder / f"trl_{i}", args.trl_python, fitting(settings, task))
        name = f"{settings['micro_batch']}_rows_{settings['num_ranks']}_ranks"
        name += "_paged" if settings["continuous_batching"] else ""
        report.figure(f"samples_per_s_trl_{args.dtype}_{name}", run.samples_per_s(samples(task)))
    for ranks in (1, 2):
        run = run_meshrl(task, folder / f"meshrl_{ranks}", ranks)
        report.figure(f"samples_per_s_meshrl_{args.dtype}_{ranks}_ranks", run.samples_per_s(samples(task)))
    report.finish()


if __name__ == "__main__":
    main()

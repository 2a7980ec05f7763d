"""The overhead of the train engine over plain loops, its communication, and the CPU time of the controller.

    python benchmarks/engine_overhead.py

A training step (forward and backward over all micro-batches, clip, AdamW) on one rank. The contenders take turns with
the same packed batches:

    engine        TrainEngine.forward_backward and optim_step, with the policy loss and its metrics
    bare          bare_fsdp2.py: a loop of 60 lines with the same model, attention, head and optimizer
    bare_no_ent   bare without the entropy, which the head also computes, to show the cost of that metric

engine_overhead: CPU time of engine over bare, minus 1, median over rounds.

overhead_AXIS: the same for each axis of the mesh, on two ranks with one thread each, in fp32, without activation
checkpointing; CPU time of both ranks. The bare loops are bare_fsdp2.py, bare_ulysses.py and bare_tp.py, of 60 to 100
lines, with the same attention, head and optimizer. overhead_tp_plain: over bare_tp.py without FSDP2, which the
engine does not use for ranks of tp alone.

bytes_AXIS: the bytes that a rank gives to collectives in a step, by mesh_bytes.py, and bytes_off_AXIS their distance to
the axis's formula, which must be 0; _recomputed: with activation checkpointing.

controller_share: in a real `meshrl train` run of two ranks, CPU seconds of the controller's process over wall seconds,
from the end of the first step to the end of the last. The controller plans batches, flattens, computes advantages,
packs messages and writes logs. Graders are separate processes and not counted. no_rank_share: wall time of the same
steps outside of rollout, train and sync (by the run's own metrics), when ranks wait for the controller and the graders.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from axes import axes
from bare_fsdp2 import BareLoop
from measure import Report, alternate, median, paired_ratio, parser
from runs import TrainingRun, TrainingTask, objective, rows_for, run_meshrl
from stand_in import stand_in
from workload import micro_batches, model_folder, start_single_rank

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY
from meshrl.model.recipe import DTYPES, load_causal_lm
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

LR = 1e-5


def main() -> None:
    p = parser(__doc__, rounds=11)
    p.add_argument("--data", type=Path, help="GSM8K's train.jsonl, or its folder, for the controller's run")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="compute dtype")
    p.add_argument("--steps", type=int, default=6, help="steps of the controller's run; the first is not counted")
    p.add_argument("--only", choices=["engine", "axes", "controller"], help="run one of the parts")
    args = p.parse_args()
    if args.smoke:
        args.rounds, args.steps = 2, 3
    report = Report("engine_overhead", args)
    for part in (engine, axes, controller):
        if args.only in (None, part.__name__):
            part(report, args)
    report.finish()


def engine(report: Report, args: Any) -> None:
    """Steps of the engine and of the bare loop, on batches of 32 rows (4 groups of 8) in two micro-batches."""
    mesh = start_single_rank(args.threads)
    folder = model_folder(args.model, "smoke" if args.smoke else "5M")
    cfg = TrainConfig(activation_checkpointing=False)
    ours = TrainEngine.wrap(load_causal_lm(folder), cfg, mesh, POLICY, DTYPES[args.dtype])
    bare = BareLoop(folder, DTYPES[args.dtype], LR, cfg.logprob_chunk_tokens)
    loss = make_policy_loss(AlgoConfig())
    work = {i: batches(i, args.smoke) for i in range(-1, args.rounds)}

    def engine_step(i: int) -> float:
        ours.forward_backward(work[i], loss)
        return ours.optim_step(LR).grad_norm

    norms = engine_step(-1), bare.step(work[-1])
    if not np.isclose(*norms, rtol=1e-3 if args.dtype == "float32" else 5e-2):
        raise SystemExit(f"gradient norms differ: {norms}; the two don't compute the same")
    contenders = {
        "engine": engine_step,
        "bare": lambda i: bare.step(work[i]),
        "bare_no_ent": lambda i: bare.step(work[i], entropy=False),
    }
    took = alternate(contenders, args.rounds)
    report.add_timings(f"step_{args.dtype}", took)
    cpu = {name: [t.cpu_s for t in timings] for name, timings in took.items()}
    wall = {name: [t.wall_s for t in timings] for name, timings in took.items()}
    for name in took:
        report.figure(f"cpu_s_{name}", median(cpu[name]))
        report.figure(f"wall_s_{name}", median(wall[name]))
    value = report.figure("engine_overhead", minus_one(paired_ratio(cpu["engine"], cpu["bare"])))
    report.figure("engine_overhead_wall", minus_one(paired_ratio(wall["engine"], wall["bare"])))
    report.figure("entropy_cost", minus_one(paired_ratio(cpu["bare"], cpu["bare_no_ent"])))
    report.bar("engine_overhead", value, at_most=0.05)
    torch.distributed.destroy_process_group()


def batches(i: int, smoke: bool) -> list[Any]:
    """The packed micro-batches of round i; every call returns the same ones."""
    samples, (rows,) = micro_batches(i, smoke)
    return [pack([samples[r] for r in micro], micro) for micro in rows]


def minus_one(ratio: Any) -> Any:
    return type(ratio)(ratio.value - 1, ratio.low - 1, ratio.high - 1)


def controller(report: Report, args: Any) -> None:
    """A real run of two ranks, measured from outside."""
    model, data = stand_in(args.model, args.data, args.smoke)
    small = dict(prompts_per_step=2, samples_per_prompt=4, max_new_tokens=16) if args.smoke else {}
    with tempfile.TemporaryDirectory(prefix="engine-overhead-") as name:
        folder = Path(name)
        num_rows = args.steps * small.get("prompts_per_step", 8)
        task = TrainingTask(
            model=str(model.resolve()),
            data=str(rows_for(model, data, num_rows, folder / "rows.jsonl")),
            **objective(args.model),
            num_steps=args.steps,
            threads=args.threads,
            dtype=args.dtype,
            **small,
        )
        run = run_meshrl(task, folder / "meshrl")
    report.raw["controller_run"] = asdict(run)
    report.figure("step_s", run.seconds_after_first() / (len(run.steps) - 1))
    for phase in ("rollout", "reward", "train", "sync"):
        report.figure(f"share_{phase}", phase_share(run, phase))
    report.figure("no_rank_share", 1 - sum(phase_share(run, phase) for phase in ("rollout", "train", "sync")))
    value = report.figure("controller_share", run.cpu_s_after_first() / run.seconds_after_first())
    report.bar("controller_share", value, at_most=0.03)


def phase_share(run: TrainingRun, phase: str) -> float:
    return sum(s.metrics[f"time/{phase}_s"] for s in run.steps[1:]) / run.seconds_after_first()


if __name__ == "__main__":
    main()

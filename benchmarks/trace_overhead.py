"""The cost of recording spans, which every run does, and of torch.profiler (monitor.trace_steps).

    python benchmarks/trace_overhead.py

A training step (forward and backward over two micro-batches, clip, AdamW) on two ranks with gloo and FULL_SHARD. The
contenders take turns with the same batches:

    recorded    as in a run: spans of phases, computation and collectives, memory samples, the metrics of the step
    plain       FSDP2's own collectives, and no spans
    profiled    recorded, and torch.profiler is active

recorded_overhead, profiled_overhead: CPU time of rank 0 over that of plain, minus 1, median over rounds.
spans_overhead: the number of spans of a step times the CPU time of one span, with a memory sample, over the CPU time of
a plain step. The noise of the steps is far larger than this figure, so the bar is for it.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measure import Report, alternate, median, paired_ratio, parser
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from workload import gsm8k_groups, model_folder, training_samples

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY
from meshrl.model.recipe import load_causal_lm
from meshrl.monitor.recorder import RING, TRACED, recorder
from meshrl.parallel.mesh import build_mesh
from meshrl.process.diagnosis import own_memory
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

WORLD = 2
NUM_TIMED_SPANS = 20_000


def main() -> None:
    p = parser(__doc__, rounds=21)
    args = p.parse_args()
    if args.smoke:
        args.rounds = 2
    folder = model_folder(args.model, "smoke" if args.smoke else "5M")
    with tempfile.TemporaryDirectory(prefix="trace-overhead-") as store:
        torch.multiprocessing.spawn(rank_main, (args, folder, f"{store}/store"), nprocs=WORLD)


def rank_main(rank: int, args: Any, folder: Path, store: str) -> None:
    report = Report("trace_overhead", args) if rank == 0 else None
    torch.set_num_threads(max(1, args.threads // WORLD))
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    steps = Steps(folder, args.smoke)
    took = alternate({"plain": steps.plain, "recorded": steps.recorded, "profiled": steps.profiled}, args.rounds)
    if report is not None:
        report.add_timings("step", took)
        cpu = {name: [t.cpu_s for t in timings] for name, timings in took.items()}
        for name in took:
            report.figure(f"cpu_s_{name}", median(cpu[name]))
        for name in ("recorded", "profiled"):
            ratio = paired_ratio(cpu[name], cpu["plain"])
            report.figure(f"{name}_overhead", type(ratio)(ratio.value - 1, ratio.low - 1, ratio.high - 1))
        span_s = seconds_of_a_span()
        report.figure("spans_of_a_step", float(steps.num_spans))
        report.figure("us_of_a_span", span_s * 1e6)
        value = report.figure("spans_overhead", steps.num_spans * span_s / median(cpu["plain"]))
        report.bar("spans_overhead", value, at_most=0.01)
        report.finish()
    dist.barrier()
    dist.destroy_process_group()


class Steps:
    """Two engines with the same weights; one of them has FSDP2's own collectives."""

    def __init__(self, folder: Path, smoke: bool):
        mesh = build_mesh((1, WORLD, 1, 1), "cpu")
        cfg = TrainConfig(activation_checkpointing=False)
        make = lambda: TrainEngine.wrap(load_causal_lm(folder), cfg, mesh, POLICY, torch.float32)  # noqa: E731
        self.without, self.engine = make(), make()
        for module in self.without.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(DefaultAllGather())
                module.set_custom_reduce_scatter(DefaultReduceScatter())
        samples = training_samples(gsm8k_groups(2, 2 if smoke else 8, seed=1, scale=0.1 if smoke else 1.0), seed=1)
        halves = (range(0, len(samples), 2), range(1, len(samples), 2))
        self.batches = [pack([samples[i] for i in rows], list(rows)) for rows in halves]
        self.loss = make_policy_loss(AlgoConfig())
        self.num_spans = 0

    def plain(self, i: int) -> None:
        with (
            mock.patch("meshrl.train.engine.timed", lambda *_, **__: nullcontext()),
            mock.patch("meshrl.train.optim.timed_collective", lambda *_: nullcontext()),
            mock.patch("meshrl.parallel.fsdp.timed_collective", lambda *_: nullcontext()),
        ):
            self._step(self.without)

    def recorded(self, i: int) -> None:
        recorder.clear(RING)
        recorder.measure = own_memory
        with recorder.span("train", "phase"):
            self._step(self.engine)
        recorder.step_metrics(blocking=True)
        self.num_spans = len(recorder.trace(0).spans)

    def profiled(self, i: int) -> None:
        recorder.clear(TRACED)
        recorder.annotate = torch.profiler.record_function
        profiler = torch.profiler.profile()
        profiler.start()
        self._step(self.engine)
        profiler.stop()
        recorder.annotate = nullcontext

    def _step(self, engine: TrainEngine) -> None:
        engine.forward_backward(self.batches, self.loss)
        engine.optim_step(1e-5)


def seconds_of_a_span() -> float:
    """CPU time of one recorded span with its facts, and with the memory sample of a phase."""
    recorder.clear(RING)
    recorder.measure = own_memory
    began = time.process_time()
    for _ in range(NUM_TIMED_SPANS):
        with recorder.span("train", "phase", bytes=1, dtype="float32", group=2, phase="train"):
            pass
    return (time.process_time() - began) / NUM_TIMED_SPANS


if __name__ == "__main__":
    main()

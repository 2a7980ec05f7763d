"""GRPO steps of a model of 0.5B's shape on one GPU, colocated, and the rate of the weight sync.

    python benchmarks/gpu_step.py

A step is that of a run, with the same groups (executor inline): sample groups of 8, reward, flatten, advantages, one
update with the sampler's proof before it, sync with digests. Weights are random; the reward is a share of the answer's
tokens; the number of tokens of each answer is fixed in advance, by GSM8K's lengths. The first step is a warm-up.

sync_gb_per_s: bytes of the weights in bf16 over seconds of a complete sync with all proofs; sync_over_copy: over the
same rate of a bare copy within the device. A sync reads the fp32 masters, writes bf16, and reads it back for its proof,
8 bytes where a copy of bf16 moves 4: at most 0.5. step_peak_gib_PHASE: peak of the device's memory in that
phase. ..._released: of steps that release the sampler's memory for training, as a run does by default.

step_s: the sum of the three phases; step_wall_s: from the first request to the end of the sync. The table at the end
has these times over the roofline of gpu_predict.py (over roofline), and the roofline over these times (of sheet); of
GEMM: the same with the rate of a large matrix product in this process in place of the data sheet's FLOP/s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gpu_predict
import gpu_table
import numpy as np
import torch
from gpu_predict import Roofline, predict, roofline_of, shape_of
from gpu_workload import GEMM, gpu_parser, measure_copy, measure_gemm, model_folder, peak_bytes, start
from measure import Report, median
from transformers import AutoConfig
from workload import VOCAB, GroupLengths, gsm8k_groups

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.algo.losses import make_policy_loss
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.launch import launched
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.cluster.train_group import TrainGroup
from meshrl.cluster.weight_sync import sync_weights
from meshrl.config.algo import AlgoConfig
from meshrl.config.cluster import ClusterConfig
from meshrl.config.data import DataConfig
from meshrl.config.loop import LoopConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import RunConfig
from meshrl.config.train import TrainConfig
from meshrl.core.device import reset_peak_memory, synchronize
from meshrl.core.types import Prompt, Request, SamplingParams, Trajectory, Turn, turn_seed
from meshrl.loops.sync_and_probe import SamplerProof
from meshrl.monitor.metrics import divide, merge
from meshrl.monitor.recorder import Spans
from meshrl.sync.layout import Layout

SYNCS = 5
PHASES = ("rollout", "train", "sync")


class Steps:
    """GRPO steps, written out, with the seconds and the peak memory of each phase."""

    def __init__(self, trainer: TrainGroup, rollouts: RolloutGroup, layout: Layout, device: torch.device, args: Any):
        self.trainer, self.rollouts, self.layout, self.device = trainer, rollouts, layout, device
        self.num_groups, self.scale = (2, 0.1) if args.smoke else (args.prompts, 1.0)
        self.algo, self.proof, self.spans = AlgoConfig(), SamplerProof(), Spans()
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        reset_peak_memory(self.device)
        with self.spans(name):
            yield
            synchronize(self.device)
        self.peaks[name] = peak_bytes(self.device)

    async def sync(self) -> None:
        with self.phase("sync"):
            await sync_weights(self.trainer, self.rollouts, self.layout)

    async def step(self, ordinal: int, release: bool = False) -> dict[str, float]:
        """Sample, train, sync. Returns the seconds of each phase and of all, and counts. release: the sampler's
        memory."""
        began = time.perf_counter()
        with self.phase("rollout"):
            trajectories = await asyncio.gather(*self.attempts(ordinal))
        samples, _ = flatten(trajectories)
        assign_advantages(samples, self.algo)
        assign_loss_weights(samples, self.algo, 256)
        with self.phase("train"):
            if release:
                await self.rollouts.release_memory()
            rows, loss = self.trainer.plan_rows(samples), make_policy_loss(self.algo)
            report = await self.trainer.forward_backward(rows, "policy", loss)
            proven = self.proof.check(report.mismatch, samples, "bfloat16", self.trainer.version, print)
            update = await self.trainer.optim_step("policy", 1e-6)
        await self.sync()
        return {
            **{name: self.spans.seconds(name) for name in PHASES},
            "wall": time.perf_counter() - began,
            "sampled_tokens": sum(len(t.turns[0].output_ids) for t in trajectories),
            "trained_tokens": sum(len(s) for s in samples),
            "grad_norm": update.grad_norm,
            **divide(merge(proven)),
        }

    def attempts(self, ordinal: int) -> Iterator[Any]:
        """Coroutines of 8 attempts at each prompt of the step."""
        rng = np.random.default_rng(ordinal)
        for g, group in enumerate(gsm8k_groups(self.num_groups, 8, ordinal, self.scale)):
            place = ordinal * self.num_groups + g
            prompt = Prompt(id=str(place), ordinal=place, ids=rng.integers(3, VOCAB, group.prompt).astype(np.int32))
            for index, tokens in enumerate(group.answers):
                yield self.attempt(prompt, index, tokens)

    async def attempt(self, prompt: Prompt, index: int, tokens: int) -> Trajectory:
        turn: Turn = await self.rollouts.generate(
            Request(
                id=f"{prompt.id}/{index}",
                context_ids=prompt.ids,
                sampling=SamplingParams(ignore_eos=True),
                seed=turn_seed(0, prompt.ordinal, index, 0),
                max_new_tokens=tokens,
                min_version=self.trainer.version,
            )
        )
        reward = float((turn.output_ids % 2).mean())
        return Trajectory(prompt=prompt, group_id=prompt.id, index=index, turns=[turn], reward=reward)


def engine_bytes(worker: RankWorker) -> dict[str, int]:
    """Bytes of the train engine by kind."""
    return worker.engines["policy"].memory()


async def measure(report: Report, args: Any, device: torch.device) -> None:
    folder = model_folder(args.model, "smoke" if args.smoke else "0.5B", device)
    cfg = RunConfig(
        model=ModelConfig(path=str(folder), dtype="bfloat16"),
        train=TrainConfig(),
        rollout=RolloutConfig(max_context_tokens=512, release_memory=True),
        data=DataConfig(),
        loop=LoopConfig(num_steps=1),
        cluster=ClusterConfig(executor="inline"),
    )
    async with launched(cfg, 1, 0) as groups:
        trainer, rollouts = groups.trainer, groups.rollouts
        assert trainer is not None and rollouts is not None
        layout = await trainer.layout()
        await rollouts.reconcile(layout)
        run = Steps(trainer, rollouts, layout, device, args)
        await run.sync()
        run.spans.take()
        steps, released, peaks = list[dict[str, float]](), list[dict[str, float]](), dict[str, int]()
        for ordinal in range(2 * args.rounds + 2):  # the first of each is a warm-up: a release costs the step after it
            release = ordinal > args.rounds
            (released if release else steps).append(await run.step(ordinal, release))
            peaks = peaks if release else dict(run.peaks)
            run.spans.take()
        syncs = []
        for _ in range(SYNCS):
            await run.sync()
            syncs.append(run.spans.seconds("sync"))
            run.spans.take()
        held = await trainer.executor.call(0, engine_bytes)
    report.raw |= {
        "steps": steps,
        "released_steps": released,
        "syncs_s": syncs,
        "sync_bytes": layout.num_bytes,
        "trainer_bytes": held,
    }
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    roofline = roofline_of(report, args.peak_tflops)
    gemm = measure_gemm(report, device, 128 if args.smoke else GEMM, roofline)
    rate = measure_copy(report, device, 1 << 20 if args.smoke else 1 << 31) / 2
    report.bar("sync_over_copy", layout.num_bytes / median(syncs) / rate, at_least=0.6)
    report_figures(report, steps[1:], peaks, layout.num_bytes, syncs)
    report.figure("step_s_released", median([sum(step[name] for name in PHASES) for step in released[1:]]))
    for name in (*PHASES, "wall"):
        report.figure(f"step_{name}_s_released", median([step[name] for step in released[1:]]))
    works = [gsm8k_groups(run.num_groups, 8, ordinal, run.scale) for ordinal in range(1, args.rounds + 1)]
    for name, value in step_bounds(config, roofline, works, layout.num_bytes).items():
        predict(report, name, value)
    of_gemm = step_bounds(config, replace(roofline, flop_per_s=gemm), works, layout.num_bytes)
    report.raw["gemm_predictions"] = of_gemm
    report.print_line("\n".join([*gpu_table.HEAD, *gpu_table.rows(report.figures, report.raw["predictions"], of_gemm)]))


def report_figures(
    report: Report, steps: list[dict[str, float]], peaks: dict[str, int], num_bytes: int, syncs: list[float]
) -> None:
    def middle(name: str) -> float:
        return median([step[name] for step in steps])

    report.figure("step_s", median([sum(step[name] for name in PHASES) for step in steps]))
    for name in (*PHASES, "wall"):
        report.figure(f"step_{name}_s", middle(name))
        if peaks.get(name):
            report.figure(f"step_peak_gib_{name}", peaks[name] / 2**30)
    report.figure("step_sampled_tokens_per_s", median([s["sampled_tokens"] / s["rollout"] for s in steps]))
    report.figure("step_trained_tokens_per_s", median([s["trained_tokens"] / s["train"] for s in steps]))
    report.figure("step_proof_logprob_abs_diff_mean", middle("proof/logprob_abs_diff_mean"))
    report.figure("sync_gb_per_s", num_bytes / median(syncs) / 1e9)


def step_bounds(config: Any, roofline: Roofline, steps: list[list[GroupLengths]], num_bytes: int) -> dict[str, float]:
    """The bounds of these figures at the roofline's rates. A group's prompt is computed once, by sampler and trainer.
    A step is bounded by the sum of its phases."""
    shape = shape_of(config)
    sync = gpu_predict.sync_in_place(roofline, shape)
    of_steps = list[dict[str, float]]()
    for groups in steps:
        prompts = [group.prompt for group in groups]
        rows = [(group.prompt, n) for group in groups for n in group.answers]
        sampled = sum(n for _, n in rows)
        num_pairs = gpu_predict.pairs(prompts) + sum(prompt * n + gpu_predict.pairs([n]) for prompt, n in rows)
        rollout = gpu_predict.rollout(roofline, shape, prompts, rows, RolloutConfig().max_running_requests)
        work = sum(prompts) + sampled, num_pairs, sampled
        train = gpu_predict.train_step(roofline, shape, *work, TrainConfig().activation_checkpointing)
        of_steps.append(
            {
                "step_s": rollout + train + sync,
                "step_wall_s": rollout + train + sync,
                "step_rollout_s": rollout,
                "step_train_s": train,
                "step_sync_s": sync,
                "step_sampled_tokens_per_s": sampled / rollout,
                "step_trained_tokens_per_s": sum(prompt + n for prompt, n in rows) / train,
                "sync_gb_per_s": num_bytes / sync / 1e9,
            }
        )
    return {name: median([bounds[name] for bounds in of_steps]) for name in of_steps[0]}


def main() -> None:
    p = gpu_parser(__doc__, rounds=2)
    p.add_argument("--prompts", type=int, default=32, help="prompts a step, with 8 answers each (default 32)")
    args = p.parse_args()
    report, device = start("gpu_step", args)
    asyncio.run(measure(report, args, device))
    report.finish()


if __name__ == "__main__":
    main()

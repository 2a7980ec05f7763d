"""model.dtype on a CPU: training and sampling in bfloat16 and float32, for three sizes of a model.

    python benchmarks/cpu_dtype.py

Two pieces of work on one rank, each in both dtypes in turn:

    train    forward, backward and optimizer step over one group of answers (GSM8K's lengths), packed, as on a rank of
             `meshrl train` and `meshrl sft`; the masters are float32 in both dtypes
    sample   the embedded engine: 8 rows of 64 prompt tokens and 32 sampled ones

A ratio is the CPU time in float32 over that in bfloat16: above 1, bfloat16 is faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Report, alternate, median, paired_ratio, parser
from workload import VOCAB, gsm8k_groups, model_folder, start_single_rank, training_samples

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, Request, SamplingParams
from meshrl.model.recipe import DTYPES, load_causal_lm
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

NAMES = ("float32", "bfloat16")


def train_step(engine: TrainEngine, num_answers: int, i: int) -> None:
    """One optimizer step on a group that depends on the round."""
    samples = training_samples(gsm8k_groups(1, num_answers, seed=100 + i), seed=100 + i)
    batch = pack(samples, range(len(samples)), share_prefix=True)
    engine.forward_backward([batch], make_policy_loss(AlgoConfig()), entropy=False)
    engine.optim_step(1e-6)


def sample_rows(engine: EmbeddedEngine, num_tokens: int, i: int) -> None:
    """8 answers of num_tokens to prompts that depend on the round."""
    rng = np.random.default_rng(100 + i)
    for row in range(8):
        prompt = rng.integers(3, VOCAB, 64).astype(np.int32)
        params = SamplingParams(ignore_eos=True)
        engine.submit(Request(id=f"{row}", context_ids=prompt, sampling=params, seed=row, max_new_tokens=num_tokens))
    while engine.has_work:
        engine.step()


def trainer(folder: Path, dtype: str, mesh: Any) -> TrainEngine:
    cfg = TrainConfig(activation_checkpointing=False)
    return TrainEngine.wrap(load_causal_lm(folder), cfg, mesh, POLICY, DTYPES[dtype])


def sampler(folder: Path, dtype: str) -> EmbeddedEngine:
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype})
    engine = build_embedded_engine(model, RolloutConfig(), torch.device("cpu"), "benchmark", ())
    engine.trust_loaded_weights()
    return engine


def compare(report: Report, name: str, contenders: dict[str, Callable[[int], Any]], rounds: int) -> None:
    took = alternate(contenders, rounds)
    report.add_timings(name, took)
    cpu = {dtype: [t.cpu_s for t in timings] for dtype, timings in took.items()}
    for dtype, seconds in cpu.items():
        report.figure(f"cpu_s_{name}_{dtype}", median(seconds))
    report.figure(f"ratio_{name}", paired_ratio(cpu["float32"], cpu["bfloat16"]))


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--shapes", nargs="+", default=["5M", "54M", "134M"], help="names of SHAPES in workload.py")
    args = p.parse_args()
    args.rounds = 2 if args.smoke else args.rounds
    report = Report("cpu_dtype", args)
    flags = Path("/proc/cpuinfo").read_text().split() if os.path.exists("/proc/cpuinfo") else []
    report.raw["cpu_flags"] = sorted({flag for flag in flags if "bf16" in flag or flag == "avx512f"})
    mesh = start_single_rank(args.threads)
    for shape in ["smoke"] if args.smoke else args.shapes:
        folder = model_folder(args.model, shape)
        engines = {dtype: trainer(folder, dtype, mesh) for dtype in NAMES}
        work = {dtype: partial(train_step, engine, 2 if args.smoke else 4) for dtype, engine in engines.items()}
        compare(report, f"train_{shape}", work, args.rounds)
        del engines, work
        samplers = {dtype: sampler(folder, dtype) for dtype in NAMES}
        rows = {dtype: partial(sample_rows, engine, 4 if args.smoke else 32) for dtype, engine in samplers.items()}
        compare(report, f"sample_{shape}", rows, args.rounds)
    report.finish()


if __name__ == "__main__":
    main()

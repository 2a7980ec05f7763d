"""Model FLOP utilisation (MFU) of a training step on one GPU, its memory, and the time of its attention.

    python benchmarks/gpu_train.py [--shapes 1.5B] [--tokens 16384] [--checkpointing off] [--compile both]

A step is a rank's work on one micro-batch: pack it, forward, backward, clip, AdamW; bf16 compute with fp32 masters
in one rank; a model of one of Qwen2.5's shapes with random weights.

    row       one row of all the tokens, each of them scored
    rows      packed rows of GSM8K's lengths, answers scored; the lengths differ in each round, as in a run
    ..._ckpt  activation checkpointing: backward recomputes each block; recomputed FLOP are not counted
    ..._compiled  train.torch_compile

mfu: FLOP of gpu_workload.step_flop over seconds and over the rate of a large matrix product, which is measured before;
mfu_sheet: over the rate of the data sheet. memory_over_predicted: the peak of the device's memory over
`predicted_bytes`. What is not expected to fit is skipped.

Then packed attention by itself, forward and backward, one layer: PyTorch's varlen kernel; the one that is used (auto),
which may be another one for long rows; and the buckets that replace it on devices without one. Lengths differ from
round to round. family: groups of 8 that share their prompt.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_predict
import numpy as np
import torch
from gpu_predict import Roofline, pairs, pairs_of_segments, predict, roofline_of, shape_of
from gpu_workload import (
    GEMM,
    SHAPES,
    config_of,
    gpu_parser,
    measure_gemm,
    peak_bytes,
    random_model,
    seconds,
    start,
    start_single_rank,
    step_flop,
)
from measure import Report, median
from workload import gsm8k_groups, training_samples

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.run import SftRunConfig
from meshrl.config.train import TrainConfig
from meshrl.core.device import empty_cache, free_bytes, reset_peak_memory
from meshrl.core.types import POLICY, Sample
from meshrl.model.attention import AttentionSpec, PackedAttention
from meshrl.model.costs import run_memory
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

LR = 1e-6
HEADS, KV_HEADS, HEAD_SIZE = 14, 2, 64  # of the attention that is measured by itself


def one_row(tokens: int, seed: int) -> list[Sample]:
    (sample,) = training_samples(gsm8k_groups(1, 1, seed), seed)
    rng = np.random.default_rng(seed)
    mask = np.arange(tokens) > 0
    sample.tokens, sample.mask = rng.integers(3, 2048, tokens).astype(np.int32), mask
    sample.turn = sample.versions = np.zeros(tokens, np.int32)
    sample.rollout_logprobs = np.full(tokens, -11.9, np.float32)
    sample.rewards = np.zeros(tokens, np.float32)
    sample.advantages = mask.astype(np.float32)
    sample.loss_weight = (mask / (tokens - 1)).astype(np.float32)
    return [sample]


def gsm8k_rows(tokens: int, seed: int) -> list[Sample]:
    """As many rows as fit; all groups but the last are complete."""
    samples = training_samples(gsm8k_groups(max(1, tokens // 1500), 8, seed), seed)
    ends = np.cumsum([len(s) for s in samples])
    return samples[: max(1, int(np.searchsorted(ends, tokens, side="right")))]


ROWS: dict[str, Callable[[int, int], list[Sample]]] = {"row": one_row, "rows": gsm8k_rows}


def predicted_bytes(shape: str, cfg: TrainConfig, tokens: int) -> int:
    """Bytes of a step of one micro-batch, without the libraries, by the plan of `meshrl plan`."""
    sft = {"path": "rows.jsonl", "num_steps": 1, "rows_per_step": 1, "max_row_tokens": tokens}
    train = cfg.model_dump(exclude_unset=True) | {"max_tokens_per_microbatch": tokens}
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        model = {"path": folder, "dtype": "bfloat16"}
        _, (rank,) = run_memory(SftRunConfig.model_validate({"model": model, "train": train, "sft": sft}), "cuda")
    return max(rank.total(phase) for phase in ("train", "optimizer")) - rank.device["libraries"]["train"]


def measure_steps(report: Report, args: Any, device: torch.device, gemm: float, roofline: Roofline) -> None:
    mesh = start_single_rank(device)
    for shape, checkpointing, compiled in itertools.product(args.shapes, args.checkpointing, args.compile):
        cfg = TrainConfig(activation_checkpointing=checkpointing, torch_compile=compiled)
        fitting = []
        for tokens in args.tokens:
            need, free = predicted_bytes(shape, cfg, tokens), free_bytes(device)
            if free is None or need < free:
                fitting.append(tokens)
            else:
                report.print_line(f"skipped: {shape}, {tokens} tokens, {cell_of(cfg)}: {need:.3g} of {free:.3g} bytes")
        if fitting:
            model = random_model(shape, device)
            engine = TrainEngine.wrap(model, cfg, mesh, POLICY, torch.bfloat16)
            try:
                for tokens, kind in itertools.product(sorted(fitting), args.rows):
                    measure_cell(report, args.rounds, engine, shape, kind, tokens, gemm, roofline)
                    empty_cache(device)
            except torch.OutOfMemoryError as error:
                report.print_line(f"out of memory: {shape}, {tokens} tokens, {kind}, {cell_of(cfg)}: {error}"[:300])
            del model, engine
            gc.collect()  # sharded modules are reference cycles
            empty_cache(device)
    torch.distributed.destroy_process_group()


def cell_of(cfg: TrainConfig) -> str:
    return ("_ckpt" if cfg.activation_checkpointing else "") + ("_compiled" if cfg.torch_compile else "")


def measure_cell(
    report: Report,
    num_rounds: int,
    engine: TrainEngine,
    shape: str,
    kind: str,
    tokens: int,
    gemm: float,
    roofline: Roofline,
) -> None:
    device, config, loss = engine.device, config_of(shape), make_policy_loss(AlgoConfig())
    rounds = {i: ROWS[kind](tokens, 100 + i) for i in range(-2, num_rounds)}  # a second warm-up: moments exist
    took, flop, bound = [], [], []
    for i, samples in rounds.items():
        if i == 0:
            reset_peak_memory(device)

        def step(samples: list[Sample] = samples) -> None:
            batch = pack(samples, range(len(samples)), device, share_prefix=False)
            engine.forward_backward([batch], loss)
            engine.optim_step(LR)

        spent = seconds(device, step)
        if i >= 0:
            took.append(spent)
            scored = sum(int(s.mask.sum()) for s in samples)
            lengths = [len(s) for s in samples]
            flop.append(step_flop(config, lengths, scored))
            work = sum(lengths), pairs(lengths), scored
            checkpointing = engine.cfg.activation_checkpointing
            bound.append(gpu_predict.train_step(roofline, shape_of(config), *work, checkpointing))
    name = f"{shape}_{kind}_{tokens}{cell_of(engine.cfg)}"
    report.raw[f"step_{name}"] = {"seconds": took, "flop": flop}
    for figure, peak_flop in (("mfu", gemm), ("mfu_sheet", roofline.flop_per_s)):
        report.figure(f"{figure}_{name}", median([f / s for f, s in zip(flop, took, strict=True)]) / peak_flop)
        predict(report, f"{figure}_{name}", median([f / s for f, s in zip(flop, bound, strict=True)]) / peak_flop)
    computed = [sum(len(s) for s in rounds[i]) for i in range(num_rounds)]
    for record, spent_s in ((report.figure, took), (partial(predict, report), bound)):
        record(f"train_tokens_per_s_{name}", median([n / s for n, s in zip(computed, spent_s, strict=True)]))
    if peak := peak_bytes(device):
        report.figure(f"train_peak_gib_{name}", peak / 2**30)
        ratio = report.figure(f"memory_over_predicted_{name}", peak / predicted_bytes(shape, engine.cfg, tokens))
        report.bar(f"memory_over_predicted_{name}, or its inverse", max(ratio, 1 / ratio), at_most=1.1)


def measure_attention(report: Report, args: Any, device: torch.device, roofline: Roofline) -> None:
    """One layer of packed attention, forward and backward, with each implementation that this device has."""
    ways = ["varlen", "auto", "buckets"] if PackedAttention([0, 1], device).use_varlen else ["buckets"]
    for tokens, kind in itertools.product(args.tokens[-1:], ("row", "rows", "family")):
        packs = {i: pack_of(kind, tokens, 500 + i) for i in range(-1, args.rounds)}
        bound = [
            gpu_predict.attention(roofline, pairs_of_segments(cu, parents), cu[-1], HEADS, KV_HEADS, HEAD_SIZE)
            for i, (cu, parents) in packs.items()
            if i >= 0
        ]
        for way in ways:
            took, spec = [], AttentionSpec(HEAD_SIZE**-0.5, implementation="flash" if way == "varlen" else "auto")
            for i, (cu, parents) in packs.items():
                q, k, v = (
                    torch.randn(cu[-1], h, HEAD_SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
                    for h in (HEADS, KV_HEADS, KV_HEADS)
                )

                def work(cu: Any = cu, parents: Any = parents, q: Any = q, k: Any = k, v: Any = v) -> None:
                    packed = PackedAttention(cu, device, parents)
                    packed.use_varlen &= way != "buckets"  # noqa: B023  (called at once)
                    packed.attend(0, q, k, v, spec).sum().backward()  # noqa: B023

                spent = seconds(device, work)
                if i >= 0:
                    took.append(spent)
            report.raw[f"attention_{kind}_{tokens}_{way}"] = took
            report.figure(f"attention_ms_{kind}_{tokens}_{way}", 1e3 * median(took))
            predict(report, f"attention_ms_{kind}_{tokens}_{way}", 1e3 * median(bound))
        empty_cache(device)


def pack_of(kind: str, tokens: int, seed: int) -> tuple[list[int], list[int]]:
    """Bounds and parents of the segments of a pack of `tokens` tokens."""
    samples = ROWS["row" if kind == "row" else "rows"](tokens, seed)
    batch = pack(samples, range(len(samples)), share_prefix=kind == "family")
    return batch.cu_seqlens.tolist(), batch.parents


def main() -> None:
    p = gpu_parser(__doc__, rounds=3)
    choices = {"off": [False], "on": [True], "both": [False, True]}
    p.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B"])
    p.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    p.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    p.add_argument(
        "--checkpointing", choices=list(choices), default="both", help="activation checkpointing (default both)"
    )
    p.add_argument("--compile", choices=list(choices), default="off", help="train.torch_compile (default off)")
    p.add_argument("--only", choices=["steps", "attention"])
    args = p.parse_args()
    report, device = start("gpu_train", args)
    args.checkpointing, args.compile = choices[args.checkpointing], choices[args.compile]
    if args.smoke:
        args.shapes, args.tokens = ["smoke"], [64, 256]
    roofline = roofline_of(report, args.peak_tflops)
    report.figure("peak_tflops_of_mfu_sheet", roofline.flop_per_s / 1e12)
    gemm = measure_gemm(report, device, 128 if args.smoke else GEMM, roofline)
    if args.only != "attention":
        measure_steps(report, args, device, gemm, roofline)
    if args.only != "steps":
        measure_attention(report, args, device, roofline)
    reached = [value for name, value in report.figures.items() if name.startswith("mfu_1.5B_row_16384")]
    if reached:
        report.bar("mfu_1.5B_row_16384", max(reached), at_least=0.5)
    report.finish()


if __name__ == "__main__":
    main()

"""Model FLOP utilisation (MFU) of a training step at 4k, 16k and 64k tokens on one GPU, and the time of its attention.

    python benchmarks/gpu_train.py [--peak-tflops 989]

A step is a rank's work on one micro-batch: pack it, forward, backward, clip, AdamW; bf16 compute with fp32 masters
under FSDP2 with one rank; a model of 0.5B's shape with random weights.

    row       one row of all the tokens, each of them scored
    rows      packed rows of GSM8K's lengths, answers scored; the lengths differ in each round, as in a run
    ..._ckpt  activation checkpointing: backward recomputes each block; recomputed FLOP are not counted

mfu: FLOP of gpu_workload.step_flop over seconds and over the device's peak.

Then packed attention by itself, forward and backward, one layer: PyTorch's varlen kernel, and the buckets that replace
it on devices without one. Lengths differ from round to round. family: groups of 8 that share their prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_predict
import numpy as np
import torch
from gpu_predict import Roofline, pairs, pairs_of_segments, predict, roofline_of, shape_of
from gpu_workload import config_of, gpu_parser, peak_bytes, random_model, seconds, start, start_single_rank, step_flop
from measure import Report, median
from workload import gsm8k_groups, training_samples

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.device import empty_cache, reset_peak_memory
from meshrl.core.types import Sample
from meshrl.model.attention import AttentionSpec, PackedAttention
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

LR = 1e-6
GEMM = 8192
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


def measure_gemm(report: Report, device: torch.device, size: int, roofline: Roofline) -> None:
    """Measure the rate of a large bf16 matrix product on this device: the upper limit of all figures below."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = [seconds(device, lambda: [a @ b for _ in range(5)]) / 5 for _ in range(4)][1:]
    report.figure("gemm_tflop_per_s", 2 * size**3 / median(took) / 1e12)
    predict(report, "gemm_tflop_per_s", 2 * size**3 / gpu_predict.product(roofline, size) / 1e12)


def measure_steps(report: Report, args: Any, device: torch.device, sizes: list[int], roofline: Roofline) -> None:
    shape = "smoke" if args.smoke else "0.5B"
    config = config_of(shape)
    mesh = start_single_rank(device)
    cfg = TrainConfig(activation_checkpointing=True)
    engine = TrainEngine.wrap(random_model(shape, device), cfg, mesh, "policy", torch.bfloat16)
    loss = make_policy_loss(AlgoConfig())
    for tokens, kind, checkpointing in itertools.product(sizes, ROWS, (True, False)):
        if tokens == max(sizes) and not checkpointing:
            continue  # without checkpointing, the activations of the longest size exceed the memory
        lm = engine.model.lm
        if checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            lm.gradient_checkpointing_disable()
        rounds = {i: ROWS[kind](tokens, 100 + i) for i in range(-1, args.rounds)}
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
                bound.append(gpu_predict.train_step(roofline, shape_of(config), *work, checkpointing))
        name = f"{kind}_{tokens}{'_ckpt' if checkpointing else ''}"
        report.raw[f"step_{name}"] = {"seconds": took, "flop": flop}
        report.figure(f"mfu_{name}", median([f / s for f, s in zip(flop, took, strict=True)]) / roofline.flop_per_s)
        predict(report, f"mfu_{name}", median([f / s for f, s in zip(flop, bound, strict=True)]) / roofline.flop_per_s)
        computed = [sum(len(s) for s in rounds[i]) for i in range(args.rounds)]
        for record, spent_s in ((report.figure, took), (partial(predict, report), bound)):
            record(f"train_tokens_per_s_{name}", median([n / s for n, s in zip(computed, spent_s, strict=True)]))
        if peak := peak_bytes(device):
            report.figure(f"train_peak_gib_{name}", peak / 2**30)
        empty_cache(device)
    torch.distributed.destroy_process_group()


def measure_attention(report: Report, args: Any, device: torch.device, sizes: list[int], roofline: Roofline) -> None:
    """One layer of packed attention, forward and backward, with each implementation that this device has."""
    ways = ["varlen", "buckets"] if PackedAttention([0, 1], device).use_varlen else ["buckets"]
    for tokens, kind in itertools.product(sizes, ("row", "rows", "family")):
        packs = {i: pack_of(kind, tokens, 500 + i) for i in range(-1, args.rounds)}
        bound = [
            gpu_predict.attention(roofline, pairs_of_segments(cu, parents), cu[-1], HEADS, KV_HEADS, HEAD_SIZE)
            for i, (cu, parents) in packs.items()
            if i >= 0
        ]
        for way in ways:
            took = []
            for i, (cu, parents) in packs.items():
                q, k, v = (
                    torch.randn(cu[-1], h, HEAD_SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
                    for h in (HEADS, KV_HEADS, KV_HEADS)
                )

                def work(cu: Any = cu, parents: Any = parents, q: Any = q, k: Any = k, v: Any = v) -> None:
                    packed = PackedAttention(cu, device, parents)
                    packed.use_varlen = way == "varlen"  # noqa: B023  (called at once)
                    packed.attend(0, q, k, v, AttentionSpec(HEAD_SIZE**-0.5)).sum().backward()

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
    args = gpu_parser(__doc__, rounds=3).parse_args()
    report, device = start("gpu_train", args)
    sizes = [64, 256] if args.smoke else [4096, 16384, 65536]
    roofline = roofline_of(report, args.peak_tflops)
    report.figure("peak_tflops_of_mfu", roofline.flop_per_s / 1e12)
    measure_gemm(report, device, 128 if args.smoke else GEMM, roofline)
    measure_steps(report, args, device, sizes, roofline)
    measure_attention(report, args, device, sizes[1:], roofline)
    report.finish()


if __name__ == "__main__":
    main()

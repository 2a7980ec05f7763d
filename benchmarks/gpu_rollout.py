"""Sampled tokens per second on one GPU: the embedded engine against Transformers' `generate`, in turn.

    python benchmarks/gpu_rollout.py

A model of 0.5B's shape with random weights, bf16. The number of tokens of each request is fixed in advance:

    mixed   GSM8K's lengths, groups of 8 that share their prompt
    equal   every request has its own prompt, all lengths are equal: no prompt is shared, no slot is refilled

generate is one left-padded batch with SDPA and a dynamic cache, run to the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_predict
import numpy as np
import torch
from gpu_predict import Roofline, predict, roofline_of, shape_of
from gpu_workload import gpu_parser, model_folder, peak_bytes, seconds, start
from measure import Report, median, paired_ratio
from workload import VOCAB, gsm8k_groups

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import reset_peak_memory
from meshrl.core.types import Request, SamplingParams
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine

EQUAL_PROMPT, EQUAL_ANSWER = 85, 64
MAX_RUNNING = 256
RequestSpec = tuple[np.ndarray, int]  # prompt, tokens to sample


def make_requests(kind: str, num_requests: int, seed: int, scale: float) -> list[RequestSpec]:
    rng = np.random.default_rng(seed)
    if kind == "equal":
        sizes = [max(2, round(n * scale)) for n in (EQUAL_PROMPT, EQUAL_ANSWER)]
        return [(rng.integers(3, VOCAB, sizes[0]).astype(np.int32), sizes[1]) for _ in range(num_requests)]
    found: list[RequestSpec] = []
    for group in gsm8k_groups(num_requests // 8, 8, seed, scale):
        prompt = rng.integers(3, VOCAB, group.prompt).astype(np.int32)
        found += [(prompt, n) for n in group.answers]
    return found


@torch.inference_mode()
def generate(lm: Any, work: Sequence[RequestSpec]) -> None:
    """One left-padded batch, to its longest answer."""
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt, _ in work)
    ids = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt, _ in work])
    mask = np.stack([np.arange(longest) >= longest - len(prompt) for prompt, _ in work])
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=max(n for _, n in work), eos_token_id=None, pad_token_id=0
    )
    inputs = [torch.from_numpy(x).long().to(lm.device) for x in (ids, mask)]
    out = lm.generate(input_ids=inputs[0], attention_mask=inputs[1], generation_config=config)
    assert out.shape[1] == longest + config.max_new_tokens


def embedded(engine: EmbeddedEngine, work: Sequence[RequestSpec]) -> None:
    """Sample with the embedded engine, which also computes the logprob of each token."""
    params = SamplingParams(ignore_eos=True)
    for i, (prompt, n) in enumerate(work):
        engine.submit(Request(id=str(i), context_ids=prompt, sampling=params, seed=i, max_new_tokens=n))
    sampled = 0
    while engine.has_work:
        sampled += sum(len(turn.output_ids) for _, turn in engine.step())
    assert sampled == sum(n for _, n in work)


def load_plain(folder: Path, device: torch.device) -> Any:
    """The model, loaded by plain Transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return lm.to(device).eval()


def predict_cell(
    report: Report, config: Any, roofline: Roofline, name: str, works: Sequence[Sequence[RequestSpec]]
) -> None:
    """Predictions of the figures of a cell. A group's prompt is computed once."""
    shape, rates = shape_of(config), dict[str, list[float]](embedded=[], generate=[])
    for work in works:
        rows = [(len(prompt), n) for prompt, n in work]
        prompts = {id(prompt): len(prompt) for prompt, _ in work}
        spent = {
            "embedded": gpu_predict.rollout(roofline, shape, [*prompts.values()], rows, MAX_RUNNING),
            "generate": gpu_predict.padded_rollout(roofline, shape, rows),
        }
        for sampler, bound in spent.items():
            rates[sampler].append(sum(n for _, n in rows) / bound)
    for sampler, found in rates.items():
        predict(report, f"rollout_tokens_per_s_{name}_{sampler}", median(found))
    ratios = [ours / theirs for ours, theirs in zip(rates["embedded"], rates["generate"], strict=True)]
    predict(report, f"ratio_{name}_embedded_over_generate", median(ratios))


def measure_cell(
    report: Report,
    args: Any,
    device: torch.device,
    lm: Any,
    engine: Any,
    cell: tuple[str, int],
    roofline: Roofline,
) -> None:
    kind, n = cell
    scale = 0.1 if args.smoke else 1.0
    took: dict[str, list[float]] = {"generate": [], "embedded": []}
    peak = dict.fromkeys(took, 0)
    tokens, works = [], []
    for i in range(-1, args.rounds):
        work = make_requests(kind, n, 300 + i, scale)
        for sampler in list(took) if i % 2 else list(took)[::-1]:
            reset_peak_memory(device)
            spent = seconds(device, lambda: generate(lm, work) if sampler == "generate" else embedded(engine, work))  # noqa: B023
            if i >= 0:
                took[sampler].append(spent)
                peak[sampler] = max(peak[sampler], peak_bytes(device))
        if i >= 0:
            tokens.append(sum(count for _, count in work))
            works.append(work)
    name = f"{kind}_{n}"
    report.raw[name] = {"seconds": took, "tokens": tokens, "peak_bytes": peak}
    for sampler, spent in took.items():
        rates = [t / s for t, s in zip(tokens, spent, strict=True)]
        report.figure(f"rollout_tokens_per_s_{name}_{sampler}", median(rates))
        if peak[sampler]:
            report.figure(f"rollout_peak_gib_{name}_{sampler}", peak[sampler] / 2**30)
    report.figure(f"ratio_{name}_embedded_over_generate", paired_ratio(took["generate"], took["embedded"]))
    predict_cell(report, lm.config, roofline, name, works)


def main() -> None:
    p = gpu_parser(__doc__, rounds=2)
    p.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    args = p.parse_args()
    report, device = start("gpu_rollout", args)
    folder = model_folder(args.model, "smoke" if args.smoke else "0.5B", device)
    lm = load_plain(folder, device)
    cfg = ModelConfig(path=str(folder), dtype="bfloat16")
    limit = RolloutConfig(max_context_tokens=512, max_running_requests=MAX_RUNNING)
    engine = build_embedded_engine(cfg, limit, device, "benchmark", ())
    engine.trust_loaded_weights()
    cells = [("mixed", n) for n in ([16] if args.smoke else args.requests)]
    roofline = roofline_of(report, args.peak_tflops)
    for cell in [*cells, ("equal", cells[-1][1])]:
        measure_cell(report, args, device, lm, engine, cell, roofline)
    report.finish()


if __name__ == "__main__":
    main()

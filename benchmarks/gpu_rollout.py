"""Sampled tokens per second on one GPU: the embedded engine against Transformers' `generate`, in turn; and the share
of the device's memory bandwidth that decode reaches.

    python benchmarks/gpu_rollout.py [--shapes 0.5B 1.5B] [--contexts 256 4096] [--requests 64 256]

decode_bandwidth_SHAPE_CONTEXT: steps of 256 rows whose contexts have that many tokens, with all that a step does
(sampling, logprobs, the work of the host). The bytes that every engine must read (the weights once, the keys and
values of all rows), over the seconds of a step, and over the rate of a copy in this run, counted as bytes read plus
bytes written.

Against generate: a model of 0.5B's shape with random weights, bf16. The number of tokens of each request is fixed in
advance:

    mixed   GSM8K's lengths, groups of 8 that share their prompt
    equal   every request has its own prompt, all lengths are equal: no prompt is shared, no slot is refilled

generate is one left-padded batch with SDPA and a dynamic cache, run to the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_predict
import numpy as np
import torch
from gpu_predict import Roofline, predict, roofline_of, shape_of
from gpu_workload import gpu_parser, measure_copy, model_folder, peak_bytes, seconds, start
from measure import Report, median, paired_ratio
from transformers import AutoConfig
from workload import VOCAB, gsm8k_groups

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import empty_cache, reset_peak_memory
from meshrl.core.types import Request, SamplingParams
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine

EQUAL_PROMPT, EQUAL_ANSWER = 85, 64
BANDWIDTH_SHAPES, BANDWIDTH_CONTEXT = ["0.5B", "1.5B"], 4096  # for which there is a bar
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
        do_sample=True,
        top_k=0,
        max_new_tokens=max(n for _, n in work),
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,  # a saved model has the value of the config that it was made from
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

    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
    )
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
            if sampler == "generate":
                few = work if i >= 0 else [(prompt, min(count, 8)) for prompt, count in work]  # as a warm-up
                spent = seconds(device, partial(generate, lm, few))
            else:
                spent = seconds(device, partial(embedded, engine, work))
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


def build_engine(folder: Path, device: torch.device, max_context_tokens: int) -> EmbeddedEngine:
    cfg = ModelConfig(path=str(folder), dtype="bfloat16")
    limit = RolloutConfig(max_context_tokens=max_context_tokens, max_running_requests=MAX_RUNNING)
    engine = build_embedded_engine(cfg, limit, device, "benchmark", ())
    engine.trust_loaded_weights()
    return engine


def run_steps(engine: EmbeddedEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def measure_decode(report: Report, args: Any, device: torch.device, shape: str, rate: float) -> None:
    """Steps in which no row joins or ends. Groups of 8 share their prompts, so that few are computed."""
    contexts, num_rows, num_steps = ([16], 16, 8) if args.smoke else (args.contexts, MAX_RUNNING, 48)
    folder = model_folder(None, shape, device)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = shape_of(config)
    for context in contexts:
        engine = build_engine(folder, device, context + 2 * num_steps)
        prompts = np.random.default_rng(0).integers(3, VOCAB, (num_rows // 8, context)).astype(np.int32)
        for i, prompt in enumerate(prompts.repeat(8, axis=0)):
            sampling = SamplingParams(ignore_eos=True)
            request = Request(id=str(i), context_ids=prompt, sampling=sampling, seed=i, max_new_tokens=2 * num_steps)
            engine.submit(request)
        while engine.stats().running < num_rows:
            engine.step()
        for _ in range(4):
            engine.step()
        took, num_bytes, span = [], [], num_steps // 4
        for _ in range(4):  # a step of the host overlaps with the next forward, so steps are not timed one by one
            took.append(seconds(device, partial(run_steps, engine, span)) / span)
            cached = engine.stats().cached_tokens - num_rows * span // 2
            num_bytes.append(model.total * gpu_predict.HALF + cached * model.token)
        name = f"{shape}_{context}"
        report.raw[f"decode_{name}"] = {"seconds": took, "bytes": num_bytes}
        report.figure(f"decode_step_ms_{name}", 1e3 * median(took))
        predict(report, f"decode_step_ms_{name}", 1e3 * median(num_bytes) / rate)
        share = median([n / rate / s for n, s in zip(num_bytes, took, strict=True)])
        if shape in BANDWIDTH_SHAPES and context == BANDWIDTH_CONTEXT:
            report.bar(f"decode_bandwidth_{name}", share, at_least=0.6)
        else:
            report.figure(f"decode_bandwidth_{name}", share)
        del engine
        empty_cache(device)


def main() -> None:
    p = gpu_parser(__doc__, rounds=2)
    p.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    p.add_argument("--shapes", nargs="*", default=BANDWIDTH_SHAPES)
    p.add_argument("--contexts", nargs="+", type=int, default=[256, 4096])
    args = p.parse_args()
    report, device = start("gpu_rollout", args)
    rate = measure_copy(report, device, 1 << 20 if args.smoke else 1 << 31)
    for shape in ["smoke"] if args.smoke else args.shapes:
        measure_decode(report, args, device, shape, rate)
    folder = model_folder(args.model, "smoke" if args.smoke else "0.5B", device)
    lm = load_plain(folder, device)
    engine = build_engine(folder, device, 512)
    cells = [("mixed", n) for n in ([16] if args.smoke else args.requests)]
    roofline = roofline_of(report, args.peak_tflops)
    for cell in [*cells, ("equal", cells[-1][1])]:
        measure_cell(report, args, device, lm, engine, cell, roofline)
    report.finish()


if __name__ == "__main__":
    main()

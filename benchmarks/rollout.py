"""Sampling speed: Transformers' generate and generate_batch, vLLM and the embedded engine, in one run.

    python benchmarks/rollout.py            # the rows of NOTES.md, at the lengths that are published: about 45 minutes
    python benchmarks/rollout.py --quick    # only the rows of 0.9M and 64 requests
    python benchmarks/rollout.py --scale 0.25 --rivals vllm --vllm-python .venv-vllm/bin/python    # only against vLLM

The number of tokens of each request is fixed in advance (stop tokens are ignored), so all contenders sample the same
number. Lengths are full, except those of 28M with 256 requests, which are halved; the bars are for these lengths. Over
generate the goal is 4 at mixed lengths, or 3 with --model.

    mixed   GSM8K's lengths, groups of 8 that share their prompt
    equal   every request has its own prompt, all lengths are equal: no prompt is shared, no slot is refilled

generate is one left-padded batch (or batches of 64, if that is faster) that runs to its longest answer.
generate_batch is Transformers' continuous batching, with a length limit for each request, and the slowest by far, so it
is not measured with 28M. Rates are sampled tokens per second of wall time; the time includes the prompts.
vllm is meshrl's vLLM engine with its own server; --vllm-python names the Python that has vLLM. Start-up is the time
from the start of the process to the answer to a request of one token.

gemm: only the matrix products of one step of the model, with as many rows as there are requests. The bound is the rate
that sampling could reach if it consisted only of these products at that rate, with one prefill for each group.
"""

from __future__ import annotations

import argparse
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Ratio, Report, Timing, alternate, geometric_mean, median, paired_ratio, parser, timed
from vllm_row import VllmRival, cache_bytes, version_of
from workload import VOCAB, gsm8k_groups, model_folder

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.types import Request, SamplingParams
from meshrl.model.recipe import DTYPES
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine

RIVALS = ("generate", "generate_batch", "vllm")
EQUAL_PROMPT, EQUAL_ANSWER = 85, 64
GEMM_FLOP = 2e10  # work of one measurement of the GEMM rate: a few tenths of a second here
PAGE = 32  # tokens; generate_batch's default of 256 is half as fast with rows this short
PAGED_REQUESTS = 16  # at a time: its attention on CPUs costs requests x all their tokens, so fewer are faster


@dataclass(frozen=True)
class RequestSpec:
    """One request: its prompt, and the number of tokens to sample."""

    prompt: np.ndarray
    tokens: int


def mixed(num_requests: int, seed: int, scale: float) -> list[RequestSpec]:
    """Groups of 8 with GSM8K's lengths."""
    rng = np.random.default_rng(seed)
    specs = []
    for group in gsm8k_groups(num_requests // 8, 8, seed, scale):
        prompt = rng.integers(3, VOCAB, group.prompt).astype(np.int32)
        specs += [RequestSpec(prompt, n) for n in group.answers]
    return specs


def equal(num_requests: int, seed: int, scale: float) -> list[RequestSpec]:
    """Different prompts of one length, answers of one length."""
    rng = np.random.default_rng(seed)
    prompt, answer = (max(2, round(n * scale)) for n in (EQUAL_PROMPT, EQUAL_ANSWER))
    return [RequestSpec(rng.integers(3, VOCAB, prompt).astype(np.int32), answer) for _ in range(num_requests)]


LENGTHS: dict[str, Callable[[int, int, float], list[RequestSpec]]] = {"mixed": mixed, "equal": equal}


def load_plain(folder: Path, dtype: str) -> Any:
    """The model, loaded by plain Transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="sdpa", trust_remote_code=False
    ).eval()


def generate(lm: Any, specs: Sequence[RequestSpec], rows: int) -> int:
    """Left-padded batches of `rows` requests, each run to its longest. Returns the number of requested tokens."""
    from transformers import GenerationConfig

    for start in range(0, len(specs), rows):
        part = specs[start : start + rows]
        longest = max(len(s.prompt) for s in part)
        ids = np.stack([np.pad(s.prompt, (longest - len(s.prompt), 0)) for s in part])
        mask = np.stack([np.arange(longest) >= longest - len(s.prompt) for s in part])
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=max(s.tokens for s in part), eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            out = lm.generate(
                input_ids=torch.from_numpy(ids).long(),
                attention_mask=torch.from_numpy(mask).long(),
                generation_config=config,
            )
        assert out.shape[1] == longest + config.max_new_tokens
    return sum(s.tokens for s in specs)


def generate_batch(lm: Any, specs: Sequence[RequestSpec]) -> int:
    """The continuous batching of `generate_batch`, with a limit for each request."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    longest = max(len(s.prompt) + s.tokens for s in specs)
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=2 * PAGED_REQUESTS * -(-longest // PAGE),
        max_batch_tokens=1024,
        max_requests_per_batch=PAGED_REQUESTS,
    )
    sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0)
    with lm.continuous_batching_context_manager(sampling, continuous_batching_config=config) as manager:
        for i, spec in enumerate(specs):
            manager.add_request(spec.prompt.tolist(), request_id=str(i), max_new_tokens=spec.tokens, eos_token_id=-1)
        done = 0
        sampled = 0
        while done < len(specs):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done += 1
                sampled += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError(f"generate_batch ended after {done} of {len(specs)} requests")
    return sampled


def model_config(folder: Path, dtype: str) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(folder), "dtype": dtype})


def build_engine(folder: Path, dtype: str) -> EmbeddedEngine:
    cfg = model_config(folder, dtype)
    engine = build_embedded_engine(cfg, RolloutConfig(), torch.device("cpu"), "benchmark", ())
    engine.trust_loaded_weights()
    return engine


def requests_of(specs: Sequence[RequestSpec]) -> list[Request]:
    """The requests for meshrl's engines."""
    params = SamplingParams(ignore_eos=True)
    return [
        Request(id=str(i), context_ids=spec.prompt, sampling=params, seed=i, max_new_tokens=spec.tokens)
        for i, spec in enumerate(specs)
    ]


def embedded(engine: EmbeddedEngine, specs: Sequence[RequestSpec]) -> int:
    """Sample with the embedded engine, which also computes the logprob of each token."""
    for request in requests_of(specs):
        engine.submit(request)
    sampled = 0
    while engine.has_work:
        sampled += sum(len(turn.output_ids) for _, turn in engine.step())
    return sampled


class Gemm:
    """The matrix products of one step of the model with `rows` rows, repeated until the time can be measured."""

    def __init__(self, lm: Any, rows: int):
        self.layers = [m for m in lm.modules() if isinstance(m, torch.nn.Linear)]  # the head is one of them
        self.inputs = {m.in_features: torch.randn(rows, m.in_features, dtype=m.weight.dtype) for m in self.layers}
        self.flop_per_token = sum(2 * m.weight.numel() for m in self.layers)
        self.steps = min(200, max(2, math.ceil(GEMM_FLOP / (self.flop_per_token * rows))))
        self.tokens = self.steps * rows

    @torch.inference_mode()
    def __call__(self) -> None:
        for _ in range(self.steps):
            for m in self.layers:
                torch.nn.functional.linear(self.inputs[m.in_features], m.weight, m.bias)


FIRST = RequestSpec(np.array([3], np.int32), 1)  # its answer ends the start-up


def first_answer(folder: str, dtype: str) -> None:
    """Start the embedded engine and wait for its first answer."""
    embedded(build_engine(Path(folder), dtype), [FIRST])


def embedded_startup_s(folder: Path, dtype: str) -> float:
    """Measured in a separate process, like vLLM's start-up."""
    code = "import sys, rollout; rollout.first_answer(*sys.argv[1:])"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(folder.resolve()), dtype], cwd=Path(__file__).parent, check=True)
    return time.perf_counter() - began


@dataclass
class Models:
    """One model in one dtype, loaded by each contender."""

    name: str
    size: str
    plain: Any
    engine: EmbeddedEngine
    vllm: VllmRival | None


@contextmanager
def loaded(report: Report, args: Any, size: str, dtype: str, requests: Sequence[int]) -> Iterator[Models]:
    """The model, loaded for cells of these numbers of requests. At its end the context ends vLLM's server, if any."""
    folder = model_folder(args.model, size)
    models = Models(f"{size}_{dtype}", size, load_plain(folder, dtype), build_engine(folder, dtype), None)
    if "vllm" not in args.rivals:
        yield models
        return
    most = max(
        cache_bytes(models.plain.config, DTYPES[dtype], [len(s.prompt) + s.tokens for s in specs])
        for num_requests, kind in itertools.product(requests, LENGTHS)
        for specs in specs_by_round(args, size, num_requests, kind).values()
    )
    own = embedded_startup_s(folder, dtype)
    models.vllm = VllmRival(model_config(folder, dtype), args.vllm_python, most, requests_of([FIRST])[0])
    report.raw[f"{models.name}_startup_s"] = {"embedded": own, "vllm": models.vllm.startup_s}
    report.raw[f"{models.name}_vllm_settings"] = models.vllm.settings
    report.figure(f"embedded_startup_s_{models.name}", own)
    report.figure(f"vllm_startup_s_{models.name}", models.vllm.startup_s)
    try:
        yield models
    finally:
        models.vllm.close()


def specs_by_round(args: Any, size: str, num_requests: int, kind: str) -> dict[int, list[RequestSpec]]:
    """The requests of each round, including the warm-up (-1)."""
    scale = length_scale(args, size, num_requests)
    return {i: LENGTHS[kind](num_requests, 300 + i, scale) for i in range(-1, args.rounds)}


def length_scale(args: Any, size: str, num_requests: int) -> float:
    """The factor for all lengths of a cell: --scale, or else that of the published row."""
    if args.scale is not None:
        return float(args.scale)
    return 0.5 if (size, num_requests) == ("28M", 256) else 1.0


def measure_cell(report: Report, args: Any, models: Models, num_requests: int, kind: str) -> dict[str, list[Timing]]:
    """All contenders with the same requests; each round has different requests."""
    name = f"{models.name}_{num_requests}_{kind}"
    specs = specs_by_round(args, models.size, num_requests, kind)
    report.figure(f"length_scale_{name}", length_scale(args, models.size, num_requests))
    gemm = Gemm(models.plain, num_requests)
    sampled: dict[str, int] = {}

    def run(contender: str, work: Callable[[Sequence[RequestSpec]], int]) -> Callable[[int], None]:
        def one(i: int) -> None:
            sampled[contender] = work(specs[i])
            requested = sum(s.tokens for s in specs[i])
            if sampled[contender] != requested:
                raise RuntimeError(f"{contender} sampled {sampled[contender]} tokens, but {requested} were requested")

        return one

    contenders: dict[str, Callable[[int], None]] = {}
    if "generate" in args.rivals:
        rows = report.raw[f"{name}_generate_rows"] = best_rows(models.plain, specs[-1])
        contenders["generate"] = run("generate", lambda s: generate(models.plain, s, rows))
    contenders["embedded"] = run("embedded", lambda s: embedded(models.engine, s))
    if (vllm := models.vllm) is not None:
        contenders["vllm"] = run("vllm", lambda s: vllm.sample(requests_of(s)))
    contenders["gemm"] = lambda i: gemm()
    if "generate_batch" in args.rivals and models.size != "28M":
        contenders["generate_batch"] = run("generate_batch", lambda s: generate_batch(models.plain, s))
    if vllm is None:
        took = alternate(contenders, args.rounds)
    else:
        took = alternate(contenders, args.rounds, before_each=vllm.wait_until_idle, cpu_clock=vllm.cpu_clock)
    report.add_timings(name, took)
    report_cell(report, name, took, [specs[i] for i in range(args.rounds)], gemm, kind)
    return took


def best_rows(lm: Any, specs: Sequence[RequestSpec]) -> int:
    """generate's batch size: all requests, or 64 at a time if that is faster."""
    if len(specs) <= 64:
        return len(specs)
    took = {rows: timed(generate, lm, specs, rows).wall_s for rows in (64, len(specs))}
    return min(took, key=lambda rows: took[rows])


def report_cell(
    report: Report,
    name: str,
    took: dict[str, list[Timing]],
    specs: Sequence[Sequence[RequestSpec]],
    gemm: Gemm,
    kind: str,
) -> None:
    """Rates, ratios and the bar of one cell."""
    wall = {contender: [t.wall_s for t in timings] for contender, timings in took.items()}
    tokens = [sum(s.tokens for s in part) for part in specs]
    for contender in wall:
        if contender != "gemm":
            rates = [n / s for n, s in zip(tokens, wall[contender])]
            report.figure(f"tokens_per_s_{name}_{contender}", median(rates))
            cpu_s = median(_cpu_per_1k(took[contender], tokens))
            report.figure(f"cpu_s_per_1k_tokens_{name}_{contender}", cpu_s, digits=3)
            if contender != "embedded":
                report.figure(f"ratio_{name}_over_{contender}", paired_ratio(wall[contender], wall["embedded"]))
    report.figure(
        f"gemm_gflop_per_s_{name}", median([gemm.tokens * gemm.flop_per_token / s / 1e9 for s in wall["gemm"]])
    )
    # Seconds that the round's tokens would take at the round's GEMM rate.
    least = [(n + prompts(part)) * s / gemm.tokens for n, part, s in zip(tokens, specs, wall["gemm"])]
    report.figure(f"bound_tokens_per_s_{name}", median([n / s for n, s in zip(tokens, least)]))
    report.figure(f"share_of_bound_{name}", paired_ratio(least, wall["embedded"]))
    if "generate" not in wall:
        return
    ratio: Ratio = paired_ratio(wall["generate"], wall["embedded"])
    if kind == "mixed":
        allowed = paired_ratio(wall["generate"], least).value
        least_ratio = 3.0 if name.startswith("given") else min(4.0, 0.85 * allowed)
        report.bar(f"{name}_over_generate", ratio.value, at_least=least_ratio)
    else:
        report.bar(f"{name}_over_generate", ratio.value, at_least=1.0)


def report_vllm(report: Report, cells_took: Sequence[dict[str, list[Timing]]]) -> None:
    """Start-up times, and the summary of all rows: vLLM's wall time over the embedded engine's in each round."""
    for contender in ("embedded", "vllm"):
        starts = [raw[contender] for name, raw in report.raw.items() if name.endswith("_startup_s")]
        report.figure(f"{contender}_startup_s", median(starts))
    rows = [[v.wall_s / e.wall_s for v, e in zip(took["vllm"], took["embedded"])] for took in cells_took]
    mean = report.figure("vllm_geometric_mean", geometric_mean(rows))
    lowest = report.figure("vllm_lowest_row", min(median(row) for row in rows))
    report.bar("vllm_geometric_mean", mean, at_least=1.0)
    report.bar("vllm_lowest_row", lowest, at_least=0.85)


def _cpu_per_1k(timings: Sequence[Timing], tokens: Sequence[int]) -> list[float]:
    return [1e3 * t.cpu_s / n for t, n in zip(timings, tokens, strict=True)]


def prompts(specs: Sequence[RequestSpec]) -> int:
    """The number of prompt tokens to compute; equal prompts count once."""
    return sum(len(p) for p in {s.prompt.tobytes(): s.prompt for s in specs}.values())


def cells(args: Any) -> list[tuple[str, str, int]]:
    """(size, dtype, requests) of this run."""
    if args.smoke:
        # vLLM's attention has no CPU kernel for heads as small as the smallest model's.
        return [("0.9M" if "vllm" in args.rivals else "smoke", "float32", 16)]
    if args.quick:
        return [("0.9M", dtype, 64) for dtype in args.dtypes]
    sizes = ["given"] if args.model else args.sizes
    return [(size, dtype, n) for size in sizes for dtype in args.dtypes for n in args.requests]


def arguments() -> argparse.Namespace:
    p = parser(__doc__, rounds=3)
    p.add_argument("--quick", action="store_true", help="only 0.9M and 64 requests")
    p.add_argument("--sizes", nargs="+", default=["0.9M", "28M"], help="some of 0.9M, 5M, 28M; --model replaces them")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    p.add_argument("--scale", type=float, help="factor for all lengths (default: as published)")
    p.add_argument("--rivals", nargs="+", choices=RIVALS, help="default: all; vllm only with --vllm-python")
    p.add_argument("--no-generate-batch", action="store_true", help="without generate_batch, the slowest by far")
    p.add_argument("--vllm-python", type=Path, help="a Python that has vLLM and meshrl, such as .venv-vllm/bin/python")
    args = p.parse_args()
    if args.rivals is None:
        args.rivals = [name for name in RIVALS if name != "vllm" or args.vllm_python]
    if args.no_generate_batch:
        args.rivals = [name for name in args.rivals if name != "generate_batch"]
    if "vllm" in args.rivals and args.vllm_python is None:
        p.error("--rivals vllm needs --vllm-python, a Python that has vLLM; `make setup-vllm` makes .venv-vllm")
    args.vllm_version = version_of(args.vllm_python) if "vllm" in args.rivals else None
    if "vllm" in args.rivals and args.vllm_version is None:
        p.error(f"--vllm-python {args.vllm_python} is no Python with vLLM; `make setup-vllm` makes .venv-vllm")
    if args.smoke:
        args.rounds, args.scale = 2, 0.1
    return args


def main() -> None:
    args = arguments()
    report = Report("rollout", args)
    if "vllm" not in args.rivals:
        report.print_line("vLLM is not measured; to measure it, give a Python that has vLLM with --vllm-python")
    torch.set_num_threads(args.threads)
    took = []
    for (size, dtype), found in itertools.groupby(cells(args), key=lambda cell: cell[:2]):
        requests = [n for _, _, n in found]
        with loaded(report, args, size, dtype, requests) as models:
            for num_requests, kind in itertools.product(requests, LENGTHS):
                took.append(measure_cell(report, args, models, num_requests, kind))
    if "vllm" in args.rivals:
        report_vllm(report, took)
    report.finish()


if __name__ == "__main__":
    main()

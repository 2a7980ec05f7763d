"""How fast answers are sampled: Transformers' `generate` and `generate_batch`, and the embedded engine, in one run.

    python benchmarks/rollout.py            # all cells but 28M x 256, lengths at a quarter: about 6 minutes
    python benchmarks/rollout.py --quick    # 0.9M and 64 requests only
    python benchmarks/rollout.py --full     # everything at full length: over an hour

Every request gets its number of tokens in advance (no stop token counts), so all three sample the same:

    mixed   GSM8K's lengths, groups of 8 that share their prompt
    equal   every request its own prompt, all of one length: nothing to share, nothing to refill

generate is one left-padded batch (or batches of 64, where that is faster) that runs to its longest answer.
generate_batch is Transformers' continuous batching, with a length limit for each request. Rates are sampled tokens per
second of wall time, prompts included in the time.

gemm: the matrix products of one step of the model, and nothing else, with as many rows as there are requests. The bound
is what sampling could reach if the products at that rate were all its work, each prompt computed once a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Ratio, Report, Timing, alternate, median, paired_ratio, parser, timed
from workload import VOCAB, gsm8k_groups, model_folder

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.types import Request, SamplingParams
from meshrl.model.load import DTYPES
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine

EQUAL_PROMPT, EQUAL_ANSWER = 85, 64
GEMM_FLOP = 2e10  # work of one measurement of the GEMM rate: a few tenths of a second here
PAGE = 32  # tokens; generate_batch's own 256 is half as fast with rows this short
PAGED_REQUESTS = 16  # at a time: its attention on CPUs costs requests x all their tokens, so fewer are faster


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, and how many tokens to sample."""

    prompt: np.ndarray
    tokens: int


def mixed(num_requests: int, seed: int, scale: float) -> list[Ask]:
    """Groups of 8 with GSM8K's lengths."""
    rng = np.random.default_rng(seed)
    asks = []
    for group in gsm8k_groups(num_requests // 8, 8, seed, scale):
        prompt = rng.integers(3, VOCAB, group.prompt).astype(np.int32)
        asks += [Ask(prompt, n) for n in group.answers]
    return asks


def equal(num_requests: int, seed: int, scale: float) -> list[Ask]:
    """Different prompts of one length, answers of one length."""
    rng = np.random.default_rng(seed)
    prompt, answer = (max(2, round(n * scale)) for n in (EQUAL_PROMPT, EQUAL_ANSWER))
    return [Ask(rng.integers(3, VOCAB, prompt).astype(np.int32), answer) for _ in range(num_requests)]


LENGTHS: dict[str, Callable[[int, int, float], list[Ask]]] = {"mixed": mixed, "equal": equal}


def load_plain(folder: Path, dtype: str) -> Any:
    """The model as Transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa").eval()


def generate(lm: Any, asks: Sequence[Ask], rows: int) -> int:
    """Left-padded batches of `rows` requests, each to its longest; returns the tokens that were asked for."""
    from transformers import GenerationConfig

    for start in range(0, len(asks), rows):
        part = asks[start : start + rows]
        longest = max(len(a.prompt) for a in part)
        ids = np.stack([np.pad(a.prompt, (longest - len(a.prompt), 0)) for a in part])
        mask = np.stack([np.arange(longest) >= longest - len(a.prompt) for a in part])
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=max(a.tokens for a in part), eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            out = lm.generate(
                input_ids=torch.from_numpy(ids).long(),
                attention_mask=torch.from_numpy(mask).long(),
                generation_config=config,
            )
        assert out.shape[1] == longest + config.max_new_tokens
    return sum(a.tokens for a in asks)


def generate_batch(lm: Any, asks: Sequence[Ask]) -> int:
    """Continuous batching, as `generate_batch` does it, with a limit for each request."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    longest = max(len(a.prompt) + a.tokens for a in asks)
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=2 * PAGED_REQUESTS * -(-longest // PAGE),
        max_batch_tokens=1024,
        max_requests_per_batch=PAGED_REQUESTS,
    )
    sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0)
    with lm.continuous_batching_context_manager(sampling, continuous_batching_config=config) as manager:
        for i, ask in enumerate(asks):
            manager.add_request(ask.prompt.tolist(), request_id=str(i), max_new_tokens=ask.tokens, eos_token_id=-1)
        done = 0
        sampled = 0
        while done < len(asks):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done += 1
                sampled += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError(f"generate_batch ended after {done} of {len(asks)} requests")
    return sampled


def build_engine(folder: Path, dtype: str) -> EmbeddedEngine:
    cfg = ModelConfig(path=str(folder), dtype=dtype)
    engine = build_embedded_engine(cfg, RolloutConfig(), torch.device("cpu"), "benchmark", ())
    engine.trust_loaded_weights()
    return engine


def embedded(engine: EmbeddedEngine, asks: Sequence[Ask]) -> int:
    """meshrl's engine, logprobs of all tokens included."""
    for i, ask in enumerate(asks):
        params = SamplingParams(ignore_eos=True)
        engine.submit(Request(id=str(i), context_ids=ask.prompt, sampling=params, seed=i, max_new_tokens=ask.tokens))
    sampled = 0
    while engine.has_work:
        sampled += sum(len(turn.output_ids) for _, turn in engine.step())
    return sampled


class Gemm:
    """The matrix products of one step of the model with `rows` rows, as often as it takes to be measured."""

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


@dataclass
class Models:
    """One model in one dtype, as each contender holds it."""

    name: str
    plain: Any
    engine: EmbeddedEngine


def measure_cell(report: Report, args: Any, models: Models, num_requests: int, kind: str) -> None:
    """All contenders on the same requests; other requests in each round."""
    name = f"{models.name}_{num_requests}_{kind}"
    asks = {i: LENGTHS[kind](num_requests, 300 + i, args.scale) for i in range(-1, args.rounds)}
    gemm = Gemm(models.plain, num_requests)
    rows = best_rows(models.plain, asks[-1])
    sampled: dict[str, int] = {}

    def run(who: str, work: Callable[[Sequence[Ask]], int]) -> Callable[[int], None]:
        def one(i: int) -> None:
            sampled[who] = work(asks[i])
            if sampled[who] != sum(a.tokens for a in asks[i]):
                raise RuntimeError(f"{who} sampled {sampled[who]} tokens, not those asked for")

        return one

    contenders: dict[str, Callable[[int], None]] = {
        "generate": run("generate", lambda a: generate(models.plain, a, rows)),
        "embedded": run("embedded", lambda a: embedded(models.engine, a)),
        "gemm": lambda i: gemm(),
    }
    if not args.no_generate_batch:
        contenders["generate_batch"] = run("generate_batch", lambda a: generate_batch(models.plain, a))
    took = alternate(contenders, args.rounds)
    report.keep_timings(name, took)
    report.raw[f"{name}_generate_rows"] = rows
    tell(report, name, took, [asks[i] for i in range(args.rounds)], gemm, kind)


def best_rows(lm: Any, asks: Sequence[Ask]) -> int:
    """generate's batch size: all requests, or 64 at a time where that is faster."""
    if len(asks) <= 64:
        return len(asks)
    took = {rows: timed(generate, lm, asks, rows).wall_s for rows in (64, len(asks))}
    return min(took, key=lambda rows: took[rows])


def tell(
    report: Report, name: str, took: dict[str, list[Timing]], asks: Sequence[Sequence[Ask]], gemm: Gemm, kind: str
) -> None:
    """Rates, ratios and the bar of one cell."""
    wall = {who: [t.wall_s for t in timings] for who, timings in took.items()}
    tokens = [sum(a.tokens for a in part) for part in asks]
    for who in wall:
        if who != "gemm":
            report.figure(f"tokens_per_s_{name}_{who}", median([n / s for n, s in zip(tokens, wall[who])]))
            report.figure(f"cpu_s_per_1k_tokens_{name}_{who}", median(_cpu_per_1k(took[who], tokens)), digits=3)
            if who != "embedded":
                report.figure(f"ratio_{name}_over_{who}", paired_ratio(wall[who], wall["embedded"]))
    report.figure(
        f"gemm_gflop_per_s_{name}", median([gemm.tokens * gemm.flop_per_token / s / 1e9 for s in wall["gemm"]])
    )
    # Seconds that the round's tokens would take at the round's GEMM rate.
    least = [(n + prompts(part)) * s / gemm.tokens for n, part, s in zip(tokens, asks, wall["gemm"])]
    report.figure(f"bound_tokens_per_s_{name}", median([n / s for n, s in zip(tokens, least)]))
    report.figure(f"share_of_bound_{name}", paired_ratio(least, wall["embedded"]))
    ratio: Ratio = paired_ratio(wall["generate"], wall["embedded"])
    if kind == "mixed":
        allowed = paired_ratio(wall["generate"], least).value
        report.bar(f"{name}_over_generate", ratio.value, at_least=min(4.0, 0.85 * allowed))
    else:
        report.bar(f"{name}_over_generate", ratio.value, at_least=1.0)


def _cpu_per_1k(timings: Sequence[Timing], tokens: Sequence[int]) -> list[float]:
    return [1e3 * t.cpu_s / n for t, n in zip(timings, tokens, strict=True)]


def prompts(asks: Sequence[Ask]) -> int:
    """Prompt tokens that have to be computed: equal prompts once."""
    return sum(len(p) for p in {a.prompt.tobytes(): a.prompt for a in asks}.values())


def cells(args: Any) -> list[tuple[str, str, int]]:
    """(size, dtype, requests) of this run."""
    if args.smoke:
        return [("smoke", "float32", 16)]
    if args.quick:
        return [("0.9M", dtype, 64) for dtype in args.dtypes]
    sizes = ["given"] if args.model else args.sizes
    grid = [(size, dtype, n) for size in sizes for dtype in args.dtypes for n in args.requests]
    return grid if args.full else [cell for cell in grid if cell[0] == "0.9M" or cell[2] <= 64]


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--quick", action="store_true", help="0.9M and 64 requests only")
    p.add_argument("--full", action="store_true", help="every cell at full length")
    p.add_argument("--sizes", nargs="+", default=["0.9M", "28M"], help="of 0.9M, 5M, 28M; --model takes their place")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    p.add_argument("--scale", type=float, help="factor of all lengths (default 0.25; 1 with --full)")
    p.add_argument("--no-generate-batch", action="store_true", help="leave out the slowest of the three")
    args = p.parse_args()
    args.rounds = 2 if args.smoke else args.rounds
    if args.scale is None:
        args.scale = 1.0 if args.full else 0.1 if args.smoke else 0.25
    report = Report("rollout", args)
    report.figure("length_scale", args.scale)
    torch.set_num_threads(args.threads)
    built: dict[tuple[str, str], Models] = {}
    for size, dtype, num_requests in cells(args):
        if (size, dtype) not in built:
            folder = model_folder(args.model, size)
            built = {(size, dtype): Models(f"{size}_{dtype}", load_plain(folder, dtype), build_engine(folder, dtype))}
        for kind in LENGTHS:
            measure_cell(report, args, built[size, dtype], num_requests, kind)
    report.finish()


if __name__ == "__main__":
    main()

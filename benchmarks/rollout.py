"""How fast answers are sampled: Transformers' generate and generate_batch, vLLM and the embedded engine, in one run.

    python benchmarks/rollout.py            # all cells but 28M x 256, lengths at a quarter: about 6 minutes
    python benchmarks/rollout.py --quick    # 0.9M and 64 requests only
    python benchmarks/rollout.py --full     # everything at full length: over an hour
    python benchmarks/rollout.py --full --rivals vllm --vllm-python .venv-vllm/bin/python    # against vLLM alone

Every request gets its number of tokens in advance (no stop token counts), so all of them sample the same:

    mixed   GSM8K's lengths, groups of 8 that share their prompt
    equal   every request its own prompt, all of one length: nothing to share, nothing to refill

generate is one left-padded batch (or batches of 64, where that is faster) that runs to its longest answer.
generate_batch is Transformers' continuous batching, with a length limit for each request. Rates are sampled tokens per
second of wall time, prompts included in the time.
vllm is meshrl's engine for vLLM, over a server of its own; --vllm-python names the Python that has it. Start-up counts
from no process at all to the answer to a request of one token.

gemm: the matrix products of one step of the model, and nothing else, with as many rows as there are requests. The bound
is what sampling could reach if the products at that rate were all its work, each prompt computed once a group.
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
from meshrl.model.load import DTYPES
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine

RIVALS = ("generate", "generate_batch", "vllm")
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


def model_config(folder: Path, dtype: str) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(folder), "dtype": dtype})


def build_engine(folder: Path, dtype: str) -> EmbeddedEngine:
    cfg = model_config(folder, dtype)
    engine = build_embedded_engine(cfg, RolloutConfig(), torch.device("cpu"), "benchmark", ())
    engine.trust_loaded_weights()
    return engine


def requests_of(asks: Sequence[Ask]) -> list[Request]:
    """As meshrl's engines take them."""
    params = SamplingParams(ignore_eos=True)
    return [
        Request(id=str(i), context_ids=ask.prompt, sampling=params, seed=i, max_new_tokens=ask.tokens)
        for i, ask in enumerate(asks)
    ]


def embedded(engine: EmbeddedEngine, asks: Sequence[Ask]) -> int:
    """meshrl's engine, logprobs of all tokens included."""
    for request in requests_of(asks):
        engine.submit(request)
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


FIRST = Ask(np.array([3], np.int32), 1)  # what start-up ends with


def first_answer(folder: str, dtype: str) -> None:
    """Everything that a process does until the embedded engine's first answer."""
    embedded(build_engine(Path(folder), dtype), [FIRST])


def embedded_startup_s(folder: Path, dtype: str) -> float:
    """In a process of its own, as vLLM's is."""
    code = "import sys, rollout; rollout.first_answer(*sys.argv[1:])"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(folder.resolve()), dtype], cwd=Path(__file__).parent, check=True)
    return time.perf_counter() - began


@dataclass
class Models:
    """One model in one dtype, as each contender holds it."""

    name: str
    plain: Any
    engine: EmbeddedEngine
    vllm: VllmRival | None


@contextmanager
def loaded(report: Report, args: Any, size: str, dtype: str, requests: Sequence[int]) -> Iterator[Models]:
    """The model for cells of so many requests. vLLM's server, where it is a rival, ends with the context."""
    folder = model_folder(args.model, size)
    models = Models(f"{size}_{dtype}", load_plain(folder, dtype), build_engine(folder, dtype), None)
    if "vllm" not in args.rivals:
        yield models
        return
    most = max(
        cache_bytes(models.plain.config, DTYPES[dtype], [len(a.prompt) + a.tokens for a in asks])
        for num_requests, kind in itertools.product(requests, LENGTHS)
        for asks in asks_of(args, num_requests, kind).values()
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


def asks_of(args: Any, num_requests: int, kind: str) -> dict[int, list[Ask]]:
    """Of each round, the warm-up (-1) included."""
    return {i: LENGTHS[kind](num_requests, 300 + i, args.scale) for i in range(-1, args.rounds)}


def measure_cell(report: Report, args: Any, models: Models, num_requests: int, kind: str) -> dict[str, list[Timing]]:
    """All contenders on the same requests; other requests in each round."""
    name = f"{models.name}_{num_requests}_{kind}"
    asks = asks_of(args, num_requests, kind)
    gemm = Gemm(models.plain, num_requests)
    sampled: dict[str, int] = {}

    def run(who: str, work: Callable[[Sequence[Ask]], int]) -> Callable[[int], None]:
        def one(i: int) -> None:
            sampled[who] = work(asks[i])
            if sampled[who] != sum(a.tokens for a in asks[i]):
                raise RuntimeError(f"{who} sampled {sampled[who]} tokens, not those asked for")

        return one

    contenders: dict[str, Callable[[int], None]] = {}
    if "generate" in args.rivals:
        rows = report.raw[f"{name}_generate_rows"] = best_rows(models.plain, asks[-1])
        contenders["generate"] = run("generate", lambda a: generate(models.plain, a, rows))
    contenders["embedded"] = run("embedded", lambda a: embedded(models.engine, a))
    if (vllm := models.vllm) is not None:
        contenders["vllm"] = run("vllm", lambda a: vllm.sample(requests_of(a)))
    contenders["gemm"] = lambda i: gemm()
    if "generate_batch" in args.rivals:
        contenders["generate_batch"] = run("generate_batch", lambda a: generate_batch(models.plain, a))
    if vllm is None:
        took = alternate(contenders, args.rounds)
    else:
        took = alternate(contenders, args.rounds, before_each=vllm.wait_until_quiet, cpu_clock=vllm.cpu_clock)
    report.keep_timings(name, took)
    tell(report, name, took, [asks[i] for i in range(args.rounds)], gemm, kind)
    return took


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
    if "generate" not in wall:
        return
    ratio: Ratio = paired_ratio(wall["generate"], wall["embedded"])
    if kind == "mixed":
        allowed = paired_ratio(wall["generate"], least).value
        report.bar(f"{name}_over_generate", ratio.value, at_least=min(4.0, 0.85 * allowed))
    else:
        report.bar(f"{name}_over_generate", ratio.value, at_least=1.0)


def tell_vllm(report: Report, cells_took: Sequence[dict[str, list[Timing]]]) -> None:
    """Start-up, and what all rows say together: vLLM's wall time over the embedded engine's, of each round."""
    for who in ("embedded", "vllm"):
        starts = [raw[who] for name, raw in report.raw.items() if name.endswith("_startup_s")]
        report.figure(f"{who}_startup_s", median(starts))
    rows = [[v.wall_s / e.wall_s for v, e in zip(took["vllm"], took["embedded"])] for took in cells_took]
    mean = report.figure("vllm_geometric_mean", geometric_mean(rows))
    lowest = report.figure("vllm_lowest_row", min(median(row) for row in rows))
    report.bar("vllm_geometric_mean", mean, at_least=1.0)
    report.bar("vllm_lowest_row", lowest, at_least=0.85)


def _cpu_per_1k(timings: Sequence[Timing], tokens: Sequence[int]) -> list[float]:
    return [1e3 * t.cpu_s / n for t, n in zip(timings, tokens, strict=True)]


def prompts(asks: Sequence[Ask]) -> int:
    """Prompt tokens that have to be computed: equal prompts once."""
    return sum(len(p) for p in {a.prompt.tobytes(): a.prompt for a in asks}.values())


def cells(args: Any) -> list[tuple[str, str, int]]:
    """(size, dtype, requests) of this run."""
    if args.smoke:
        # vLLM's attention has no CPU kernel for heads as small as the smallest model's.
        return [("0.9M" if "vllm" in args.rivals else "smoke", "float32", 16)]
    if args.quick:
        return [("0.9M", dtype, 64) for dtype in args.dtypes]
    sizes = ["given"] if args.model else args.sizes
    grid = [(size, dtype, n) for size in sizes for dtype in args.dtypes for n in args.requests]
    return grid if args.full else [cell for cell in grid if cell[0] == "0.9M" or cell[2] <= 64]


def arguments() -> argparse.Namespace:
    p = parser(__doc__, rounds=5)
    p.add_argument("--quick", action="store_true", help="0.9M and 64 requests only")
    p.add_argument("--full", action="store_true", help="every cell at full length")
    p.add_argument("--sizes", nargs="+", default=["0.9M", "28M"], help="of 0.9M, 5M, 28M; --model takes their place")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    p.add_argument("--scale", type=float, help="factor of all lengths (default 0.25; 1 with --full)")
    p.add_argument("--rivals", nargs="+", choices=RIVALS, help="default: all; vllm where --vllm-python is given")
    p.add_argument("--no-generate-batch", action="store_true", help="leave out generate_batch, the slowest by far")
    p.add_argument("--vllm-python", type=Path, help="the Python that has vLLM and meshrl, as .venv-vllm/bin/python")
    args = p.parse_args()
    if args.rivals is None:
        args.rivals = [name for name in RIVALS if name != "vllm" or args.vllm_python]
    if args.no_generate_batch:
        args.rivals = [name for name in args.rivals if name != "generate_batch"]
    if "vllm" in args.rivals and args.vllm_python is None:
        p.error("--rivals vllm needs --vllm-python, the Python that has vLLM; `make setup-vllm` makes .venv-vllm")
    args.vllm_version = version_of(args.vllm_python) if "vllm" in args.rivals else None
    if "vllm" in args.rivals and args.vllm_version is None:
        p.error(f"--vllm-python {args.vllm_python}: no Python with vLLM; `make setup-vllm` makes .venv-vllm")
    args.rounds = 2 if args.smoke else args.rounds
    if args.scale is None:
        args.scale = 1.0 if args.full else 0.1 if args.smoke else 0.25
    return args


def main() -> None:
    args = arguments()
    report = Report("rollout", args)
    report.figure("length_scale", args.scale)
    if "vllm" not in args.rivals:
        report.say("vLLM is left out; --vllm-python takes the Python that has it")
    torch.set_num_threads(args.threads)
    took = []
    for (size, dtype), found in itertools.groupby(cells(args), key=lambda cell: cell[:2]):
        requests = [n for _, _, n in found]
        with loaded(report, args, size, dtype, requests) as models:
            for num_requests, kind in itertools.product(requests, LENGTHS):
                took.append(measure_cell(report, args, models, num_requests, kind))
    if "vllm" in args.rivals:
        tell_vllm(report, took)
    report.finish()


if __name__ == "__main__":
    main()

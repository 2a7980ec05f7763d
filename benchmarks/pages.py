"""The pages of the embedded engine's KV cache: memory, admitted rows, reads of shared prompts, and reused tokens, by
counting; and with --base, the speed of a sampler and the CPU time of its host against another checkout of meshrl.

    python benchmarks/pages.py
    python benchmarks/pages.py --base ../other-checkout --model runs/smollm2/model

allocated_over_needed: tokens of all pages over those of the rows, for 192 rows with the lengths of GSM8K's answers and
with lognormal lengths (mean 1,236), when all rows are at half of their lengths and at the end.

admitted_rows: rows that run on average in a cache of 268,000 tokens, with prompts of 200 tokens, max_new_tokens 32,768
and answers of 8,192 tokens on average (lognormal), over the rows that the engine with tiles admitted;
rows_over_reserving: over as many as fit when each reserves exactly what it may sample. tokens_computed_again: of
preempted rows, over all sampled tokens.

prompt_reads: pages with the prompts' keys and values that a decode step reads for a group of 8, over what 8 rows read
that each have their own.

cached_of_context: of the tokens that turns 2 to 10 of a conversation have in common with the turn before, those that
are not computed again.

rate (--base, --model): tokens per second over those of the other checkout, for 64 requests with GSM8K's lengths in
groups of 8; the two take turns, each in its own process. host (--base): CPU time of a decode step of up to 256 rows
with GSM8K's lengths, without the model, the head, the draws and the kernels, best of 5.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import ROOT, Report, median_interval, paired_ratio, parser
from workload import gsm8k_groups, model_folder

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import EmbeddedConfig, RolloutConfig
from meshrl.core.types import Request, SamplingParams
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine

CACHE_TOKENS, LONGEST, PROMPT, MEAN = 268_000, 32_768, 200, 8_192
FORMER_ROWS = 6  # that the engine with rows in tiles admitted then: it reserved 40,960 tokens for each
GROUP = 8


def main() -> None:
    p = parser(__doc__, rounds=9)
    p.add_argument("--base", type=Path, help="folder of another checkout, whose sampler is the rival")
    p.add_argument("--child", choices=("rate", "host"), help=argparse.SUPPRESS)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        child(args)
        return
    report = Report("pages", args)
    count_pages(report)
    count_rows(report, args)
    count_reads(report)
    count_reused(report, args)
    if args.base is not None:
        compare(report, args)
    report.finish()


def count_pages(report: Report) -> None:
    from meshrl.plan.sizes import PAGE_TOKENS
    from meshrl.rollout.embedded.pages import PageTable

    rng, width = np.random.default_rng(0), PAGE_TOKENS["cpu"]
    answers = [n for group in gsm8k_groups(24, GROUP, 0) for n in (group.prompt + k for k in group.answers)]
    for name, lengths in (
        ("lognormal", np.minimum(rng.lognormal(6.8, 0.8, 192).astype(int) + 1, LONGEST)),
        ("gsm8k", np.array(answers)),
    ):
        table, found = PageTable(width, LONGEST), []
        slots = np.array([table.join([], np.array([row])) for row in range(len(lengths))])
        for share in np.linspace(0, 1, 1001)[1:]:
            now = np.maximum(1, (lengths * share).astype(int))
            while len(full := np.flatnonzero(now > table.rooms[slots])):
                table.extend(slots[full], table.rooms[slots[full]])
            if share in (0.5, 1.0):
                found.append(table.num_used * width / now.sum())
        report.figure(f"allocated_over_needed_{name}_half", found[0])
        value = report.figure(f"allocated_over_needed_{name}", found[1])
        if name == "lognormal":
            report.bar("allocated_over_needed", value, at_most=1.1)


def count_rows(report: Report, args: argparse.Namespace) -> None:
    """The scheduler and the table alone; each row gets a token a step."""
    from meshrl.plan.sizes import DEVICE_PAGE_TOKENS
    from meshrl.rollout.admission import Bounds
    from meshrl.rollout.embedded.kv_cache import CacheBound, KVPool
    from meshrl.rollout.embedded.pages import PageTable
    from meshrl.rollout.embedded.rows import Sequence
    from meshrl.rollout.embedded.scheduler import Scheduler

    rng, num = np.random.default_rng(0), 40 if args.smoke else 240
    lengths = np.minimum(rng.lognormal(np.log(MEAN) - 0.32, 0.8, num).astype(int) + 1, LONGEST)
    table = PageTable(DEVICE_PAGE_TOKENS, PROMPT + LONGEST)
    pool = KVPool(DEVICE_PAGE_TOKENS, lambda: table.num_pages)
    bound = CacheBound(CACHE_TOKENS, 1, torch.device("cpu"), pool, pool)  # a byte a token
    scheduler = Scheduler(1024, 4096, bound, table, has_states=False)
    for row in range(num):
        request = Request(id=f"{row}", context_ids=np.full(PROMPT, row, np.int32), max_new_tokens=LONGEST)
        scheduler.submit(Sequence(request, Bounds(stop_ids=frozenset(), limit=LONGEST, limit_reason="length"), None))
    running, rows, computed = [], scheduler.rows, 0
    while scheduler.waiting or len(rows):
        admission = scheduler.admit(0, is_ahead=False)
        computed += sum(len(prefill.ids) for prefill in admission.prefills)
        decoding = slice(0, len(rows) - len(admission.sampled))
        rows.cached[rows.slots[decoding]] += 1
        rows.append(np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32))
        if scheduler.waiting:  # afterwards, nothing is left to be admitted
            running.append(len(rows))
        ends = [i for i, s in enumerate(rows.sequences) if rows.sampled[s.slot] >= lengths[int(s.request.id)]]
        if ends:
            scheduler.compact(ends)
    admitted = report.figure("rows_admitted", float(np.mean(running)))
    report.figure("rows_over_reserving", admitted / (CACHE_TOKENS // (PROMPT + LONGEST)))
    report.figure("rows_preempted", scheduler.num_preempted)
    report.figure("tokens_computed_again", (computed - num * PROMPT) / lengths.sum())
    report.bar("admitted_rows", admitted / FORMER_ROWS, at_least=5)


def count_reads(report: Report) -> None:
    from meshrl.plan.sizes import PAGE_TOKENS
    from meshrl.rollout.embedded.cached_attention import PageReads
    from meshrl.rollout.embedded.pages import PageTable

    width, shares = PAGE_TOKENS["cpu"], []
    for group in gsm8k_groups(64, GROUP, 0):
        table, prompt = PageTable(width, 4096), np.arange(group.prompt)
        slots = np.array([table.join(table.find(prompt[:-1]), prompt[:-1]) for _ in range(GROUP)])
        reads = PageReads(table, slots, torch.device("cpu"))
        shares.append((sum(e.num for e in reads.extents), GROUP * -(-(group.prompt - 1) // width)))
    once, each = np.array(shares).sum(axis=0)
    report.bar("prompt_reads", once / each, at_most=1 / GROUP)


def count_reused(report: Report, args: argparse.Namespace) -> None:
    """A conversation of 10 turns, each with an answer of 60 tokens and a result of 20."""
    engine = _engine(model_folder(args.model, "smoke"), prefix_cache=True)
    rng, known, cached, before = np.random.default_rng(0), 0, 0, 0
    ids = rng.integers(3, 200, 150).astype(np.int32)
    for turn in range(10):
        request = _request(f"{turn}", ids, 60, turn)
        answer = _run(engine, [request])[0]
        known, cached = known + before, cached + answer.times.cached_tokens
        before = len(ids) + len(answer.output_ids) - 1
        ids = np.concatenate([ids, answer.output_ids, rng.integers(3, 200, 20).astype(np.int32)])
    report.bar("cached_of_context", cached / known, at_least=0.95)


# ---- against another checkout


def compare(report: Report, args: argparse.Namespace) -> None:
    kinds = ["host"] if args.model is None else ["host", "rate"]
    for kind in kinds:
        rounds = 2 if args.smoke else 5 if kind == "host" else args.rounds
        with _child(args, kind, args.base) as base, _child(args, kind, ROOT) as own:
            pairs = []
            for i in range(rounds):
                order = (base, own) if i % 2 == 0 else (own, base)
                took = {ask: ask(i % 3) for ask in order}
                pairs.append((took[base], took[own]))
        report.raw[kind] = pairs
        if kind == "host":
            figures = [min(side) for side in zip(*pairs, strict=True)]
            report.figure("host_base_us", figures[0])
            report.figure("host_us", figures[1])
            report.bar("host", figures[1] / figures[0], at_most=0.3)
        else:
            report.figure("rate", paired_ratio(*zip(*pairs, strict=True)))
            low = median_interval([a / b for a, b in pairs]).low
            report.bar("rate_low", low, at_least=1.0)


@contextmanager
def _child(args: argparse.Namespace, kind: str, checkout: Path) -> Iterator[Callable[[int], float]]:
    """A process with the meshrl of a checkout: seed -> its result."""
    command = [sys.executable, __file__, "--child", kind, "--threads", str(args.threads)]
    command += ["--smoke"] * args.smoke + (["--model", str(args.model)] if args.model else [])
    env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None and process.stdout is not None
        lines, out = process.stdin, process.stdout

        def ask(seed: int) -> float:
            lines.write(f"{seed}\n")
            lines.flush()
            return float(json.loads(out.readline()))

        ask(0)
        yield ask
        lines.close()


def child(args: argparse.Namespace) -> None:
    folder = model_folder(args.model if args.child == "rate" else None, "smoke")
    engine = _engine(folder, prefix_cache=False)
    if args.child == "host":
        torch.set_num_threads(1)
        _without_device(engine)
    for line in sys.stdin:
        print(json.dumps((host if args.child == "host" else rate)(engine, int(line), args.smoke)), flush=True)


def rate(engine: EmbeddedEngine, seed: int, is_smoke: bool) -> float:
    """Seconds for 64 requests."""
    rng = np.random.default_rng(seed)
    requests = []
    for group in gsm8k_groups(8, GROUP, seed, 0.1 if is_smoke else 1.0):
        prompt = rng.integers(3, 2000, group.prompt).astype(np.int32)
        requests += [_request(f"{len(requests) + i}", prompt, n, i) for i, n in enumerate(group.answers)]
    began = time.perf_counter()
    _run(engine, requests)
    took = time.perf_counter() - began
    engine.drop_caches()
    return took


def host(engine: EmbeddedEngine, seed: int, is_smoke: bool) -> float:
    """Microseconds of CPU time for a step of decode, in the first 128 of 256 rows, of which some end."""
    for i, group in enumerate(gsm8k_groups(256 // GROUP, GROUP, seed)):
        prompt = np.arange(group.prompt, dtype=np.int32) % 50 + i
        for j, n in enumerate(group.answers):
            engine.submit(_request(f"{i} {j}", prompt, n, j))
    while engine.stats().waiting:
        engine.step()
    steps = 8 if is_smoke else 128
    began = time.process_time()
    for _ in range(steps):
        engine.step()
    took = (time.process_time() - began) / steps * 1e6
    engine._withdraw(None)
    engine.drop_caches()
    return took


def _without_device(engine: EmbeddedEngine) -> None:
    """Replace what a device computes: hidden states, logits, draws and copies; keys and values of one head remain."""
    from meshrl.rollout.embedded import engine as module
    from meshrl.rollout.embedded.sampler import Drawn

    runner: Any = engine._runner
    states, keys = torch.zeros(1 << 15, 8), torch.zeros(1 << 15, 1, 2)
    tokens, logprobs = torch.full((512,), 5), torch.full((512,), -1.0)

    def hidden(ids: torch.Tensor, places: torch.Tensor, context: Any, **_: Any) -> torch.Tensor:
        prefill = getattr(context, "prefill", context)
        if type(prefill).__name__ == "PrefillAttention":
            prefill.write(0, keys[: prefill.num_tokens], keys[: prefill.num_tokens])
        return states[: len(ids)]

    head = type("Head", (), {"weight": states, "ready": lambda self: self, "logits": lambda self, x: x})
    runner._hidden, runner.model.head, runner.kernels_fit, runner._fast = hidden, head, True, None
    runner._copy = lambda *_: None
    module.draw = lambda logits, *_: Drawn(tokens[: len(logits)], logprobs[: len(logits)])  # type: ignore[assignment]


def _engine(folder: Path, prefix_cache: bool) -> EmbeddedEngine:
    cfg = ModelConfig(path=str(folder), dtype="float32")
    rollout = RolloutConfig(max_context_tokens=1024, max_running_requests=256)
    if prefix_cache:
        rollout = rollout.model_copy(update={"embedded": EmbeddedConfig(prefix_cache=True)})
    engine = build_embedded_engine(cfg, rollout, torch.device("cpu"), "pages", ())
    engine.trust_loaded_weights()
    return engine


def _request(name: str, prompt: np.ndarray, tokens: int, seed: int) -> Request:
    return Request(
        id=name, context_ids=prompt, sampling=SamplingParams(ignore_eos=True), max_new_tokens=tokens, seed=seed
    )


def _run(engine: EmbeddedEngine, requests: list[Request]) -> list[Any]:
    for request in requests:
        engine.submit(request)
    turns = []
    while engine.has_work:
        turns += [turn for _, turn in engine.step()]
    return turns


if __name__ == "__main__":
    main()

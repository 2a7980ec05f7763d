"""The gain of packing in training: right-padded batches, packed rows, and packed rows that share a group's prompt.

    python benchmarks/packing.py

One forward and backward over 64 rows (8 groups of 8, GSM8K's lengths, different in each round) on one rank:

    padded   plain Transformers (SDPA with an attention mask): all rows padded to the longest of the 64, as in trainers
             without packing, in micro-batches of the size that is fastest here
    trimmed  the same, but each micro-batch is padded only to its own longest row. No padding can be faster, because the
             answers of a group have similar lengths and are in the same micro-batch
    packed   meshrl's engine, rows end to end
    shared   meshrl's engine, the prompt of a group computed once (the default of a run)

All contenders score the same positions with the same chunked head, and their logprobs are compared. Trained tokens are
the tokens with a loss, i.e. the answers. Then the batch plan: the cost of the busiest of 8 ranks over the minimum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from measure import Report, alternate, median, paired_ratio, parser, timed
from workload import gsm8k_groups, model_folder, start_single_rank, trained_tokens, training_samples

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, Sample
from meshrl.model.logprob import Head, token_logprobs
from meshrl.model.recipe import DTYPES, load_causal_lm
from meshrl.train.batch_plan import make_batch_plan, row_cost
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

CHUNK_TOKENS = 2048
MAX_TOKENS = 16384
ROWS_PER_BATCH = (8, 16, 64)  # of the padded micro-batches; the fastest of these is the rival
SAME_NATS = {"float32": 1e-3, "bfloat16": 0.2}  # largest difference of a logprob that rounding may make

Rows = dict[int, np.ndarray]


def load_plain(folder: Any, dtype: str) -> Any:
    """The model, loaded by plain Transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="sdpa", trust_remote_code=False
    ).train()
    lm.config.use_cache = False
    return lm


class Padded:
    """Right-padded batches with Transformers' own attention and the engine's head and loss."""

    def __init__(self, lm: Any, trim: bool):
        self.lm, self.trim = lm, trim
        self.rows_per_batch = ROWS_PER_BATCH[0]

    def __call__(self, samples: Sequence[Sample]) -> Rows:
        """Forward, backward, and the logprobs of the trained tokens by row."""
        found: Rows = {}
        for start in range(0, len(samples), self.rows_per_batch):
            rows = samples[start : start + self.rows_per_batch]
            longest = max(len(s) for s in (rows if self.trim else samples))

            def padded(name: str, rows: Sequence[Sample] = rows, longest: int = longest) -> torch.Tensor:
                arrays = [getattr(s, name) for s in rows]
                return torch.from_numpy(np.stack([np.pad(a, (0, longest - len(a))) for a in arrays]))

            tokens, mask = padded("tokens").long(), padded("mask")
            real = torch.arange(longest) < torch.tensor([len(s) for s in rows])[:, None]
            hidden = self.lm.base_model(input_ids=tokens, attention_mask=real.long()).last_hidden_state
            row, place = mask.nonzero(as_tuple=True)
            logp, _ = token_logprobs(
                hidden[row, place - 1],
                Head(self.lm.get_output_embeddings().weight),
                tokens[row, place],
                torch.ones(len(row)),
                chunk_tokens=CHUNK_TOKENS,
            )
            weight = padded("loss_weight")[row, place] * padded("advantages")[row, place]
            (-weight * (logp - logp.detach()).exp()).sum().backward()
            parts = logp.detach().float().numpy()
            ends = np.cumsum([s.mask.sum() for s in rows])
            found.update({start + i: part for i, part in enumerate(np.split(parts, ends[:-1]))})
        return found

    def drop_gradients(self) -> None:
        self.lm.zero_grad(set_to_none=True)


class Packed:
    """The engine: batch plan, packing, forward and backward, as on a rank."""

    def __init__(self, folder: Any, dtype: str, mesh: Any, share: bool):
        cfg = TrainConfig(activation_checkpointing=False, logprob_chunk_tokens=CHUNK_TOKENS)
        self.engine = TrainEngine.wrap(load_causal_lm(folder), cfg, mesh, POLICY, DTYPES[dtype])
        self.share, self.loss = share, make_policy_loss(AlgoConfig())

    def __call__(self, samples: Sequence[Sample]) -> Rows:
        lengths, groups = [len(s) for s in samples], [int(s.group_id) for s in samples]
        prefixes = [s.prefix_len for s in samples]
        batch_plan = make_batch_plan(lengths, 1, MAX_TOKENS, *((groups, prefixes) if self.share else ()))
        micro = batch_plan.micro_batches[0]
        batches = [pack([samples[i] for i in rows], rows, share_prefix=self.share) for rows in micro]
        result = self.engine.forward_backward(batches, self.loss, entropy=False)
        return {i: row[samples[i].mask] for i, row in result.logprobs.items()}

    def drop_gradients(self) -> None:
        self.engine.model.zero_grad(set_to_none=True)


def measure_dtype(report: Report, args: Any, folder: Any, mesh: Any, dtype: str) -> None:
    """Measure in one compute dtype. The engine's parameters are fp32 in any dtype; the rival's have that dtype."""
    num_groups, scale = (2, 0.1) if args.smoke else (8, 1.0)
    lm = load_plain(folder, dtype)
    runs: dict[str, Any] = {
        "padded": Padded(lm, trim=False),
        "trimmed": Padded(lm, trim=True),
        "packed": Packed(folder, dtype, mesh, share=False),
        "shared": Packed(folder, dtype, mesh, share=True),
    }
    work: dict[int, list[Sample]] = {}

    def samples(i: int) -> list[Sample]:
        if i not in work:
            work[i] = training_samples(gsm8k_groups(num_groups, 8, seed=100 + i, scale=scale), seed=100 + i)
        return work[i]

    def contender(run: Any) -> Any:
        def one(i: int) -> None:
            run(samples(i))
            run.drop_gradients()

        return one

    found = {name: run(samples(-1)) for name, run in runs.items()}
    require_same(found, dtype)
    for name in ("padded", "trimmed"):
        probe = {}
        for size in ROWS_PER_BATCH[: 2 if name == "trimmed" else None]:  # 64 rows have nothing to trim
            runs[name].rows_per_batch = size
            probe[size] = timed(contender(runs[name]), -1).wall_s
        runs[name].rows_per_batch = min(probe, key=lambda size: probe[size])
        fastest = runs[name].rows_per_batch
        report.print_line(f"{dtype}: {name} batches are fastest with {fastest} of {tuple(probe)} rows")
        report.raw[f"{name}_rows_per_batch_{dtype}"] = probe

    took = alternate({name: contender(run) for name, run in runs.items()}, args.rounds)
    report.add_timings(dtype, took)
    for name, timings in took.items():
        rates = [trained_tokens(samples(i)) / t.wall_s for i, t in enumerate(timings)]
        report.figure(f"trained_tokens_per_s_{name}_{dtype}", median(rates))
        report.figure(f"cpu_s_{name}_{dtype}", median([t.cpu_s for t in timings]))
    lengths = [[len(s) for s in samples(i)] for i in range(args.rounds)]
    report.figure("padding_factor", median([len(rows) * max(rows) / sum(rows) for rows in lengths]))
    wall = {name: [t.wall_s for t in timings] for name, timings in took.items()}
    ratio = report.figure(f"ratio_packed_over_padded_{dtype}", paired_ratio(wall["padded"], wall["packed"]))
    report.bar(f"ratio_packed_over_padded_{dtype}", ratio, at_least=1.8)
    report.figure(f"ratio_shared_over_packed_{dtype}", paired_ratio(wall["packed"], wall["shared"]))
    report.figure(f"ratio_shared_over_padded_{dtype}", paired_ratio(wall["padded"], wall["shared"]))
    report.figure(f"ratio_packed_over_trimmed_{dtype}", paired_ratio(wall["trimmed"], wall["packed"]))
    report.figure(f"ratio_shared_over_trimmed_{dtype}", paired_ratio(wall["trimmed"], wall["shared"]))


def require_same(found: dict[str, Rows], dtype: str) -> None:
    """Check that all contenders compute the same logprobs. Raises: SystemExit."""
    for name, rows in found.items():
        off = max(float(np.abs(rows[i] - row).max()) for i, row in found["padded"].items())
        if not off <= SAME_NATS[dtype]:
            raise SystemExit(f"{name} and padded differ by {off:.3g} nats in {dtype}; they don't compute the same")


def balance(report: Report, draws: int, num_ranks: int = 8, num_groups: int = 16, samples: int = 8) -> None:
    """Cost of the busiest rank over max(mean, largest row), on heavy-tailed lengths; the worst of many draws.

    Rows: prompts of GSM8K's size, answers lognormal with a tail of several thousand tokens (sigma 1, cut at 8,192).
    """
    worst: dict[str, list[float]] = defaultdict(list)
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        prompts = rng.integers(40, 170, num_groups).repeat(samples)
        lengths = prompts + np.minimum(8192, np.exp(rng.normal(6, 1, len(prompts)))).astype(int) + 1
        groups = np.arange(num_groups).repeat(samples)
        for name, share in (("alone", False), ("shared", True)):
            extra = (groups.tolist(), prompts.tolist()) if share else ()
            batch_plan = make_batch_plan(lengths.tolist(), num_ranks, MAX_TOKENS, *extra)
            costs = [
                _cost(
                    [(int(lengths[i]), int(groups[i]), int(prompts[i]) if share else 0) for i in batch_plan.rows(rank)]
                )
                for rank in range(num_ranks)
            ]
            least = max(float(np.mean(costs)), max(row_cost(int(n)) for n in lengths))
            worst[name].append(max(costs) / least)
    report.raw["balance"] = dict(worst)
    for name, values in worst.items():
        value = report.figure(f"balance_worst_of_{draws}_{name}", max(values))
        report.bar(f"balance_{name}", value, at_most=1.1)


def _cost(rows: Sequence[tuple[int, int, int]]) -> float:
    """The cost of one rank's rows, given as (length, group, prompt). A shared prompt counts once."""
    members = Counter(group for _, group, _ in rows)
    prompts = {group: prompt for _, group, prompt in rows}
    total = sum(row_cost(length) for length, _, _ in rows)
    return total - sum((count - 1) * row_cost(prompts[group]) for group, count in members.items())


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both", help="compute dtype")
    args = p.parse_args()
    args.rounds = 2 if args.smoke else args.rounds
    report = Report("packing", args)
    mesh = start_single_rank(args.threads)
    folder = model_folder(args.model, "smoke" if args.smoke else "5M")
    for dtype in ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,):
        measure_dtype(report, args, folder, mesh, dtype)
    balance(report, draws=5 if args.smoke else 100)
    report.finish()


if __name__ == "__main__":
    main()

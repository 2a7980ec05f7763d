"""The batch plan against a simple one: the balance of ranks and micro-batches, and the CPU time for 16,384 rows.

    python benchmarks/batch_plan.py

The rival is greedy, without groups and exchanges: the longest row first, each to the least loaded rank, and there to
the first micro-batch into which it fits, with a prompt of its own. Both are counted alike, by the plan's `row_cost`; a
prompt counts once in a micro-batch. For each distribution of lengths and size of groups, with 4,096 rows on 8 ranks:

    rank_NAME       cost of the costliest rank over the mean
    micro_NAME      cost of the costliest micro-batch over the mean, dummies included
    step_NAME       ranks wait for each other in each micro-batch: the sum of the costliest ones, over the lowest
                    possible one, the mean of the ranks if each prompt counts once
    NAME_over_greedy: that sum over the rival's
    cpu_s_NAME      CPU time of a plan of 16,384 rows, the best of --rounds
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from measure import Report, parser, timed

from meshrl.train.batch_plan import make_batch_plan, row_cost

RANKS = 8
CASES = [(1, 16384), (16, 16384), (16, 4096), (1024, 4096)]  # rows of a group (1 = nothing is shared), token budget
KINDS = ("uniform", "lognormal", "equal", "bimodal")
Plan = Sequence[Sequence[Sequence[int]]]


def lengths_of(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens of the answers."""
    if kind == "uniform":
        return rng.integers(64, 2049, count)
    if kind == "lognormal":
        return np.clip(np.exp(6 + 0.8 * rng.standard_normal(count)), 16, 3600).astype(int)
    if kind == "equal":
        return np.full(count, 700)
    return np.where(rng.random(count) < 0.8, rng.integers(100, 300, count), rng.integers(3000, 3600, count))


def rows_of(kind: str, count: int, group: int) -> tuple[list[int], list[int], list[int]]:
    """Lengths with their prompts, groups, prompts."""
    rng = np.random.default_rng(1)
    groups = np.arange(count) // group
    prompts = rng.integers(50, 400, count)[groups]
    return (lengths_of(kind, count, rng) + prompts).tolist(), groups.tolist(), prompts.tolist()


def greedy(lengths: Sequence[int], max_tokens: int) -> Plan:
    ranks: list[list[list[int]]] = [[] for _ in range(RANKS)]
    tokens: list[list[int]] = [[] for _ in range(RANKS)]
    costs = [0.0] * RANKS
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = costs.index(min(costs))
        costs[rank] += row_cost(lengths[i])
        at = next((m for m, n in enumerate(tokens[rank]) if n + lengths[i] <= max_tokens), len(tokens[rank]))
        if at == len(tokens[rank]):
            ranks[rank].append([])
            tokens[rank].append(0)
        ranks[rank][at].append(i)
        tokens[rank][at] += lengths[i]
    most = max(map(len, ranks))
    return [micros + [[]] * (most - len(micros)) for micros in ranks]


def cost_of(members: Sequence[int], lengths: Sequence[int], groups: Sequence[int], prompts: Sequence[int]) -> float:
    shared = {groups[i]: row_cost(prompts[i]) for i in members}
    return sum(row_cost(lengths[i]) - row_cost(prompts[i]) for i in members) + sum(shared.values())


def main() -> None:
    p = parser(__doc__, rounds=5)
    args = p.parse_args()
    num_rows, num_timed = (256, 512) if args.smoke else (4096, 16384)
    report = Report("batch_plan", args)
    worst_rank = slowest = 0.0
    over_greedy: list[float] = []
    for group, budget in CASES:
        for kind in KINDS:
            name = f"{kind}_{group}_{budget}"
            rows = lengths, groups, prompts = rows_of(kind, num_rows, group)
            least = cost_of(range(num_rows), *rows) / RANKS
            plans = {"plan": make_batch_plan(lengths, RANKS, budget, groups, prompts).micro_batches}
            plans["greedy"] = greedy(lengths, budget)
            steps = {}
            for contender, plan in plans.items():
                costs = np.array([[cost_of(micro, *rows) for micro in rank] for rank in plan])
                steps[contender] = float(costs.max(0).sum())
                suffix = "" if contender == "plan" else "_greedy"
                rank = report.figure(f"rank_{name}{suffix}", float(costs.sum(1).max() / costs.sum(1).mean()))
                report.figure(f"micro_{name}{suffix}", float(costs.max() / costs.mean()))
                report.figure(f"step_{name}{suffix}", steps[contender] / least)
                report.figure(f"micro_batches_{name}{suffix}", costs.shape[1])
                worst_rank = max(worst_rank, rank if contender == "plan" else 0.0)
            over_greedy.append(report.figure(f"{name}_over_greedy", steps["plan"] / steps["greedy"]))
            lengths, groups, prompts = rows_of(kind, num_timed, group)
            work = partial(make_batch_plan, lengths, RANKS, budget, groups, prompts)
            times = report.raw[name] = [timed(work).cpu_s for _ in range(args.rounds)]
            slowest = max(slowest, report.figure(f"cpu_s_{name}", min(times)))
    report.bar("worst_rank", worst_rank, at_most=1.05)
    report.figure("worst_over_greedy", max(over_greedy))
    report.bar("mean_over_greedy", float(np.exp(np.log(over_greedy).mean())), at_most=1.0)
    report.bar("slowest_cpu_s", slowest, at_most=1.0)
    report.finish()


if __name__ == "__main__":
    main()

"""The batch plan: which row goes to which rank and micro-batch. The controller makes it from lengths alone, without a
collective; ranks compare its hash (P25).

A group's rows share their prompt, which a micro-batch computes once. So a group stays together unless balance or the
token budget forbids it; if it is split, each part computes the prompt again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_IMBALANCE = 1.01  # cost of the fullest bin over the lowest possible one; below it no more rows are moved
MIN_GAIN = 0.999  # a move has to lower the cost of the fullest bin to at most this share
QUADRATIC_TOKENS = 4096.0  # length at which a row's attention costs as much as the rest of the model


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """micro_batches[rank][m] = indices of the rows in that micro-batch; [] is a dummy. All ranks have the same number.

    Example, 3 rows on 2 ranks: micro_batches = (((0,),), ((1, 2),)).
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    hash: str

    def rows(self, rank: int) -> list[int]:
        """All row indices of one rank, in order."""
        return [i for micro in self.micro_batches[rank] for i in micro]


@dataclass(frozen=True, slots=True)
class Row:
    """What the plan needs of a row: its tokens, and its group, whose first `prefix` tokens it shares (0 = none)."""

    length: int
    group: int
    prefix: int = 0


def row_cost(length: int) -> float:
    """Relative compute cost of a row: a linear term, and a quadratic term for attention."""
    return length * (1.0 + length / QUADRATIC_TOKENS)


@dataclass(slots=True)
class _Bin:
    """A rank, or a micro-batch, while it is filled."""

    cost: float = 0.0
    tokens: int = 0
    rows: list[int] = field(default_factory=list)
    groups: Counter[int] = field(default_factory=Counter)

    def added(self, row: Row) -> tuple[float, int]:
        """Cost and tokens that this row would add; its prompt counts only if it is not here yet."""
        here = row.prefix if self.groups[row.group] else 0
        return row_cost(row.length) - row_cost(here), row.length - here

    def freed(self, row: Row) -> float:
        """Cost that removing this row would free."""
        return row_cost(row.length) - (row_cost(row.prefix) if self.groups[row.group] > 1 else 0.0)

    def add(self, i: int, row: Row) -> None:
        cost, tokens = self.added(row)
        self.cost += cost
        self.tokens += tokens
        self.rows.append(i)
        self.groups[row.group] += 1

    def remove(self, i: int, row: Row) -> None:
        self.cost -= self.freed(row)
        self.tokens -= row.length - (row.prefix if self.groups[row.group] > 1 else 0)
        self.rows.remove(i)
        self.groups[row.group] -= 1


def make_batch_plan(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    groups: Sequence[int] | None = None,
    prefixes: Sequence[int] | None = None,
) -> BatchPlan:
    """Spread rows over ranks by cost, then over micro-batches of at most max_tokens (a longer row gets its own).

    groups, prefixes: for each row, its group and the length of the prompt that the group shares; without them no row
    shares a prompt. A pure function: the same arguments give the same plan on any machine.
    """
    if groups is None or prefixes is None:
        rows = [Row(n, i) for i, n in enumerate(lengths)]
    else:
        rows = [Row(n, g, min(p, n - 1)) for n, g, p in zip(lengths, groups, prefixes, strict=True)]
    bins = _spread(rows, num_ranks)
    ranks = [b.rows for b in bins]
    count = max(1, *(_min_micro_batches(rows, b, max_tokens) for b in bins))
    while any(_fill(rows, members, count, max_tokens) is None for members in ranks):
        count += 1
    filled = tuple(_fill(rows, members, count, max_tokens) for members in ranks)
    facts = [[[r.length, r.group, r.prefix] for r in rows], num_ranks, max_tokens, filled]
    return BatchPlan(filled, hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16])  # type: ignore[arg-type]


def _min_micro_batches(rows: Sequence[Row], b: _Bin, max_tokens: int) -> int:
    """A lower bound of this rank's number of micro-batches. Rows above the budget get their own."""
    oversized = [rows[i].length for i in b.rows if rows[i].length > max_tokens]
    return len(oversized) + -(-max(0, b.tokens - sum(oversized)) // max_tokens)


def _by_group(rows: Sequence[Row], members: Sequence[int]) -> list[list[int]]:
    """The members' groups, the costliest first; inside a group the longest row first."""
    groups: dict[int, list[int]] = {}
    for i in sorted(members, key=lambda i: (-rows[i].length, i)):
        groups.setdefault(rows[i].group, []).append(i)
    return sorted(groups.values(), key=lambda g: (-_group_cost(rows, g), g[0]))


def _group_cost(rows: Sequence[Row], group: Sequence[int]) -> float:
    """Cost of a group in a bin of its own."""
    b = _Bin()
    for i in group:
        b.add(i, rows[i])
    return b.cost


def _spread(rows: Sequence[Row], num_bins: int) -> list[_Bin]:
    """Complete groups, the costliest first, to the least loaded bin. If these bins can't be balanced, single rows to
    the bin where they cost least."""
    by_group, by_row = ([_Bin() for _ in range(num_bins)] for _ in range(2))
    for group in _by_group(rows, range(len(rows))):
        b = min(by_group, key=lambda b: b.cost)
        for i in group:
            b.add(i, rows[i])
    _balance(rows, by_group)
    if _imbalance(rows, by_group) <= MAX_IMBALANCE:
        return by_group
    for i in sorted(range(len(rows)), key=lambda i: (-rows[i].length, i)):
        min(by_row, key=lambda b: b.cost + b.added(rows[i])[0]).add(i, rows[i])
    return min(by_group, by_row, key=lambda bins: max(b.cost for b in bins))


def _imbalance(rows: Sequence[Row], bins: Sequence[_Bin]) -> float:
    """Cost of the fullest bin over the lowest possible one: the mean, or the cost of the costliest row."""
    costs = [b.cost for b in bins]
    least = max(sum(costs) / len(costs), max((row_cost(row.length) for row in rows), default=0.0))
    return max(costs) / least if least else 1.0


def _balance(rows: Sequence[Row], bins: list[_Bin]) -> None:
    """Move or swap single rows between the fullest bin and others until the bins are balanced or nothing helps."""
    for _ in range(2 * len(rows)):
        *others, high = sorted(bins, key=lambda b: b.cost)
        if _imbalance(rows, bins) <= MAX_IMBALANCE:
            break
        if not any(_move(rows, high, low) or _swap(rows, high, low) for low in others):
            break


def _move(rows: Sequence[Row], high: _Bin, low: _Bin) -> bool:
    """Move the row that balances the two bins best; False when none helps."""
    moves = [(max(high.cost - high.freed(rows[i]), low.cost + low.added(rows[i])[0]), i) for i in high.rows]
    if not moves or min(moves)[0] >= MIN_GAIN * high.cost:
        return False
    _, i = min(moves)
    high.remove(i, rows[i])
    low.add(i, rows[i])
    return True


def _swap(rows: Sequence[Row], high: _Bin, low: _Bin) -> bool:
    """Swap the two rows that balance the bins best; False when none helps. Each of the two rows counts with its own
    prompt, which is never less than its real cost."""
    swaps = [
        (max(high.cost - high.freed(rows[i]) + row_cost(rows[j].length), low.cost - low.freed(rows[j]) + gain), i, j)
        for i in high.rows
        for gain in [low.added(rows[i])[0]]
        for j in low.rows
    ]
    if not swaps or min(swaps)[0] >= MIN_GAIN * high.cost:
        return False
    _, i, j = min(swaps)
    high.remove(i, rows[i])
    low.remove(j, rows[j])
    high.add(j, rows[j])
    low.add(i, rows[i])
    return True


def _fill(
    rows: Sequence[Row], members: Sequence[int], count: int, max_tokens: int
) -> tuple[tuple[int, ...], ...] | None:
    """Pack members into `count` micro-batches of similar cost within the token budget; None when they don't fit."""
    bins = [_Bin() for _ in range(count)]
    for group in _by_group(rows, members):
        for i in group:
            row = rows[i]
            fitting = [b for b in bins if not b.tokens or b.tokens + b.added(row)[1] <= max_tokens]
            if not fitting:
                return None
            min(fitting, key=lambda b: (not b.groups[row.group], b.cost)).add(i, row)
    return tuple(tuple(sorted(b.rows)) for b in bins)

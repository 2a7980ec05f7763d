"""The batch plan: which row goes to which rank and micro-batch. The controller makes it from the rows' lengths, groups
and shared prompts, without a collective.

A group's rows share their prompt, which a micro-batch computes once. So a group stays together unless balance or the
token budget forbids it; if it is split, each part computes the prompt again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heappop, heappush

import numpy as np

MAX_IMBALANCE = 1.01  # cost of the fullest bin over the lowest possible one; below it no more rows are moved
MIN_GAIN = 0.999  # a move has to lower the cost of the fullest bin to at most this share
_TRIED = 32  # micro-batches that are tried for a row, the cheapest first
_SINGLE_MOVES = 1 << 15  # rows that are compared in moves of one row; then several are moved at once
_SWAPS = 32  # rows of the other bin that are compared with each row in a swap
QUADRATIC_TOKENS = 4096.0  # length at which a row's attention costs as much as the rest of the model


MicroBatches = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """micro_batches[rank][m] = indices of the rows in that micro-batch; [] is a dummy. All ranks have the same number.
    The first num_scored of each rank have rows without a gradient: their logprobs are computed, nothing else. unscored:
    rows in no micro-batch.

    Example, 3 rows on 2 ranks: micro_batches = (((0,),), ((1, 2),)).
    """

    micro_batches: MicroBatches
    num_scored: int = 0
    unscored: frozenset[int] = frozenset()

    def rows(self, rank: int) -> list[int]:
        """All row indices of one rank, in order."""
        return [i for micro in self.micro_batches[rank] for i in micro]


def row_cost(length: int) -> float:
    """Relative compute cost of a row: a linear term, and a quadratic term for attention."""
    return length * (1.0 + length / QUADRATIC_TOKENS)


@dataclass(slots=True)
class Row:
    """What the plan needs of a row: its tokens, and its group, whose first `prefix` tokens it shares (0 = none)."""

    length: int
    group: int
    prefix: int = 0
    cost: float = field(init=False)
    prefix_cost: float = field(init=False)

    def __post_init__(self) -> None:
        self.cost, self.prefix_cost = row_cost(self.length), row_cost(self.prefix)


@dataclass(slots=True)
class _Bin:
    """A rank, or a micro-batch, while it is filled. groups: how many rows of each group are here."""

    cost: float = 0.0
    tokens: int = 0
    rows: set[int] = field(default_factory=set)
    groups: dict[int, int] = field(default_factory=dict)

    def added_cost(self, row: Row) -> float:
        """Cost that this row would add; its prompt counts only if it is not here yet."""
        return row.cost - row.prefix_cost if self.groups.get(row.group) else row.cost

    def added_tokens(self, row: Row) -> int:
        """Tokens that this row would add."""
        return row.length - (row.prefix if self.groups.get(row.group) else 0)

    def freed(self, row: Row) -> float:
        """Cost that removing this row would free."""
        return row.cost - (row.prefix_cost if self.groups[row.group] > 1 else 0.0)

    def add(self, i: int, row: Row) -> None:
        self.cost += self.added_cost(row)
        self.tokens += self.added_tokens(row)
        self.rows.add(i)
        self.groups[row.group] = self.groups.get(row.group, 0) + 1

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
    scored: Collection[int] = (),
    unscored: Collection[int] = (),
) -> BatchPlan:
    """Spread rows over ranks by cost, then over micro-batches of at most max_tokens (a longer row gets its own).

    groups, prefixes: for each row, its group and the length of the prompt that the group shares; without them no row
    shares a prompt. scored: rows without a gradient, which get micro-batches of their own. unscored: those that get
    none. A pure function: the same arguments give the same plan on any machine.
    """
    if groups is None or prefixes is None:
        rows = [Row(n, i) for i, n in enumerate(lengths)]
    else:
        rows = [Row(n, g, min(p, n - 1)) for n, g, p in zip(lengths, groups, prefixes, strict=True)]
    trained = set(range(len(rows))).difference(scored, unscored)
    filled = _micro_batches(rows, _spread(rows, sorted(trained), num_ranks), max_tokens)
    num_scored = 0
    if scored:
        first = _micro_batches(rows, _spread(rows, sorted(scored), num_ranks), max_tokens)
        filled, num_scored = tuple(a + b for a, b in zip(first, filled, strict=True)), len(first[0])
    return BatchPlan(filled, num_scored, frozenset(unscored))


def _micro_batches(rows: Sequence[Row], bins: Sequence[_Bin], max_tokens: int) -> MicroBatches:
    """Each rank's micro-batches: few, and equally many in all ranks."""
    ranks = [_by_group(rows, b.rows) for b in bins]

    @cache
    def fill(rank: int, count: int) -> tuple[tuple[int, ...], ...] | None:
        return _fill(rows, ranks[rank], count, max_tokens)

    def fits(rank: int, count: int) -> bool:
        return fill(rank, count) is not None

    count = max(1, *(_min_micro_batches(rows, b, max_tokens) for b in bins))
    for rank in sorted(range(len(bins)), key=lambda rank: -bins[rank].tokens):  # the fullest decide the number
        few, step = count - 1, 1
        while not fits(rank, count):
            few, count, step = count, count + step, 2 * step
        if few + 1 < count:  # some numbers between were not tried
            numbers = range(few + 1, count)
            count = numbers.start + bisect_left(numbers, True, key=partial(fits, rank))
    while True:  # a rank that fits into few micro-batches may not fit into more
        filled = [micros for rank in range(len(ranks)) if (micros := fill(rank, count)) is not None]
        if len(filled) == len(ranks):
            return tuple(filled)
        count += 1


def _min_micro_batches(rows: Sequence[Row], b: _Bin, max_tokens: int) -> int:
    """A lower bound of this rank's number of micro-batches. Rows above the budget get their own, and no two rows of
    more than half of it fit into one."""
    oversized = [rows[i].length for i in b.rows if rows[i].length > max_tokens]
    by_tokens = len(oversized) + -(-max(0, b.tokens - sum(oversized)) // max_tokens)
    return max(by_tokens, sum(2 * (rows[i].length - rows[i].prefix) > max_tokens for i in b.rows))


def _by_group(rows: Sequence[Row], members: Collection[int]) -> list[list[int]]:
    """The members' groups, the costliest first; inside a group the longest row first."""
    groups: dict[int, list[int]] = {}
    for i in sorted(members, key=lambda i: (-rows[i].length, i)):
        groups.setdefault(rows[i].group, []).append(i)

    def cost(group: list[int]) -> float:
        """In a bin of its own."""
        return sum(rows[i].cost - rows[i].prefix_cost for i in group) + rows[group[0]].prefix_cost

    return sorted(groups.values(), key=lambda g: (-cost(g), g[0]))


def _spread(rows: Sequence[Row], members: Sequence[int], num_bins: int) -> list[_Bin]:
    """The members, by complete groups, the costliest first, to the least loaded bin. If these bins can't be balanced,
    single rows to the bin where they cost least."""
    by_group, by_row = ([_Bin() for _ in range(num_bins)] for _ in range(2))
    costs = np.zeros(num_bins)
    for group in _by_group(rows, members):
        at = int(costs.argmin())
        for i in group:
            by_group[at].add(i, rows[i])
        costs[at] = by_group[at].cost
    if _balance(rows, by_group):
        return by_group
    costs[:] = 0.0
    places: dict[int, list[int]] = {}  # group -> the bins that have rows of it
    for i in sorted(members, key=lambda i: (-rows[i].length, i)):
        row, after = rows[i], costs + rows[i].cost
        for at in places.setdefault(row.group, []):
            after[at] = by_row[at].cost + by_row[at].added_cost(row)
        at = int(after.argmin())
        by_row[at].add(i, row)
        costs[at] = by_row[at].cost
        if at not in places[row.group]:
            places[row.group].append(at)
    return min(by_group, by_row, key=lambda bins: max(b.cost for b in bins))


def _balance(rows: Sequence[Row], bins: list[_Bin]) -> bool:
    """Move or swap rows between the fullest bin and others until the bins are balanced or nothing helps. Returns
    whether they are balanced."""
    costliest_row = max((rows[i].cost for b in bins for i in b.rows), default=0.0)
    costs = [b.cost for b in bins]
    order = sorted((cost, at) for at, cost in enumerate(costs))
    single = _SINGLE_MOVES  # how many rows may still be compared for moves of one row
    for _ in range(2 * len(rows)):
        if _is_balanced(costs, costliest_row):
            return True
        high = order[-1][1]
        for _, low in order[:-1]:
            single -= len(bins[high].rows)
            if _move(rows, bins[high], bins[low], single < 0) or _swap(rows, bins[high], bins[low]):
                break
        else:
            return False
        for at in (high, low):
            del order[bisect_left(order, (costs[at], at))]
            costs[at] = bins[at].cost
            insort(order, (costs[at], at))
    return _is_balanced(costs, costliest_row)


def _is_balanced(costs: Sequence[float], costliest_row: float) -> bool:
    """Whether the fullest bin costs little more than the lowest possible cost: the mean, or that of one row."""
    least = max(sum(costs) / len(costs), costliest_row)
    return not least or max(costs) / least <= MAX_IMBALANCE


def _move(rows: Sequence[Row], high: _Bin, low: _Bin, several: bool) -> bool:
    """Move the row that balances the two bins best; False when none helps. several: before that, move rows by groups
    as long as the low bin stays the lower one, of each group long and short ones alike: only few long rows fit into a
    micro-batch."""
    before = high.cost
    for i in [i for group in _by_group(rows, high.rows) for i in sorted(group)] if several else ():
        if low.cost + low.added_cost(rows[i]) <= high.cost - high.freed(rows[i]):
            high.remove(i, rows[i])
            low.add(i, rows[i])
    moves = [(max(high.cost - high.freed(rows[i]), low.cost + low.added_cost(rows[i])), i) for i in high.rows]
    if moves and min(moves)[0] < MIN_GAIN * high.cost:
        _, i = min(moves)
        high.remove(i, rows[i])
        low.add(i, rows[i])
    return high.cost < before


def _swap(rows: Sequence[Row], high: _Bin, low: _Bin) -> bool:
    """Swap the two rows that balance the bins best; False when none helps. Each of the two rows counts with its own
    prompt, which is never less than its real cost."""
    if not high.rows or not low.rows:
        return False
    mine, theirs = [*high.rows], sorted(low.rows, key=lambda j: (rows[j].cost + low.freed(rows[j]), j))
    high_after = high.cost - np.array([high.freed(rows[i]) for i in mine])
    low_after = low.cost + np.array([low.added_cost(rows[i]) for i in mine])
    cost, freed = np.array([(rows[j].cost, low.freed(rows[j])) for j in theirs]).T
    # The higher bin is lowest where both are equal. Prompts shift that place by a few rows.
    first = np.searchsorted(cost + freed, low_after - high_after) - _SWAPS // 2
    near = np.clip(first, 0, max(0, len(theirs) - _SWAPS))[:, None] + np.arange(min(_SWAPS, len(theirs)))
    after = np.maximum(high_after[:, None] + cost[near], low_after[:, None] - freed[near])
    best = after.min()
    if best >= MIN_GAIN * high.cost:
        return False
    i, j = min((mine[a], theirs[near[a, b]]) for a, b in np.argwhere(after == best))
    high.remove(i, rows[i])
    low.remove(j, rows[j])
    high.add(j, rows[j])
    low.add(i, rows[i])
    return True


class _Emptiest:
    """The bin of least cost among those that were pushed, or of fewest tokens, in O(log n). A bin is pushed again after
    each of its changes."""

    def __init__(self, bins: Sequence[_Bin]):
        self._bins = bins
        self._by_cost: list[tuple[float, int]] = []
        self._by_tokens: list[tuple[float, int]] = []

    def push(self, at: int) -> None:
        heappush(self._by_cost, (self._bins[at].cost, at))
        heappush(self._by_tokens, (self._bins[at].tokens, at))

    def fitting(self, tokens: int, max_tokens: int) -> int | None:
        """Where these tokens fit: the first of the _TRIED cheapest bins, else the bin with fewest tokens; None if they
        fit nowhere."""
        while self._by_tokens and self._by_tokens[0][0] != self._bins[self._by_tokens[0][1]].tokens:
            heappop(self._by_tokens)  # it was pushed again since
        if not self._by_tokens or (self._by_tokens[0][0] > 0 and max_tokens < self._by_tokens[0][0] + tokens):
            return None
        fits = self._by_tokens[0][1]
        passed: list[tuple[float, int]] = []
        while self._by_cost and len(passed) < _TRIED:
            cost, at = heappop(self._by_cost)
            if cost == (b := self._bins[at]).cost:
                passed.append((cost, at))
                if not b.tokens or b.tokens + tokens <= max_tokens:
                    fits = at
                    break
        for entry in passed:
            heappush(self._by_cost, entry)
        return fits


def _fill(
    rows: Sequence[Row], groups: Sequence[Sequence[int]], count: int, max_tokens: int
) -> tuple[tuple[int, ...], ...] | None:
    """Pack a rank's groups into `count` micro-batches of similar cost within the token budget; None when they don't
    fit."""
    bins = [_Bin() for _ in range(count)]
    everywhere = _Emptiest(bins)
    for at in range(count):
        everywhere.push(at)
    for group in groups:
        with_group = _Emptiest(bins)
        for i in group:
            row = rows[i]
            place = with_group.fitting(row.length - row.prefix, max_tokens)
            if place is None and (place := everywhere.fitting(row.length, max_tokens)) is None:
                return None
            bins[place].add(i, row)
            everywhere.push(place)
            with_group.push(place)
    return tuple(tuple(sorted(b.rows)) for b in bins)

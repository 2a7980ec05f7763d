"""The page table of the KV cache: which tokens each page has, and which rows read it. Without tensors.

A page has room for the keys and values of `page_tokens` tokens in all layers. A row reads a list of pages, each up to a
position of its own: starts[slot, c] is the position of the first token in its page c, which ends where page c + 1
starts. So two rows share a page up to the token at which they part, and nothing is copied. One row at most writes a
page: the row that it was allocated for, or one that continues exactly its last token while no row reads it.

Pages are found by their tokens: each has a parent (a page, and how many of its tokens come before), and the children of
a parent differ in their tokens. A page that no row reads is idle: it is found until its memory is needed; the least
recently used page goes first. Weights of another version need `clear`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshrl.plan.sizes import pages_with_memory

Prefix = list[tuple[int, int]]  # (page, how many of its tokens), from the first token of a row on
Parent = tuple[int, int]  # serial number of a page, and how many of its tokens
_ROOT: Parent = (-1, 0)
_LAST = np.iinfo(np.int32).max  # the start of the page after a row's last one
_MORE_PAGES = 32  # of a row, for shared pages that it reads in part
_MOST_IDLE = 4  # times the most pages that rows have used at a time
_LEAST_PART = 16  # tokens of a page that are worth one more page for a row


class PageTable:
    """keeps_idle: allocate new memory before idle pages are evicted, up to _MOST_IDLE: for conversations, which come
    back. limit: returns the most pages that may exist, None = no limit."""

    def __init__(self, page_tokens: int, max_tokens: int, keeps_idle: bool = False):
        self.page_tokens, self.keeps_idle = page_tokens, keeps_idle
        self.limit: Callable[[], int | None] = lambda: None
        self.num_columns = -(-max_tokens // page_tokens) + _MORE_PAGES
        self.num_changes = 0  # of the pages of rows
        self.clear()

    def clear(self) -> None:
        """Forget all pages and rows."""
        self.num_pages = 0  # that exist
        self._serials, self._most_used, self._clock = 0, 0, 0
        self._tokens = np.empty((0, self.page_tokens), np.int64)
        # Of each page: its serial number (-1 = free), its tokens that can be found, the rows that read it, when a row
        # last ended that had read it, and its first position.
        self._serial, self._known, self.readers, self._used, self._start = np.zeros((5, 0), np.int64)
        self._parents: dict[int, Parent] = {}
        self._children: dict[Parent, list[int]] = {}
        # Of each row, by its slot: pages, starts, their number, and the position at which it needs another page: the
        # end of its last page if it writes that one.
        self.pages = np.zeros((0, self.num_columns), np.int32)
        self.starts = np.zeros((0, self.num_columns + 1), np.int32)
        self.counts, self.rooms = np.zeros((2, 0), np.int64)
        self._free_slots: list[int] = []
        self.changed: set[int] = set()  # slots whose pages are others since a reader of the table has cleared it
        self.num_changes += 1

    @property
    def num_used(self) -> int:
        """Pages that rows read."""
        return int(np.count_nonzero(self.readers))

    def find(self, ids: np.ndarray) -> Prefix:
        """The longest start of ids int64[T] that pages have."""
        found: Prefix = []
        at, parent = 0, _ROOT
        while at < len(ids) and (pages := self._children.get(parent)):
            part = ids[at : at + self.page_tokens]
            is_same = self._tokens[pages, : len(part)] == part
            equal = np.where(is_same.all(1), len(part), is_same.argmin(1))
            equal = np.minimum(equal, self._known[pages])
            best = int(equal.argmax())
            if equal[best] < min(_LEAST_PART, len(part)):
                break
            found.append((pages[best], int(equal[best])))
            at, parent = at + found[-1][1], (int(self._serial[pages[best]]), found[-1][1])
        return found

    def num_needed(self, found: Prefix, length: int) -> int:
        """New pages for a row of this length which reads the found ones."""
        return -(-(length - sum(n for _, n in found)) // self.page_tokens)

    def join(self, found: Prefix, ids: np.ndarray) -> int:
        """A new row that reads the found pages, and gets new ones for the rest of ids int64[T], which can be found from
        now on; returns its slot. The caller has compared `num_needed` with the limit."""
        slot = self._free_slots.pop() if self._free_slots else self._new_slot()
        pages = [page for page, _ in found]
        continues = bool(found) and self.readers[pages[-1]] == 0 and self._known[pages[-1]] == found[-1][1]
        self.readers[pages] += 1
        ends = np.cumsum([n for _, n in found], dtype=np.int64)
        self.pages[slot, : len(pages)] = pages
        self.starts[slot, 0], self.starts[slot, 1 : len(pages)] = 0, ends[:-1]
        self.starts[slot, len(pages)] = _LAST
        self.counts[slot] = len(pages)
        at = int(ends[-1]) if found else 0
        self.rooms[slot] = int(self.starts[slot, len(pages) - 1]) + self.page_tokens if continues else at
        for page in self.allocate(max(0, -(-(len(ids) - int(self.rooms[slot])) // self.page_tokens))):
            self._append(slot, int(self.rooms[slot]), page)
        self.register(slot, ids, at)
        self._note(slot)
        return slot

    def extend(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """A page for the next token of each row that has no room for it; returns the slots for which none is left.
        lengths: of the rows without that token."""
        full = np.flatnonzero(lengths >= self.rooms[slots])
        if not len(full):
            return slots[full]
        pages = self.allocate(len(full))
        for place, page in zip(full, pages, strict=False):
            self._append(int(slots[place]), int(lengths[place]), page)
        return slots[full[len(pages) :]]

    def register(self, slot: int, ids: np.ndarray, start: int) -> None:
        """ids[start:] of this row can be found, if the row writes their pages."""
        count, width = int(self.counts[slot]), self.page_tokens
        first = max(0, int(np.searchsorted(self.starts[slot, :count], start, side="right")) - 1)
        for column in range(first, count):
            page, at = int(self.pages[slot, column]), int(self.starts[slot, column])
            end = min(int(self.starts[slot, column + 1]), len(ids), at + width)
            known = int(self._known[page])
            is_written = column < count - 1 or self.rooms[slot] == at + width
            if not is_written or end - at <= known:
                continue
            self._tokens[page, known : end - at] = ids[at + known : end]
            self._known[page], self._start[page] = end - at, at
            if page not in self._parents:
                parent = _ROOT
                if column:
                    before = int(self.pages[slot, column - 1])
                    parent = (int(self._serial[before]), at - int(self.starts[slot, column - 1]))
                self._parents[page] = parent
                self._children.setdefault(parent, []).append(page)

    def leave(self, slot: int) -> None:
        """The row ends. Pages that no other row reads are idle, or free if they can't be found."""
        self._clock += 1
        pages = self.pages[slot, : self.counts[slot]]
        self.readers[pages] -= 1
        self._used[pages] = self._clock
        for page in pages[(self.readers[pages] == 0) & (self._known[pages] == 0)]:
            self._free(int(page))
        self.counts[slot] = self.rooms[slot] = 0
        self._free_slots.append(slot)
        self._note(slot)

    def allocate(self, num: int) -> list[int]:
        """Pages without a reader, which one row gets; fewer than num where no memory is left."""
        used = self.num_used
        self._most_used = max(self._most_used, used + num)
        num_free = int(np.count_nonzero(self._serial < 0))
        if num_free < num and self.keeps_idle and self.num_pages - num_free - used < _MOST_IDLE * self._most_used:
            num_free += self._grow(num - num_free)
        if num_free < num:
            num_free += self._evict(num - num_free)
        if num_free < num:
            self._grow(num - num_free)
        pages: list[int] = np.flatnonzero(self._serial < 0)[:num].tolist()
        self._serial[pages] = np.arange(self._serials, self._serials + len(pages))
        self._serials += len(pages)
        self._known[pages] = 0
        return pages

    def gather(self) -> np.ndarray:
        """Exchange places so that the pages that rows read are the first ones, sorted by `kinds` of readers; returns
        int64[2, N]: new and old page of those whose keys and values must be copied, all at once."""
        new_of, end = np.full(self.num_pages, -1), 0
        kind = np.where(self.readers > 0, kinds(np.maximum(1, self.readers)), -1)
        for each in np.unique(kind)[::-1]:
            pages = np.flatnonzero(kind == each)
            free = np.setdiff1d(np.arange(end, end + len(pages)), pages)
            is_there = (pages >= end) & (pages < end + len(pages))
            new_of[pages[is_there]], new_of[pages[~is_there]] = pages[is_there], free
            end += len(pages)
        moved = np.flatnonzero((new_of != np.arange(self.num_pages)) & (self._serial >= 0))
        for of_pages in (self._tokens, self._serial, self._known, self.readers, self._used, self._start):
            of_pages[new_of] = of_pages.copy()
        self.pages = new_of[self.pages].astype(np.int32)
        self._parents = {int(new_of[page]): parent for page, parent in self._parents.items()}
        self._children = {parent: new_of[pages].tolist() for parent, pages in self._children.items()}
        self.changed.update(range(len(self.counts)))
        self.num_changes += 1
        return np.stack([new_of[moved], moved])

    def _append(self, slot: int, start: int, page: int) -> None:
        count = int(self.counts[slot])
        self.pages[slot, count], self.starts[slot, count], self.starts[slot, count + 1] = page, start, _LAST
        self.counts[slot], self.rooms[slot] = count + 1, start + self.page_tokens
        self.readers[page] += 1
        self._note(slot)

    def _note(self, slot: int) -> None:
        self.changed.add(slot)
        self.num_changes += 1

    def _grow(self, num: int) -> int:
        """At least num more pages, within the limit; returns how many."""
        total, limit = pages_with_memory(self.num_pages + num), self.limit()
        more = (total if limit is None else min(total, limit)) - self.num_pages
        if more > 0:
            self._tokens = np.concatenate([self._tokens, np.zeros((more, self.page_tokens), np.int64)])
            of_pages = np.stack([self._serial, self._known, self.readers, self._used, self._start])
            new = np.zeros((5, more), np.int64)
            new[0] = -1
            self._serial, self._known, self.readers, self._used, self._start = np.concatenate([of_pages, new], axis=1)
            self.num_pages += more
        return max(0, more)

    def _evict(self, num: int) -> int:
        """Free as many of the idle pages that were used least recently, the later ones of a row first; returns how
        many."""
        idle = np.flatnonzero((self._serial >= 0) & (self.readers == 0))
        pages = idle[np.lexsort((-self._start[idle], self._used[idle]))][:num]
        for page in pages:
            self._free(int(page))
        return len(pages)

    def _free(self, page: int) -> None:
        self._serial[page], self._known[page] = -1, 0
        parent = self._parents.pop(page, None)
        if parent is not None:
            self._children[parent].remove(page)
            if not self._children[parent]:
                del self._children[parent]

    def _new_slot(self) -> int:
        slot = len(self.pages)
        more = max(8, slot // 2)
        self._free_slots += range(slot + more - 1, slot, -1)
        self.pages = np.concatenate([self.pages, np.zeros((more, self.num_columns), np.int32)])
        self.starts = np.concatenate([self.starts, np.full((more, self.num_columns + 1), _LAST, np.int32)])
        self.counts, self.rooms = (np.concatenate([x, np.zeros(more, np.int64)]) for x in (self.counts, self.rooms))
        return slot


def kinds(readers: np.ndarray) -> np.ndarray:
    """Of pages by their number of readers, up to a power of four: 0 = one reader."""
    return np.ceil(np.log2(readers) / 2).astype(np.int64)


def places_of(table: PageTable, slot: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page and place in it of each of these positions of a row."""
    starts = table.starts[slot, : table.counts[slot]]
    column = np.searchsorted(starts, positions, side="right") - 1
    return table.pages[slot, column].astype(np.int64), positions - starts[column]


def places_of_last(table: PageTable, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64[2, N]: page and place in it of one position in the last page of each row."""
    columns = table.counts[slots] - 1
    return np.stack([table.pages[slots, columns], positions - table.starts[slots, columns]]).astype(np.int64)

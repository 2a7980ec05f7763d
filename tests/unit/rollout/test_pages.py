"""The pages of the KV cache: their table against a list of tokens for each row, and engines that use them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tiny_engines import ask, run, scores, tiny_engine
from tiny_models import tiny_lm

from meshrl.core.types import Request, Turn
from meshrl.rollout.admission import Bounds
from meshrl.rollout.embedded.cached_attention import PageReads
from meshrl.rollout.embedded.kv_cache import CacheBound, KVPool
from meshrl.rollout.embedded.pages import PageTable, places_of, places_of_last
from meshrl.rollout.embedded.rows import Sequence
from meshrl.rollout.embedded.scheduler import Scheduler

CPU = torch.device("cpu")
WIDTH = 16


class _Table(PageTable):
    """A table whose pages have tokens; it is checked after each event."""

    def __init__(self, limit: int | None, keeps_idle: bool):
        super().__init__(WIDTH, 400, keeps_idle)
        self.limit = lambda: limit
        self.written = np.zeros((0, WIDTH), np.int64)
        self.rows: dict[int, list[int]] = {}

    def write(self, slot: int, ids: list[int], start: int) -> None:
        self.written = np.pad(self.written, ((0, max(0, self.num_pages - len(self.written))), (0, 0)))
        pages, places = places_of(self, slot, np.arange(start, len(ids)))
        self.written[pages, places] = ids[start:]

    def add(self, ids: list[int]) -> int | None:
        found = self.find(np.array(ids[:-1]))
        cached = sum(n for _, n in found)
        available = None if self.limit() is None else self.limit() - self.num_used
        idle = sum(self.readers[page] == 0 for page, _ in found)
        if available is not None and self.num_needed(found, len(ids)) > available - idle:
            return None
        slot = self.join(found, np.array(ids))
        self.rows[slot] = list(ids)
        self.write(slot, ids, cached)
        return slot

    def end(self, slot: int, is_known: bool) -> None:
        ids = self.rows.pop(slot)
        if is_known:
            self.register(slot, np.array(ids), 0)
        self.leave(slot)

    def check(self) -> None:
        readers = np.zeros(self.num_pages, np.int64)
        for slot, ids in self.rows.items():
            pages, starts = self.pages[slot, : self.counts[slot]], self.starts[slot, : self.counts[slot] + 1]
            assert (np.diff(starts) > 0).all() and (np.diff(starts[:-1]) <= WIDTH).all() and starts[0] == 0
            assert len(set(pages.tolist())) == len(pages)
            readers[pages] += 1
            assert self.written[places_of(self, slot, np.arange(len(ids)))].tolist() == ids, "a page of another row"
        assert self.readers.tolist() == readers.tolist() and self.num_used == np.count_nonzero(readers)
        assert self.limit() is None or self.num_pages <= self.limit()
        known = sorted(page for pages in self._children.values() for page in pages)
        assert known == sorted(self._parents) and (self._serial[known] >= 0).all()
        assert (self._serial[readers > 0] >= 0).all()


@pytest.mark.parametrize("limit", [None, 60])
@pytest.mark.parametrize("keeps_idle", [False, True])
def test_rows_read_their_own_tokens_whatever_they_share(limit: int | None, keeps_idle: bool) -> None:
    """Groups, conversations and forks join, grow, end, are aborted, preempted and dropped at random."""
    rng = random.Random(f"{limit} {keeps_idle}")
    table, texts, shared = _Table(limit, keeps_idle), [[i] for i in range(3)], 0
    for _ in range(1500):
        event = rng.random()
        if event < 0.3:
            text = rng.choice(texts)
            ids = text[: rng.randint(1, len(text))] + [rng.randrange(50) for _ in range(rng.choice((0, 3, 20, 60)))]
            shared += sum(n for _, n in table.find(np.array(ids[:-1]))) if table.add(ids[:300]) is not None else 0
            texts = [*texts, ids[:300]][-20:]
        elif event < 0.8 and table.rows:
            slots = np.array(sorted(table.rows))
            lengths = np.array([len(table.rows[slot]) for slot in slots])
            slots, lengths = slots[lengths < 380], lengths[lengths < 380]
            lacking = set(table.extend(slots, lengths).tolist())
            for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
                if slot not in lacking:
                    table.rows[slot].append(rng.randrange(50))
                    table.write(slot, table.rows[slot], length)
            for slot in lacking:  # preempted
                texts.append(list(table.rows[slot]))
                table.end(slot, True)
        elif table.rows:
            slot = rng.choice(sorted(table.rows))
            texts.append(list(table.rows[slot]))
            table.end(slot, rng.random() < 0.7)
        if rng.random() < 0.05:
            table.check()
            new, old = table.gather()
            table.written[new] = table.written[old]
            assert (np.flatnonzero(table.readers) == np.arange(table.num_used)).all()
        if rng.random() < 0.01:  # a sync
            table.rows.clear()
            table.clear()
            assert table.find(np.array(texts[-1])) == []
        table.check()
    assert shared > 1000
    for slot in list(table.rows):
        table.end(slot, True)
    table.check()
    assert table.num_used == 0


def test_idle_pages_go_by_least_recent_use_and_the_ends_of_rows_first() -> None:
    table = _Table(8, True)
    for first in (0, 100):
        slot = table.add([first + i for i in range(3 * WIDTH)])
        assert slot is not None
        table.end(slot, True)
    assert table.add([200 + i for i in range(4 * WIDTH)]) is not None
    left = [sum(n for _, n in table.find(np.arange(first, first + 3 * WIDTH))) for first in (0, 100)]
    assert left == [WIDTH, 3 * WIDTH]


def test_what_an_evicted_page_had_is_not_found_behind_the_tokens_of_a_new_row() -> None:
    table = _Table(1, False)
    slot = table.add(list(range(WIDTH)))
    assert slot is not None
    table.end(slot, True)
    assert table.add([99, *range(1, 8)]) is not None
    assert sum(n for _, n in table.find(np.array([99, *range(1, WIDTH)]))) == 0
    assert sum(n for _, n in table.find(np.array([99, *range(1, 8)]))) == 8


def test_a_page_that_a_group_shares_is_read_once_for_the_group() -> None:
    """Keys and values of its prompt that are read for a token of each member: a page for the group, not for a row."""
    table = PageTable(WIDTH, 400)
    prompt, slots = np.arange(5 * WIDTH + 3), []
    for _ in range(8):
        found = table.find(prompt)
        slots.append(table.join(found, prompt))
    table.extend(np.array(slots), np.full(8, len(prompt)))
    reads = PageReads(table, np.array(slots), CPU)
    assert sum(e.num for e in reads.extents if e.readers == 8) == 6
    assert sum(e.num for e in reads.extents) == table.num_used == 6 + 7  # the first one continues in the last page


def test_the_pages_of_rows_of_real_lengths_are_hardly_larger_than_the_rows() -> None:
    """Lengths that are distributed as those of answers, up to 32,768 tokens."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.8, 0.8, 192).astype(int) + 1, 32768)
    table = PageTable(64, 32768)
    slots = np.array([table.join([], np.array([row])) for row in range(len(lengths))])
    for step in range(1, int(lengths.max())):
        growing = lengths > step
        table.extend(slots[growing], np.full(growing.sum(), step))
    assert table.num_used * 64 / lengths.sum() < 1.1


# ---- engines


@pytest.fixture(scope="module")
def lm() -> torch.nn.Module:
    return tiny_lm("qwen2")


def _conversation(engine: object, num_turns: int, branch: int = 0) -> list[Turn]:
    """Turns that each continue the tokens of the turn before, with a result of a tool."""
    ids, turns = [5 + i % 50 for i in range(40)], []
    for turn in range(num_turns):
        request = ask(f"{branch} {turn}", ids, seed=turn + 100 * branch, max_new_tokens=12)
        turns.append(run(engine, [request])[request.id])  # type: ignore[arg-type]
        ids = [*ids, *turns[-1].output_ids.tolist(), *[(turn + branch + i) % 60 for i in range(9)]]
    return turns


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_turn_computes_what_is_new_in_its_conversation(family: str) -> None:
    """At least 95 % of the tokens of contexts come from the cache, in trees of turns, too. Tokens and logprobs are
    those without it."""
    engine, plain = tiny_engine(tiny_lm(family), prefix_cache=True), tiny_engine(tiny_lm(family))
    turns = [turn for branch in range(2) for turn in _conversation(engine, 10, branch)]
    alone = []
    for turn in turns:
        plain.drop_caches()
        request = ask("a", turn.context_ids, seed=turn.seed, max_new_tokens=12)
        alone.append(run(plain, [request])["a"])
    for turn, other in zip(turns, alone, strict=True):
        assert turn.output_ids.tolist() == other.output_ids.tolist() and other.times.cached_tokens == 0
        np.testing.assert_allclose(turn.logprobs, other.logprobs, atol=1e-5)
    later = [turn for turn in turns if len(turn.context_ids) > 40]
    known = sum(len(turn.context_ids) - 10 for turn in later)  # the last sampled token is new, too
    assert sum(turn.times.cached_tokens for turn in later) >= 0.95 * known


def test_pages_of_old_weights_are_not_found(lm: torch.nn.Module) -> None:
    engine = tiny_engine(lm, prefix_cache=True)
    context = list(range(3, 60))
    for _ in range(2):
        first, second = (run(engine, [ask("a", context)])["a"].times.cached_tokens for _ in range(2))
        assert (first, second) == (0, len(context) - 1)
        engine.drop_caches()


def test_an_engine_keeps_every_invariant_under_random_events(lm: torch.nn.Module) -> None:
    """Groups, continuations, aborts, syncs and releases with few pages: all turns are those of their requests alone."""
    rng = random.Random(3)
    engine = tiny_engine(lm, max_running=6, kv_cache_bytes=8 * 64 * 256, prefix_cache=True)
    texts, requests, turns = [[i + 3] * 20 for i in range(3)], dict[str, Request](), dict[str, Turn]()
    for step in range(250):
        if rng.random() < 0.2 and step < 200:
            text = rng.choice(texts)[: rng.choice((15, 60, 150))]
            for member in range(rng.choice((1, 4))):
                request = ask(f"{step} {member}", text, seed=step + member, max_new_tokens=rng.choice((1, 20, 90)))
                requests[request.id] = request
                engine.submit(request)
        for name, turn in engine.step():
            turns[name] = turn
            texts = [*texts, [*turn.context_ids.tolist(), *turn.output_ids.tolist()]][-9:]
        if rng.random() < 0.03 and engine._scheduler.running:
            turns.update(engine._withdraw({rng.choice(engine._scheduler.running).request.id}))
        if rng.random() < 0.02:
            engine.drop_caches()
        rows, table = engine._scheduler.rows, engine._runner.table
        readers = np.zeros(table.num_pages, np.int64)
        for slot in rows.slots:
            readers[table.pages[slot, : table.counts[slot]]] += 1
        assert table.readers.tolist() == readers.tolist()
        assert (rows.cached[rows.slots] == rows.length[rows.slots] - 1).all()
    while engine.has_work:
        turns.update(engine.step())
    assert engine._scheduler.num_preempted > 0 and turns.keys() == requests.keys()
    alone = run(tiny_engine(lm, max_running=64), requests.values())
    for name, turn in turns.items():
        want = alone[name]
        assert turn.output_ids.tolist() == want.output_ids[: len(turn.output_ids)].tolist()
        assert turn.stop_reason in (want.stop_reason, "abort")
        np.testing.assert_allclose(turn.logprobs, want.logprobs[: len(turn.logprobs)], atol=1e-5)


@pytest.mark.slow
def test_long_rows_are_sampled_and_scored() -> None:
    """One of 32,768 tokens and 64 of 4,096."""
    lm = tiny_lm("qwen2", num_hidden_layers=1, max_position_embeddings=1 << 16)
    engine = tiny_engine(lm, max_running=80, max_context_tokens=40000)
    long = [ask("long", np.arange(32000) % 60 + 1, max_new_tokens=768)]
    rows = [ask(str(i), np.arange(3000 + i) % 59 + 1, seed=i, max_new_tokens=1096) for i in range(64)]
    turns = run(engine, [*long, *rows])
    for turn in (turns["long"], turns["0"], turns["63"]):
        want = scores(lm, np.concatenate([turn.context_ids, turn.output_ids]))[len(turn.context_ids) :]
        np.testing.assert_allclose(turn.logprobs, want, atol=1e-4)


def test_a_sequence_that_joins_gets_its_page_before_rows_that_are_computed_ahead() -> None:
    """They have a page for their token already, and their next one is not due."""
    table = PageTable(WIDTH, 400)
    pool = KVPool(WIDTH, lambda: table.num_pages)
    scheduler = Scheduler(8, 4096, CacheBound(8 * WIDTH, 1, CPU, pool, pool), table, False)  # a byte for a token
    bounds = Bounds(stop_ids=frozenset(), limit=99, limit_reason="length")
    for i in range(3):
        scheduler.submit(Sequence(ask(f"ahead {i}", [i] * WIDTH), bounds, None))
    scheduler.admit(0, is_ahead=False)
    for i in range(2):
        scheduler.submit(Sequence(ask(f"group {i}", [9] * (2 * WIDTH + 1)), bounds, None))
    decoders = scheduler.admit(0, is_ahead=True).decoders
    assert len(decoders) == 2 and (table.rooms[[s.slot for s in decoders]] > 2 * WIDTH).all()


def test_the_last_places_are_those_of_the_last_tokens() -> None:
    table = PageTable(WIDTH, 400)
    slots = np.array([table.join([], np.arange(n)) for n in (1, WIDTH, 3 * WIDTH + 5)])
    last = places_of_last(table, slots, np.array([0, WIDTH - 1, 3 * WIDTH + 4]))
    for i, (slot, position) in enumerate(zip(slots, (0, WIDTH - 1, 3 * WIDTH + 4), strict=True)):
        assert [x.item() for x in places_of(table, slot, np.array([position]))] == last[:, i].tolist()

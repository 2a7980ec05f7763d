"""The prompts of a run: data.path, data.sources or a caller's rows, in memory or streamed, as one PromptFeed. Their
order is deterministic, and resumable at any step of a run.

An ordinal counts all draws of a run, over epochs. Row and epoch are pure functions of a position and the seed, so the
state of a source is one or two numbers; the rest of `state()` serves to refuse a resume on other data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from meshrl.config.data import NamedRows
from meshrl.core.errors import DataError
from meshrl.core.types import SCHEMA, Prompt, Sample
from meshrl.data.datasets import PromptMaker, SftRow, all_too_long, load_prompts, make_all, require_rows
from meshrl.data.tables import RowTable, Table, open_table

PROBED_ROWS = 8  # a stream renders them at the start, so that another tokenizer or template changes its digest


class PromptFeed(Protocol):
    """An endless stream of training prompts that can be resumed exactly."""

    @property
    def num_left_out(self) -> int:
        """Rows longer than data.max_prompt_tokens that were found so far: all of them at the start if every row is read
        then, else as they are drawn."""
        ...

    def shared(self, texts: set[bytes]) -> set[bytes]:
        """Those of these (as `content_of`) that a training prompt has; a stream compares only its first rows."""
        ...

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts, with consecutive ordinals."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain JSON: the exact position, and values that must be equal in a resume, so that it gets the same rows."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises: DataError when rows, order or seed have changed."""
        ...


def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of `size` rows, int64[size], that depends only on the numbers in `key`.

    Raw bits of Philox and a stable sort: numpy guarantees this stream for all versions. It does not guarantee
    Generator.permutation, with which a resume under another numpy could get another order.
    """
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits, kind="stable")


def require_same(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises: DataError when a saved state belongs to other rows, or to another order of the rows, than `mine`."""
    differing = {k: (saved.get(k), v) for k, v in mine.items() if saved.get(k) != v}
    if differing:
        changes = "; ".join(f"{k} was {was!r}, is {now!r}" for k, (was, now) in differing.items())
        raise DataError(
            f"this checkpoint was made with another data order ({changes}), so it can't be resumed at the exact row. "
            "Restore the data files, the tokenizer, data.* or sft.*, run.seed and run.date, or start a new run."
        )


class _Source:
    """A position in an order of rows, and its checked state. Each epoch has every row once; with shuffle, each epoch
    has another order. The order takes 8 bytes per row of memory.

    identity: more values that must be equal in a resume.
    """

    prompts: Sequence[Prompt] = ()  # that have been rendered

    def __init__(self, digest: str, num_rows: int, seed: int, shuffle: bool, **identity: Any):
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._epoch, self._epoch_rows = -1, np.arange(num_rows)
        order = {"num_rows": num_rows, "seed": seed, "shuffle": shuffle, "digest": digest}
        self._identity = {"schema": SCHEMA, **order, **identity}
        self.next_ordinal = 0

    def _row_at(self, position: int) -> int:
        epoch, place = divmod(position, self._num_rows)
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._epoch_rows = epoch, permutation(self._num_rows, self._seed, epoch)
        return int(self._epoch_rows[place])

    def _draw(self, n: int) -> list[tuple[int, int]]:
        drawn = [(o, self._row_at(o)) for o in range(self.next_ordinal, self.next_ordinal + n)]
        self.next_ordinal += n
        return drawn

    def shared(self, texts: set[bytes]) -> set[bytes]:
        return texts.intersection(content_of(prompt) for prompt in self.prompts if prompt.ids is not None)

    def state(self) -> dict[str, Any]:
        return {"next_ordinal": self.next_ordinal, **self._identity}

    def load_state(self, state: dict[str, Any]) -> None:
        known = {k: v for k, v in self._identity.items() if k not in ("answers", "held_out") or k in state}
        require_same(known, state)
        self.next_ordinal = int(state["next_ordinal"])


class PromptSource(_Source):
    """A PromptFeed over prompts in memory."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, num_left_out: int = 0):
        digest, answers = digest_of((p.id, p.ids) for p in prompts), digest_of_answers(prompts)
        super().__init__(digest, len(prompts), seed, shuffle, answers=answers)
        self.prompts = list(prompts)
        self.num_left_out = num_left_out

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts, also across epochs. With fewer rows than n, a row occurs again, with another ordinal."""
        return [dataclasses.replace(self.prompts[row], ordinal=ordinal) for ordinal, row in self._draw(n)]


class PromptStream(_Source):
    """A PromptFeed that reads, renders and filters each row of a table when it is drawn, and keeps none. A bad row is
    an error when it is drawn, with file and line, or left out with make.bad. Ordinals count returned prompts, positions
    count rows that were read.

    rows: the numbers of those to draw; None = all. num_left_out: rows that were found to be too long before.
    """

    def __init__(
        self, table: Table, make: PromptMaker, seed: int, rows: Sequence[int] | None = None, num_left_out: int = 0
    ):
        require_rows(table, table.num_rows)
        self._table, self._make, self._limit = table, make, make.cfg.max_prompt_tokens
        self._rows = range(table.num_rows) if rows is None else rows
        # Of the first rows as rendered, and of the table's fingerprint: the other rows are not read for the digest.
        probed = (raw for number in self._rows[:PROBED_ROWS] for raw in table.rows(number, number + 1))
        self.prompts = make_all(probed, lambda raw: make(raw, 0))
        chosen = [] if rows is None else [hashlib.sha256(np.array(rows).tobytes()).hexdigest()]
        images = [media.digest for prompt in self.prompts for media in prompt.media.values()]
        fingerprint = np.frombuffer(repr([*table.fingerprint(), *chosen, *images]).encode(), np.uint8)
        digest = digest_of([*((p.id, p.ids) for p in self.prompts), ("fingerprint", fingerprint)])
        own = {"max_prompt_tokens": self._limit, "answers": digest_of_answers(self.prompts)}
        super().__init__(digest, len(self._rows), seed, make.cfg.shuffle, **own)
        self.position, self.num_left_out = 0, num_left_out

    def next(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        too_long: list[int] = []
        num_bad = 0
        while len(prompts) < n:
            number = self._rows[self._row_at(self.position)]
            row = next(self._table.rows(number, number + 1), None)
            if row is None:
                raise DataError(
                    f"{self._table.name} has fewer rows than at the start of the run: it was changed. Restore it, or "
                    "start a new run."
                )
            self.position += 1
            try:
                prompt = self._make(row, self.next_ordinal)
            except DataError as error:
                num_bad += 1
                if self._make.bad is None or num_bad >= self._num_rows:
                    raise
                self._make.bad.append(str(error))
                self.num_left_out += 1
                continue
            length = len(prompt.ids) if prompt.ids is not None else 0
            if length <= self._limit:
                self.next_ordinal += 1
                prompts.append(prompt)
                too_long.clear()
                continue
            self.num_left_out += 1
            too_long.append(length)
            if len(too_long) >= self._num_rows:
                raise all_too_long(self._table.name, too_long, "data.max_prompt_tokens", self._limit)
        return prompts

    def state(self) -> dict[str, Any]:
        return {**super().state(), "position": self.position, "num_left_out": self.num_left_out}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.position, self.num_left_out = int(state["position"]), int(state["num_left_out"])


class PromptMixture:
    """A PromptFeed that draws from several, each in proportion to its weight, as evenly as possible.

    Every draw takes the source that is furthest behind its share; the seed sets the initial offsets. So in any part of
    the run, even a single step, the number of prompts of a source differs from its share by at most one or two (with
    independent random draws it would vary by the square root of the number drawn). Each source has separate epochs.
    """

    def __init__(self, feeds: Mapping[str, PromptFeed], weights: Mapping[str, float], seed: int):
        total = sum(weights.values())
        self._feeds = dict(feeds)
        self._shares = {name: weights[name] / total for name in feeds}
        self._identity = {"schema": SCHEMA, "seed": seed, "shares": self._shares}
        # Raw Philox bits as a fraction: see permutation().
        bits = np.random.Philox(np.random.SeedSequence([seed, len(feeds)])).random_raw(len(feeds))
        self._starts = {name: int(raw) / 2**64 for name, raw in zip(feeds, bits)}
        self._drawn = dict.fromkeys(feeds, 0)

    @property
    def num_left_out(self) -> int:
        return sum(feed.num_left_out for feed in self._feeds.values())

    def shared(self, texts: set[bytes]) -> set[bytes]:
        return set[bytes]().union(*(feed.shared(texts) for feed in self._feeds.values()))

    def next(self, n: int) -> list[Prompt]:
        prompts, first = [], sum(self._drawn.values())
        for ordinal in range(first, first + n):
            behind = {
                name: share * (ordinal + 1) + self._starts[name] - self._drawn[name]
                for name, share in self._shares.items()
            }
            name = max(behind, key=lambda name: behind[name])
            self._drawn[name] += 1
            prompts += [dataclasses.replace(prompt, ordinal=ordinal) for prompt in self._feeds[name].next(1)]
        return prompts

    def state(self) -> dict[str, Any]:
        sources = {name: {"drawn": self._drawn[name], **feed.state()} for name, feed in self._feeds.items()}
        return {**self._identity, "sources": sources}

    def load_state(self, state: dict[str, Any]) -> None:
        require_same(self._identity, state)
        for name, feed in self._feeds.items():
            feed.load_state(state["sources"][name])
            self._drawn[name] = int(state["sources"][name]["drawn"])


class SftSource(_Source):
    """An endless stream of SFT rows as Samples, which can be packed when their loss weights are assigned."""

    def __init__(self, rows: Sequence[SftRow], seed: int, shuffle: bool = True, held_out: Sequence[SftRow] = ()):
        contents = ([(row.id, np.frombuffer(row.content, np.uint8)) for row in each] for each in (rows, held_out))
        digest, other = map(digest_of, contents)
        super().__init__(digest, len(rows), seed, shuffle, **({"held_out": other} if held_out else {}))
        self._rows = list(rows)

    def next(self, n: int) -> list[Sample]:
        """The next n rows."""
        drawn = [(ordinal, self._rows[number]) for ordinal, number in self._draw(n)]
        return [row.sample(f"{row.id}@{ordinal}") for ordinal, row in drawn]


def content_of(prompt: Prompt) -> bytes:
    """The ids and images of a prompt that is not a draft, to compare it with others."""
    assert prompt.ids is not None
    return b"".join([prompt.ids.tobytes(), *(media.digest.encode() for media in prompt.media.values())])


def digest_of(rows: Iterable[tuple[str, np.ndarray | None]]) -> str:
    """Digest of ids and rendered tokens: it differs with another tokenizer or template, or another date (run.date)."""
    total = hashlib.sha256()
    for name, ids in rows:
        total.update(name.encode() + b"\0" + (b"" if ids is None else ids.tobytes()) + b"\0")
    return total.hexdigest()[:16]


def digest_of_answers(prompts: Iterable[Prompt]) -> str:
    """Digest of ids and answers."""
    texts = ((p.id, json.dumps(p.answer, sort_keys=True, default=repr)) for p in prompts)
    return digest_of((name, np.frombuffer(text.encode(), np.uint8)) for name, text in texts)


def open_feed(make: PromptMaker, seed: int, rows: RowTable | None = None) -> PromptFeed:
    """The training prompts of make.cfg. rows: rows in memory, in place of those at data.path."""
    sources = make.cfg.sources
    if not sources:
        return _open_one(make, seed, rows)
    feeds = {str(own.source): _open_one(own, seed, None) for own in _makers(make, sources)}
    return PromptMixture(feeds, {name: source.weight for name, source in sources.items()}, seed)


def _makers(make: PromptMaker, sources: Mapping[str, NamedRows]) -> Iterator[PromptMaker]:
    for name, source in sources.items():  # keys that a source does not set are those of data
        values = {key: getattr(source, key) for key in ("prompt", "answer", "map") if getattr(source, key) is not None}
        values |= {key: getattr(source, key) for key in ("path", "format", "subset", "split")} | {"sources": {}}
        yield dataclasses.replace(make, cfg=make.cfg.model_copy(update=values), source=name)


def load_eval_prompts(make: PromptMaker, rows: RowTable | None = None) -> tuple[list[Prompt], int]:
    """The held-out prompts, from the first data.eval_limit rows of data.eval_path, of each of data.eval_sets or of
    data.eval_fraction, and the number of rows left out because they are longer than data.max_prompt_tokens; ([], 0)
    without any. rows: rows in memory, in place of those at data.eval_path, or with data.eval_fraction at data.path.

    Their ordinals count down from -1, so that no seed is also a seed of training, where ordinals count up from 0.
    """
    cfg = make.cfg
    sets = [(own.cfg.path, own.cfg.split, own) for own in _makers(make, cfg.eval_sets)]
    if cfg.is_evaluated and not sets:
        path, split = (cfg.path, cfg.split) if cfg.eval_path is None else (cfg.eval_path, cfg.eval_split)
        sets = [(path, split, dataclasses.replace(make, held_out=True))]
    loaded = [load_prompts(rows or path, own, cfg.eval_limit, split) for path, split, own in sets if path is not None]
    prompts = [prompt for of_set, _ in loaded for prompt in of_set]
    for i, prompt in enumerate(prompts):
        prompt.ordinal = -1 - i
    return prompts, sum(left_out for _, left_out in loaded)


def _open_one(make: PromptMaker, seed: int, rows: RowTable | None) -> PromptFeed:
    cfg = make.cfg
    path = rows or cfg.path
    assert path is not None, "the config's check requires data.path or data.sources"
    if cfg.streaming:
        table = open_table(path, cfg.format, cfg.subset, cfg.split)
        return PromptStream(table, make, seed)
    prompts, left_out = load_prompts(path, make, split=cfg.split, drafts=True)
    if any(prompt.media for prompt in prompts):  # rows are made again when they are drawn: images fill much memory
        table = open_table(path, cfg.format, cfg.subset, cfg.split)
        return PromptStream(table, make, seed, [prompt.ordinal for prompt in prompts], left_out)
    return PromptSource(prompts, seed, cfg.shuffle, left_out)

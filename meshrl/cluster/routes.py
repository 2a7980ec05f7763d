"""Which sampler gets a request, and for how long each sampler has requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from meshrl.cluster.executor import ignored


class Routes:
    """The routes of requests to samplers. ranks: the samplers.

    num_running: requests that have no answer yet.
    """

    def __init__(self, ranks: Sequence[int]):
        self.ranks, self.num_running = ranks, 0
        self._on_turn_end: Callable[[], None] = ignored
        self._on_session_start: Callable[[str], object] = ignored
        self._of_session: dict[str, int] = {}
        self._num_sessions = dict.fromkeys(ranks, 0)
        self._running = dict.fromkeys(ranks, 0)
        self._busy_since: dict[int, float] = {}
        self._busy_s = 0.0

    def call(self, on_turn_end: Callable[[], None], on_session_start: Callable[[str], object]) -> None:
        """From now on, call on_turn_end when a request has ended, and on_session_start at the first request of a
        session."""
        self._on_turn_end, self._on_session_start = on_turn_end, on_session_start

    def _rank_of(self, session: str) -> int:
        """The sampler with the fewest open sessions, else the first of them. A session stays at its sampler, which
        has its KV cache. Requests without a session go where the fewest requests run.

        After all sessions have ended, the next ones get the same routes as at the start of a run: a resumed run has the
        same rounding as an uninterrupted one.
        """
        if not session:
            return min(self.ranks, key=self._running.__getitem__)
        if session not in self._of_session:
            rank = self._of_session[session] = min(self.ranks, key=self._num_sessions.__getitem__)
            self._num_sessions[rank] += 1
            self._on_session_start(session)
        return self._of_session[session]

    def end_session(self, session: str) -> None:
        """Called when a session has no more requests."""
        if session in self._of_session:
            self._num_sessions[self._of_session.pop(session)] -= 1

    @contextmanager
    def request(self, session: str) -> Iterator[int]:
        """The context of a request of this session; the rank of its sampler."""
        rank = self._rank_of(session)
        if not self._running[rank]:
            self._busy_since[rank] = time.perf_counter()
        self._running[rank] += 1
        self.num_running += 1
        try:
            yield rank
        finally:
            self._running[rank] -= 1
            self.num_running -= 1
            if not self._running[rank]:
                self._busy_s += time.perf_counter() - self._busy_since.pop(rank)
            self._on_turn_end()

    def take_busy_s(self) -> float:
        """Seconds in which a rank had a request, summed over the ranks, since the last call."""
        now = time.perf_counter()
        taken, self._busy_s = self._busy_s + sum(now - since for since in self._busy_since.values()), 0.0
        self._busy_since = dict.fromkeys(self._busy_since, now)
        return taken

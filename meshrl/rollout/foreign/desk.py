"""What engines whose server is another process have in common: who may be asked now, who is under way, and how those
who can't go on get their answer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np

from meshrl.core.errors import EngineEnded, EngineFailure, RequestError
from meshrl.core.types import Request, Turn
from meshrl.rollout.accept import check_free
from meshrl.rollout.base import EngineStats, PauseMode
from meshrl.rollout.server.process import ServerProcess

_LAST_WORDS_S = 30.0  # a server whose engine is dead ends by itself, on a busy machine within this time
_ABORT_AGAIN_S = 0.1  # a request that had not reached the server's scheduler when it was aborted is aborted once more


class Desk:
    """Requests from their arrival to their answer.

    A gate in this process holds them back (a pause, a sync, lent memory), and no server does: what waits here can be
    aborted, and none is sampled with weights that it should not see. Waits for: the gate. Unblocked by: `open`,
    `end`, `close`.
    """

    def __init__(self, engine_id: str, abort: Callable[[list[str]], Awaitable[None]]):
        """abort: tells the server to end these requests, all of which it was sent."""
        self.engine_id = engine_id
        self.paused = self.closed = False
        self.keeps_in_place = False  # pause "keep": who was sent stays where it is until `resume`
        self._abort = abort
        self._gate = asyncio.Event()
        self._gate.set()
        self._at_gate: dict[str, asyncio.Future[None]] = {}  # accepted, not sent
        self._sent: dict[str, asyncio.Future[None]] = {}  # done when the answer has ended
        self._totals = EngineStats()

    @property
    def num_sent(self) -> int:
        return len(self._sent)

    def accept(self, request: Request, version: int) -> None:
        """version: that the engine will sample with. Raises: StaleWeightsError, RequestError."""
        check_free(request, self.engine_id, version, self.closed, self._sent.keys() | self._at_gate.keys())

    def shut(self) -> None:
        self._gate.clear()

    def open(self) -> None:
        self._gate.set()

    async def pause(self, mode: PauseMode) -> None:
        """Shut the gate; wait = until who runs has finished, abort = end all, keep = the engine itself holds them."""
        self.paused, self.keeps_in_place = True, mode == "keep"
        self.shut()
        if mode == "abort":
            await self.end()
        elif mode != "keep":
            await self.drained()

    def resume(self) -> None:
        """The pause is over; the gate stays as it is."""
        self.paused = self.keeps_in_place = False

    async def let_in(self, request_id: str) -> bool:
        """Wait for the gate; False when the request was ended before."""
        called_off = self._at_gate[request_id] = asyncio.get_running_loop().create_future()
        try:
            while not self._gate.is_set() and not called_off.done():
                opened = asyncio.ensure_future(self._gate.wait())
                await asyncio.wait([opened, called_off], return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
            return not (called_off.done() or self.closed)
        finally:
            del self._at_gate[request_id]

    @contextmanager
    def sending(self, request_id: str) -> Iterator[None]:
        """Around the exchange with the server."""
        ended = self._sent[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._sent[request_id]
            ended.set_result(None)

    async def end(self, ids: Collection[str] | None = None) -> int:
        """End these requests (None = all), sent or not, and wait for it; returns how many there were."""
        called_off = [f for name, f in self._at_gate.items() if (ids is None or name in ids) and not f.done()]
        for future in called_off:
            future.set_result(None)
        left = {name: f for name, f in self._sent.items() if ids is None or name in ids}
        count = len(called_off) + len(left)
        while left:
            await self._abort(list(left))
            await asyncio.wait(left.values(), timeout=_ABORT_AGAIN_S)
            left = {name: f for name, f in left.items() if not f.done()}
        return count

    def count_tokens(self, num_new: int) -> None:
        """Tokens that a stream has brought."""
        self._totals.decode_tokens += num_new

    def count_turn(self, request: Request, turn: Turn) -> None:
        """A turn whose stream has ended."""
        self._totals.prefill_tokens += len(request.context_ids) - turn.times.cached_tokens
        self._totals.prefill_s += turn.times.prefill_s
        self._totals.decode_s += turn.times.decode_s

    def stats(self, version: int, max_running: int) -> EngineStats:
        """As this client knows it: what waits in the server's own queue counts as running."""
        running = len(self._sent)
        return dataclasses.replace(
            self._totals,
            running=running,
            waiting=len(self._at_gate),
            free_slots=max(0, max_running - running),
            version=version,
        )

    async def drained(self) -> None:
        """Wait until nothing is under way."""
        if self._sent:
            await asyncio.wait(self._sent.values())


@asynccontextmanager
async def watched(server: ServerProcess | None) -> AsyncIterator[None]:
    """Around an exchange with a server: makes an EngineFailure an EngineEnded that says how the server ended, where
    that is why. None = it is somebody else's."""
    try:
        yield
    except EngineFailure as error:
        if server is None or not await asyncio.to_thread(server.ends_within, _LAST_WORDS_S):
            raise
        raise EngineEnded(f"{error}. {server.name} has ended{server.last_words()}") from error


def ended_unsent(request: Request, engine_id: str) -> Turn:
    """The turn of a request that was aborted before it was sent."""
    return Turn(
        context_ids=request.context_ids,
        output_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        stop_reason="abort",
        sampling=request.sampling,
        seed=request.seed,
        engine_id=engine_id,
    )


def full_ids(request: Request) -> list[int]:
    """What the server continues: the context, and what was sampled before an abort."""
    prefix = [] if request.prefix_output is None else [np.asarray(request.prefix_output)]
    return np.concatenate([np.asarray(request.context_ids), *prefix]).tolist()


def check_echo(request: Request, ids: list[int], echoed: object, server: str) -> None:
    """P21. Raises: RequestError when the server goes on from other ids than it was sent, or keeps them to itself."""
    if echoed != ids:
        said = f"{len(echoed)} ids" if isinstance(echoed, list) else "no ids at all"
        raise RequestError(
            f"request {request.id}: {server} was sent {len(ids)} ids and echoed {said} that differ; a template or a "
            "tokenizer stands between meshrl and the model"
        )

"""Ranks without models, for benchmarks of the controller: one process answers at once for all of them.

Each rank has a TCP connection to the controller, as a rank of another machine. Messages are pickled and sent by
`process/frames.py`, as the executors do. In the controller a thread receives all answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from meshrl.cluster.actors import UpdateReport
from meshrl.cluster.executor import WorkerSpec, phase_of
from meshrl.core.errors import RankFailure
from meshrl.core.types import Metric, Request, Times, Turn
from meshrl.process import frames
from meshrl.train.engine import StepReport

PROMPT_TOKENS = 256


class CountingSocket:
    """A connected TCP socket that counts the bytes that are sent."""

    def __init__(self, sock: socket.socket):
        self._sock, self.num_bytes = sock, 0

    def sendall(self, data: Any) -> None:
        self.num_bytes += memoryview(data).nbytes
        self._sock.sendall(data)


class StandInExecutor:
    """The Executor of ranks that another process answers for."""

    def __init__(self, specs: Sequence[WorkerSpec], socks: Sequence[socket.socket]):
        self.specs = specs
        self.on_lost: Callable[[RankFailure], None] = lambda failure: None
        self.can_restart_trainers = False
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._socks = [CountingSocket(sock) for sock in socks]
        self._outboxes: list[list[Any]] = [[] for _ in socks]
        self._pending: dict[int, asyncio.Future[Any]] = {}
        threading.Thread(target=self._read, args=(socks,), daemon=True).start()

    @property
    def num_bytes(self) -> int:
        """All bytes sent to ranks so far."""
        return sum(sock.num_bytes for sock in self._socks)

    async def call(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call_id = next(self._ids)
        future = self._pending[call_id] = self._loop.create_future()
        outbox = self._outboxes[rank]
        if not outbox:
            self._loop.call_soon(self._flush, rank)
        outbox.append((call_id, method, args, kwargs))
        timer = self._loop.call_later(self.specs[rank].deadline_s(phase_of(method)), future.cancel)
        try:
            return await future
        finally:
            timer.cancel()

    def _flush(self, rank: int) -> None:
        calls, self._outboxes[rank] = self._outboxes[rank], []
        frames.send(self._socks[rank], calls)  # type: ignore[arg-type]

    def _read(self, socks: Sequence[socket.socket]) -> None:
        selector = selectors.DefaultSelector()
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                try:
                    answers = frames.receive(key.fileobj)  # type: ignore[arg-type]
                except (EOFError, OSError):
                    self._loop.call_soon_threadsafe(self._lost)
                    return
                self._loop.call_soon_threadsafe(self._answered, answers)

    def _answered(self, answers: list[tuple[int, bool, Any]]) -> None:
        for call_id, _, value in answers:
            self._pending.pop(call_id).set_result(value)

    def _lost(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(RuntimeError("The process that answers for the ranks has ended."))

    async def start(self) -> None: ...
    def failure_of(self, rank: int) -> RankFailure | None: ...
    def computed_tokens(self, rank: int) -> int:
        return 0

    async def restart(self, ranks: Sequence[int]) -> None: ...
    async def close(self) -> None: ...


@contextlib.contextmanager
def stand_in_ranks(
    num_ranks: int, vocab: int, mean_tokens: int, metrics: list[Metric]
) -> Iterator[list[socket.socket]]:
    """Start the process that answers; returns the controller's sockets.

    mean_tokens: of a row; lengths are drawn between a quarter of it and seven quarters. metrics: of a micro-batch.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as listener:
        pairs = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for _ in range(num_ranks)]
    for pair in pairs:
        for sock in pair:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answering = _Ranks([theirs for _, theirs in pairs], vocab, mean_tokens, metrics)
    process = multiprocessing.get_context("fork").Process(target=answering.serve, daemon=True)
    process.start()
    for _, theirs in pairs:
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        process.kill()
        process.join()


class _Ranks:
    def __init__(self, socks: Sequence[socket.socket], vocab: int, mean_tokens: int, metrics: list[Metric]):
        self.socks, self.vocab, self.mean_tokens, self.metrics = socks, vocab, mean_tokens, metrics

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, sock in enumerate(self.socks):
            selector.register(sock, selectors.EVENT_READ, rank)
        while True:
            for key, _ in selector.select():
                try:
                    calls = frames.receive(self.socks[key.data])
                except EOFError:
                    os._exit(0)
                answers = [(call_id, True, self.answer(key.data, method, args)) for call_id, method, args, _ in calls]
                del calls
                frames.send(self.socks[key.data], answers)

    def answer(self, rank: int, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return getattr(self, method.__name__)(rank, *args)

    def generate(self, rank: int, request: Request) -> Turn:
        rng = np.random.default_rng(request.seed)
        length = int(rng.integers(self.mean_tokens // 4, self.mean_tokens * 7 // 4 + 1)) - len(request.context_ids)
        count = max(1, min(length, request.max_new_tokens))
        return Turn(
            context_ids=request.context_ids,
            output_ids=rng.integers(0, self.vocab, count).astype(np.int32),
            logprobs=-rng.random(count, np.float32),
            versions=np.zeros(count, np.int32),
            stop_reason="stop",
            sampling=request.sampling,
            seed=request.seed,
            engine_id=f"rank {rank}",
            times=Times(queue_s=0.1, prefill_s=0.2, decode_s=30.0, cached_tokens=len(request.context_ids)),
        )

    def forward_backward(self, rank: int, message: Any, role: str, loss: Any, values: bool = False) -> UpdateReport:
        rows = message.samples()
        metrics = self.metrics * len(message.micro_batches)
        mismatch = {i: np.array([row.mask.sum(), row.mask.sum(), 1e-3, 1e-5, 1e-6]) for i, row in rows.items()}
        counts = {i: int(row.mask.sum()) for i, row in rows.items()} if values else {}
        rng = np.random.default_rng(rank)
        of_tokens = {i: -rng.random((2, count), np.float32) for i, count in counts.items()}
        return UpdateReport(metrics=metrics, mismatch=mismatch, values=of_tokens)

    def optim_step(self, rank: int, role: str, lr: float) -> StepReport:
        return StepReport(grad_norm=1.0, skipped=False)

    def memory(self, rank: int) -> list[Metric]:
        names = ("allocated", "reserved", "peak_allocated", "peak_reserved", "free", "total")
        return [Metric(name=f"memory/device_{name}", sum=1e9, reduce="max", unit="bytes") for name in names]

"""Transfers over sockets: each receiver has one connection to each sender. On one machine the bytes stay in the
sender's shared memory, and the connection carries digests and acknowledgements; to another machine it carries the
bytes, too.

A sender fills a slot again when every receiver has acknowledged that it has read the slot. A blocked put or get ends
when its task is cancelled, when either side closes the connection, or after a time limit: a rank that waits for a
hanging rank then fails before it is itself taken for a hanging one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshrl.core.errors import SyncInterrupted
from meshrl.process.connect import listening_socket
from meshrl.sync.delivery import NUM_SLOTS, Address, Delivery, Transport, delivery_from_facts, facts_bytes
from meshrl.sync.layout import Layout, Transfer
from meshrl.sync.shared_memory import SharedRing, SharedRingView

_HELLO = struct.Struct("<64s64s?")  # token, connection_id (padded with zeros), whether the receiver shares the memory
_HELLO_S = 20.0


class Sockets(Transport):
    """One rank's end of its connections: as a sender, a receiver, or both."""

    double_buffered = True

    def __init__(self, layout: Layout, sender: int | None, host: str, machine: int, timeout_s: float = 600.0):
        """sender: this rank's number among the senders; None = it only receives. host: the address under which other
        ranks reach this machine. machine: ranks of one number share memory. timeout_s: for each wait for another
        rank."""
        self._layout, self._machine, self._timeout_s = layout, machine, timeout_s
        self._connection_id = ""
        self._ring: SharedRing | None = None
        self._listening: socket.socket | None = None
        self._address: Address | None = None
        self._receivers: list[tuple[socket.socket, bool]] = []  # and whether it reads the shared memory itself
        self._slots_in_use = [False] * NUM_SLOTS
        self._senders: dict[int, tuple[socket.socket, SharedRingView | None]] = {}
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}  # by sender and slot, for what other machines send
        if sender is not None:
            self._ring = SharedRing(NUM_SLOTS, layout.slot_bytes)
            self.num_bytes = NUM_SLOTS * layout.slot_bytes
            self._listening = listening_socket(host)
            self._listening.setblocking(False)
            self._token = secrets.token_hex(32)
            port = self._listening.getsockname()[1]
            self._address = Address(host=host, port=port, token=self._token, ring=self._ring.name, machine=machine)

    def prepare(self, connection_id: str) -> Address | None:
        return self._address

    async def connect(
        self, connection_id: str, senders: Mapping[int, Address], number: int, num_receivers: int
    ) -> None:
        """Connect to each sender, and accept a connection of each receiver. With an unchanged connection_id, keep the
        connections. Waits for: the other ranks."""
        if connection_id == self._connection_id:
            return
        self.disconnect()
        sends = self._listening is not None
        accepting = asyncio.ensure_future(self._accept(connection_id, num_receivers if sends else 0))
        try:
            for sender, address in senders.items():
                self._senders[sender] = await self._join(connection_id, address)
            await asyncio.wait_for(accepting, self._timeout_s)
        except TimeoutError as error:
            raise SyncInterrupted(
                f"only {len(self._receivers)} of {num_receivers} receivers of weights connected within "
                f"{self._timeout_s:g} s"
            ) from error
        finally:
            accepting.cancel()
        self._connection_id = connection_id

    async def buffer(self, transfer: Transfer) -> torch.Tensor:
        assert self._ring is not None
        slot = transfer.index % NUM_SLOTS
        if self._slots_in_use[slot]:
            await self._all(transfer, [_read(sock, bytearray(1)) for sock, _ in self._receivers])
            self._slots_in_use[slot] = False
        return self._ring.slots[slot]

    async def exchange(self, window: Sequence[Transfer], filled: Delivery | None, receives: bool) -> list[Delivery]:
        deliveries = []
        for transfer in window:
            if filled is not None and transfer is filled.transfer:
                deliveries.append(await self.put(filled))
            elif receives:
                deliveries.append(await self.get(transfer))
        return deliveries

    async def put(self, delivery: Delivery) -> Delivery:
        """Announce a transfer; also send its bytes to other machines. Returns it with the address of its slot."""
        facts, payload = delivery.facts(), delivery.payload
        assert payload is not None and self._ring is not None
        raw = payload.numpy().data
        loop = asyncio.get_running_loop()

        async def send(sock: socket.socket, shares: bool) -> None:
            await loop.sock_sendall(sock, facts)
            if not shares:
                await loop.sock_sendall(sock, raw)

        await self._all(delivery.transfer, [send(sock, shares) for sock, shares in self._receivers])
        slot = delivery.transfer.index % NUM_SLOTS
        self._slots_in_use[slot] = bool(self._receivers)
        return replace(delivery, slot_address=self._ring.slot_address(slot))

    async def get(self, transfer: Transfer) -> Delivery:
        """Wait for a transfer of another rank."""
        sock, view = self._senders[transfer.sender]
        try:
            async with asyncio.timeout(self._timeout_s):
                facts = await _read(sock, bytearray(facts_bytes(transfer)))
                slot = transfer.index % NUM_SLOTS
                if view is not None:
                    return delivery_from_facts(transfer, facts, view.slots[slot], view.slot_address(slot))
                key = transfer.sender, slot
                if key not in self._buffers:
                    self._buffers[key] = torch.empty(self._layout.slot_bytes, dtype=torch.uint8)
                buffer = self._buffers[key]
                delivery = delivery_from_facts(transfer, facts, buffer)
                await _read(sock, buffer.numpy().data[: delivery.num_bytes])
                return delivery
        except OSError as error:
            raise SyncInterrupted(f"{transfer} was not received from its sender: {self._reason(error)}") from error

    async def release_slot(self, delivery: Delivery) -> None:
        sock, _ = self._senders[delivery.transfer.sender]
        with contextlib.suppress(OSError):  # a sender that has disconnected needs no answer; later `get`s fail
            await asyncio.get_running_loop().sock_sendall(sock, b"t")

    def disconnect(self) -> None:
        self._connection_id, self._slots_in_use = "", [False] * NUM_SLOTS
        for sock, _ in [*self._receivers, *self._senders.values()]:
            sock.close()
        for _, view in self._senders.values():
            if view is not None:
                view.close()
        self._receivers, self._senders = [], {}

    def close(self) -> None:
        self.disconnect()
        if self._listening is not None:
            self._listening.close()
        if self._ring is not None:
            self._ring.close()

    # ---- connections

    async def _accept(self, connection_id: str, num_receivers: int) -> None:
        """Accept receivers with the right token and connection_id until there are num_receivers."""
        loop, greetings = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        accepting: asyncio.Task[tuple[socket.socket, Any]] | None = None
        try:
            while len(self._receivers) < num_receivers:
                assert self._listening is not None
                accepting = accepting or loop.create_task(loop.sock_accept(self._listening))
                done, _ = await asyncio.wait({accepting, *greetings}, return_when=asyncio.FIRST_COMPLETED)
                if accepting in done:
                    greetings.add(loop.create_task(self._greet(accepting.result()[0], connection_id)))
                    accepting = None
                greetings -= done
        finally:
            for task in [*greetings, *([accepting] if accepting else [])]:
                task.cancel()

    async def _greet(self, sock: socket.socket, connection_id: str) -> None:
        """Add a receiver with the right token and connection_id; others are disconnected without an answer."""
        try:
            async with asyncio.timeout(_HELLO_S):
                token, theirs, shares = _HELLO.unpack(await _read(sock, bytearray(_HELLO.size)))
        except OSError:
            sock.close()
            return
        if hmac.compare_digest(token, self._token.encode()) and theirs.rstrip(b"\0") == connection_id.encode():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._receivers.append((sock, shares))
        else:
            sock.close()

    async def _join(self, connection_id: str, address: Address) -> tuple[socket.socket, SharedRingView | None]:
        shares = address.machine == self._machine
        try:
            sock = await asyncio.to_thread(socket.create_connection, (address.host, address.port), _HELLO_S)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _HELLO.pack(address.token.encode(), connection_id.encode(), shares)
            await asyncio.get_running_loop().sock_sendall(sock, hello)
            view = SharedRingView(address.ring, NUM_SLOTS, self._layout.slot_bytes) if shares else None
        except OSError as error:
            raise SyncInterrupted(
                f"the sender of weights at {address.host}:{address.port} can't be reached: {str(error) or 'timeout'}"
            ) from error
        return sock, view

    async def _all(self, transfer: Transfer, calls: list[Coroutine[Any, Any, Any]]) -> None:
        """Wait for all calls. The first that fails cancels the others, so that none uses a closed socket."""
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                for call in calls:
                    group.create_task(call)
        except (BaseExceptionGroup, TimeoutError) as errors:
            error = errors.exceptions[0] if isinstance(errors, BaseExceptionGroup) else errors
            if not isinstance(error, OSError):
                raise error from None
            raise SyncInterrupted(f"{transfer} could not be sent to a receiver: {self._reason(error)}") from error

    def _reason(self, error: OSError) -> str:
        """The error's text; a timeout has no text of its own."""
        return f"not within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)


async def _read(sock: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    view, got, loop = memoryview(into), 0, asyncio.get_running_loop()
    while got < len(view):
        count = await loop.sock_recv_into(sock, view[got:])
        if count == 0:
            raise ConnectionError("the other side has closed the connection")
        got += count
    return into

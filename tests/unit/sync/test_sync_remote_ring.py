"""A ring over TCP: the bytes that were staged arrive, and strangers get none."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.receive import Bucket
from meshrl.sync.remote_ring import RemoteRingView, RingServer, ring_of
from meshrl.sync.transport import SharedRing

SLOT_BYTES = 300_000


@pytest.fixture
def served() -> Iterator[tuple[SharedRing, RingServer]]:
    with SharedRing(2, SLOT_BYTES) as ring:
        server = RingServer(ring, "127.0.0.1")
        yield ring, server
        server.close()


def test_two_receivers_fetch_each_bucket_from_its_slot(served):
    ring, server = served
    assert ring_of(server.name) == ring.name and ring_of(ring.name) == ring.name
    views = [RemoteRingView(server.name, SLOT_BYTES) for _ in range(2)]
    for index, size in enumerate((SLOT_BYTES, 7, 123_457, 1)):
        payload = ring.slots[index % 2][:size]
        payload.random_(0, 256)
        ref = ring.ref(Bucket(index=index, payload=payload, digest=index))
        for view in views:
            bucket = view.bucket(ref)
            assert (bucket.index, bucket.digest) == (index, index)
            assert torch.equal(bucket.payload, payload)
    for view in views:
        view.close()


def test_who_does_not_know_the_token_gets_nothing(served):
    ring, server = served
    address, _, name = server.name.split("/")
    stranger = RemoteRingView(f"{address}/{'0' * 64}/{name}", SLOT_BYTES)
    with pytest.raises(SyncError, match="bucket 0 did not come"):
        stranger.bucket(ring.ref(Bucket(index=0, payload=ring.slots[0], digest=0)))
    stranger.close()


def test_a_sender_that_is_gone_is_a_named_error():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SyncError, match=rf"can't be reached at 127\.0\.0\.1:{port}"):
        RemoteRingView(f"127.0.0.1:{port}/{'0' * 64}/ring", SLOT_BYTES)

"""Tensors put together from buckets in a process that holds no model: of one sender, and of one for each shard."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from meshrl.core.errors import SyncError
from meshrl.rollout.foreign.arrival import Arrival, header_from, header_to, layout_from, ref_from, ref_to
from meshrl.sync.digest import digest
from meshrl.sync.manifest import Layout, make_layout
from meshrl.sync.receive import Bucket
from meshrl.sync.send import iter_buckets, make_header
from meshrl.sync.shards import ShardSender

SHAPES = {"a": (7, 5), "b": (3,), "empty": (0, 4), "c": (40, 3), "d": (2, 2)}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def layout_of(**changes: object) -> Layout:
    specs = [(name, shape, "float32") for name, shape in SHAPES.items()]
    return make_layout(specs, bucket_bytes=128, **changes)


def whole(weights: dict[str, torch.Tensor]) -> tuple[Arrival, list[Bucket]]:
    layout = layout_of()
    header = make_header(layout, 1, {name: digest(tensor) for name, tensor in weights.items()})
    return Arrival(layout, header, "w"), list(iter_buckets(layout, weights.items()))


def sharded(weights: dict[str, torch.Tensor]) -> tuple[Arrival, list[Bucket]]:
    """Two streams, whose buckets come in turn."""
    layout = layout_of(num_shards=2, digest="xxh3")
    streams = []
    for shard, stream in enumerate(layout.streams):
        staging = [torch.empty(stream.staging_bytes, dtype=torch.uint8) for _ in range(stream.num_buckets)]
        sender = ShardSender(layout, shard, staging, keep_base=False)
        parts = {e.name: weights[e.name].view(-1)[e.first // 4 : (e.first + e.num_bytes) // 4] for e in stream.entries}
        streams.append(list(sender.buckets(parts, 1)))
    longest = max(map(len, streams))
    return Arrival(layout, make_header(layout, 1), "w"), [s[i] for i in range(longest) for s in streams if i < len(s)]


@pytest.mark.parametrize("send", [whole, sharded])
def test_tensors_come_out_as_they_went_in_and_outlive_their_buckets(weights, send):
    arrival, buckets = send(weights)
    found = {}
    for bucket in buckets:
        found |= {entry.name: tensor for entry, tensor in arrival.take(bucket)}
        bucket.payload.fill_(255)  # the sender fills it anew
    found |= {entry.name: tensor for entry, tensor in arrival.finish()}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("send", [whole, sharded])
@pytest.mark.parametrize(
    ("fault", "words"),
    [("dropped", "incomplete"), ("twice", "came twice"), ("late", "out of order"), ("bit", "digest")],
)
def test_a_stream_with_a_fault_is_refused(weights, send, fault, words):
    """P15"""
    arrival, buckets = send(weights)
    if fault == "dropped":
        buckets = buckets[:-1]
    elif fault == "twice":
        buckets.insert(1, buckets[0])
    elif fault == "late":
        buckets = buckets[2:]
    else:
        buckets[1].payload[3] ^= 1
    with pytest.raises(SyncError, match=words):
        for bucket in buckets:
            list(arrival.take(bucket))
        list(arrival.finish())


def test_a_tensor_that_was_gathered_wrong_is_named(weights):
    arrival, _ = whole(weights)
    wrong = weights | {"c": weights["c"].roll(1, 0)}
    with pytest.raises(SyncError, match=r"\bc arrived with digest"):
        for bucket in iter_buckets(arrival.layout, wrong.items()):
            list(arrival.take(bucket))


@pytest.mark.parametrize("send", [whole, sharded])
def test_what_is_said_of_a_sync_crosses_as_json_unchanged(weights, send):
    """Digests have 64 bits, of which a reader of JSON may keep 53."""
    arrival, buckets = send(weights)

    def across(message):
        return json.loads(json.dumps(message))

    assert layout_from(across(asdict(arrival.layout))).hash == arrival.layout.hash
    assert header_from(across(header_to(arrival.header))) == arrival.header
    for bucket in buckets:
        again = ref_from(across(ref_to(bucket, 1)))
        assert (again.index, again.slot, again.num_bytes) == (bucket.index, 1, bucket.payload.numel())
        assert (again.digest, again.stream, again.pieces) == (bucket.digest, bucket.stream, bucket.pieces)

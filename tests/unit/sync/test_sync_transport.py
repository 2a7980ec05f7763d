"""Buckets through shared memory, into other processes, and what is left behind afterwards."""

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import digest
from meshrl.sync.manifest import make_layout
from meshrl.sync.receive import ReceiverState, describe
from meshrl.sync.send import iter_buckets, make_header, send_weights
from meshrl.sync.transport import BucketRef, RingReceiver, SharedRing, SharedRingView


def make_weights(seed):
    torch.manual_seed(seed)
    return {"a": torch.randn(33, 3), "b": torch.randn(50).bfloat16(), "c": torch.randn(7, 11).double()}


def zeros_like(weights):
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def layout_of(weights, bucket_bytes=101):
    return make_layout([(name, *spec) for name, spec in describe(weights).items()], bucket_bytes=bucket_bytes)


def header_of(layout, weights, version):
    return make_header(layout, version, {name: digest(tensor) for name, tensor in weights.items()})


def serve(pipe, name, num_slots, slot_bytes, layout, dies_at):
    """A receiver in a process of its own: run what the pipe says, answer with the result or the error."""
    torch.set_num_threads(1)
    targets = zeros_like(make_weights(0))
    state = ReceiverState(layout, targets, f"process {os.getpid()}")
    view = SharedRingView(name, num_slots, slot_bytes)
    while True:
        method, argument = pipe.recv()
        if method == "stop":
            return
        if isinstance(argument, BucketRef) and argument.index == dies_at and state._expected.version == 2:
            os._exit(9)
        try:
            if method == "receive":
                answer = state.receive(view.bucket(argument))
            elif method == "commit":
                answer = state.commit(targets.items)
            elif method == "version":
                answer = state.version
            else:
                answer = getattr(state, method)(*([argument] if argument is not None else []))
        except SyncError as error:
            answer = error
        pipe.send(answer)


def channel(pipe, log=None):
    async def call(method, argument):
        if log is not None:
            log.append((method, len(pickle.dumps(argument))))
        pipe.send((method, argument))
        answer = await asyncio.to_thread(pipe.recv)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return call


def test_weights_reach_other_processes_through_one_segment():
    """P15: right the first time; a bit flipped in the segment is refused; a receiver killed half-way cancels the
    other. Nothing but a few numbers a bucket crosses the pipe, and no segment is left behind."""
    context = multiprocessing.get_context("spawn")
    first, second = make_weights(1), make_weights(2)
    layout = layout_of(first)
    with SharedRing(2, layout.staging_bytes) as ring:
        pipes, children, log = [], [], []
        for dies_at in (None, 4):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=serve, args=(theirs, ring.name, ring.num_slots, ring.slot_bytes, layout, dies_at), daemon=True
            )
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        receivers = [RingReceiver(ring, channel(pipe, log)) for pipe in pipes]

        def send(weights, version, spoil=None):
            def buckets():
                for bucket in iter_buckets(layout, weights.items(), staging=ring.slots):
                    if bucket.index == spoil:
                        bucket.payload[40] ^= 1
                    yield bucket

            return asyncio.run(send_weights(header_of(layout, weights, version), buckets(), receivers))

        acks = send(first, 0)
        assert [(ack.version, ack.wire, ack.resident) for ack in acks] == [(0, True, True)] * 2
        assert {ack.receiver for ack in acks} == {f"process {child.pid}" for child in children}
        sizes = [size for method, size in log if method == "receive"]
        assert len(sizes) == 2 * layout.num_buckets and max(sizes) < 200

        with pytest.raises(SyncError, match=r"bucket 3 was sent with digest .* it carries a"):
            send(second, 1, spoil=3)
        assert [asyncio.run(channel(pipe)("version", None)) for pipe in pipes] == [-1, -1]
        assert send(second, 1)[1].resident

        with pytest.raises(SyncError, match=r"receiver 1 failed at bucket 4: EOFError"):
            send(first, 2)
        assert asyncio.run(channel(pipes[0])("version", None)) == -1

        pipes[0].send(("stop", None))
        for child in children:
            child.join(20)
        assert [child.exitcode for child in children] == [0, 9]
        SharedRingView(ring.name, ring.num_slots, ring.slot_bytes).close()  # their end did not unlink ours
    with pytest.raises(FileNotFoundError):
        SharedRingView(ring.name, ring.num_slots, ring.slot_bytes)


def test_a_process_of_another_family_does_not_unlink_the_segment_when_it_ends():
    """A resource tracker of its own would remove whatever it had attached to."""
    with SharedRing(1, 64) as ring:
        ring.slots[0].fill_(7)
        code = (
            "from meshrl.sync.transport import BucketRef, SharedRingView\n"
            f"view = SharedRingView({ring.name!r}, 1, 64)\n"
            "print(view.bucket(BucketRef(index=0, slot=0, num_bytes=64, digest=0)).payload.sum().item())\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert (ended.stdout.strip(), ended.stderr) == (str(7 * 64), "")
        SharedRingView(ring.name, 1, 64).close()


def test_the_segment_is_gone_after_an_error_and_closing_twice_is_fine():
    with pytest.raises(RuntimeError, match="boom"), SharedRing(1, 64) as ring:
        raise RuntimeError("boom")
    with pytest.raises(FileNotFoundError):
        SharedRingView(ring.name, 1, 64)
    ring.close()


def test_a_payload_outlives_the_closing_of_both_ends():
    """The memory is unmapped when the last tensor that looks at it is gone, so no late reader meets a bad address."""
    ring = SharedRing(2, 100)
    view = SharedRingView(ring.name, 2, 100)
    ring.slots[1].fill_(5)
    bucket = view.bucket(BucketRef(index=1, slot=1, num_bytes=60, digest=0))
    ring.close()
    view.close()
    assert bucket.payload.sum() == 300


def test_slots_are_apart_and_seen_by_every_view():
    with SharedRing(3, 33) as ring:
        views = [SharedRingView(ring.name, 3, 33) for _ in range(2)]
        for index, slot in enumerate(ring.slots):
            slot.fill_(index + 1)
        for view in views:
            for index in range(3):
                payload = view.bucket(BucketRef(index=index, slot=index, num_bytes=33, digest=0)).payload
                assert payload.tolist() == [index + 1] * 33


def test_names_do_not_repeat():
    rings = [SharedRing(1, 16) for _ in range(8)]
    assert len({ring.name for ring in rings}) == 8
    for ring in rings:
        ring.close()


def test_a_bucket_that_lies_elsewhere_is_not_described():
    """The slot would hold the bytes of an earlier sync."""
    weights = make_weights(0)
    layout = layout_of(weights)
    with SharedRing(2, layout.staging_bytes) as ring:
        inside, outside = (next(iter_buckets(layout, weights.items(), staging=s)) for s in (ring.slots, None))
        assert ring.ref(inside) == BucketRef(index=0, slot=0, num_bytes=101, digest=outside.digest)
        with pytest.raises(SyncError, match="bucket 0 does not lie in slot 0"):
            ring.ref(outside)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_too_little_shared_memory_is_an_error_and_not_a_crash():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(SyncError, match=r"rollout.sync_bucket_bytes smaller, or /dev/shm larger"):
        SharedRing(2, 1 << 43)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("meshrl_")}

"""Transfers through shared memory, into other processes, and what is left behind afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tiny_sync import Sampler, Trainer, header_of, held_of, layout_on, weights_of

from meshrl.core.errors import SyncError
from meshrl.sync.delivery import delivery_read, delivery_to
from meshrl.sync.layout import SyncHeader, layout_from, layout_to
from meshrl.sync.shared_memory import SharedRing, SharedRingView


def serve(pipe: Any, layout_message: str) -> None:
    """A receiver in a process of its own: run what the pipe holds, and answer with the version or the error."""
    torch.set_num_threads(1)
    layout = layout_from(json.loads(layout_message))
    sampler, views = Sampler(layout, f"process {os.getpid()}"), dict[str, SharedRingView]()
    while (order := pipe.recv()) is not None:
        step, message = order[0], json.loads(order[1])
        try:
            if step == "begin":
                sampler.receiver.begin(SyncHeader(**message))
            elif step == "commit":
                sampler.receiver.commit(sampler.read_back)
            else:
                ring = message["ring"]
                views.setdefault(ring, SharedRingView(ring, message["num_slots"], message["slot_bytes"]))
                sampler.receiver.receive(delivery_read(layout, message, views[ring].slot(message["slot"])))
            pipe.send(sampler.receiver.version)
        except SyncError as error:
            pipe.send(error)


def test_weights_reach_other_processes_through_one_segment():
    """P15: right the first time, and a bit flipped in the segment is refused. Digests and numbers alone cross the pipe,
    as JSON, and no segment is left behind."""
    context = multiprocessing.get_context("spawn")
    layout = layout_on("one rank", 2048)
    (sender,) = Trainer(layout, keep_base=False).senders
    pipes, children, sizes = [], [], []
    with SharedRing(2, layout.slot_bytes) as ring:
        for _ in range(2):
            ours, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs, json.dumps(layout_to(layout))), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)

        def call(step: str, message: Any) -> list[Any]:
            text = json.dumps(message)
            sizes.append(len(text))
            for pipe in pipes:
                pipe.send((step, text))
            answers = [pipe.recv() for pipe in pipes]
            for answer in answers:
                if isinstance(answer, SyncError):
                    raise answer
            return answers

        def send(seed: int, version: int, spoil: int | None = None) -> list[Any]:
            call("begin", asdict(header_of(layout, version)))
            sender.begin(held_of(weights_of(seed), layout.senders[0]))
            for transfer in layout.transfers:
                slot = transfer.index % 2
                delivery = sender.fill(transfer, ring.slots[slot])
                if transfer.number == spoil:
                    ring.slots[slot][40] ^= 1
                call("receive", delivery_to(delivery, ring.place(slot)))
            return call("commit", None)

        assert send(1, 0) == [0, 0] and len(layout.transfers) > 4 and max(sizes) < 500
        with pytest.raises(SyncError, match=r"process \d+: transfer 3 .* brought big.weight\[.*with digest"):
            send(2, 1, spoil=3)
        assert send(2, 1) == [1, 1]
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join(20)
        assert [child.exitcode for child in children] == [0, 0]
        SharedRingView(ring.name, ring.num_slots, ring.slot_bytes).close()  # their end did not unlink ours
    with pytest.raises(FileNotFoundError):
        SharedRingView(ring.name, ring.num_slots, ring.slot_bytes)


def test_a_process_of_another_family_does_not_unlink_the_segment_when_it_ends():
    """A resource tracker of its own would remove whatever it had attached to."""
    with SharedRing(1, 64) as ring:
        ring.slots[0].fill_(7)
        code = (
            "from meshrl.sync.shared_memory import SharedRingView\n"
            f"view = SharedRingView({ring.name!r}, 1, 64)\n"
            "print(view.slot(0).sum().item())\n"
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


def test_a_slot_outlives_the_closing_of_both_ends():
    """The memory is unmapped when the last tensor that looks at it is gone, so no late reader meets a bad address."""
    ring = SharedRing(2, 100)
    view = SharedRingView(ring.name, 2, 100)
    ring.slots[1].fill_(5)
    payload = view.slot(1)[:60]
    ring.close()
    view.close()
    assert payload.sum() == 300


def test_slots_are_apart_and_seen_by_every_view():
    with SharedRing(3, 33) as ring:
        views = [SharedRingView(ring.name, 3, 33) for _ in range(2)]
        for index, slot in enumerate(ring.slots):
            slot.fill_(index + 1)
        for view in views:
            assert [view.slot(index).tolist() for index in range(3)] == [[index + 1] * 33 for index in range(3)]
            assert view.place(2) == ring.place(2)


def test_names_do_not_repeat():
    rings = [SharedRing(1, 16) for _ in range(8)]
    assert len({ring.name for ring in rings}) == 8
    for ring in rings:
        ring.close()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_too_little_shared_memory_is_an_error_and_not_a_crash():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(SyncError, match=r"rollout.sync_bucket_bytes smaller, or /dev/shm larger"):
        SharedRing(2, 1 << 43)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("meshrl_")}

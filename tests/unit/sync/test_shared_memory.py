"""Transfers through shared memory to other processes, and the removal of the memory afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tiny_sync import Sampler, Trainer, header_of, held_of, layout_on, weights_of

from meshrl.core.errors import SyncError
from meshrl.sync import shared_memory
from meshrl.sync.delivery import delivery_from_json, delivery_to_json
from meshrl.sync.layout import SyncHeader, layout_from_json, layout_to_json
from meshrl.sync.shared_memory import SharedRing, SharedRingView, open_slots

CPU = torch.device("cpu")


def serve(pipe: Any, layout_message: str) -> None:
    """A receiver in its own process: runs each step from the pipe, and answers with the version or the error."""
    torch.set_num_threads(1)
    layout = layout_from_json(json.loads(layout_message))
    sampler, slots_at = Sampler(layout, f"process {os.getpid()}"), lambda address: open_slots(address, CPU, 0)
    while (order := pipe.recv()) is not None:
        step, message = order[0], json.loads(order[1])
        try:
            if step == "begin":
                sampler.receiver.begin(SyncHeader(**message))
            elif step == "commit":
                sampler.receiver.commit(sampler.read_back)
            else:
                sampler.receiver.receive(delivery_from_json(layout, message, slots_at))
            pipe.send(sampler.receiver.state.version)
        except SyncError as error:
            pipe.send(error)


@pytest.mark.slow
def test_weights_reach_other_processes_through_one_segment():
    """A flipped bit in the segment is refused. Only digests and numbers go through the pipe, as JSON, and no
    segment is left."""
    context = multiprocessing.get_context("spawn")
    layout = layout_on("one rank", 2048)
    (sender,) = Trainer(layout, keep_base=False).senders
    pipes, children, sizes = [], [], []
    with closing(SharedRing(2, layout.slot_bytes)) as ring:
        for _ in range(2):
            ours, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs, json.dumps(layout_to_json(layout))), daemon=True)
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

        def send(seed: int, version: int, damaged: int | None = None) -> list[Any]:
            call("begin", asdict(header_of(layout, version)))
            sender.begin(held_of(weights_of(seed), layout.senders[0]))
            for transfer in layout.transfers:
                slot = transfer.index % 2
                delivery = sender.fill(transfer, ring.slots[slot])
                if transfer.number == damaged:
                    ring.slots[slot][40] ^= 1
                call("receive", delivery_to_json(delivery, ring.slot_address(slot)))
            return call("commit", None)

        assert send(1, 0) == [0, 0] and len(layout.transfers) > 4 and max(sizes) < 500
        with pytest.raises(SyncError, match=r"process \d+: transfer 3 .*: big.weight\[.* was sent with digest"):
            send(2, 1, damaged=3)
        assert send(2, 1) == [1, 1]
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join(20)
        assert [child.exitcode for child in children] == [0, 0]
        SharedRingView(ring.name, ring.num_slots, ring.slot_bytes).close()  # the receivers did not unlink it
    with pytest.raises(FileNotFoundError):
        SharedRingView(ring.name, ring.num_slots, ring.slot_bytes)


def test_a_separately_started_process_does_not_unlink_the_segment_when_it_ends():
    """Its own resource tracker would remove every segment that it attached."""
    with closing(SharedRing(1, 64)) as ring:
        ring.slots[0].fill_(7)
        code = (
            "from meshrl.sync.shared_memory import SharedRingView\n"
            f"view = SharedRingView({ring.name!r}, 1, 64)\n"
            "print(view.slots[0].sum().item())\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert (ended.stdout.strip(), ended.stderr) == (str(7 * 64), "")
        SharedRingView(ring.name, 1, 64).close()


def test_the_segment_is_removed_after_an_error_and_closing_twice_is_allowed():
    with pytest.raises(RuntimeError, match="boom"), closing(SharedRing(1, 64)) as ring:
        raise RuntimeError("boom")
    with pytest.raises(FileNotFoundError):
        SharedRingView(ring.name, 1, 64)
    ring.close()


def test_a_slot_outlives_the_closing_of_both_ends():
    """The memory is unmapped after its last tensor, so that a late reader never has an invalid address."""
    ring = SharedRing(2, 100)
    view = SharedRingView(ring.name, 2, 100)
    ring.slots[1].fill_(5)
    payload = view.slots[1][:60]
    ring.close()
    view.close()
    assert payload.sum() == 300


def test_slots_are_separate_and_shared_by_every_view():
    with closing(SharedRing(3, 33)) as ring:
        views = [SharedRingView(ring.name, 3, 33) for _ in range(2)]
        for index, slot in enumerate(ring.slots):
            slot.fill_(index + 1)
        for view in views:
            assert [slot.tolist() for slot in view.slots] == [[index + 1] * 33 for index in range(3)]
            assert view.slot_address(2) == ring.slot_address(2)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_too_little_shared_memory_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch):
    made, new_name = [], shared_memory.new_name
    monkeypatch.setattr(shared_memory, "new_name", lambda: made.append(new_name()) or made[-1])
    with pytest.raises(SyncError) as error:
        SharedRing(2, 1 << 43)
    size = shutil.disk_usage("/dev/shm")
    text = f"17,592,186,044,416 bytes of shared memory .* /dev/shm has {size.total:,} bytes, [0-9,]+ of them free"
    assert re.search(text, str(error.value))
    assert all(word in str(error.value) for word in ("No space left", "rollout.sync_bucket_bytes", "--shm-size"))
    assert made and not set(made) & set(os.listdir("/dev/shm"))

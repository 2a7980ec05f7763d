"""A sync within the memory of an accelerator, without one: on meta tensors, whose numbers are all zeros."""

from __future__ import annotations

import torch
from meta_device import META, DeviceCalls
from tiny_sync import Trainer, header_of, held_of, receiver_of

from meshrl.sync.layout import make_layout


def _sync(num_tensors: int) -> DeviceCalls:
    """A sync of this many tensors, with all proofs."""
    names = [f"layers.{i}.weight" for i in range(num_tensors)]
    layout = make_layout({name: ((96, 64), "bfloat16") for name in names}, transfer_bytes=1 << 14, digest="sum64")
    weights = {name: torch.empty(96, 64, device=META) for name in names}
    targets = {name: torch.empty(96, 64, dtype=torch.bfloat16, device=META) for name in names}
    receiver, (sender,) = receiver_of(layout, lambda: targets), Trainer(layout, keep_base=False).senders
    with DeviceCalls() as calls:
        receiver.begin(header_of(layout, 0))
        sender.begin(held_of(weights, layout.senders[0]))
        for delivery in sender.write(receiver.targets()):
            receiver.receive(delivery)
        ack = receiver.commit(lambda: iter(targets.items()))
    assert ack.read_back and ack.num_bytes == num_tensors * 96 * 64 * 2
    return calls


def test_a_sync_in_place_reads_all_digests_of_a_proof_together() -> None:
    """One read of the written digests and one of those that were read back: a read for each tensor would leave the
    device idle after each of some hundred tensors."""
    assert _sync(3).num_reads == _sync(20).num_reads == 2


def test_a_sync_in_place_stays_within_its_budget() -> None:
    """No copy to the device, and 23 launches for each tensor: a cast into its place, and two digests of ten."""
    _sync(1)  # copies the keys of the digests
    calls = _sync(20)
    assert calls.num_uploads == 0
    assert calls.num_launches <= 2 + 20 * 23

"""Boxes of train ranks to samplers: full, as changes, or directly into a receiver's tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sync_layout import partitions
from tiny_sync import (
    SHAPES,
    TIED,
    Sampler,
    Trainer,
    header_of,
    held_of,
    layout_on,
    receiver_of,
    sync,
    trained,
    trainer_and_sampler,
    weights_of,
)

from meshrl.core.errors import SyncError
from meshrl.sync.delivery import ALL
from meshrl.sync.layout import make_layout
from meshrl.sync.sender import Elements


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    made=partitions(),
    transfer_bytes=st.one_of(st.integers(16, 300), st.just(1 << 20)),
    digest=st.sampled_from(["xxh3", "sum64"]),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_partition_arrives_to_the_bit_and_then_its_changes_do(made, transfer_bytes, digest, transposed, seed):
    """Transposed: the receiver's tensors are not contiguous."""
    specs, ranks = made
    layout = make_layout(specs, ranks, None, transfer_bytes, digest)
    numbers = torch.Generator().manual_seed(seed)
    weights = {name: 9 * torch.randn(shape, generator=numbers) for name, (shape, _) in specs.items()}
    targets = {}
    for tensor in layout.tensors:
        shape = tensor.shape[::-1] if transposed else tensor.shape
        empty = torch.zeros(shape, dtype=tensor.torch_dtype)
        targets[tensor.name] = empty.permute(tuple(range(empty.dim()))[::-1]) if transposed else empty
    trainer, receiver = Trainer(layout), receiver_of(layout, lambda: targets)
    for version, changes in enumerate([False, True, True, False]):
        before = {name: target.clone() for name, target in targets.items()}
        receiver.begin(header_of(layout, version, version - 1 if changes else None))
        for delivery in trainer.deliveries(weights, version, changes):
            receiver.receive(delivery)
        ack = receiver.commit(lambda: iter(targets.items()))
        assert ack.read_back and all(torch.equal(t, weights[name].to(t.dtype)) for name, t in targets.items())
        moved = [int((targets[name] != before[name]).sum()) for name in before]
        if changes:
            assert sum(report.num_changed or 0 for report in trainer.reports) == sum(moved)
            assert ack.num_changed == sum(count > 0 for count in moved) and ack.num_bytes <= layout.num_bytes + 16 * 99
        weights = trained(weights, seed + version, 0.3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_changes_are_exact_in_other_dtypes(dtype):
    layout = layout_on("rows", dtype=dtype)
    trainer, sampler, weights = Trainer(layout), Sampler(layout), weights_of()
    weights["norm.weight"][0] = 0.0
    sync(trainer, sampler, weights)
    weights = trained(weights, 1)
    weights["norm.weight"][0] = -0.0  # an equal number with another bit
    sync(trainer, sampler, weights, 1, base=0)
    assert sampler.holds(weights) and torch.signbit(sampler.params["norm.weight"][0])


def test_changes_far_inside_a_large_tensor_have_the_right_indices():
    """The tensor is longer than a chunk."""
    layout = make_layout({"w": ((1300, 1000), "bfloat16")})
    target, first = torch.zeros(1300, 1000, dtype=torch.bfloat16), torch.randn(1300, 1000)
    receiver, trainer = receiver_of(layout, lambda: {"w": target}), Trainer(layout)
    second = first.clone()
    second.view(-1)[[7, 600_000, 1_299_999]] += 1
    for version, weights in enumerate((first, second)):
        receiver.begin(header_of(layout, version, version - 1 if version else None))
        for delivery in trainer.deliveries({"w": weights}, version, bool(version)):
            receiver.receive(delivery)
        receiver.commit()
        assert torch.equal(target, weights.bfloat16())
    assert trainer.reports[0].num_changed == 3


def test_a_part_whose_changes_are_not_smaller_is_sent_in_full():
    """One tensor changes everywhere, the others nowhere."""
    trainer, sampler = trainer_and_sampler("one rank", 1 << 20)
    weights = weights_of()
    sync(trainer, sampler, weights)
    weights = weights | {"big.weight": weights["big.weight"] + 1}
    seen = {}

    def look(deliveries):
        for delivery in deliveries:
            seen.update({part.tensor.name: count for part, count, _ in delivery.sections()})
            yield delivery

    sync(trainer, sampler, weights, 1, base=0, mangle=look)
    assert sampler.holds(weights)
    assert seen == {**{name: 0 for name in SHAPES if "empty" not in name}, "big.weight": ALL}
    assert trainer.reports[0].num_changed == weights["big.weight"].numel()


def test_without_changes_nothing_is_sent():
    trainer, sampler = trainer_and_sampler("3 x 2")
    weights = weights_of()
    sync(trainer, sampler, weights)
    assert sync(trainer, sampler, weights, 1, base=0).num_bytes == 0 and sampler.holds(weights)


def test_updates_below_the_samplers_precision_are_not_sent():
    """An update that rounding hides from the sampler is not sent until it has added up."""
    trainer, sampler = trainer_and_sampler("one rank")
    weights = weights_of()
    sync(trainer, sampler, weights)
    tiny = {name: t * (1 + 1e-5) for name, t in weights.items()}
    sync(trainer, sampler, tiny, 1, base=0)
    assert trainer.reports[0].num_changed < sum(t.numel() for t in tiny.values()) / 50
    assert sampler.holds(tiny)


def test_a_delta_on_another_base_is_refused_and_a_full_sync_repairs_it():
    """After a cancel, and when the receiver missed a version, whatever base the sender has."""
    trainer, sampler = trainer_and_sampler()
    weights = weights_of()
    sync(trainer, sampler, weights)
    sampler.receiver.cancel()
    with pytest.raises(SyncError, match=r"delta needs base version 0, but the current version is -1.*send everything"):
        sync(trainer, sampler, trained(weights, 1), 1, base=0)
    sync(trainer, sampler, trained(weights, 2), 1)
    assert sampler.holds(trained(weights, 2))
    with pytest.raises(SyncError, match="delta needs base version 0, but the current version is 1"):
        sync(trainer, sampler, weights, 2, base=0)


def test_an_interrupted_sender_has_no_base():
    """Its stored base is a mix of two versions."""
    trainer, sampler = trainer_and_sampler("one rank", 256)
    weights = weights_of()
    sync(trainer, sampler, weights)
    (sender,) = trainer.senders
    assert sender.base_version == 0
    next(trainer.deliveries(trained(weights, 1), 1, changes=True))
    assert sender.base_version is None
    with pytest.raises(ValueError, match="nothing was sent before"):
        next(trainer.deliveries(weights, 2, changes=True))


def test_a_receiver_with_another_base_is_found_by_the_read_back():
    """The wire proof can't find a changed element that no rank sent."""
    trainer, sampler = trainer_and_sampler()
    weights = weights_of()
    sync(trainer, sampler, weights)
    sampler.params["big.weight"][100, 3] += 1
    with pytest.raises(
        SyncError, match=r"1 of 10 tensors differ(.|\n)*big.weight has digest .* in big.weight\[100:120, 0:33\]"
    ):
        sync(trainer, sampler, trained(weights, 1), 1, base=0)
    assert sampler.receiver.state.version == -1


def test_gaps_between_parts_are_zero():
    layout = make_layout({"a": ((3,), "uint8"), "b": ((1,), "uint8")})
    ones = {"a": torch.ones(3), "b": torch.ones(1)}
    trainer = Trainer(layout)
    (delivery,) = trainer.deliveries(ones)
    assert delivery.payload.tolist() == [1, 1, 1] + [0] * 13 + [1]
    (delivery,) = trainer.deliveries(ones | {"a": torch.tensor([1.0, 7, 1])}, 1, changes=True)
    assert delivery.payload.tolist()[3:16] == [0] * 13 and delivery.counts == (ALL, 0)


def test_a_missing_box_and_a_box_of_another_size_are_refused():
    layout, weights = layout_on("rows"), weights_of()
    (sender, *_), boxes = Trainer(layout).senders, layout.senders[0]
    held = held_of(weights, boxes)
    held["norm.weight"] = [held["norm.weight"][0]._replace(elements=Elements(weights["norm.weight"]))]
    with pytest.raises(SyncError, match=r"norm.weight at \[0\] should be 3 elements; the trainer has 7 elements"):
        sender.begin(held)
    with pytest.raises(SyncError, match="the trainer has nothing"):
        sender.begin({})


# ---- directly into the receiver


def write(trainer, sampler, weights, version=0, base=None):
    """One sync by a sender that holds all weights, with the receiver in its process."""
    (sender,), layout = trainer.senders, trainer.layout
    sampler.receiver.begin(header_of(layout, version, base, "adapter"))
    sender.begin(held_of(weights, layout.senders[0]), base is not None)
    for delivery in sender.write(sampler.receiver.targets()):
        sampler.receiver.receive(delivery)
    sender.finish(version)
    return sampler.receiver.commit(sampler.read_back)


def test_a_sender_in_the_receivers_process_writes_its_tensors_directly():
    """With the same proofs, and without a buffer."""
    trainer, sampler = trainer_and_sampler("one rank", keep_base=False)
    weights = weights_of()
    ack = write(trainer, sampler, weights)
    assert sampler.holds(weights) and ack.read_back and ack.num_bytes == sum(p.nbytes for p in sampler.params.values())
    assert trainer.reports[0].extra_bytes == 0 and trainer.senders[0].base_version is None
    sampler.head = sampler.head.clone()
    with pytest.raises(SyncError, match=r"lm_head.weight \(tied to embed.weight\) still has the values of version 0"):
        write(trainer, sampler, trained(weights, 1, share=1), 1)


def test_large_tensors_are_written_by_as_many_threads_as_torch_has():
    """To the bit, with all digests; torch has the same number of threads afterwards."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    weights = {name: torch.randn(700, 1024) for name in "abc"}
    layout = make_layout({name: ((700, 1024), "bfloat16") for name in weights}, transfer_bytes=1 << 20)
    targets = {name: torch.zeros(700, 1024, dtype=torch.bfloat16) for name in weights}
    receiver, (sender,) = receiver_of(layout, lambda: targets), Trainer(layout, keep_base=False).senders
    try:
        torch.set_num_threads(3)
        receiver.begin(header_of(layout, 0))
        sender.begin(held_of(weights, layout.senders[0]))
        for delivery in sender.write(receiver.targets()):
            receiver.receive(delivery)
        ack = receiver.commit(lambda: iter(targets.items()))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert ack.read_back and all(torch.equal(targets[name], t.bfloat16()) for name, t in weights.items())
    assert ack.num_bytes == sender.report.num_bytes == 3 * 700 * 1024 * 2


def test_tensors_that_are_not_contiguous_are_written_directly():
    trainer, sampler = trainer_and_sampler("one rank", 256)
    transposed = torch.zeros(6, 37, dtype=torch.bfloat16).t()
    sampler.params["embed.weight"] = sampler.head = transposed
    write(trainer, sampler, weights_of())
    assert torch.equal(transposed, weights_of()["embed.weight"].bfloat16())


def test_directly_written_tensors_are_compared_with_the_digests():
    class Clumsy(Sampler):
        def read_back(self):
            self.params["norm.weight"][2] += 1
            yield from super().read_back()

    trainer = Trainer(layout_on("one rank"))
    with pytest.raises(SyncError, match=r"norm.weight has digest"):
        write(trainer, Clumsy(trainer.layout), weights_of())


@pytest.mark.parametrize("way", ["all of it", "changes", "in place"])
def test_an_alias_with_memory_of_its_own_is_written_from_its_source(way):
    trainer, sampler = trainer_and_sampler("one rank")
    sampler.params["lm_head.weight"] = sampler.head = torch.zeros_like(sampler.head)
    sampler.read_back = sampler.params.items
    weights = weights_of()
    sync(trainer, sampler, weights)
    weights = trained(weights, 1)
    if way == "in place":
        write(trainer, sampler, weights, 1)
    else:
        sync(trainer, sampler, weights, 1, base=0 if way == "changes" else None)
    assert sampler.holds(weights) and torch.equal(sampler.head, weights[TIED["lm_head.weight"]].bfloat16())


# ---- frozen tensors


FROZEN = frozenset(SHAPES) - {"q_proj.weight", "norm.weight"}


class Unread:
    """Elements that may not be read; only their number is known."""

    device = torch.device("cpu")

    def __init__(self, block):
        self.block, self.numel = block, block.numel


class OnlyMoving(Trainer):
    """Its frozen weights may not be read after the first sync."""

    def deliveries(self, weights, version=0, changes=False):
        for sender, boxes in zip(self.senders, self.layout.senders):
            held = held_of(weights, boxes)
            for name in FROZEN if changes else ():
                held[name] = [box._replace(elements=Unread(box.elements.block)) for box in held[name]]
            sender.begin(held, changes)
        for transfer in self.layout.transfers:
            yield self.senders[transfer.sender].fill(transfer, torch.empty(self.layout.slot_bytes, dtype=torch.uint8))
        for sender in self.senders:
            sender.finish(version)


@pytest.mark.parametrize("keep_base", [False, True], ids=["everything", "searched"])
@pytest.mark.parametrize("transfer_bytes", [128, 4096])
@pytest.mark.parametrize("mesh", ["one rank", "rows", "3 x 2"])
def test_frozen_tensors_are_read_and_sent_once_and_proven_each_time(mesh, transfer_bytes, keep_base):
    """The receiver's frozen tensors are still compared with their digests."""
    layout = layout_on(mesh, transfer_bytes)
    trainer, sampler, weights = OnlyMoving(layout, keep_base, FROZEN), Sampler(layout), weights_of()
    full = sync(trainer, sampler, weights).num_bytes
    moved = {n: p for n, p in trained(weights, 1, share=1).items() if n not in FROZEN}
    weights |= moved
    ack = sync(trainer, sampler, weights, 1, base=0)
    assert sampler.holds(weights) and ack.read_back and ack.num_changed == len(moved)
    assert sum(p.numel() for p in moved.values()) * 2 <= ack.num_bytes < full / 10
    counted = [report.num_changed for report in trainer.reports]
    assert sum(counted) == sum(p.numel() for p in moved.values()) if keep_base else set(counted) == {None}
    sampler.params["big.weight"].view(torch.int16)[3, 3] ^= 1
    with pytest.raises(SyncError, match=r"1 of 10 tensors differ from the trainer's:\n +big.weight has digest"):
        sync(trainer, sampler, weights, 2, base=1)


def test_frozen_tensors_are_not_written_again_in_one_process():
    trainer, sampler = trainer_and_sampler("one rank", 256, keep_base=False, frozen=FROZEN)
    weights = weights_of()
    write(trainer, sampler, weights)
    weights |= {n: p for n, p in trained(weights, 1, share=1).items() if n not in FROZEN}
    sampler.params["embed.weight"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(SyncError, match=r"2 of 10 tensors differ.*\n +embed.weight has digest"):
        write(trainer, sampler, weights, 1, base=0)
    write(trainer, sampler, weights, 2)
    weights["norm.weight"] = weights["norm.weight"] + 1
    ack = write(trainer, sampler, weights, 3, base=2)
    assert sampler.holds(weights) and ack.num_bytes == 2 * (12 * 4 + 7) and ack.num_changed == 1

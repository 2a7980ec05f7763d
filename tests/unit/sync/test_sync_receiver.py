"""The receiving half: the order of its steps; every fault of transfers or engine is refused and named."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_sync import (
    SHAPES,
    Sampler,
    Trainer,
    header_of,
    layout_on,
    receiver_of,
    sync,
    trained,
    trainer_and_sampler,
    weights_of,
)

from meshrl.core.errors import SyncError, UnloadedParamsError
from meshrl.sync.delivery import Delivery, delivery_from_facts, delivery_from_json
from meshrl.sync.layout import make_layout
from meshrl.sync.receiver import describe

TRANSFER_BYTES = 1536  # for all three senders together

# ---- faults of transfers


def change_third(change: Callable[[Delivery], Delivery]) -> Callable[[list[Delivery]], list[Delivery]]:
    return lambda sent: [change(each) if number == 3 else each for number, each in enumerate(sent)]


def flip_a_bit(delivery: Delivery) -> Delivery:
    delivery.payload[5] ^= 4
    return delivery


def of(delivery: Delivery, **changes: object) -> Delivery:
    return replace(delivery, transfer=replace(delivery.transfer, **changes))


def with_offsets_moved(delivery: Delivery) -> Delivery:
    first, *others = delivery.transfer.parts
    return of(delivery, parts=(first._replace(offsets=(first.offsets[0] + 1, *first.offsets[1:])), *others))


def with_each_others_bytes(sent: list[Delivery]) -> list[Delivery]:
    one, two = sent[3].payload, sent[4].payload
    count = min(len(one), len(two))
    one[:count], two[:count] = two[:count].clone(), one[:count].clone()
    return sent


def with_count(count: int) -> Callable[[Delivery], Delivery]:
    return lambda d: replace(d, counts=(count, *([0] * (len(d.transfer.parts) - 1))))


OUT_OF_ORDER = r"transfer -?\d+ of sender \d \(.*\) was received; expected "
DIGEST = r"transfer 3 of sender 0 \(.*was sent with digest [0-9a-f]{16}, received with"
DAMAGES = {  # -> change of the deliveries, expected error
    "dropped": (lambda sent: sent[:3] + sent[4:], OUT_OF_ORDER + "transfer 3 of sender 0"),
    "last one dropped": (lambda sent: sent[:-1], r"commit after \d+ of \d+ transfers; big.weight is the first tensor"),
    "all dropped": (lambda sent: [], "commit after 0 of .* embed.weight is the first"),
    "twice": (lambda sent: sent[:4] + sent[3:], OUT_OF_ORDER + "transfer 4"),
    "swapped": (lambda sent: [*sent[:3], sent[4], sent[3], *sent[5:]], OUT_OF_ORDER + "transfer 3"),
    "one more": (lambda sent: [*sent, sent[0]], OUT_OF_ORDER + "no more"),
    "of another sender": (change_third(lambda d: of(d, sender=1)), OUT_OF_ORDER),
    "of no sender": (change_third(lambda d: of(d, number=-1)), OUT_OF_ORDER),
    "offsets moved": (change_third(with_offsets_moved), OUT_OF_ORDER),
    "a bit flipped": (change_third(flip_a_bit), DIGEST),
    "bytes of another": (with_each_others_bytes, DIGEST),
    "cut short": (
        change_third(lambda d: replace(d, payload=d.payload[:-1])),
        r"\[\d+\] torch.uint8, expected \[\d+\] torch.uint8",
    ),
    "another dtype": (change_third(lambda d: replace(d, payload=d.payload.view(torch.int8))), r"torch.int8, expected"),
    "a digest is missing": (change_third(lambda d: replace(d, digests=d.digests[1:])), "digests and counts for"),
    "digest of another part": (
        change_third(lambda d: replace(d, digests=(d.digests[0] ^ 1, *d.digests[1:]))),
        r"was sent with digest|1 of 10 tensors differ",
    ),
}


@pytest.mark.parametrize("mode", ["everything", "changes"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_transfers_are_refused_and_named(damage, mode):
    mangle, complaint = DAMAGES[damage]
    trainer, sampler = trainer_and_sampler("rows", TRANSFER_BYTES)
    weights = weights_of()
    sync(trainer, sampler, weights)
    weights = trained(weights, 1, 0.1)  # more would be sent in full
    with pytest.raises(SyncError, match=complaint):
        base = 0 if mode == "changes" else None
        sync(trainer, sampler, weights, 1, base, lambda sent: mangle(list(sent)))
    assert sampler.receiver.state.version == -1
    sync(trainer, sampler, weights, 1)
    assert sampler.holds(weights) and sampler.receiver.state.version == 1


@pytest.mark.parametrize(
    ("base", "change", "complaint"),
    [
        (None, with_count(0), "carries changes in a sync of everything"),
        (0, with_count(9999), "the changes of .* are longer than the part"),
        (0, with_count(-2), "the changes of .* are longer than the part"),
        (0, with_count(1), r"expected \[\d+\] torch.uint8"),
        (0, lambda d: replace(d, counts=d.counts[1:]), "digests and counts for"),
    ],
)
def test_wrong_counts_of_changes_in_a_delivery_are_refused(base, change, complaint):
    trainer, sampler = trainer_and_sampler("rows", TRANSFER_BYTES)
    sync(trainer, sampler, weights_of())
    with pytest.raises(SyncError, match=complaint):
        sync(trainer, sampler, weights_of(), 1, base, lambda sent: change_third(change)(list(sent)))


def test_facts_of_another_transfer_are_refused():
    layout = layout_on("rows", TRANSFER_BYTES)
    first, second, *_ = Trainer(layout).deliveries(weights_of())
    again = delivery_from_facts(first.transfer, first.facts(), first.payload)
    assert (again.digests, again.counts, again.transfer) == (first.digests, first.counts, first.transfer)
    for facts, payload in ((second.facts(), first.payload), (first.facts(), first.payload[:-1])):
        with pytest.raises(SyncError, match=r"transfer 0 .* was expected; transfer"):
            delivery_from_facts(first.transfer, facts, payload)
    with pytest.raises(SyncError, match="transfer 9999 was received; the layout has"):
        delivery_from_json(layout, {"number": 9999}, lambda address: [first.payload])


# ---- faults in the engine


def test_two_tensors_that_an_engine_swapped_are_both_named():
    class Swapped(Sampler):
        def read_back(self):
            q, k = "q_proj.weight", "k_proj.weight"
            yield from (self.params | {q: self.params[k], k: self.params[q]}).items()
            yield "lm_head.weight", self.head

    trainer = Trainer(layout_on("2 x 2"))
    with pytest.raises(SyncError, match="2 of 10") as caught:
        sync(trainer, Swapped(trainer.layout), weights_of())
    q, k = "q_proj.weight", "k_proj.weight"
    assert f"{q} has the values of {k}" in str(caught.value) and f"{k} has the values of {q}" in str(caught.value)


def test_every_tensor_that_differs_is_named_and_no_other():
    class Clumsy(Sampler):
        def read_back(self):
            self.params["norm.weight"].view(torch.int16)[3] ^= 1
            self.head.view(torch.int16)[36, 5] ^= 1
            return super().read_back()

    trainer = Trainer(layout_on("rows"))
    with pytest.raises(SyncError, match="3 of 10 tensors differ") as caught:
        sync(trainer, Clumsy(trainer.layout), weights_of())
    message = str(caught.value)
    assert all(name in message for name in ("norm.weight", "embed.weight", "lm_head.weight (tied to embed.weight)"))
    assert "proj" not in message and "big" not in message


@pytest.mark.parametrize("mode", ["everything", "changes"])
def test_a_tied_head_with_old_values_is_named_with_their_version(mode):
    """The transfers are right, but the engine computes with another tensor."""
    trainer, sampler = trainer_and_sampler()
    sync(trainer, sampler, weights_of(1))
    sampler.head = sampler.head.clone()
    complaint = r"1 of 10 .*\n.*lm_head.weight \(tied to embed.weight\) still has the values of v.* 0"
    with pytest.raises(SyncError, match=complaint):
        sync(trainer, sampler, trained(weights_of(1), 1, 0.9), 1, base=0 if mode == "changes" else None)
    assert sampler.receiver.state.version == -1


@pytest.mark.parametrize(
    ("read_back", "complaint"),
    [
        (lambda e: [(n, t) for n, t in e.read_back() if n != "lm_head.weight"], "lm_head.weight was not read back"),
        (lambda e: [(n, t) for n, t in e.read_back() if n != "norm.weight"], "norm.weight was not read back"),
        (lambda e: [*e.read_back(), ("norm.weight", e.params["norm.weight"])], "norm.weight was read back twice"),
        (lambda e: [*e.read_back(), ("odd", e.head)], "odd was read back though nothing of that name was sent"),
        (lambda e: [(n, t.float()) for n, t in e.read_back()], r"norm.weight is \[7\] float32, sent as \[7\] bfloat16"),
        (lambda e: [(n, t.t() if n == "embed.weight" else t) for n, t in e.read_back()], r"embed.weight is \[6, 37\]"),
    ],
)
def test_an_incomplete_read_back_proves_nothing(read_back, complaint):
    trainer, sampler = trainer_and_sampler("3 x 2")
    sampler.receiver.begin(header_of(trainer.layout, 0))
    for delivery in trainer.deliveries(weights_of()):
        sampler.receiver.receive(delivery)
    with pytest.raises(SyncError, match=complaint):
        sampler.receiver.commit(lambda: read_back(sampler))
    assert sampler.receiver.state.version == -1


def test_an_engine_that_cannot_read_back_states_it_and_its_targets_are_compared():
    layout = layout_on()
    ack = sync(Trainer(layout), Sampler(layout, reads_back=False), weights_of())
    assert ack.wire is True and ack.read_back is None

    class Clumsy(Sampler):
        async def commit(self):
            self.params["scale"] += 1
            return await super().commit()

    with pytest.raises(SyncError, match="scale has digest"):
        sync(Trainer(layout), Clumsy(layout, reads_back=False), weights_of())


def test_weights_that_the_engine_moved_are_written_into_their_new_memory():
    """An engine that released and restored its weights has new memory for the same parameters."""
    trainer, sampler = trainer_and_sampler()
    params = {n: torch.nn.Parameter(t, requires_grad=False) for n, t in sampler.params.items()}
    sampler.params, sampler.head = params, params["embed.weight"]
    for param in params.values():
        param.data = torch.ones_like(param)
    assert sync(trainer, sampler, weights_of()).read_back and sampler.holds(weights_of())


@pytest.mark.parametrize("end", ["commit", "cancel"])
def test_weights_may_be_replaced_between_syncs_and_their_memory_is_free(end):
    trainer, sampler = trainer_and_sampler()
    sync(trainer, sampler, weights_of())
    sampler.receiver.begin(header_of(trainer.layout, 1))
    for delivery in trainer.deliveries(weights_of(1)):
        sampler.receiver.receive(delivery)
    sampler.receiver.commit(sampler.read_back) if end == "commit" else sampler.receiver.cancel()
    memory = weakref.ref(sampler.params["big.weight"])
    sampler.params["big.weight"] = torch.zeros(SHAPES["big.weight"], dtype=torch.bfloat16)
    assert memory() is None
    sync(trainer, sampler, weights_of(2), 2)
    assert sampler.holds(weights_of(2))


def test_released_targets_are_refused():
    trainer, sampler = trainer_and_sampler()
    sampler.params["norm.weight"].untyped_storage().resize_(0)
    with pytest.raises(SyncError, match=r"norm.weight into has no memory"):
        sync(trainer, sampler, weights_of())
    assert sampler.receiver.state.version == -1


def test_a_receiver_requires_tensors_that_fit_the_layout():
    layout = layout_on()
    targets = Sampler(layout).params
    assert describe(targets)["norm.weight"] == ((7,), "bfloat16")
    with pytest.raises(UnloadedParamsError, match=r"norm.weight \[7\] bfloat16"):
        receiver_of(layout, lambda: {n: t for n, t in targets.items() if n != "norm.weight"})


def test_a_model_without_tensors_syncs():
    layout = make_layout({})
    receiver = receiver_of(layout, dict)
    receiver.begin(header_of(layout, 0))
    assert receiver.commit().version == 0 and layout.transfers == () and layout.slot_bytes == 0


# ---- states and versions


def test_versions_rise_and_a_failed_version_may_be_sent_again():
    trainer, sampler = trainer_and_sampler()
    for version in (3, 5):
        sync(trainer, sampler, weights_of(), version)
    with pytest.raises(SyncError, match="version 5 does not rise above version 5"):
        sync(trainer, sampler, weights_of(), 5)
    assert sampler.receiver.state.version == -1
    with pytest.raises(SyncError, match="version 4 does not rise above version 5"):
        sync(trainer, sampler, weights_of(), 4)
    sync(trainer, sampler, weights_of(), 5)
    assert sampler.receiver.state.version == 5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layout_hash": "0123"}, "belongs to layout 0123"),
        ({"mode": "adapter"}, "'delta' and 'adapter' need one"),
        ({"base_version": 1}, "'full' has no base version"),
        ({"base_version": 1, "mode": "delta"}, "needs base version 1, but the current version is -1"),
        ({"version": -1}, "version -1"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, complaint):
    sampler = trainer_and_sampler()[1]
    with pytest.raises(SyncError, match=complaint):
        sampler.receiver.begin(replace(header_of(sampler.receiver.state.layout, 0), **change))
    assert sampler.receiver.state.version == -1


def test_steps_out_of_order_make_the_weights_unusable():
    layout = layout_on()
    header, (first, *_) = header_of(layout, 1), list(Trainer(layout).deliveries(weights_of()))
    for steps, complaint in {
        (lambda r: r.receive(first),): "transfer 0 .* is not allowed while the weights are valid",
        (lambda r: r.commit(),): "commit is not allowed while the weights are valid",
        (lambda r: r.begin(header), lambda r: r.begin(header)): "begin is not allowed while the weights are arriving",
        (lambda r: r.begin(header), lambda r: r.cancel(), lambda r: r.receive(first)): "are invalid",
    }.items():
        sampler = Sampler(layout)
        sync(Trainer(layout), sampler, weights_of())
        with pytest.raises(SyncError, match=complaint):
            for step in steps:
                step(sampler.receiver)
        assert sampler.receiver.state.version == -1


@pytest.mark.parametrize("right", [True, False])
def test_the_new_version_is_visible_only_after_its_proof(right):
    """Not during the transfers, not during the read-back, and not after a failed proof without a cancel."""
    trainer, sampler = trainer_and_sampler()
    receiver = sampler.receiver
    seen = [receiver.state.version]
    sync(trainer, sampler, weights_of(), 4)
    receiver.begin(header_of(trainer.layout, 5))
    for delivery in trainer.deliveries(weights_of()):
        receiver.receive(delivery)
        seen.append(receiver.state.version)
    if not right:
        sampler.params["norm.weight"].zero_()

    def read_back():
        seen.append(receiver.state.version)
        yield from sampler.read_back()

    if right:
        receiver.commit(read_back)
    else:
        with pytest.raises(SyncError, match=r"norm\.weight"):
            receiver.commit(read_back)
    assert set(seen) == {-1}
    assert receiver.state.version == (5 if right else -1)


def test_errors_name_a_transfer_by_its_tensors():
    layout = layout_on("3 x 2", 768)
    names = [str(transfer) for transfer in layout.transfers]
    assert names[0] == "transfer 0 of sender 0 (embed.weight[0:13, 0:3] to k_proj.weight[0:4, 0:2])"
    assert "transfer 15 of sender 3" in names[15] and len(set(names)) == len(names)

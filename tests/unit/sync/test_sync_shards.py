"""Shards sent by the ranks that hold them: whole, as changes, or straight into a receiver's tensors (P15, P16, P19)."""

import asyncio
from dataclasses import replace

import pytest
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.manifest import Ack, make_layout
from meshrl.sync.receive import WHOLE, ReceiverState, describe
from meshrl.sync.send import make_header, merged, send_weights, with_reports
from meshrl.sync.shards import SendReport, ShardSender

SHAPES = {
    "embed.weight": (37, 5),
    "q_proj.weight": (11, 3),
    "empty": (0, 4),
    "big.weight": (301, 33),
    "norm.weight": (7,),
}
TIED = {"lm_head.weight": "embed.weight"}


def masters(seed=0):
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def step(weights, seed, share=0.05):
    """A few elements move by more than bf16 rounds."""
    torch.manual_seed(seed)
    return {name: torch.where(torch.rand_like(t) < share, t + 0.5, t) for name, t in weights.items()}


class Link:
    """Some senders and one receiver, with the tied head reading the embedding's memory."""

    def __init__(
        self, num_shards=2, bucket_bytes=4096, digest="xxh3", keep_base=True, dtype="bfloat16", frozen=frozenset()
    ):
        tensors = [(name, shape, dtype) for name, shape in SHAPES.items()]
        self.layout = make_layout(tensors, TIED, bucket_bytes, num_shards, digest)
        self.params = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in SHAPES.items()}
        self.head = self.params["embed.weight"]
        self.state = ReceiverState(self.layout, self.params, "receiver")
        size = self.layout.staging_bytes
        self.senders = [
            ShardSender(self.layout, s, [torch.empty(size, dtype=torch.uint8) for _ in range(2)], keep_base, frozen)
            for s in range(num_shards)
        ]

    async def begin(self, header):
        self.state.begin(header)

    async def receive(self, bucket):
        self.state.receive(bucket)

    async def commit(self):
        return self.state.commit(lambda: [*self.params.items(), ("lm_head.weight", self.head)])

    async def cancel(self):
        self.state.cancel()

    def shard(self, weights, s):
        chunks = {name: -(-t.shape[0] // len(self.senders)) for name, t in weights.items()}
        return {name: t[chunks[name] * s : chunks[name] * (s + 1)] for name, t in weights.items()}

    def buckets(self, weights, version, delta):
        for s, sender in enumerate(self.senders):
            yield from sender.buckets(self.shard(weights, s), version, delta)

    def sync(self, weights, version, base=None, mangle=None):
        header = make_header(self.layout, version, None, base, "full" if base is None else "delta")
        buckets = self.buckets(weights, version, base is not None)
        (ack,) = asyncio.run(send_weights(header, buckets if mangle is None else mangle(buckets), [self]))
        return ack

    def holds(self, weights):
        return all(torch.equal(self.params[name], t.to(self.head.dtype)) for name, t in weights.items())


@pytest.mark.parametrize("digest", ["xxh3", "sum64"])
@pytest.mark.parametrize("bucket_bytes", [64, 256, 4096, 1 << 20])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_shards_and_then_changes_arrive_to_the_bit(num_shards, bucket_bytes, digest):
    """P16: with rows that don't divide, ranks that hold nothing of a tensor, and tensors in several buckets."""
    link, weights = Link(num_shards, bucket_bytes, digest), masters()
    ack = link.sync(weights, 0)
    assert link.holds(weights) and (ack.wire, ack.resident, ack.num_changed) == (True, True, None)
    full = ack.num_bytes
    for version in range(1, 4):
        before, weights = {n: p.clone() for n, p in link.params.items()}, step(weights, version)
        ack = link.sync(weights, version, base=version - 1)
        assert link.holds(weights) and link.state.version == version
        moved = {name: int((link.params[name] != before[name]).sum()) for name in before}
        assert sum(sender.report.num_changed for sender in link.senders) == sum(moved.values())
        assert ack.num_changed == sum(count > 0 for count in moved.values())
        assert ack.num_bytes < full / (2 if bucket_bytes >= 4096 else 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_changes_are_exact_in_other_dtypes(dtype):
    link, weights = Link(2, 4096, dtype=dtype), masters()
    weights["norm.weight"][0] = 0.0
    link.sync(weights, 0)
    weights = step(weights, 1)
    weights["norm.weight"][0] = -0.0  # equal as a number, and another bit
    link.sync(weights, 1, base=0)
    assert link.holds(weights) and torch.signbit(link.params["norm.weight"][0])


def test_changes_far_inside_a_large_tensor_land_where_they_belong():
    """Longer than what is cast and compared at once."""
    layout = make_layout([("w", (1300, 1000), "bfloat16")], None, 64 << 20, 1, "xxh3")
    params, first = {"w": torch.zeros(1300, 1000, dtype=torch.bfloat16)}, {"w": torch.randn(1300, 1000)}
    state = ReceiverState(layout, params)
    sender = ShardSender(layout, 0, [torch.empty(layout.staging_bytes, dtype=torch.uint8)], True)
    second = {"w": first["w"].clone()}
    second["w"].view(-1)[[7, 600_000, 1_299_999]] += 1
    for version, weights in enumerate((first, second)):
        base = version - 1 if version else None
        state.begin(make_header(layout, version, None, base, "delta" if version else "full"))
        for bucket in sender.buckets(weights, version, bool(version)):
            state.receive(bucket)
        state.commit(params.items)
        assert torch.equal(params["w"], weights["w"].bfloat16())
    assert sender.report.num_changed == 3


def test_what_would_not_be_smaller_comes_whole():
    """One tensor changes everywhere, the others nowhere: its pieces come as they are."""
    link, weights = Link(1, 1 << 20), masters()
    link.sync(weights, 0)
    weights = weights | {"big.weight": weights["big.weight"] + 1}
    seen = []
    link.sync(weights, 1, base=0, mangle=lambda buckets: (seen.append(b.changes) or b for b in buckets))
    assert link.holds(weights)
    assert seen == [(0, 0, WHOLE, 0)]
    assert link.senders[0].report.num_changed == SHAPES["big.weight"][0] * SHAPES["big.weight"][1]


def test_nothing_changed_is_next_to_nothing_sent():
    link, weights = Link(2, 4096), masters()
    link.sync(weights, 0)
    assert link.sync(weights, 1, base=0).num_bytes == 0 and link.holds(weights)


def test_masters_that_move_below_the_samplers_precision_change_nothing():
    """What a sampler can't see is not sent; it is when it has added up."""
    link, weights = Link(1, 4096), masters()
    link.sync(weights, 0)
    tiny = {name: t * (1 + 1e-5) for name, t in weights.items()}
    link.sync(tiny, 1, base=0)
    assert link.senders[0].report.num_changed < sum(t.numel() for t in tiny.values()) / 50
    assert link.holds(tiny)


def test_a_delta_on_another_base_is_refused_and_everything_heals():
    """P15: after a cancel, or from a receiver that missed a version; the sender's own base does not matter then."""
    link, weights = Link(), masters()
    link.sync(weights, 0)
    link.state.cancel()
    with pytest.raises(SyncError, match=r"delta on base version 0 came, but version -1 is in place.*send everything"):
        link.sync(step(weights, 1), 1, base=0)
    link.sync(step(weights, 2), 1)
    assert link.holds(step(weights, 2))
    with pytest.raises(SyncError, match="delta on base version 0 came, but version 1"):
        link.sync(weights, 2, base=0)


def test_a_sender_that_was_interrupted_has_no_base():
    """Half of what it remembers is new, half is old."""
    link, weights = Link(1, 256), masters()
    link.sync(weights, 0)
    assert link.senders[0].base_version == 0
    next(link.senders[0].buckets(step(weights, 1), 1, True))
    assert link.senders[0].base_version is None
    with pytest.raises(ValueError, match="nothing was sent before"):
        next(link.senders[0].buckets(weights, 2, True))


def test_a_base_that_is_not_the_receivers_is_found_by_what_is_read_back():
    """P15: a changed element that nobody sent can't be seen on the wire."""
    link, weights = Link(), masters()
    link.sync(weights, 0)
    with torch.no_grad():
        link.params["big.weight"][200, 3] += 1
    with pytest.raises(SyncError, match=r"1 of 6 tensors differ(.|\n)*big.weight has digest"):
        link.sync(step(weights, 1), 1, base=0)
    assert link.state.version == -1


def flip(at):
    def mangle(buckets):
        for number, bucket in enumerate(buckets):
            if number == 1:
                bucket.payload[at] ^= 4
            yield bucket

    return mangle


def other(**change):
    def mangle(buckets):
        for number, bucket in enumerate(buckets):
            yield replace(bucket, **change) if number == 1 else bucket

    return mangle


def without_second(buckets):
    return (b for number, b in enumerate(buckets) if number != 1)


def of_other_tensors(buckets):
    """Two equally long buckets that swap payload and digests, but not their places."""
    for bucket in buckets:
        if bucket.index == 1:
            bucket = replace(bucket, pieces=bucket.pieces[::-1])
        yield bucket


@pytest.mark.parametrize(
    ("mangle", "base", "complaint"),
    [
        (flip(20), None, r"bucket 1 brought big.weight with digest [0-9a-f]{16}, sent was"),
        (flip(20), 0, r"bucket 1 was sent with digest .* it carries big.weight"),
        (without_second, None, "bucket 2 came out of order; expected bucket 1"),
        (without_second, 0, "bucket 2 came out of order; expected bucket 1"),
        (other(stream=5), None, "came of stream 5 of 2"),
        (other(stream=1), None, "bucket 1 came out of order; expected bucket 0"),
        (other(pieces=()), None, r"speaks of \[0\] pieces and carries 1, big.weight"),
        (other(pieces=None), None, "pieces and carries 1, big.weight"),
        (other(pieces=(1,)), None, "bucket 1 brought big.weight with digest"),
        (other(changes=(0,)), None, r"expected \[0\]"),
        (other(payload=torch.zeros(16, dtype=torch.uint8)), None, r"\[16\] torch.uint8, expected \[2048\]"),
        (other(payload=torch.zeros(16, dtype=torch.uint8)), 0, "it carries big.weight"),
        (other(payload=torch.zeros(2048, dtype=torch.uint8), changes=(2000,)), 0, "big.weight are longer than itself"),
        (lambda buckets: (b for b in buckets if b.stream == 0), None, r"commit after 0 of \d+ buckets; embed.weight"),
    ],
)
def test_a_damaged_stream_is_refused_and_named(mangle, base, complaint):
    """P15"""
    link, weights = Link(2, 4096), masters()
    link.sync(weights, 0)
    if base is None:
        link.sync(weights, 1)
    with pytest.raises(SyncError, match=complaint):
        link.sync(step(weights, 1), 2, base=base, mangle=mangle)
    assert link.state.version == -1


@pytest.mark.parametrize("tell", ["changes of a full sync", "a whole of a delta"])
def test_mode_and_buckets_must_agree(tell):
    link, weights = Link(1, 1 << 20), masters()
    link.sync(weights, 0)
    delta = tell.startswith("a whole")
    header = make_header(link.layout, 1, None, 0 if delta else None, "delta" if delta else "full")
    buckets = link.buckets(weights, 1, not delta)
    with pytest.raises(
        SyncError, match="whole tensors in a sync of ch" if delta else "changes in a sync of everything"
    ):
        asyncio.run(send_weights(header, buckets, [link]))


def test_a_shard_of_another_size_stops_the_sender():
    link, weights = Link(2), masters()
    with pytest.raises(SyncError, match=r"shard 0 of norm.weight should be 4 elements .* has 7$"):
        list(link.senders[0].buckets(link.shard(weights, 0) | {"norm.weight": weights["norm.weight"]}, 0))
    with pytest.raises(SyncError, match="the trainer has nothing"):
        list(link.senders[0].buckets({}, 0))


# ---- straight into the receiver


def write_in_place(link, weights, version):
    (sender,) = link.senders
    header = make_header(link.layout, version)
    return asyncio.run(send_weights(header, sender.in_place(weights, link.state.targets(), header.version), [link]))[0]


def test_a_sender_beside_the_receiver_writes_its_tensors_itself():
    """P15, P19: read back and proven all the same; no buffer at all."""
    link, weights = Link(1, 4096), masters()
    ack = write_in_place(link, weights, 0)
    assert link.holds(weights) and ack.resident and ack.num_bytes == sum(p.nbytes for p in link.params.values())
    assert link.senders[0].report.extra_bytes == 0 and link.senders[0].base_version is None
    link.head = link.head.clone()
    with pytest.raises(SyncError, match=r"lm_head.weight \(tied to embed.weight\) still has the values of version 0"):
        write_in_place(link, step(weights, 1, share=1), 1)


def test_large_pieces_are_written_by_as_many_threads_as_torch_has():
    """Each with its digest, to the bit; torch has as many threads afterwards as before."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    weights = {name: torch.randn(700, 1024) for name in "abc"}
    layout = make_layout([(name, (700, 1024), "bfloat16") for name in weights], {}, 1 << 20, 1, "xxh3")
    params = {name: torch.zeros(700, 1024, dtype=torch.bfloat16) for name in weights}
    state, sender = ReceiverState(layout, params), ShardSender(layout, 0, [], False)
    try:
        torch.set_num_threads(3)
        state.begin(make_header(layout, 0))
        for bucket in sender.in_place(weights, state.targets(), 0):
            state.receive(bucket)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    ack = state.commit(params.items)
    assert ack.resident and all(torch.equal(params[name], t.bfloat16()) for name, t in weights.items())
    assert ack.num_bytes == sender.report.num_bytes == 3 * 700 * 1024 * 2


def test_what_is_written_beside_the_receiver_is_compared_with_what_lies_there():
    class Clumsy(Link):
        async def commit(self):
            self.params["norm.weight"][2] += 1
            return await super().commit()

    with pytest.raises(SyncError, match=r"norm.weight has digest"):
        write_in_place(Clumsy(1, 4096), masters(), 0)


@pytest.mark.parametrize("delta", [False, True])
def test_an_alias_with_memory_of_its_own_is_written_from_its_source(delta):
    first, second = masters(), step(masters(), 1)
    layout = make_layout([(n, shape, "bfloat16") for n, shape in SHAPES.items()], TIED, 4096, 1, "xxh3")
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    params["lm_head.weight"] = torch.zeros_like(params["embed.weight"])
    state = ReceiverState(layout, params)
    sender = ShardSender(layout, 0, [torch.empty(layout.staging_bytes, dtype=torch.uint8)], True)
    syncs = [(make_header(layout, 0), sender.buckets(first, 0))]
    if delta:
        syncs.append((make_header(layout, 1, None, 0, "delta"), sender.buckets(second, 1, True)))
    else:
        syncs.append((make_header(layout, 1), sender.in_place(second, state.targets(), 1)))
    for header, buckets in syncs:
        state.begin(header)
        for bucket in buckets:
            state.receive(bucket)
        state.commit(params.items)
    assert torch.equal(params["lm_head.weight"], second["embed.weight"].bfloat16())


# ---- what stays as it is


FROZEN = frozenset(SHAPES) - {"q_proj.weight", "norm.weight"}


class Unread:
    """Rows of which only the size may be asked for."""

    device = torch.device("cpu")

    def __init__(self, tensor):
        self.numel, self.is_contiguous = tensor.numel, tensor.is_contiguous


def only_moving(weights):
    return {name: Unread(t) if name in FROZEN else t for name, t in weights.items()}


@pytest.mark.parametrize("keep_base", [False, True], ids=["whole", "searched"])
@pytest.mark.parametrize("bucket_bytes", [64, 4096])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_frozen_tensors_are_read_and_sent_once_and_proven_each_time(num_shards, bucket_bytes, keep_base):
    """P15, P18: their digests still hold the receiver to them."""
    link, weights = Link(num_shards, bucket_bytes, keep_base=keep_base, frozen=FROZEN), masters()
    full = link.sync(weights, 0).num_bytes
    moved = {n: p for n, p in step(weights, 1, share=1).items() if n not in FROZEN}
    weights |= moved

    def sync(version):
        header = make_header(link.layout, version, None, version - 1, "adapter")
        buckets = (
            bucket
            for s, sender in enumerate(link.senders)
            for bucket in sender.buckets(
                only_moving({n: link.shard(weights, s)[n] for n in weights}), version, changes=True
            )
        )
        return asyncio.run(send_weights(header, buckets, [link]))[0]

    ack = sync(1)
    assert link.holds(weights) and ack.resident and ack.num_changed == len(moved)
    assert sum(p.numel() for p in moved.values()) * 2 <= ack.num_bytes < full / 10
    counted = [sender.report.num_changed for sender in link.senders]
    assert sum(counted) == sum(p.numel() for p in moved.values()) if keep_base else counted == [None] * num_shards
    link.params["big.weight"].view(torch.int16)[3, 3] ^= 1
    with pytest.raises(SyncError, match=r"1 of 6 tensors differ from the trainer's:\n +big.weight has digest"):
        sync(2)


def test_frozen_tensors_are_not_written_again_beside_the_receiver():
    link, weights = Link(1, 256, keep_base=False, frozen=FROZEN), masters()
    write_in_place(link, weights, 0)
    weights |= {n: p for n, p in step(weights, 1, share=1).items() if n not in FROZEN}
    link.params["embed.weight"].view(torch.int16)[0, 0] ^= 1
    header = make_header(link.layout, 1, None, 0, "adapter")
    buckets = link.senders[0].in_place(only_moving(weights), link.state.targets(), 1, changes=True)
    with pytest.raises(SyncError, match=r"2 of 6 tensors differ.*\n +embed.weight has digest"):
        asyncio.run(send_weights(header, buckets, [link]))
    write_in_place(link, weights, 2)
    weights["norm.weight"] = weights["norm.weight"] + 1
    header = make_header(link.layout, 3, None, 2, "adapter")
    buckets = link.senders[0].in_place(only_moving(weights), link.state.targets(), 3, changes=True)
    (ack,) = asyncio.run(send_weights(header, buckets, [link]))
    assert link.holds(weights) and ack.num_bytes == 2 * (11 * 3 + 7) and ack.num_changed == 1


# ---- several streams at once


def test_streams_are_merged_in_their_own_order_and_one_ahead():
    """The next bucket of a stream is filled while the last is read, never the one after it: two slots are enough."""
    filled, consumed = {"a": 0, "b": 0}, {"a": 0, "b": 0}

    async def stream(name, count):
        for index in range(count):
            await asyncio.sleep(0)
            assert index - consumed[name] <= 1
            filled[name] += 1
            yield name, index

    async def main():
        seen = []
        async for name, index in merged([stream("a", 9), stream("b", 4)]):
            for _ in range(3):
                await asyncio.sleep(0)
            seen.append((name, index))
            consumed[name] += 1
        assert [i for n, i in seen if n == "a"] == list(range(9)) and [i for n, i in seen if n == "b"] == list(range(4))

    asyncio.run(main())


def test_an_error_of_one_stream_waits_for_the_others_before_it_is_raised():
    ended = []

    async def slow():
        yield 0
        await asyncio.sleep(0.02)
        ended.append("slow")
        yield 1

    async def broken():
        yield 0
        raise ArithmeticError("the cast failed")

    async def main():
        with pytest.raises(ArithmeticError):
            async for _ in merged([slow(), broken()]):
                pass

    asyncio.run(main())
    assert ended == ["slow"]


def test_the_stages_of_a_sender_and_a_receiver_that_take_turns_add_up_to_the_whole():
    seconds = {"load": 1.0, "verify": 1.0, "gather": 5.0, "send": 1.0}
    ack = Ack(version=0, receiver="one", wire=True, resident=True, num_bytes=8, num_tensors=1, seconds=seconds)
    report = SendReport(seconds={"gather": 0.5, "cast": 3.0, "verify": 1.0})
    (told,) = with_reports([ack], [report])
    assert told.seconds == {"gather": 0.5, "cast": 3.0, "load": 1.0, "verify": 2.0, "send": 1.5}


def test_reports_of_all_senders_stand_in_every_ack():
    link, weights = Link(2), masters()
    link.sync(weights, 0)
    ack = link.sync(step(weights, 1), 1, base=0)
    (told,) = with_reports([ack], [sender.report for sender in link.senders])
    assert told.num_changed_elements == sum(sender.report.num_changed for sender in link.senders) > 0
    assert set(told.seconds) == {"gather", "cast", "load", "verify", "send"} and min(told.seconds.values()) >= 0
    kept = sum(p.nbytes for p in link.params.values())
    assert told.extra_bytes == kept + 2 * 2 * link.layout.staging_bytes
    assert describe(link.params)["norm.weight"] == ((7,), "bfloat16")

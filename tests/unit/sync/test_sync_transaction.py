"""One sync from end to end in one process: the receiver's states, and several receivers at once."""

import asyncio
from dataclasses import replace

import pytest
import torch

from meshrl.core.errors import SyncError, UnloadedParamsError
from meshrl.sync.digest import digest
from meshrl.sync.manifest import Ack, make_layout
from meshrl.sync.receive import Bucket, ReceiverState, describe, reconcile
from meshrl.sync.send import iter_buckets, make_header, send_weights

TIED = {"lm_head.weight": "embed.weight"}


def make_weights(seed=0):
    """Odd sizes, several dtypes, an empty tensor in the middle and at the end, a scalar, two of equal shape."""
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.randn(37, 5).bfloat16(),
        "layers.0.q_proj.weight": torch.randn(11, 3),
        "layers.0.k_proj.weight": torch.randn(11, 3),
        "layers.0.empty": torch.zeros(0, 4),
        "layers.0.scale": torch.randn(()).half(),
        "layers.1.big.weight": torch.randn(301, 3).double(),
        "norm.weight": torch.randn(7).bfloat16(),
        "last.empty": torch.zeros(3, 0),
    }


def layout_of(weights, bucket_bytes=256, tied=TIED):
    return make_layout([(n, *spec) for n, spec in describe(weights).items()], tied, bucket_bytes)


def header_of(layout, weights, version=0):
    return make_header(layout, version, {name: digest(tensor) for name, tensor in weights.items()})


class Engine:
    """A receiver with parameters of its own, read back by name; the tied head reads the embedding's memory."""

    def __init__(self, layout, name="engine", reads_back=True):
        self.params = {n: torch.full_like(t, 3) for n, t in make_weights().items()}
        self.head = self.params["embed.weight"]
        self.state = ReceiverState(layout, self.params, name)
        self.reads_back = reads_back

    def read_back(self):
        yield from self.params.items()
        yield "lm_head.weight", self.head

    async def reconcile(self, layout):
        reconcile(layout, describe(self.params), TIED)

    async def begin(self, header):
        self.state.begin(header)

    async def receive(self, bucket):
        self.state.receive(bucket)

    async def commit(self):
        return self.state.commit(self.read_back if self.reads_back else None)

    async def cancel(self):
        self.state.cancel()


def sync(weights, version=0, *, engines=None, layout=None, mangle=None, **options):
    """Run a whole transaction, its buckets passed through `mangle`; returns (acks, engines)."""
    layout = layout or layout_of(weights)
    engines = engines or [Engine(layout)]
    buckets = iter_buckets(layout, weights.items(), **options)
    if mangle is not None:
        buckets = mangle([replace(b, payload=b.payload.clone()) for b in buckets])
    return asyncio.run(send_weights(header_of(layout, weights, version), buckets, engines)), engines


def assert_holds(engine, weights):
    assert all(torch.equal(engine.params[name], tensor) for name, tensor in weights.items())


# ---- what arrives


@pytest.mark.parametrize("bucket_bytes", [16, 17, 61, 256, 1000, 4096, 7933, 7934, 1 << 20])
@pytest.mark.parametrize("reuse", [False, True])
def test_weights_arrive_to_the_bit_at_any_bucket_cap(bucket_bytes, reuse):
    """Including caps far below one tensor, odd ones, and one bucket for everything."""
    weights = make_weights()
    layout = layout_of(weights, bucket_bytes)
    (ack,), (engine,) = sync(weights, 4, layout=layout, reuse=reuse)
    assert_holds(engine, weights)
    assert (ack.version, ack.wire, ack.resident, ack.num_tensors) == (4, True, True, len(weights))
    assert ack.num_bytes == layout.total_bytes
    assert engine.state.usable and engine.state.version == 4


def test_a_model_without_tensors_syncs():
    layout = make_layout([])
    state = ReceiverState(layout, {})
    state.begin(make_header(layout, 0, {}))
    assert state.commit().version == 0


# ---- what goes wrong on the way (P15)


def flip_a_bit(buckets):
    buckets[3].payload[17] ^= 4
    return buckets


def relabel(buckets):
    """Each bucket carries a digest of its own bytes, but not at their place in the stream."""
    one, two = buckets[2].payload, buckets[3].payload
    return [
        *buckets[:2],
        Bucket(index=2, payload=two, digest=digest(two, 3 * 256)),
        Bucket(index=3, payload=one, digest=digest(one, 2 * 256)),
        *buckets[4:],
    ]


@pytest.mark.parametrize(
    "mangle, complaint",
    [
        (lambda buckets: buckets[:-1], r"commit after \d+ of \d+ buckets; layers.1.big.weight is the first"),
        (lambda buckets: buckets[:1], "commit after 1 of .* embed.weight is the first"),
        (lambda buckets: buckets[:2], "commit after 2 of .* layers.0.q_proj.weight is the first"),
        (lambda buckets: [], "commit after 0 of .* embed.weight is the first"),
        (lambda buckets: buckets[:1] + buckets[2:], r"bucket 2 came out of order; expected bucket 1 \(embed.weight to"),
        (lambda buckets: buckets[:2] + buckets[1:], "bucket 1 came twice"),
        (lambda buckets: [buckets[1], buckets[0], *buckets[2:]], "bucket 1 came out of order; expected bucket 0"),
        (lambda buckets: [*buckets, replace(buckets[0], index=len(buckets))], "expected no more"),
        (lambda buckets: [replace(buckets[0], index=-1)], "bucket -1 came out of order"),
        (lambda buckets: [replace(buckets[0], payload=buckets[0].payload[:-1])], r"\[255\].*embed.weight"),
        (lambda buckets: [replace(buckets[0], payload=buckets[0].payload.view(torch.int16))], "torch.int16"),
        (flip_a_bit, "bucket 3 .* layers.1.big.weight"),
        (relabel, "bucket 2 was sent with digest"),
    ],
)
def test_a_stream_that_was_damaged_is_refused_and_named(mangle, complaint):
    weights = make_weights()
    layout = layout_of(weights)
    engine = Engine(layout)
    with pytest.raises(SyncError, match=complaint):
        sync(weights, layout=layout, engines=[engine], mangle=mangle)
    assert not engine.state.usable and engine.state.version == -1


def substituted(weights, **changed):
    """A layout-abiding stream of other values than those whose digests the header holds."""
    layout = layout_of(weights)
    engine = Engine(layout, reads_back=changed.pop("reads_back", True))
    wrong = weights | {name.replace("__", "."): tensor for name, tensor in changed.items()}
    with pytest.raises(SyncError) as caught:
        asyncio.run(send_weights(header_of(layout, weights), iter_buckets(layout, wrong.items()), [engine]))
    assert not engine.state.usable
    return str(caught.value)


@pytest.mark.parametrize("reads_back", [True, False])
def test_two_tensors_that_swapped_places_are_both_named(reads_back):
    weights = make_weights()
    q, k = "layers.0.q_proj.weight", "layers.0.k_proj.weight"
    message = substituted(weights, **{q: weights[k], k: weights[q]}, reads_back=reads_back)
    assert f"{q} has the values of {k}" in message and f"{k} has the values of {q}" in message


def test_every_tensor_that_differs_is_named_and_no_other():
    weights = make_weights()
    message = substituted(weights, norm__weight=weights["norm.weight"] + 1, embed__weight=weights["embed.weight"] * 2)
    assert "3 of 9 tensors differ" in message
    assert all(name in message for name in ("norm.weight", "embed.weight", "lm_head.weight (tied to embed.weight)"))
    assert "layers" not in message


def test_a_tied_head_left_behind_is_named_with_the_version_it_still_has():
    """P15: what was sent is right, what the engine computes with is not."""
    first, second = make_weights(1), make_weights(2)
    layout = layout_of(first)
    engine = Engine(layout)
    sync(first, 0, layout=layout, engines=[engine])
    engine.head = engine.head.clone()
    with pytest.raises(
        SyncError, match=r"1 of 9 .*\n.*lm_head.weight \(tied to embed.weight\) still has the values of v.* 0"
    ):
        sync(second, 1, layout=layout, engines=[engine])
    assert not engine.state.usable


@pytest.mark.parametrize(
    "read_back, complaint",
    [
        (lambda e: [(n, t) for n, t in e.read_back() if n != "lm_head.weight"], "lm_head.weight was not read back"),
        (lambda e: [(n, t) for n, t in e.read_back() if n != "norm.weight"], "norm.weight was not read back"),
        (lambda e: [*e.read_back(), ("norm.weight", e.params["norm.weight"])], "norm.weight was read back twice"),
        (lambda e: [*e.read_back(), ("odd", e.head)], "odd was read back though nothing of that name was sent"),
        (lambda e: [(n, t.float()) for n, t in e.read_back()], r"norm.weight is \[7\] float32, sent as \[7\] bfloat16"),
        (lambda e: [(n, t.t() if n == "embed.weight" else t) for n, t in e.read_back()], r"embed.weight is \[5, 37\]"),
    ],
)
def test_an_incomplete_read_back_proves_nothing(read_back, complaint):
    weights = make_weights()
    layout = layout_of(weights)
    engine = Engine(layout)
    engine.state.begin(header_of(layout, weights))
    for bucket in iter_buckets(layout, weights.items()):
        engine.state.receive(bucket)
    with pytest.raises(SyncError, match=complaint):
        engine.state.commit(lambda: read_back(engine))
    assert not engine.state.usable


def test_an_engine_that_cannot_read_back_says_so():
    (ack,), _ = sync(make_weights(), engines=[Engine(layout_of(make_weights()), reads_back=False)])
    assert ack.wire is True and ack.resident is None


def test_a_head_with_memory_of_its_own_is_written_too():
    weights = make_weights()
    layout = layout_of(weights)
    targets = {n: torch.zeros_like(t) for n, t in weights.items()}
    targets["lm_head.weight"] = torch.zeros_like(targets["embed.weight"])
    state = ReceiverState(layout, targets)
    state.begin(header_of(layout, weights))
    for bucket in iter_buckets(layout, weights.items()):
        state.receive(bucket)
    state.commit(targets.items)
    assert torch.equal(targets["lm_head.weight"], weights["embed.weight"])


def test_weights_that_the_engine_moved_are_written_where_they_are_now():
    """An engine that released and restored its weights has other memory under the same parameter."""
    weights = make_weights()
    layout = layout_of(weights)
    params = {n: torch.nn.Parameter(torch.zeros_like(t), requires_grad=False) for n, t in weights.items()}
    state = ReceiverState(layout, params)
    for param in params.values():
        param.data = torch.ones_like(param)
    state.begin(header_of(layout, weights))
    for bucket in iter_buckets(layout, weights.items()):
        state.receive(bucket)
    assert state.commit(lambda: [*params.items(), ("lm_head.weight", params["embed.weight"])]).resident
    assert torch.equal(params["norm.weight"], weights["norm.weight"])


def test_released_or_strided_targets_are_refused():
    weights = make_weights()
    layout = layout_of(weights)
    targets = {n: t.clone() for n, t in weights.items()}
    state = ReceiverState(layout, targets)
    targets["norm.weight"].untyped_storage().resize_(0)
    with pytest.raises(SyncError, match=r"norm.weight into has no memory"):
        state.begin(header_of(layout, weights))
    assert not state.usable
    strided = {n: t.clone() for n, t in weights.items()} | {"embed.weight": torch.zeros(5, 37).bfloat16().t()}
    with pytest.raises(SyncError, match=r"embed.weight into is not contiguous"):
        ReceiverState(layout, strided)


def test_a_receiver_is_built_only_on_fitting_tensors():
    weights = make_weights()
    with pytest.raises(UnloadedParamsError, match=r"norm.weight \[7\] bfloat16"):
        ReceiverState(layout_of(weights), {n: t for n, t in weights.items() if n != "norm.weight"})


# ---- states and versions


def test_versions_rise_and_a_failed_one_may_be_sent_again():
    weights = make_weights()
    layout = layout_of(weights)
    engine = Engine(layout)
    for version in (3, 5):
        sync(weights, version, layout=layout, engines=[engine])
    with pytest.raises(SyncError, match="version 5 does not rise above version 5"):
        sync(weights, 5, layout=layout, engines=[engine])
    assert not engine.state.usable
    with pytest.raises(SyncError, match="version 4 does not rise above version 5"):
        sync(weights, 4, layout=layout, engines=[engine])
    sync(weights, 5, layout=layout, engines=[engine])
    assert engine.state.usable and engine.state.version == 5


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"layout_hash": "0123"}, "belongs to layout 0123"),
        ({"mode": "adapter"}, "'delta' and 'adapter' need one"),
        ({"base_version": 1}, "base version 1"),
        ({"version": -1}, "version -1"),
        ({"digests": {"embed.weight": 1}}, "name different tensors: last.empty, layers.0"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, complaint):
    weights = make_weights()
    layout = layout_of(weights)
    state = Engine(layout).state
    with pytest.raises(SyncError, match=complaint):
        state.begin(replace(header_of(layout, weights), **change))
    assert not state.usable


def test_steps_out_of_order_make_the_weights_unusable():
    weights = make_weights()
    layout = layout_of(weights)
    header, buckets = header_of(layout, weights, 1), list(iter_buckets(layout, weights.items()))
    for steps, complaint in {
        (lambda s: s.receive(buckets[0]),): "bucket 0 came while the receiver was idle",
        (lambda s: s.commit(),): "commit came while the receiver was idle",
        (lambda s: s.begin(header), lambda s: s.begin(header)): "begin came while the receiver was open",
        (lambda s: s.begin(header), lambda s: s.cancel(), lambda s: s.receive(buckets[0])): "was cancelled",
    }.items():
        engine = Engine(layout)
        sync(weights, 0, layout=layout, engines=[engine])
        with pytest.raises(SyncError, match=complaint):
            for step in steps:
                step(engine.state)
        assert not engine.state.usable and engine.state.version == -1


def test_the_old_version_is_not_usable_while_the_new_one_arrives():
    weights = make_weights()
    layout = layout_of(weights)
    engine = Engine(layout)
    assert not engine.state.usable and engine.state.version == -1
    sync(weights, 0, layout=layout, engines=[engine])
    engine.state.begin(header_of(layout, weights, 1))
    assert not engine.state.usable and engine.state.version == -1


@pytest.mark.parametrize("right", [True, False])
def test_the_new_version_is_visible_only_after_its_proof(right):
    """P15: not while the parameters are read back, and not when the proof fails and nobody cancels."""
    weights, layout = make_weights(), layout_of(make_weights())
    engine, seen = Engine(layout), []
    engine.state.begin(header_of(layout, weights, 5))
    for bucket in iter_buckets(layout, weights.items()):
        engine.state.receive(bucket)
    if not right:
        engine.params["norm.weight"].zero_()

    def read_back():
        seen.append((engine.state.version, engine.state.usable))
        yield from engine.read_back()

    if right:
        engine.state.commit(read_back)
    else:
        with pytest.raises(SyncError, match=r"norm\.weight"):
            engine.state.commit(read_back)
    assert seen == [(-1, False)]
    assert (engine.state.version, engine.state.usable) == ((5, True) if right else (-1, False))


# ---- several receivers


class Failing(Engine):
    """Raises at one stage; `cancel` may fail as well."""

    def __init__(self, layout, stage, error=RuntimeError, **kwargs):
        super().__init__(layout, **kwargs)
        self.stage, self.error = stage, error

    def _at(self, stage):
        if stage == self.stage:
            raise self.error(f"lost power at {stage}")

    async def begin(self, header):
        self._at("begin")
        await super().begin(header)

    async def receive(self, bucket):
        self._at(f"bucket {bucket.index}")
        await super().receive(bucket)

    async def commit(self):
        self._at("commit")
        return await super().commit()

    async def cancel(self):
        self._at("cancel")
        await super().cancel()


def test_all_receivers_get_the_same_weights_and_report_their_seconds():
    weights = make_weights()
    layout = layout_of(weights)
    acks, engines = sync(weights, 2, layout=layout, engines=[Engine(layout, name) for name in "abc"], reuse=True)
    for engine in engines:
        assert_holds(engine, weights)
    assert [ack.receiver for ack in acks] == ["a", "b", "c"]
    assert all(set(ack.seconds) == {"load", "verify", "gather", "send"} for ack in acks)
    assert all(min(ack.seconds.values()) >= 0 for ack in acks)


@pytest.mark.parametrize("stage", ["begin", "bucket 0", "bucket 5", "commit"])
def test_one_receiver_that_fails_cancels_all(stage):
    """P15: also those that have committed already; the first cause is kept."""
    weights = make_weights()
    layout = layout_of(weights)
    engines = [Engine(layout), Failing(layout, stage), Engine(layout)]
    with pytest.raises(SyncError, match=f"receiver 1 failed at {stage}: RuntimeError: lost power") as caught:
        sync(weights, layout=layout, engines=engines)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not any(engine.state.usable for engine in engines)


def test_a_trainer_that_fails_half_way_cancels_all_receivers():
    weights = make_weights()
    layout = layout_of(weights)
    engines = [Engine(layout), Engine(layout)]

    def break_off(buckets):
        yield from buckets[:2]
        raise ArithmeticError("the gather failed")

    with pytest.raises(SyncError, match="version 0 was not sent: ArithmeticError: the gather failed"):
        sync(weights, layout=layout, engines=engines, mangle=break_off)
    assert not any(engine.state.usable for engine in engines)


def test_a_cancelled_transaction_cancels_all_receivers():
    weights = make_weights()
    layout = layout_of(weights)

    class Stuck(Engine):
        async def receive(self, bucket):
            await asyncio.Event().wait()

    engines = [Engine(layout), Stuck(layout)]

    async def run():
        task = asyncio.create_task(
            send_weights(header_of(layout, weights), iter_buckets(layout, weights.items()), engines)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [engine.state._phase for engine in engines] == ["cancelled", "cancelled"]


def test_a_receiver_that_cannot_be_cancelled_is_noted_and_the_others_still_are():
    weights = make_weights()
    layout = layout_of(weights)
    engines = [Failing(layout, "cancel"), Failing(layout, "bucket 1"), Engine(layout)]
    with pytest.raises(SyncError, match="receiver 1 failed at bucket 1") as caught:
        sync(weights, layout=layout, engines=engines)
    assert caught.value.__notes__ == [
        "receiver 0 could not be cancelled either: RuntimeError('lost power at cancel')",
    ]
    assert not engines[2].state.usable


@pytest.mark.parametrize("change", [{"version": 7}, {"wire": False}, {"resident": False}, {"num_tensors": 1}])
def test_an_ack_that_does_not_prove_the_sync_is_refused(change):
    weights = make_weights()
    layout = layout_of(weights)

    class Careless(Engine):
        async def commit(self) -> Ack:
            return replace(await super().commit(), **change)

    engines = [Engine(layout), Careless(layout, "careless")]
    with pytest.raises(SyncError, match="careless acknowledged"):
        sync(weights, layout=layout, engines=engines)
    assert not any(engine.state.usable for engine in engines)


def test_sending_to_nobody_is_an_error():
    weights = make_weights()
    with pytest.raises(SyncError, match="no receiver"):
        asyncio.run(send_weights(header_of(layout_of(weights), weights), iter([]), []))

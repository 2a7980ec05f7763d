"""What is agreed before anything runs: the layout, and names, shapes, dtypes and ties of both sides (P16)."""

import pytest

from meshrl.core.errors import UnloadedParamsError
from meshrl.sync.manifest import make_layout
from meshrl.sync.receive import reconcile

OWN = {"model.embed.weight": ((8, 4), "float32"), "model.norm.weight": ((4,), "float32")}


def wire(*tensors, tied=None):
    return make_layout([*tensors], tied)


def test_names_are_reconciled_both_ways_with_the_nearest_ones():
    layout = wire(("model.embed.weight", (8, 4), "float32"), ("model.norm.wieght", (4,), "float32"))
    with pytest.raises(UnloadedParamsError) as caught:
        reconcile(layout, OWN)
    message = str(caught.value)
    assert "never sent; the receiver would keep its own values:\n    model.norm.weight [4] float32" in message
    assert "no such parameter:\n    model.norm.wieght [4] float32 (nearest there: model.norm.weight" in message
    assert "disagree on 2" in message and "model.embed.weight [" not in message


@pytest.mark.parametrize("sent", [((4, 8), "float32"), ((8, 4), "bfloat16")])
def test_other_shapes_and_dtypes_are_named(sent):
    layout = wire(("model.embed.weight", *sent), ("model.norm.weight", (4,), "float32"))
    with pytest.raises(
        UnloadedParamsError, match=r"model.embed.weight: sent \[\d, \d\] \w+, the receiver has \[8, 4\]"
    ):
        reconcile(layout, OWN)


@pytest.mark.parametrize(
    "tied_sender, head_sent, own_head, tied_receiver, complaint",
    [
        (True, False, True, False, None),  # a head of its own in the receiver gets a copy
        (True, False, True, True, None),
        (True, False, False, True, None),
        (False, True, True, False, None),
        (True, False, False, False, "no such parameter:\n    head"),
        (False, False, True, False, "never sent.*\n    head"),
        (False, False, False, True, None),  # the receiver ties what the trainer does not know by a second name
        (False, True, True, True, "tied in the receiver.*\n    head, which shares the memory of model.embed.weight"),
        (False, True, False, True, "tied in the receiver.*\n    head"),
        (False, True, False, False, "no such parameter:\n    head"),
    ],
)
def test_ties_of_both_sides_are_compared(tied_sender, head_sent, own_head, tied_receiver, complaint):
    tensors = [(name, *spec) for name, spec in OWN.items()] + [("head", (8, 4), "float32")] * head_sent
    layout = wire(*tensors, tied={"head": "model.embed.weight"} if tied_sender else None)
    own = OWN | ({"head": ((8, 4), "float32")} if own_head else {})
    tied = {"head": "model.embed.weight"} if tied_receiver else {}
    if complaint is None:
        reconcile(layout, own, tied)
    else:
        with pytest.raises(UnloadedParamsError, match=complaint):
            reconcile(layout, own, tied)


def test_a_long_list_of_faults_is_counted_not_printed():
    with pytest.raises(UnloadedParamsError, match="disagree on 1000 ") as caught:
        reconcile(wire(), {f"layers.{i}.weight": ((1,), "float32") for i in range(1000)})
    assert "and 992 more" in str(caught.value) and len(str(caught.value)) < 2000


def test_the_layout_hash_covers_names_shapes_dtypes_ties_and_cap():
    base = [("a", (2, 3), "float32"), ("b", (4,), "bfloat16")]
    hashes = {
        make_layout(base).hash,
        make_layout(base[::-1]).hash,
        make_layout([("c", *base[0][1:]), base[1]]).hash,
        make_layout([("a", (3, 2), "float32"), base[1]]).hash,
        make_layout([base[0], ("b", (4,), "float16")]).hash,
        make_layout(base, {"t": "a"}).hash,
        make_layout(base, {"t": "b"}).hash,
        make_layout(base, bucket_bytes=99).hash,
    }
    assert len(hashes) == 8
    assert make_layout(base).hash == make_layout(list(base)).hash


@pytest.mark.parametrize(
    "tensors, tied, cap, complaint",
    [
        ([("a", (1,), "float32")] * 2, {}, 99, "a stands twice"),
        ([("a", (1,), "complex64")], {}, 99, "complex64.*no wire format"),
        ([("a", (1,), "float32")], {"b": "c"}, 99, "b is tied to c, which is not sent"),
        ([("a", (1,), "float32"), ("b", (1,), "float32")], {"b": "a"}, 99, "b is sent itself"),
        ([("a", (1,), "float32")], {}, 15, "bucket_bytes is 15; allowed: 16 or more"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(tensors, tied, cap, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_layout(tensors, tied, cap)

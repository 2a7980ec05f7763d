"""The layout, agreed on before a sync: transfers of any partition; names, shapes and dtypes of both sides."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sync import SHAPES, boxes_on, held_of, layout_on

from meshrl.core.errors import UnloadedParamsError
from meshrl.sync.layout import Box, Layout, layout_from_json, layout_to_json, make_layout
from meshrl.sync.receiver import reconcile

DTYPES = ("bfloat16", "float32", "float64", "int8")


@st.composite
def partitions(draw: st.DrawFn) -> tuple[dict[str, tuple[tuple[int, ...], str]], list[list[Box]]]:
    """Some tensors, cut anywhere into boxes, each held by one or several ranks."""
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6))
    specs = {f"t{number}": (shape, draw(st.sampled_from(DTYPES))) for number, shape in enumerate(shapes)}
    ranks: list[list[Box]] = [[] for _ in range(draw(st.integers(1, 5)))]
    for name, (shape, _) in specs.items():
        boxes = [Box(name, (0,) * len(shape), shape)]
        for _ in range(draw(st.integers(0, 5)) if math.prod(shape) > 1 else 0):
            cut = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            dim = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(0, cut.shape[dim]))
            for low, size in ((0, at), (at, cut.shape[dim] - at)):
                offsets, extent = list(cut.offsets), list(cut.shape)
                offsets[dim], extent[dim] = offsets[dim] + low, size
                boxes.append(Box(name, tuple(offsets), tuple(extent)))
        for box in boxes:
            for rank in draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1)):
                ranks[rank].append(box)
    return specs, ranks


def check_transfers(layout: Layout) -> None:
    """Each element is in one part, at its index in the sender's box; transfers and windows keep their limits."""
    numbered = {t.name: torch.arange(math.prod(t.shape)).view(t.shape) for t in layout.tensors}
    count = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in numbered.items()}
    limit = max(layout.transfer_bytes // len(layout.senders), 16)
    missing = {t.name: math.prod(t.shape) for t in layout.tensors}
    for transfer in layout.transfers:
        assert transfer.num_bytes <= min(limit, layout.slot_bytes)
        for part in transfer.parts:
            count[part.tensor.name][tuple(slice(a, a + n) for a, n in zip(part.offsets, part.shape))] += 1
            (box,) = [
                b
                for b in layout.senders[transfer.sender]
                if (b.name, b.offsets) == (part.tensor.name, part.box_offsets)
            ]
            (held,) = held_of(numbered, [box])[box.name]
            assert torch.equal(
                held.elements[part.first : part.first + part.numel], part.of(numbered[box.name]).reshape(-1)
            )
        assert [part.at % 16 for part in transfer.parts] == [0] * len(transfer.parts)
        assert all(0 <= after.at - part.end < 16 for part, after in pairwise(transfer.parts))
    assert all(bool((c == 1).all()) for c in count.values())
    assert [t.number for t in layout.transfers] == list(range(len(layout.transfers)))
    for sender in range(len(layout.senders)):
        own = [t.index for t in layout.transfers if t.sender == sender]
        assert own == list(range(len(own)))
    for window in layout.windows:
        assert len({transfer.sender for transfer in window}) == len(window)
        for part in (part for transfer in window for part in transfer.parts):
            missing[part.tensor.name] -= part.numel
        begun = [t.name for t in layout.tensors if 0 < missing[t.name] < math.prod(t.shape)]
        assert len(begun) <= 1, "a receiver of full tensors would hold several incomplete tensors"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(made=partitions(), transfer_bytes=st.one_of(st.integers(16, 300), st.just(1 << 20)))
def test_each_element_of_any_partition_is_sent_once_within_the_limits(made, transfer_bytes):
    specs, ranks = made
    layout = make_layout(specs, ranks, None, transfer_bytes)
    check_transfers(layout)
    again = layout_from_json(json.loads(json.dumps(layout_to_json(layout))))
    assert again == layout and again.hash == layout.hash and again.windows == layout.windows


def test_a_fused_tensor_is_sent_as_the_rows_that_each_rank_holds():
    held = boxes_on("fused", {"gate_up": (8, 3)})
    assert [box.offsets for box in held[0]] == [(0, 0), (4, 0)] and {box.shape for box in held[0]} == {(2, 3)}
    assert make_layout({"gate_up": ((8, 3), "bfloat16")}, held).senders == tuple(map(tuple, held))


def test_the_first_rank_sends_what_several_hold():
    layout = layout_on("replicas")
    sent = [sum(math.prod(box.shape) for box in boxes) for boxes in layout.senders]
    assert sum(sent[:2]) == sum(map(math.prod, SHAPES.values())) and sent[2:] == [0, 0]
    assert ("scale", (), ()) in layout.senders[0] and ("scale", (), ()) not in layout.senders[1]


def test_senders_alternate_where_each_tensor_has_one_sender():
    """Otherwise the experts of one rank would be sent one after the other while all other ranks wait."""
    experts = {f"experts.{number}": ((4, 4), "float32") for number in range(6)}
    specs = {"first": ((4, 4), "float32"), **experts, "last": ((4, 4), "float32")}
    ranks = [[Box(f"experts.{3 * r + i}", (0, 0), (4, 4)) for i in range(3)] for r in range(2)]
    for name in ("first", "last"):
        for r, own in enumerate(ranks):
            own.append(Box(name, (2 * r, 0), (2, 4)))
    layout = make_layout(specs, ranks, None, 128)
    assert [t.name for t in layout.tensors] == ["first", *(f"experts.{n}" for n in (0, 3, 1, 4, 2, 5)), "last"]
    assert all(len(window) == 2 for window in layout.windows)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(made=partitions(), data=st.data())
def test_boxes_that_leave_something_out_or_do_not_fit_are_refused(made, data):
    specs, ranks = made
    sent = make_layout(specs, ranks).senders
    boxes = [box for own in sent for box in own]
    if not boxes:
        return
    fault = data.draw(st.sampled_from(["gone", "moved", "longer", "twice"]))
    box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    if fault != "gone" and box.shape:
        dim = data.draw(st.integers(0, len(box.shape) - 1))
        one = tuple(int(d == dim) for d in range(len(box.shape)))
        moved = tuple(a + b for a, b in zip(box.offsets, one))
        longer = tuple(a + b for a, b in zip(box.shape, one))
        boxes += {"moved": [Box(box.name, moved, box.shape)], "longer": [Box(box.name, box.offsets, longer)]}.get(
            fault, [box, Box(box.name, box.offsets, longer)]
        )
    with pytest.raises(ValueError, match=rf"{box.name}.*(overlap|nothing sends the rest)|is not inside {box.name}"):
        make_layout(specs, [boxes])


def test_the_hash_covers_names_shapes_dtypes_ties_boxes_limit_and_digest():
    base: dict[str, Any] = {"a": ((2, 3), "float32"), "b": ((4,), "bfloat16")}
    halves = [[Box("a", (0, 0), (1, 3)), Box("b", (0,), (4,))], [Box("a", (1, 0), (1, 3))]]
    layouts = [
        make_layout(base),
        make_layout(dict(reversed(base.items()))),
        make_layout({"c": base["a"], "b": base["b"]}),
        make_layout(base | {"a": ((3, 2), "float32")}),
        make_layout(base | {"b": ((4,), "float16")}),
        make_layout(base, tied={"t": "a"}),
        make_layout(base, tied={"t": "b"}),
        make_layout(base, halves),
        make_layout(base, halves[::-1]),
        make_layout(base, transfer_bytes=99),
        make_layout(base, digest="sum64"),
    ]
    assert len({layout.hash for layout in layouts}) == len(layouts)
    assert make_layout(base).hash == make_layout(dict(base)).hash


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tensors": {"a": ((1,), "complex64")}}, "complex64.*can't be sent"),
        ({"tied": {"b": "c"}}, "b is tied to c, which is not sent"),
        ({"tensors": {"a": ((1,), "float32"), "b": ((1,), "float32")}, "tied": {"b": "a"}}, "b is sent itself"),
        ({"transfer_bytes": 15}, "transfer_bytes is 15; allowed: 16 or more"),
        (
            {"boxes_of_ranks": [[Box("a", (0,), (1,)), Box("odd", (0,), (1,))]]},
            "a box of odd, which is not one of the 1 tensors",
        ),
        ({"boxes_of_ranks": [[Box("a", (0, 0), (1, 1))]]}, r"\[1, 1\] at \[0, 0\] is not inside a \[1\]"),
    ],
)
def test_an_inconsistent_layout_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_layout(**({"tensors": {"a": ((1,), "float32")}} | changes))


# ---- the names of both sides

OWN = {"model.embed.weight": ((8, 4), "float32"), "model.norm.weight": ((4,), "float32")}


def test_names_are_reconciled_both_ways_with_the_nearest_ones():
    layout = make_layout({"model.embed.weight": ((8, 4), "float32"), "model.norm.wieght": ((4,), "float32")})
    with pytest.raises(UnloadedParamsError) as caught:
        reconcile(layout, OWN)
    message = str(caught.value)
    assert "never sent; the receiver would keep its own values:\n    model.norm.weight [4] float32" in message
    assert "no such parameter:\n    model.norm.wieght [4] float32 (nearest there: model.norm.weight" in message
    assert "disagree on 2" in message and "model.embed.weight [" not in message


@pytest.mark.parametrize("sent", [((4, 8), "float32"), ((8, 4), "bfloat16")])
def test_other_shapes_and_dtypes_are_named(sent):
    layout = make_layout({**OWN, "model.embed.weight": sent})
    complaint = r"model.embed.weight: sent \[\d, \d\] \w+, the receiver has \[8, 4\]"
    with pytest.raises(UnloadedParamsError, match=complaint):
        reconcile(layout, OWN)


@pytest.mark.parametrize(
    ("tied_sender", "head_sent", "own_head", "tied_receiver", "complaint"),
    [
        (True, False, True, False, None),  # a head of its own in the receiver gets a copy
        (True, False, True, True, None),
        (True, False, False, True, None),
        (False, True, True, False, None),
        (True, False, False, False, "no such parameter:\n    head"),
        (False, False, True, False, "never sent.*\n    head"),
        (False, False, False, True, None),  # the trainer has no second name for the tied tensor
        (False, True, True, True, "tied in the receiver.*\n    head, which shares the memory of model.embed.weight"),
        (False, True, False, True, "tied in the receiver.*\n    head"),
        (False, True, False, False, "no such parameter:\n    head"),
    ],
)
def test_ties_of_both_sides_are_compared(tied_sender, head_sent, own_head, tied_receiver, complaint):
    head = {"head": OWN["model.embed.weight"]}
    layout = make_layout(OWN | (head if head_sent else {}), tied={"head": "model.embed.weight"} if tied_sender else {})
    own = OWN | (head if own_head else {})
    tied = {"head": "model.embed.weight"} if tied_receiver else {}
    if complaint is None:
        reconcile(layout, own, tied)
    else:
        with pytest.raises(UnloadedParamsError, match=complaint):
            reconcile(layout, own, tied)


def test_a_long_list_of_faults_is_counted_not_printed():
    with pytest.raises(UnloadedParamsError, match="disagree on 1000 ") as caught:
        reconcile(make_layout({}), {f"layers.{i}.weight": ((1,), "float32") for i in range(1000)})
    assert "and 992 more" in str(caught.value) and len(str(caught.value)) < 2000

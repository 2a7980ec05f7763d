"""The sending half: the stream, how it is cut, and what the trainer has to yield."""

import weakref

import numpy as np
import pytest
import torch

from meshrl.core.errors import SyncError
from meshrl.sync.digest import digest
from meshrl.sync.manifest import make_layout
from meshrl.sync.receive import describe
from meshrl.sync.send import iter_buckets, make_header

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


def test_tensors_lie_end_to_end_and_aligned():
    layout = layout_of(make_weights())
    ends = [entry.offset + entry.num_bytes for entry in layout.entries]
    assert all(entry.offset % 16 == 0 for entry in layout.entries)
    assert all(0 <= after.offset - end < 16 for end, after in zip(ends, layout.entries[1:]))
    assert layout.total_bytes == ends[-2]  # the last one is empty


def test_pieces_cover_each_tensor_once():
    layout = layout_of(make_weights(), 61)
    pieces = [piece for index in range(layout.num_buckets) for piece in layout.pieces(index)]
    for entry in layout.entries:
        own = [(piece.start, piece.stop) for piece in pieces if piece.entry is entry]
        assert [b for _, b in own[:-1]] == [a for a, _ in own[1:]]
        assert (not own and not entry.num_bytes) or (own[0][0], own[-1][1]) == (0, entry.num_bytes)


def test_reuse_fills_one_buffer_and_staging_takes_turns():
    weights = make_weights()
    layout = layout_of(weights)
    assert len({bucket.payload.data_ptr() for bucket in iter_buckets(layout, weights.items(), reuse=True)}) == 1
    staging = [torch.full((layout.staging_bytes,), 99, dtype=torch.uint8) for _ in range(2)]
    places = [bucket.payload.data_ptr() for bucket in iter_buckets(layout, weights.items(), staging=staging)]
    assert places == [staging[index % 2].data_ptr() for index in range(layout.num_buckets)]


def test_gaps_between_tensors_carry_zeros_and_not_what_lay_there_before():
    weights = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.uint8)}
    (bucket,) = iter_buckets(layout_of(weights, tied={}), weights.items(), staging=[torch.full((17,), 9).byte()])
    assert bucket.payload.tolist() == [1, 1, 1] + [0] * 13 + [1]


class Memory(np.ndarray):
    """An array that a weak reference can point to: it dies when no tensor looks at its memory any more."""


def test_one_tensor_is_alive_at_a_time():
    """P19: the memory of a tensor is let go before the next one is gathered."""
    weights = {name: torch.zeros(shape) for name, shape in (("a", (5, 7)), ("b", (3,)), ("c", (0,)), ("d", (99,)))}
    memories: list[weakref.ref] = []

    def gather():
        for name, tensor in weights.items():
            assert all(memory() is None for memory in memories)
            memory = np.ones(tensor.shape, dtype=np.float32).view(Memory)
            memories.append(weakref.ref(memory))
            item = [(name, torch.from_numpy(memory))]
            del memory
            yield item.pop()

    layout = layout_of(weights, 64, tied={})
    alive = [sum(memory() is not None for memory in memories) for _ in iter_buckets(layout, gather(), reuse=True)]
    assert alive == [1] * layout.num_buckets and len(memories) == 4


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda items: items[:-1], "ended before last.empty"),
        (lambda items: [*items, ("more", torch.ones(1))], "yielded more after the last"),
        (lambda items: [items[1], items[0], *items[2:]], r"yielded layers.0.q_proj.weight .* layout has embed.weight"),
        (lambda items: [items[0], items[2], items[1], *items[3:]], r"k_proj.weight .* layout has layers.0.q_proj"),
        (lambda items: [("embed.weight", torch.zeros(5, 37).bfloat16()), *items[1:]], r"embed.weight \[5, 37\]"),
        (lambda items: [("embed.weight", torch.zeros(37, 5)), *items[1:]], "float32 where .* bfloat16"),
        (lambda items: [("embed.weight", torch.zeros(5, 37).bfloat16().t()), *items[1:]], "contiguous"),
    ],
)
def test_a_trainer_that_yields_something_else_is_stopped(change, complaint):
    weights = make_weights()
    with pytest.raises(SyncError, match=complaint):
        list(iter_buckets(layout_of(weights), change(list(weights.items()))))


def test_a_header_that_contradicts_itself_is_refused():
    weights = make_weights()
    layout = layout_of(weights)
    digests = {name: digest(tensor) for name, tensor in weights.items()}
    with pytest.raises(ValueError, match=r"different: norm.weight"):
        make_header(layout, 0, {n: d for n, d in digests.items() if n != "norm.weight"})
    with pytest.raises(ValueError, match="base_version goes with every mode but 'full'"):
        make_header(layout, 1, digests, base_version=0)
    with pytest.raises(ValueError, match="base_version goes with every mode but 'full'"):
        make_header(layout, 1, digests, mode="delta")

"""The digest against a plain-Python reference, its additivity over any cut, and what it must notice (P15)."""

import math
import random
from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode

from meshrl.core.types import mix64
from meshrl.sync.digest import MASK64, digest, digest_slice, partial_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int8, torch.float8_e4m3fn, torch.int64]


def _random(shape, dtype, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=numbers).view(dtype).view(shape)


def _reference(tensor):
    """The definition, byte by byte."""
    total = 0
    for at, byte in enumerate(tensor.reshape(-1).view(torch.uint8).tolist()):
        word, lane = divmod(at, 4)
        key = (_odd(word % 16384) * _odd(word // 16384 + (1 << 40))) & MASK64
        signed = byte - 256 if lane == 3 and byte > 127 else byte
        total += ((signed + 1) << (8 * lane)) * key
    return total & MASK64


def _odd(counter):
    return mix64(counter) | 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 7, 1001])
def test_digest_is_what_its_definition_says(dtype, count):
    tensor = _random((count,), dtype)
    assert digest(tensor) == _reference(tensor)


def test_digest_over_several_rows_of_keys_is_what_its_definition_says():
    tensor = _random((70_003,), torch.int16)
    assert digest(tensor) == _reference(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_of_any_cut_add_up(dtype):
    """Also where a cut falls inside a 32-bit word, a row of keys or a chunk, and with empty shards."""
    rng = random.Random(str(dtype))
    tensor = _random((300_001,), dtype)
    whole = digest(tensor)
    for _ in range(8):
        cuts = sorted(rng.choices(range(tensor.numel() + 1), k=rng.randint(0, 6)))
        bounds = [0, *cuts, *cuts[-1:], tensor.numel()]
        parts = [digest(tensor[low:high], start=low) for low, high in pairwise(bounds)]
        assert sum(parts) & MASK64 == whole
        copies = [digest(tensor[low:high].clone(), start=low) for low, high in pairwise(bounds)]
        assert copies == parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(13, 7, 5), (8, 16), (1, 9), (5, 1, 3), (6,), (3, 4, 8, 2)])
def test_digests_of_slices_along_every_dim_add_up(shape, dtype):
    rng = random.Random(f"{shape}{dtype}")
    tensor = _random(shape, dtype)
    for _ in range(6):
        boxes = [((0,) * len(shape), tensor)]
        for dim in range(len(shape)):
            cut = rng.randint(0, shape[dim])
            boxes = [
                ((*at[:dim], at[dim] + low, *at[dim + 1 :]), box.narrow(dim, low, high - low))
                for at, box in boxes
                for low, high in ((0, cut), (cut, shape[dim]))
            ]
        assert sum(digest_slice(box, shape, at) for at, box in boxes) & MASK64 == digest(tensor)


def test_long_runs_of_a_slice_add_up_too():
    tensor = _random((3, 200_001), torch.bfloat16)
    halves = [
        digest_slice(tensor[:, a:b].contiguous(), tensor.shape, (0, a)) for a, b in ((0, 99_999), (99_999, 200_001))
    ]
    assert sum(halves) & MASK64 == digest(tensor)


def test_partials_of_ranks_sum_with_wrap_around():
    """Uneven FSDP shards: what an int64 all-reduce does to the stacked partial digests."""
    names = {"a": _random((10, 33), torch.float32, 1), "b": _random((3,), torch.bfloat16, 2)}
    ranks = [
        torch.stack([partial_digest(shard, t.shape, (first, *[0] * (t.dim() - 1))) for t, shard, first in rank])
        for rank in zip(*[_dim0_shards(t, 4) for t in names.values()])
    ]
    assert [value & MASK64 for value in torch.stack(ranks).sum(0).tolist()] == [digest(t) for t in names.values()]


def _dim0_shards(tensor, world):
    size = -(-tensor.shape[0] // world)
    return [
        (tensor, tensor[rank * size : (rank + 1) * size], min(rank * size, tensor.shape[0])) for rank in range(world)
    ]


def test_views_that_are_not_contiguous_have_the_digest_of_their_copy():
    tensor = _random((257, 130), torch.float32)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(tensor[:, 1:8]) == digest(tensor[:, 1:8].contiguous())


def test_any_stride_of_a_size_that_does_not_move_is_contiguous():
    one, none = torch.ones(5, 7)[3:4, 2], torch.zeros(0).as_strided((0,), (0,))
    assert one.stride() == (7,) and digest(one) == digest(torch.ones(1))
    assert digest(none) == 0


def test_scalars_have_a_digest():
    assert digest(torch.tensor(2.5)) == digest(torch.tensor([2.5])) != digest(torch.tensor(2.0))


def test_a_slice_outside_its_tensor_is_refused():
    with pytest.raises(ValueError, match="does not lie inside"):
        digest_slice(torch.zeros(4, 4), (8, 4), (5, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_flip_is_noticed(dtype):
    raw = _random((33,), dtype).view(torch.uint8)
    seen = {digest(raw.view(dtype))}
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            seen.add(digest(raw.view(dtype)))
            raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * raw.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_swap_of_two_elements_is_noticed(dtype):
    values = torch.arange(1, 25).to(dtype)
    seen = {digest(values)}
    for i in range(24):
        for j in range(i):
            swapped = values.clone()
            swapped[i], swapped[j] = values[j], values[i]
            seen.add(digest(swapped))
    assert len(seen) == 1 + 24 * 23 // 2


def test_swapped_rows_blocks_and_transposes_are_noticed():
    tensor = _random((512, 512), torch.float32)
    flat = tensor.view(-1)
    others = [
        tensor[torch.randperm(512, generator=torch.Generator().manual_seed(0))],
        tensor.t(),
        tensor.flip(0),
        torch.cat([flat[16384:32768], flat[:16384], flat[32768:]]),
        flat.roll(1),
    ]
    assert len({digest(tensor), *map(digest, others)}) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_count_and_depend_on_their_place(dtype):
    digests = {digest(torch.zeros(n, dtype=dtype), start=start) for n in (1, 2, 5) for start in (0, 1, 3, 100_000)}
    assert len(digests) == 12 and 0 not in digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_alone_are_noticed(dtype):
    """Only the top bit of each element changes: the weakest case of a sum of products."""
    zeros, values = torch.zeros(100_000, dtype=dtype), torch.randn(100_000).to(dtype)
    assert digest(-zeros) != digest(zeros)
    assert digest(-values) != digest(values)
    pairs = [values.clone() for _ in range(200)]
    for n, pair in enumerate(pairs):
        pair[n], pair[n + 16384] = -pair[n], -pair[n + 16384]
    assert len({digest(values), *map(digest, pairs)}) == 201


def test_one_step_of_training_changes_the_digest():
    values = torch.randn(4096).bfloat16()
    assert digest(torch.nextafter(values, torch.zeros_like(values))) != digest(values)


class _LargestAllocation(TorchFunctionMode):
    """The largest storage that any operator returns, other than the one given."""

    def __init__(self, given):
        super().__init__()
        self.given, self.num_bytes = given.untyped_storage().data_ptr(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.given:
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t[1:], lambda t: t.view(4096, -1).t(), lambda t: t.view(64, -1)[:, 3:-1]]
)
def test_extra_memory_does_not_grow_with_the_tensor(view):
    tensor = _random((1 << 22,), torch.bfloat16)
    with _LargestAllocation(tensor) as largest:
        digest(view(tensor))
    assert largest.num_bytes <= 1 << 20 < tensor.nbytes

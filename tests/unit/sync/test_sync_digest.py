"""The digests compared with a plain-Python reference, in any pieces, and changes that they must detect."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from meshrl.core.types import mix64
from meshrl.sync.digest import RunningDigest, as_bytes, digest_bytes, tensor_digests, values

MASK64 = (1 << 64) - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int8, torch.float8_e4m3fn, torch.int64]
KINDS = ["sum64", "xxh3"]


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def sum64(tensor: torch.Tensor) -> int:
    return digest_bytes("sum64", as_bytes(tensor.contiguous()))


def reference(raw: torch.Tensor) -> int:
    """The definition of sum64, byte by byte."""
    total = 0
    for at, byte in enumerate(raw.tolist()):
        word, lane = divmod(at, 4)
        key = ((mix64(word % 16384) | 1) * (mix64(word // 16384 + (1 << 40)) | 1)) & MASK64
        signed = byte - 256 if lane == 3 and byte > 127 else byte
        total += ((signed + 1) << (8 * lane)) * key
    return total & MASK64


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 28, 1001, 70_003, 140_006])
def test_a_digest_equals_its_definition(count, start):
    """Also of bytes that begin inside a word, and over several rows of keys."""
    raw = random_bytes(count + start)[start:]
    assert digest_bytes("sum64", raw) == reference(raw)
    assert digest_bytes("xxh3", raw) == xxhash.xxh3_64_intdigest(raw.numpy().tobytes())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.lists(st.integers(0, 18), max_size=6), rest=st.integers(0, 9), kind=st.sampled_from(KINDS))
def test_a_digest_does_not_depend_on_the_pieces(rows, rest, kind):
    """Also with cuts inside a chunk, and with empty pieces."""
    raw = random_bytes(18 * 65536 + rest)
    running = RunningDigest(kind)
    readable = running.readable(raw)
    for low, high in pairwise([0, *sorted(65536 * row for row in rows), raw.numel()]):
        running.update(readable[low:high])
    assert running.value == digest_bytes(kind, raw)


@pytest.mark.parametrize("kind", KINDS)
def test_several_digests_are_read_with_one_call(kind):
    runs = [RunningDigest(kind) for _ in range(4)]
    for seed, running in enumerate(runs[:3]):
        running.update(running.readable(random_bytes(33, seed)))
    assert values(runs) == [
        *(digest_bytes(kind, random_bytes(33, seed)) for seed in range(3)),
        RunningDigest(kind).value,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digests_of_tensors_are_those_of_their_elements_in_order(dtype):
    """Also of an empty tensor, of one with an offset in its memory, and of a transpose."""
    own = random_bytes(48 * dtype.itemsize).view(dtype).view(6, 8).requires_grad_(dtype.is_floating_point)
    tensors = {"own": own, "rows": own[2:5], "turned": own.T, "one": own[5, 7], "none": own[:0]}
    expected = {name: digest_bytes("xxh3", as_bytes(tensor.contiguous())) for name, tensor in tensors.items()}
    assert tensor_digests(tensors) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_single_bit_flip_is_noticed(kind):
    raw = random_bytes(67)
    seen = {digest_bytes(kind, raw)}
    for byte, bit in product(range(67), range(8)):
        raw[byte] ^= 1 << bit
        seen.add(digest_bytes(kind, raw))
        raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * 67


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_swap_of_two_elements_is_noticed(dtype):
    elements = torch.arange(1, 25).to(dtype)
    seen = {sum64(elements)}
    for i in range(24):
        for j in range(i):
            swapped = elements.clone()
            swapped[i], swapped[j] = elements[j], elements[i]
            seen.add(sum64(swapped))
    assert len(seen) == 1 + 24 * 23 // 2


def test_swapped_rows_blocks_and_transposes_are_noticed():
    tensor = random_bytes(512 * 512 * 4).view(torch.int32).view(512, 512)
    flat = tensor.view(-1)
    others = [
        tensor[torch.randperm(512, generator=torch.Generator().manual_seed(0))],
        tensor.t(),
        tensor.flip(0),
        torch.cat([flat[16384:32768], flat[:16384], flat[32768:]]),
        flat.roll(1),
    ]
    assert len({sum64(tensor), *map(sum64, others)}) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_count_by_their_number_and_position(dtype):
    zeros = {sum64(torch.zeros(count, dtype=dtype)) for count in (1, 2, 5, 100_000)}
    assert len(zeros) == 4 and 0 not in zeros
    one = torch.ones(1, dtype=torch.float32).to(dtype)
    around = [torch.cat([torch.zeros(n, dtype=dtype), one, torch.zeros(9 - n, dtype=dtype)]) for n in range(10)]
    assert len(set(map(sum64, around))) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_of_only_the_sign_are_noticed(dtype):
    """Only the top bit of elements changes: the worst case for a sum of products."""
    zeros, numbers = torch.zeros(100_000, dtype=dtype), torch.randn(100_000).to(dtype)
    assert sum64(-zeros) != sum64(zeros) and sum64(-numbers) != sum64(numbers)
    seen = {sum64(numbers)}
    for n in range(200):
        numbers[[n, n + 16384]] *= -1
        seen.add(sum64(numbers))
        numbers[[n, n + 16384]] *= -1
    assert len(seen) == 201


def test_dims_of_size_0_and_1_may_have_any_stride():
    one, none = torch.ones(5, 7)[3:4, 2], torch.zeros(0).as_strided((0,), (0,))
    assert one.stride() == (7,) and sum64(one) == sum64(torch.ones(1)) == sum64(torch.tensor(1.0))
    assert as_bytes(none).numel() == 0


class _LargestAllocation(TorchFunctionMode):
    """The largest storage that any operator returns, other than the one given."""

    def __init__(self, given: torch.Tensor):
        super().__init__()
        self.given, self.num_bytes = given.untyped_storage().data_ptr(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.given:
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_extra_memory_does_not_grow_with_the_tensor(kind):
    raw = random_bytes(1 << 23)
    with _LargestAllocation(raw) as largest:
        digest_bytes(kind, raw)
    assert largest.num_bytes <= 1 << 20 < raw.nbytes

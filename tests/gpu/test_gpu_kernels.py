"""The Triton kernels on a device, against torch's functions on the same device."""

from __future__ import annotations

import pytest
import torch

from meshrl.core.device import has_triton
from meshrl.model import logprob
from meshrl.model.logprob import Head, token_logprobs
from meshrl.sync import sender
from meshrl.sync.digest import RunningDigest, Sums, as_bytes, bits_of, digest_bytes, values

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(accelerator: torch.device) -> torch.device:
    if not has_triton(accelerator):
        pytest.skip("Triton's kernels are not used on this accelerator")
    return accelerator


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_logprobs_entropies_and_gradients_are_those_of_torch(device, dtype, softcap, monkeypatch):
    """With bias and scale, for sizes that no tile divides, in several slices of the vocabulary."""
    n, d, v = 700, 1000, 9001
    g = torch.Generator().manual_seed(0)
    x, w, b = torch.randn(n, d, generator=g), torch.randn(v, d, generator=g) / d**0.5, torch.randn(v, generator=g)
    targets = torch.randint(v, (n,), generator=g).to(device)
    temperature = torch.tensor([0.6, 1.0, 0.0])[torch.randint(3, (n,), generator=g)].to(device)
    found = []
    for has_kernels in (True, False):
        monkeypatch.setattr(logprob, "has_triton", lambda device, has=has_kernels: has)
        leaves = [each.to(device, dtype, copy=True).requires_grad_() for each in (x, w, b)]
        head = Head(leaves[1], leaves[2], 1.5, softcap)
        scored = token_logprobs(leaves[0], head, targets, temperature, chunk_tokens=100, entropy=True)
        (scored[0].sum() + 0.1 * scored[1].sum()).backward()
        found.append([*(each.detach() for each in scored), *(leaf.grad.float() for leaf in leaves)])
    for tiled, plain in zip(*(each[:2] for each in found), strict=True):
        torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=3e-5)
    for tiled, plain in zip(*(each[2:] for each in found), strict=True):
        assert (tiled - plain).norm() < 1e-2 * plain.norm()


def test_digests_of_many_pieces_are_those_of_the_host(device):
    memory = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    places = [(0, 3_000_001), (5, 70_000), (2, 65_536 * 9), (7, 3), (16, 0), (1_000_000, 1)]

    def digests(of: torch.Tensor) -> list[int]:
        running = [RunningDigest("sum64") for _ in places]
        for each, (first, count) in zip(running, places, strict=True):
            each.update(of[first : first + count])
        return values(running)

    assert digests(memory.to(device)) == digests(memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_values_that_are_cast_in_place_are_those_of_the_host(device, dtype):
    """To the bit, with their digests, for sizes that end inside a word and others that fill several programs."""
    numbers = torch.Generator().manual_seed(0)
    masters = [torch.randn(count, generator=numbers) for count in (1, 7, 1000, 300_001, 3 * 8 * 32768)]
    targets = [torch.full((len(each) + 8,), 3.0, dtype=dtype, device=device) for each in masters]
    sums = Sums()
    sums.add_together(
        [(i, as_bytes(target[:-8]), 0) for i, target in enumerate(targets)],
        len(targets),
        [each.to(device) for each in masters],
        dtype,
    )
    cast = [each.to(dtype) for each in masters]
    assert sums.read() == [digest_bytes("sum64", as_bytes(each)) for each in cast]
    for target, each in zip(targets, cast, strict=True):
        assert torch.equal(target[:-8].cpu(), each) and (target[-8:] == 3).all()


@pytest.mark.parametrize("count", [1, 1000, 1_000_003])
def test_changes_are_those_of_the_host(device, count):
    from meshrl.sync.kernels import take_changes

    g = torch.Generator().manual_seed(count)
    before = torch.randn(count, generator=g)
    after = torch.where(torch.rand(count, generator=g) < 0.02, before * 1.5, before * (1 + 2**-12))
    base = before.to(device).bfloat16()
    expected, bits = sender._differing(bits_of(after.bfloat16()), bits_of(before.bfloat16()))
    indices, new = take_changes(after.to(device), base)
    assert torch.equal(indices.long().cpu(), expected) and torch.equal(new.cpu(), bits)
    assert torch.equal(as_bytes(base).cpu(), as_bytes(after.bfloat16()))

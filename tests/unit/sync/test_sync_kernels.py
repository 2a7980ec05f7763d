"""Digests of many pieces in one launch, and the changes of a delta, in Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # skips this file where the interpreter can't run
from tiny_sync import Sampler, Trainer, held_of, layout_on, sync, trained, weights_of

from meshrl.sync import digest, kernels, sender
from meshrl.sync.digest import RunningDigest, bits_of, digest_bytes, digests_in_threads, values
from meshrl.sync.layout import make_layout

ROW = 65536  # bytes


@pytest.fixture(autouse=True)
def devices_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.bf16_as_on_devices(monkeypatch)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel is used on a CPU, too. The number of pieces of each launch."""
    seen: list[int] = []
    kernel = kernels.sum64_kernel

    class Counted:
        def __getitem__(self, grid):
            def launch(table, *args, **options):
                assert not (table[0] % 16).any()  # the interpreter can read words at any address, a device can't
                seen.append(table.shape[1])
                kernel[grid](table, *args, **options)

            return launch

    monkeypatch.setattr(digest, "has_triton", lambda device: True)
    monkeypatch.setattr(kernels, "sum64_kernel", Counted())
    return seen


def _random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _expected(raw: torch.Tensor) -> int:
    return digest._sum64(raw, 0).item() & ((1 << 64) - 1)


def _started(raw: torch.Tensor) -> RunningDigest:
    running = RunningDigest("sum64")
    running.update(running.readable(raw))
    return running


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1001, ROW - 1, ROW, ROW + 1, 9 * ROW + 7])
def test_a_digest_equals_that_of_torch(count, launches):
    """Also of bytes that do not fill a word, a row, or the rows of a program."""
    raw = _random_bytes(count)
    assert digest_bytes("sum64", raw) == _expected(raw)
    assert launches == [1] * (count > 0)


def test_digests_of_many_pieces_take_one_launch(launches):
    """Pieces at any address, and digests of several pieces, of an empty one, and of none."""
    memory = _random_bytes(20 * ROW)
    raws = [memory[low : low + count] for low, count in [(0, 5000), (5001, 2 * ROW), (7, 3), (9, 0), (2, 17 * ROW + 2)]]
    cut = RunningDigest("sum64")
    for part in (memory[:ROW], memory[ROW : 13 * ROW], memory[13 * ROW : 13 * ROW], memory[13 * ROW : 13 * ROW + 99]):
        cut.update(part)
    found = values([*map(_started, raws), RunningDigest("sum64"), cut])
    assert found == [*map(_expected, raws), 0, _expected(memory[: 13 * ROW + 99])]
    assert launches == [4 + 3]


def test_a_transfer_takes_one_launch_on_each_side_and_arrives_to_the_bit(launches, monkeypatch):
    layout = layout_on("2 x 2", digest="sum64")
    trainer, sampler = Trainer(layout, keep_base=False), Sampler(layout)
    digests = [delivery.digests for delivery in trainer.deliveries(weights_of())]
    parts = [len(transfer.parts) for transfer in layout.transfers]
    assert launches == parts and max(parts) == 5
    launches.clear()
    assert sync(trainer, sampler, weights_of(), 1).read_back
    assert launches == [each for each in parts for _ in range(2)] + [sum(parts)]  # sent, received, read back
    monkeypatch.setattr(digest, "has_triton", lambda device: False)
    assert [delivery.digests for delivery in trainer.deliveries(weights_of())] == digests


def test_a_read_back_of_much_memory_is_digested_in_batches(launches, monkeypatch):
    """Else all slices that had to be copied would be in memory at one time."""
    monkeypatch.setattr(digest, "_BATCH_BYTES", 100)
    raws = [_random_bytes(count, count) for count in (60, 70, 150, 10, 20)]
    assert digests_in_threads("sum64", _started, raws, [raw.numel() for raw in raws]) == [*map(_expected, raws)]
    assert launches == [2, 1, 2]


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=["fp32 masters", "bf16 masters"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("count", [1, 31, 64, 500])
def test_changes_equal_those_of_torch(count, of, to, monkeypatch):
    """In programs of 32 elements: their indices, in order, and their bits; the base then has them. A zero with another
    sign is a change, another master that rounds to the same number is none."""
    monkeypatch.setattr(kernels, "ELEMENTS", 32)
    numbers = torch.Generator().manual_seed(count)
    before = torch.randn(count, generator=numbers).to(of)
    after = torch.where(torch.rand(count, generator=numbers) < 0.3, before * 1.5, before * (1 + 2**-20))
    after[0], before[0], after[-1] = -0.0, 0.0, torch.inf
    base = before.to(to)
    expected, bits = sender._differing(bits_of(after.to(to)), bits_of(base))
    indices, new = kernels.take_changes(after, base)
    assert indices.dtype == torch.int32 and torch.equal(indices.long(), expected) and torch.equal(new, bits)
    assert torch.equal(bits_of(base), bits_of(after.to(to)))
    assert [len(each) for each in kernels.take_changes(after, base)] == [0, 0]


def test_a_delta_arrives_to_the_bit(launches, monkeypatch):
    monkeypatch.setattr(sender, "has_triton", lambda device: True)
    monkeypatch.setattr(kernels, "ELEMENTS", 64)
    layout = layout_on("2 x 2", digest="sum64")
    trainer, sampler = Trainer(layout), Sampler(layout)
    sync(trainer, sampler, weights_of(), 0)
    changed = trained(weights_of(), 1)
    ack = sync(trainer, sampler, changed, 1, base=0)
    assert ack.read_back and sampler.holds(changed)
    assert ack.num_bytes < layout.num_bytes / 2
    assert sum(report.num_changed for report in trainer.reports) == sum(
        int((changed[name].bfloat16() != each.bfloat16()).sum()) for name, each in weights_of().items()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sync_in_place_casts_all_parts_in_one_launch(dtype, launches, monkeypatch):
    """Those in another order of memory or at another address one by one. All have the bits and digests that torch's
    functions give them, also parts that end inside a word, and memory next to them does not change."""
    shapes = {
        "odd": (7, 3),
        "rows": (40, 2200),
        "scale": (),
        "moved": (33,),
        "empty": (0, 4),
        "long": (9 * 32768 + 2,),
        "turned": (64, 48),
    }
    layout = make_layout({name: (shape, dtype) for name, shape in shapes.items()}, digest="sum64")
    numbers = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    weights["rows"][0, :6] = torch.tensor([0.0, -0.0, torch.inf, 1 + 2**-8, 1 + 3 * 2**-8, 65520.0])
    weights["turned"] = weights["turned"].T.contiguous().T
    found = {}
    for has_kernels in (True, False):
        for module in (digest, sender):
            monkeypatch.setattr(module, "has_triton", lambda device, has=has_kernels: has)
        memory = {name: torch.full((weights[name].numel() + 16,), 3.0, dtype=getattr(torch, dtype)) for name in shapes}
        memory["moved"] = memory["moved"][1:]
        targets = {name: each[8 : 8 + weights[name].numel()].view(shapes[name]) for name, each in memory.items()}
        (one,) = Trainer(layout, keep_base=False).senders
        launches.clear()
        one.begin(held_of(weights, layout.senders[0]))
        digests = [delivery.digests for delivery in one.write(targets)]
        assert all((m[:8] == 3).all() and (m[-7:] == 3).all() for m in memory.values())
        for name, target in targets.items():
            assert torch.equal(bits_of(target), bits_of(weights[name].to(target.dtype)))
        found[has_kernels] = digests
        assert one.report.seconds["cast"] > 0
        assert launches == ([4, 2] if has_kernels else [])  # cast together; the digests of the others
    assert found[True] == found[False]

"""Decode attention over pages, and the operations of the fast decoder, in Triton's interpreter, against torch's."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_engines
import torch
import triton_interpreter  # skips this file where the interpreter can't run
from meta_device import META, DeviceCalls
from tiny_engines import ask, run, scores, tiny_engine
from tiny_models import tiny_lm

from meshrl.model import fast_decoder
from meshrl.model import kernels as decoder_kernels
from meshrl.model.attention import AttentionSpec, Rotation
from meshrl.model.causal import CausalModel
from meshrl.model.recipe import cast_parameters
from meshrl.rollout.embedded import decode_graph, kernels, kv_cache, runner
from meshrl.rollout.embedded.cached_attention import DecodeAttention, KernelAttention, PageReads
from meshrl.rollout.embedded.kv_cache import AddressTable, KVPool, Places
from meshrl.rollout.embedded.pages import PageTable, places_of, places_of_last

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 6, 2, 16


@pytest.fixture(autouse=True)
def as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.bf16_as_on_devices(monkeypatch)
    monkeypatch.setattr(kv_cache, "cache_format", lambda device, dtype: (dtype, False))


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _filled(lengths: np.ndarray, prefix: int, layers: int) -> tuple[PageTable, KVPool, np.ndarray]:
    """A table and its pages, whose rows have this many tokens in each layer and share the first ones if they are so
    long; and the slots of the rows."""
    table = PageTable(128, 4096)
    pool = KVPool(128, lambda: table.num_pages)
    ids = [np.concatenate([np.arange(prefix), 1000 * row + np.arange(4096)])[:n] for row, n in enumerate(lengths, 1)]
    slots = np.array([table.join(table.find(row), row) for row in ids])
    assert not len(table.extend(slots, lengths))
    placed = [places_of(table, slot, np.arange(n)) for slot, n in zip(slots, lengths, strict=True)]
    places = torch.from_numpy(np.concatenate(placed, axis=1))
    for layer in range(layers):
        k, v = (_random(int(lengths.sum()), KV_HEADS, SIZE, seed=10 * layer + i) for i in range(2))
        pool.write(layer, k, v, Places(lambda: places))
    return table, pool, slots


@pytest.mark.parametrize("window", [None, 40, 128])
@pytest.mark.parametrize("programs", [1, 8, 64], ids=["one split", "two splits", "more splits than pages"])
def test_each_row_attends_to_its_positions_in_all_pages(programs, window, monkeypatch):
    """Rows of one and of many pages, which share a prefix that ends within a page, and empty ones; results and written
    keys are those of torch."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    lengths = np.array([1400, 1, 127, 128, 129, 300])
    tables, pools, slots = zip(*(_filled(lengths - 1, 150, 2) for _ in range(2)), strict=True)
    assert tables[0].readers.max() == 5
    addresses = AddressTable(pools[1], tables[1], CPU)
    addresses.update([])
    spec = AttentionSpec(20.0 if programs == 8 else 0.3, window=window)  # scores whose exp overflows, too
    padded = torch.from_numpy(np.append(lengths, [0, 0]))
    slots_of = torch.from_numpy(np.append(slots[1], [0, 0]))
    places, n = torch.from_numpy(places_of_last(tables[0], slots[0], lengths - 1)), len(lengths)
    for layer in (1, 0):
        qkv = _random(len(padded), HEADS + 2 * KV_HEADS, SIZE, seed=7 + layer)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)  # views with the strides of the fused product
        reads = PageReads(tables[0], slots[0], CPU)
        decode = DecodeAttention(pools[0], reads, Places(lambda: places), lambda: padded[: len(lengths)])
        want = decode.attend(layer, q[:n], k[:n], v[:n], spec)
        got = KernelAttention(addresses, lambda: slots_of, lambda: padded).attend(layer, q, k, v, spec)
        torch.testing.assert_close(got[:n], want, rtol=2e-2, atol=4e-3)
        assert not got[n:].any()
        assert all(torch.equal(*pair) for pair in zip(pools[1].layers[layer], pools[0].layers[layer], strict=True))


def test_the_table_follows_pages_that_move_and_rows_that_change_and_keeps_its_addresses():
    table, pool, slots = _filled(np.array([100, 90]), 0, 1)
    addresses = AddressTable(pool, table, CPU)
    addresses.update([])
    tensor, before, pointers = addresses.bases(0), addresses.bases(0).clone(), addresses.pointers
    addresses.update([])
    table.join([], np.arange(3000))
    pool.reserve()
    addresses.update([])
    assert addresses.pointers == pointers and not torch.equal(tensor, before)
    assert tensor.tolist() == [x.data_ptr() for x in pool.layers[0]]
    row = addresses.rows[slots[1]].tolist()
    assert row[:2] == [1, table.pages[slots[1], 0]] and row[1 + table.num_columns] == 0


@pytest.mark.parametrize("name", ["qwen2", "qwen3"], ids=["plain", "norms of heads"])
def test_the_fast_decoder_computes_the_same_with_kernels(name, monkeypatch):
    """In bf16, to the rounding of a few sums."""
    lm = tiny_lm(name, num_hidden_layers=2, hidden_size=64)
    for parameter in lm.parameters():  # norms of ones and biases of zeros would hide an error
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    model = CausalModel(lm.bfloat16().eval().requires_grad_(False))
    fast = fast_decoder.fast_decoder(model)
    assert fast is not None
    fast.fuse()
    probe = fast_decoder._Probe(model)
    want = fast.hidden(probe.tokens, probe.positions, probe)
    monkeypatch.setattr(fast_decoder, "_kernels_of", lambda device: decoder_kernels)
    got = fast.hidden(probe.tokens, probe.positions, probe)
    assert not torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def _num_launches(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kernels and torch's operators that a decode step launches on an accelerator, without sampling."""
    model = CausalModel(tiny_lm("qwen3", num_hidden_layers=num_layers, hidden_size=64).eval().requires_grad_(False))
    specs = [layer.spec for layer in fast_decoder.fast_decoder(model).layers]
    cast_parameters(model, torch.bfloat16).to(META)
    fast = fast_decoder.FastDecoder(model.lm.base_model, specs)
    fast.fuse()
    numbers, calls = torch.zeros(4, dtype=torch.int64, device=META), DeviceCalls()
    rows = torch.zeros(4, 130, dtype=torch.int32, device=META)
    table = SimpleNamespace(bases=lambda layer: numbers[:2], rows=rows, pool=SimpleNamespace(page_tokens=128))
    launched: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(fast_decoder, "_kernels_of", lambda device: decoder_kernels)
        for module in (kernels, decoder_kernels):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                patch.setattr(module, name, defaultdict(lambda: lambda *args, **options: launched.append(1)))
        context = KernelAttention(table, lambda: numbers, lambda: numbers)
        with torch.inference_mode(), calls:
            fast.hidden(numbers, numbers, context)
    return len(launched) + calls.num_launches


@pytest.mark.parametrize(("programs", "budget"), [(1, 8), (1024, 9)], ids=["one split", "several splits"])
def test_a_layer_of_a_decode_step_stays_within_its_budget_of_launches(programs, budget, monkeypatch):
    """Four matrix products, two norms, attention, gate, and the merge of splits."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    of_one, of_two = (_num_launches(num_layers, monkeypatch) for num_layers in (1, 2))
    assert of_two - of_one == budget


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms of heads"])
@pytest.mark.parametrize("programs", [1, 64], ids=["one split", "several splits"])
def test_attention_that_rotates_equals_a_rotation_before_it(programs, has_norms, monkeypatch):
    """To the bit, in its results and in the pages; rows of length 0 write nothing."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    lengths = np.array([300, 1, 129])
    padded = torch.from_numpy(np.append(lengths, 0))
    qkv, cos, sin = (_random(4, n, SIZE, seed=n) for n in (HEADS + 2 * KV_HEADS, 1, 2))
    norms = (_random(SIZE, seed=3), _random(SIZE, seed=4), 1e-6) if has_norms else None
    rotation, parts = Rotation(cos, sin[:, :1].contiguous(), norms), [HEADS, KV_HEADS, KV_HEADS]
    rotated = torch.cat([decoder_kernels.rotate(qkv, (HEADS, KV_HEADS), rotation), qkv[:, -KV_HEADS:]], 1)
    outs, pools = [], []
    for x, given in ((rotated, None), (qkv, rotation)):
        table, pool, slots = _filled(lengths - 1, 100, 1)
        addresses = AddressTable(pool, table, CPU)
        addresses.update([])
        attention = KernelAttention(addresses, lambda at=slots: torch.from_numpy(np.append(at, 0)), lambda: padded)
        outs.append(attention.attend_rotated(0, *x.split(parts, dim=1), AttentionSpec(0.3), given))
        pools.append(pool.layers[0])
    assert torch.equal(*outs)
    assert all(torch.equal(*pair) for pair in zip(*pools, strict=True))


def test_each_operation_is_that_of_transformers():
    """To the bit: the same operations in fp32, rounded at the same places."""
    x, weight = _random(9, 40), _random(40, seed=1)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    torch.testing.assert_close(decoder_kernels.norm(x, weight, 1e-6), normed, rtol=8e-3, atol=0)
    added = _random(9, 40, seed=6)
    before, total = x.clone(), x + added
    assert torch.equal(decoder_kernels.norm(x, weight, 1e-6, added), decoder_kernels.norm(total, weight, 1e-6))
    assert torch.equal(x, total) and not torch.equal(x, before)
    gate, up = _random(9, 2 * 1100, seed=2).chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(decoder_kernels.gate(torch.cat([gate, up], -1)), want, rtol=8e-3, atol=0)
    qkv, cos, sin = _random(9, 7, 24, seed=3), _random(9, 1, 24, seed=4), _random(9, 1, 24, seed=5)
    qk = qkv[:, :5]
    want = qk * cos + qk.roll(12, -1) * sin
    assert torch.equal(decoder_kernels.rotate(qkv, (3, 2), Rotation(cos, sin)), want)


def test_weights_of_sampling_and_their_sums_are_those_of_torch():
    z = 3 * torch.randn(3, 17 * 128, generator=torch.Generator().manual_seed(0))
    z[1, 5] = -torch.inf
    top = z.amax(-1, keepdim=True)
    weights, sums = kernels.exponentials(z, top, 128)
    torch.testing.assert_close(weights, torch.exp(z - top), rtol=1e-6, atol=0)
    torch.testing.assert_close(sums, weights.view(3, 17, 128).sum(-1), rtol=1e-6, atol=0)


def _off(engine, requests) -> np.ndarray:
    """How far the reported logprobs are from those of a forward without a cache."""
    turns = run(engine, requests).values()
    scored = [scores(engine._runner.model, [*turn.context_ids, *turn.output_ids]) for turn in turns]
    return np.abs(np.concatenate([x[len(t.context_ids) :] - t.logprobs for x, t in zip(scored, turns, strict=True)]))


@pytest.fixture
def requests_of_engine(monkeypatch):
    """Groups that share a prompt, rows that join, end, move and grow into other tiles, in engines that use kernels."""
    monkeypatch.setattr(runner, "has_triton", lambda device: True)
    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    return [
        ask(f"{p}-{i}", [3 + (7 * p + j) % 50 for j in range(length)], seed=i, max_new_tokens=2 + 3 * i)
        for p, length in enumerate([5, 122])
        for i in range(3)
    ]


def _model(num_layers: int) -> torch.nn.Module:
    shape = {"hidden_size": 64, "max_position_embeddings": 512, "initializer_range": 0.3}
    return tiny_lm("qwen2", num_hidden_layers=num_layers, **shape).bfloat16()


def test_an_engine_without_a_fast_decoder_samples_the_same(requests_of_engine, monkeypatch):
    monkeypatch.setattr(tiny_engines, "fast_decoder", lambda model: None)
    engine = tiny_engine(_model(1), max_running=4)
    assert _off(engine, requests_of_engine).mean() < 0.04
    assert engine._runner.kernels_fit and engine._runner._graphs is None


def test_an_engine_with_kernels_and_graphs_samples_the_same(requests_of_engine, monkeypatch):
    """The graph of a step is stood in for by the work that it records, which reads the same tensors again."""

    def recorded(work, memory):
        result = work()
        return lambda: result.copy_(work()), result

    monkeypatch.setattr(fast_decoder, "_kernels_of", lambda device: decoder_kernels)
    monkeypatch.setattr(decode_graph, "recorded", recorded)
    monkeypatch.setattr(decode_graph, "graph_memory", lambda: None)
    engine = tiny_engine(_model(1), max_running=5)
    graphs, longest = engine._runner._graphs, []
    replay = graphs.run
    monkeypatch.setattr(
        graphs, "run", lambda inputs, tokens: longest.append(int(inputs[1].max())) or replay(inputs, tokens)
    )
    assert _off(engine, requests_of_engine).mean() < 0.04
    assert set(graphs._graphs) == {1, 2, 4, 6}
    for request in requests_of_engine[4:]:
        engine.submit(request)
    engine.step()
    engine.drop_caches()  # as a sync does; what was computed ahead goes, too
    assert _off(engine, []).mean() < 0.04
    assert max(longest) == max(len(r.context_ids) + r.max_new_tokens - 1 for r in requests_of_engine)
    before = graphs._graphs[1]
    with torch.no_grad():
        parameter = next(engine._runner.model.parameters())
        parameter.data = parameter.data.clone()  # as after releasing and restoring memory
    engine.drop_caches()
    run(engine, requests_of_engine[:1])
    assert graphs._graphs[1] is not before

"""Decode attention over tiles, and the operations of the fast decoder, in Triton's interpreter, against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_engines
import torch
import triton_interpreter  # skips this file where the interpreter can't run
from tiny_engines import ask, run, scores, tiny_engine
from tiny_models import tiny_lm

from meshrl.model import fast_decoder
from meshrl.model import kernels as decoder_kernels
from meshrl.model.attention import AttentionSpec
from meshrl.model.causal import CausalModel
from meshrl.rollout.embedded import decode_graph, kernels, kv_cache, runner
from meshrl.rollout.embedded.cached_attention import DecodeAttention, TiledAttention
from meshrl.rollout.embedded.decode_graph import StepArrays
from meshrl.rollout.embedded.kv_cache import KVStore, TileTable, plan_writes, rows_of_tiles

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 6, 2, 16


@pytest.fixture(autouse=True)
def as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.bf16_as_on_devices(monkeypatch)
    monkeypatch.setattr(kv_cache, "tile_format", lambda device, dtype: (dtype, False))


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _filled(lengths: np.ndarray, layers: int) -> KVStore:
    """A store whose rows have this many tokens in each layer."""
    store, arrays = KVStore(), StepArrays(CPU)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    writes = plan_writes(rows, positions, arrays)
    for layer in range(layers):
        k, v = (_random(len(rows), KV_HEADS, SIZE, seed=10 * layer + i) for i in range(2))
        store.write(layer, k, v, writes)
    return store


@pytest.mark.parametrize("window", [None, 40, 128])
@pytest.mark.parametrize("programs", [1, 8, 64], ids=["one split", "two splits", "more splits than chunks"])
def test_each_row_attends_to_its_positions_in_all_tiles(programs, window, monkeypatch):
    """Rows of one and of many tiles, of wider tiles, and empty ones; results and written keys are those of torch."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    lengths = np.array([1400, 1, 127, 128, 129, 300])
    stores = [_filled(lengths - 1, 2) for _ in range(2)]
    table = TileTable(stores[1], 4096, CPU)
    for store in stores:
        store.reserve(rows_of_tiles(lengths))
    table.update()
    spec = AttentionSpec(20.0 if programs == 8 else 0.3, window=window)  # scores whose exp overflows, too
    padded = torch.from_numpy(np.append(lengths, [0, 0]))
    for layer in (1, 0):
        qkv = _random(len(padded), HEADS + 2 * KV_HEADS, SIZE, seed=7 + layer)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)  # views with the strides of the fused product
        n = len(lengths)
        want = DecodeAttention(stores[0], lengths, StepArrays(CPU)).attend(layer, q[:n], k[:n], v[:n], spec)
        got = TiledAttention(table, lambda: padded).attend(layer, q, k, v, spec)
        torch.testing.assert_close(got[:n], want, rtol=2e-2, atol=4e-3)
        assert not got[n:].any()
        for ours, theirs in zip(stores[1].layers[layer], stores[0].layers[layer], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_rows_are_copied_in_all_layers_by_one_launch():
    """From another store, and within one; rows of one and of many tiles, into a store without tiles."""
    lengths = np.array([1, 128, 129, 700])
    prompts = _filled(lengths, 2)
    stores = [KVStore(), KVStore()]
    tables = TileTable(stores[1], 4096, CPU), TileTable(prompts, 4096, CPU)
    for copies in ([(3, 2, 129), (0, 3, 700), (1, 0, 1)], [(2, 0, 700), (4, 3, 129)]):
        source = prompts if copies[0][0] == 3 else stores[1]
        stores[0].copy_rows(prompts if copies[0][0] == 3 else stores[0], copies, CPU)
        needed = np.zeros(5, np.int64)
        needed[[new for new, _, _ in copies]] = [length for _, _, length in copies]
        stores[1].reserve(rows_of_tiles(needed), source)
        for table in tables:
            table.update()
        sources = tables[1].tables if source is prompts else tables[0].tables
        moves = torch.tensor(copies).T.contiguous()
        kernels.copy_rows(sources, tables[0].tables, tables[0].widths, moves, int(moves[2].max()), KV_HEADS, SIZE)
        for layer in range(2):
            for ours, theirs in zip(stores[1].layers[layer], stores[0].layers[layer], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_table_follows_tiles_that_grow_and_keeps_its_address():
    lengths = np.array([100, 90])
    store = _filled(lengths, 1)
    table = TileTable(store, 4096, CPU)
    table.update()
    tensor, before = table.bases(0), table.bases(0).clone()
    table.update()
    store.reserve([40, 40])
    table.update()
    (keys, values), (later, _) = store.layers[0]
    assert table.bases(0).data_ptr() == tensor.data_ptr() and not torch.equal(tensor, before)
    assert tensor[:, 0].tolist() == [keys.data_ptr(), values.data_ptr()] and tensor[0, 1] == later.data_ptr()
    assert table.widths[[0, 7, 8, 9, 10]].tolist() == [128, 128, 256, 256, 256]


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


def test_each_operation_is_that_of_transformers():
    """To the bit: the same operations in fp32, rounded at the same places."""
    x, weight = _random(9, 40), _random(40, seed=1)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    torch.testing.assert_close(decoder_kernels.norm(x, weight, 1e-6), normed, rtol=8e-3, atol=0)
    gate, up = _random(9, 2 * 1100, seed=2).chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(decoder_kernels.gate(torch.cat([gate, up], -1)), want, rtol=8e-3, atol=0)
    qkv, cos, sin = _random(9, 7, 24, seed=3), _random(9, 1, 24, seed=4), _random(9, 1, 24, seed=5)
    qk = qkv[:, :5]
    want = qk * cos + qk.roll(12, -1) * sin
    assert torch.equal(decoder_kernels.rotate(qkv, cos, sin, (3, 2), None), want)


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

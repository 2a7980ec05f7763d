"""The tiled cache: rows of any length join, grow, move and leave, compared with one list for each row."""

import random

import numpy as np
import pytest
import torch

from meshrl.rollout.embedded.cached_attention import DecodeAttention
from meshrl.rollout.embedded.decode_graph import StepArrays
from meshrl.rollout.embedded.kv_cache import MAX_WASTE, STARTS, KVStore, arrange, plan_writes, rows_of_tiles

CPU = torch.device("cpu")
HEADS, K_SIZE, V_SIZE = 2, 3, 5  # keys and values may differ in size


def value_of(token):
    """Keys and values that identify their token."""
    return torch.full((HEADS, K_SIZE), float(token)), torch.full((HEADS, V_SIZE), -float(token))


def put(store, rows, positions, tokens):
    k, v = (torch.stack(side) for side in zip(*map(value_of, tokens)))
    for layer in (0, 1):
        store.write(layer, k + layer, v + layer, plan_writes(np.array(rows), np.array(positions), StepArrays(CPU)))


def contents(store, row, length, layer):
    tiles = store.layers[layer][: int(np.searchsorted(STARTS, length))]
    keys = torch.cat([k[row] for k, _ in tiles], dim=1)[:, :length]
    values = torch.cat([v[row] for _, v in tiles], dim=1)[:, :length]
    assert (keys == keys[:1, :, :1]).all() and (values == values[:1, :, :1]).all()
    assert torch.equal(keys[0, :, 0] - layer, layer - values[0, :, 0])
    return (keys[0, :, 0] - layer).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_rows_survive_growth_moves_and_neighbours(seed):
    """Rows join and leave at random and get one token per step: every row has its own tokens, in both layers."""
    rng = random.Random(seed)
    store, rows, fresh = KVStore(), [], iter(range(1, 10**6))
    for _ in range(60):
        if rows:
            tokens = [next(fresh) for _ in rows]
            put(store, range(len(rows)), [len(row) for row in rows], tokens)
            for row, token in zip(rows, tokens):
                row.append(token)
        for _ in range(rng.choice((0, 0, 1, 3))):
            row = [next(fresh) for _ in range(rng.choice((1, 30, 64, 65, 200)))]
            put(store, [len(rows)] * len(row), range(len(row)), row)
            rows.append(row)
        gone = {i for i in range(len(rows)) if rng.random() < 0.1}
        lengths = [len(row) for row in rows]
        order = arrange(lengths, gone)
        store.copy_rows(store, [(new, old, lengths[old]) for new, old in enumerate(order) if new != old], CPU)
        assert sorted(order) == [i for i in range(len(rows)) if i not in gone]
        rows = [rows[i] for i in order]
        for i, row in enumerate(rows):
            assert contents(store, i, len(row), 0) == contents(store, i, len(row), 1) == row


def test_only_rows_that_reach_a_tile_are_read():
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 700) for _ in range(rng.randint(1, 9))]
        want = []
        for start in STARTS:
            holders = [i for i, length in enumerate(lengths) if length > start]
            if not holders:
                break
            want.append(max(holders) + 1)
        assert rows_of_tiles(np.array(lengths)) == want
    assert rows_of_tiles(np.zeros(0, np.int64)) == []


def test_arrange_limits_the_positions_that_are_read():
    """A single long row after many short ones would make every row as expensive as the long one."""
    lengths = [10] * 30 + [1000]
    assert arrange(lengths, ())[0] == 30
    rng = random.Random(1)
    for _ in range(50):
        lengths = [rng.choice((5, 60, 100, 400)) for _ in range(20)]
        gone = set(rng.sample(range(20), 5))
        order = arrange(lengths, gone)
        assert sorted(order) == sorted(set(range(20)) - gone)
        after = np.array([lengths[i] for i in order])
        read = sum(rows * (STARTS[t + 1] - STARTS[t]) for t, rows in enumerate(rows_of_tiles(after)))
        assert read <= MAX_WASTE * sum(STARTS[np.searchsorted(STARTS, length)] for length in after)


def test_a_gap_is_filled_from_the_end_and_no_other_row_moves():
    assert arrange([9, 9, 9, 9], {1}) == [0, 3, 2]
    assert arrange([9, 9, 9, 9], {3}) == [0, 1, 2]
    assert arrange([9, 9, 9, 9], ()) == [0, 1, 2, 3]
    assert arrange([9, 9], {0, 1}) == []


def test_tile_widths_grow_so_that_long_contexts_have_few_tiles():
    assert STARTS[:9].tolist() == [0, 128, 256, 384, 512, 640, 768, 896, 1024]
    assert np.searchsorted(STARTS, 32768) <= 32
    assert (np.diff(STARTS) <= np.maximum(128, STARTS[:-1] // 4)).all()


def test_copied_rows_are_the_rows_of_the_other_store():
    source, store = KVStore(), KVStore()
    put(source, [0] * 70, range(70), range(1, 71))
    put(source, [1] * 3, range(3), range(201, 204))
    store.copy_rows(source, [(0, 1, 3), (1, 0, 70), (2, 0, 70)], CPU)
    assert contents(store, 0, 3, 1) == [201, 202, 203]
    assert contents(store, 1, 70, 0) == contents(store, 2, 70, 1) == list(range(1, 71))


def test_a_product_reads_keys_and_values_as_they_are_in_memory():
    """Also after rows have joined and moved to another store: a library that multiplies few queries would copy keys
    whose numbers are next to each other, in each step."""
    length, source, store = 140, KVStore(), KVStore()
    k, v = torch.randn(length, HEADS, K_SIZE), torch.randn(length, HEADS, V_SIZE)
    for row in range(3):
        writes = plan_writes(np.full(length, row), np.arange(length), StepArrays(CPU))
        source.write(0, k + row, v + row, writes)
    store.copy_rows(source, [(0, 2, length), (1, 1, length)], CPU)
    for tile, (start, width) in enumerate(((0, 128), (128, 12))):
        keys, values = store.read(0, tile, 2, width)
        assert keys.shape == (2 * HEADS, K_SIZE, width) and values.shape == (2 * HEADS, width, V_SIZE)
        assert keys.stride(2) == 1 and values.stride(2) == 1
        for i, row in enumerate((2, 1)):
            heads, part = slice(i * HEADS, (i + 1) * HEADS), slice(start, start + width)
            assert torch.equal(keys[heads], k[part].permute(1, 2, 0) + row)
            assert torch.equal(values[heads], v[part].transpose(0, 1) + row)


def test_the_last_tile_is_read_as_far_as_the_longest_row():
    def read(*lengths):
        attention = DecodeAttention(KVStore(), np.array(lengths), StepArrays(CPU))
        return [(rows, part.start, part.stop) for rows, part in attention.tiles]

    assert read(128, 20) == [(2, 0, 128)]
    assert read(129, 20) == [(2, 0, 128), (1, 128, 144)]
    assert read(3, 17) == [(2, 0, 32)]

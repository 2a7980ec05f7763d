"""Keys and values of running sequences, in tiles: memory that decode attention reads in one contiguous stream.

A store has rows (one for each sequence) and places (tokens of a row). Tile t of a layer
holds places [STARTS[t], STARTS[t + 1]) of the leading rows, as K [R, heads, W, D] and V [R, heads, W, Dv]. So
`tile[:n]` is contiguous, and a batched matrix product over it reads nothing but what it needs. On CPUs that is twice
as fast as views into rows of full capacity, growing copies nothing, and rows of mixed lengths cost what they are
long, as long as the long ones come first: `arrange` sees to that.

On a CPU, 16-bit keys and values are held in fp32, which rounds nothing: for a few rows its products in bf16 take twice
as long, for many no less.

Letters: R rows that a tile has room for, W places of a tile, D head size, N tokens to write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

FIRST_WIDTH = 128  # places of the first tiles; measured best of 64, 96, 128, 192 for float32 and bfloat16
MAX_WASTE = 1.25  # rows are sorted when the tiles to be read hold this much more than the rows need


def _starts(limit: int) -> np.ndarray:
    """First place of each tile: width 128 up to place 1024, then a quarter of what lies before, so tiles stay few."""
    starts = [0]
    while starts[-1] < limit:
        starts.append(starts[-1] + max(FIRST_WIDTH, 1 << max(0, (starts[-1] // 4).bit_length() - 1)))
    return np.array(starts)


STARTS = _starts(1 << 24)
Tiles = list[tuple[torch.Tensor, torch.Tensor]]  # of one layer: keys and values


@dataclass(frozen=True, slots=True)
class Write:
    """Tokens that go into one tile: k[source] -> tile[row, :, place]; source None = all tokens, in order."""

    tile: int
    num_rows: int  # the tile needs room for
    rows: torch.Tensor  # int64[N, 1]
    places: torch.Tensor  # int64[N, 1], within the tile
    source: torch.Tensor | None  # int64[N]
    _index: dict[int, torch.Tensor] = field(default_factory=dict)

    def index(self, heads: int) -> torch.Tensor:
        """int64[N, heads]: where each token goes in the tile seen as [R * heads * W, D]; one for all layers."""
        if heads not in self._index:
            width = int(STARTS[self.tile + 1] - STARTS[self.tile])
            head = torch.arange(heads, device=self.rows.device)
            self._index[heads] = (self.rows * heads + head) * width + self.places
        return self._index[heads]


def plan_writes(
    rows: np.ndarray, places: np.ndarray, device: torch.device, source: np.ndarray | None = None
) -> list[Write]:
    """Token i (or token source[i]) goes to (rows[i], places[i]): the same for every layer, so planned once a step."""
    tiles = np.searchsorted(STARTS, places, side="right") - 1
    used = np.flatnonzero(np.bincount(tiles))
    writes = []
    for tile in used:
        pick = np.flatnonzero(tiles == tile)
        src = pick if source is None else source[pick]
        whole = source is None and len(used) == 1
        writes.append(
            Write(
                int(tile),
                int(rows[pick].max()) + 1,
                torch.from_numpy(rows[pick, None]).to(device),
                torch.from_numpy(places[pick, None] - STARTS[tile]).to(device),
                None if whole else torch.from_numpy(src).to(device),
            )
        )
    return writes


def rows_of_tiles(lengths: np.ndarray) -> list[int]:
    """How many leading rows of each tile hold something, for rows of these lengths in this order."""
    if len(lengths) == 0:
        return []
    reach = np.maximum.accumulate(lengths[::-1])  # of this row and all behind it
    num_tiles = int(np.searchsorted(STARTS, reach[-1], side="left"))
    return [int(np.count_nonzero(reach > start)) for start in STARTS[:num_tiles]]


def arrange(lengths: Sequence[int], gone: Collection[int]) -> list[int] | None:
    """New order of rows (old index at each new place) after the rows in `gone` have left; None = as they are.

    Rows from the end fill the holes, which moves least. When that makes tiles wasteful, long rows go first: all rows
    grow alike, so they stay sorted until the next one comes or goes.
    """
    num_left = len(lengths) - len(gone)
    order = list(range(num_left))
    movers = iter([row for row in range(num_left, len(lengths)) if row not in gone])
    for hole in sorted(row for row in gone if row < num_left):
        order[hole] = next(movers)
    after = np.array([lengths[row] for row in order], dtype=np.int64)
    read = sum(rows * int(STARTS[t + 1] - STARTS[t]) for t, rows in enumerate(rows_of_tiles(after)))
    needed = int(STARTS[np.searchsorted(STARTS, after, side="left")].sum())
    if read > MAX_WASTE * needed:
        order.sort(key=lambda row: -lengths[row])
    elif not gone:
        return None
    return None if order == list(range(len(lengths))) else order


class KVStore:
    """The tiles of all layers. Layers and their head sizes are learned from the first keys and values seen."""

    def __init__(self) -> None:
        self.layers: dict[int, Tiles] = {}
        # Views of the tiles by (layer, tile), made once rather than at every token: for reading, with their number of
        # rows, and for writing. They go when their tile does.
        self._reads: dict[tuple[int, int], tuple[int, torch.Tensor, torch.Tensor]] = {}
        self._places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for tiles in self.layers.values() for pair in tiles for x in pair)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, writes: Sequence[Write]) -> None:
        """Put k [T, heads, D] and v [T, heads, Dv] where the plan says."""
        for w in writes:
            tiles = self._tile(layer, w.tile, w.num_rows, k, v)
            if (layer, w.tile) not in self._places:
                self._places[layer, w.tile] = tiles[0].view(-1, k.shape[2]), tiles[1].view(-1, v.shape[2])
            index = (w.index(k.shape[1]),)
            for places, x in zip(self._places[layer, w.tile], (k, v), strict=True):
                x = x if w.source is None else x.index_select(0, w.source)
                places.index_put_(index, x.to(places.dtype))

    def read(self, layer: int, tile: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The leading rows of a tile as matrix products take them: keys [num_rows * heads, D, W], values
        [num_rows * heads, W, Dv]."""
        known = self._reads.get((layer, tile))
        if known is None or known[0] != num_rows:
            keys, values = self.layers[layer][tile]
            known = num_rows, keys[:num_rows].flatten(0, 1).transpose(1, 2), values[:num_rows].flatten(0, 1)
            self._reads[layer, tile] = known
        return known[1], known[2]

    def copy_rows(self, other: KVStore, pairs: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """Copy rows of another store; pairs: (row here, row there, length)."""
        for t, start in enumerate(STARTS):
            pairs = [pair for pair in pairs if pair[2] > start]
            if not pairs:
                return
            here, there, _ = (torch.tensor(side, device=device) for side in zip(*pairs, strict=True))
            for layer, tiles in other.layers.items():
                mine = self._tile(
                    layer, t, max(pair[0] for pair in pairs) + 1, *(x[0].transpose(0, 1) for x in tiles[t])
                )
                for to, source in zip(mine, tiles[t], strict=True):
                    to.index_copy_(0, here, source.index_select(0, there))

    def move(self, order: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """Row order[i] becomes row i. lengths: of the rows in their old places."""
        moves = [(new, old) for new, old in enumerate(order) if new != old]
        for tile, start in enumerate(STARTS):
            moves = [(new, old) for new, old in moves if lengths[old] > start]
            if not moves:
                return
            to, source = (torch.tensor(side, device=device) for side in zip(*moves, strict=True))
            for tiles in self.layers.values():
                for x in tiles[tile]:
                    x.index_copy_(0, to, x.index_select(0, source))

    def clear(self) -> None:
        """Give the memory back."""
        self.layers = {}
        self._reads.clear()
        self._places.clear()

    def _tile(
        self, layer: int, index: int, num_rows: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A tile with room for num_rows; k [T, heads, D] and v [T, heads, Dv] say of what."""
        tiles = self.layers.setdefault(layer, [])
        while len(tiles) <= index:
            width = int(STARTS[len(tiles) + 1] - STARTS[len(tiles)])
            tiles.append((_empty(k, width), _empty(v, width)))
        if tiles[index][0].shape[0] < num_rows:
            tiles[index] = (_grown(tiles[index][0], num_rows), _grown(tiles[index][1], num_rows))
            self._reads.pop((layer, index), None)
            self._places.pop((layer, index), None)
        return tiles[index]


def _empty(like: torch.Tensor, width: int) -> torch.Tensor:
    wide = like.device.type == "cpu" and like.dtype.itemsize < 4
    dtype = torch.float32 if wide else like.dtype
    return like.new_empty((0, like.shape[-2], width, like.shape[-1]), dtype=dtype)


def _grown(tile: torch.Tensor, num_rows: int) -> torch.Tensor:
    grown = tile.new_zeros((max(8, 1 << (num_rows - 1).bit_length()), *tile.shape[1:]))  # 0 * NaN would be NaN
    grown[: tile.shape[0]] = tile
    return grown

"""The KV cache of running sequences, in tiles: memory that decode attention reads contiguously.

A store has rows (one for each sequence) and positions (tokens of a row). Tile t of a layer
has positions [STARTS[t], STARTS[t + 1]) of the leading rows, as K [R, heads, W, D] and V [R, heads, W, Dv]. So
`tile[:n]` is contiguous, and a batched matrix product over it reads only these rows. On CPUs that is twice as fast as
views into rows of full capacity, and growing copies nothing. Short rows cost less than long ones if the long rows come
first: `arrange` sorts them when needed. A row also has the states of layers such as linear attention, whatever its
length.

On a CPU, keys are in the memory order [R, heads, D, W]: a product with few queries reads them 1.5 times as fast,
because the library copies them to that order otherwise.

On a CPU, 16-bit keys and values are stored in fp32, which rounds nothing: products in bf16 take twice as long for a few
rows, and are not faster for many.

Letters: R rows that a tile has room for, W positions of a tile, D head size, N tokens to write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch

from meshrl.core.device import free_bytes, upload
from meshrl.core.errors import RequestError
from meshrl.core.types import Request
from meshrl.plan.decisions import CACHE_SHARE
from meshrl.plan.sizes import FIRST_WIDTH, STARTS, rows_with_memory
from meshrl.rollout.embedded.decode_graph import StepArrays

CHUNK = FIRST_WIDTH  # positions that are in one tile: every tile begins at a multiple of it
MAX_WASTE = 1.25  # rows are sorted when the tiles to be read are larger than the rows by this factor


Tiles = list[tuple[torch.Tensor, torch.Tensor]]  # of one layer: keys and values
RowCopy = tuple[int, int, int]  # new row, old row, its length


@dataclass(frozen=True, slots=True)
class Write:
    """Tokens to write into one tile: k[source] -> tile[row, :, position]; source None = all tokens, in order."""

    tile: int
    num_rows: int  # rows for which the tile needs room
    rows: Callable[[], torch.Tensor]  # int64[N, 1]
    positions: Callable[[], torch.Tensor]  # int64[N, 1], within the tile
    source: Callable[[], torch.Tensor] | None  # int64[N]
    _index: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def index(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each int64[N, heads]: index of each token in the tile, seen as [R * heads, W, D]; the same for all layers."""
        if heads not in self._index:
            rows = self.rows()
            head = torch.arange(heads, device=rows.device)
            self._index[heads] = rows * heads + head, self.positions().expand(-1, heads)
        return self._index[heads]


def plan_writes(
    rows: np.ndarray, positions: np.ndarray, arrays: StepArrays, source: np.ndarray | None = None
) -> list[Write]:
    """Write token i (or token source[i]) to (rows[i], positions[i]). Made once per step, for all layers."""
    tiles = np.searchsorted(STARTS, positions, side="right") - 1
    used = np.flatnonzero(np.bincount(tiles))
    writes = []
    for tile in used:
        pick = np.flatnonzero(tiles == tile)
        src = pick if source is None else source[pick]
        all_in_order = source is None and len(used) == 1
        writes.append(
            Write(
                int(tile),
                int(rows[pick].max()) + 1,
                arrays.add(rows[pick, None]),
                arrays.add(positions[pick, None] - STARTS[tile]),
                None if all_in_order else arrays.add(src),
            )
        )
    return writes


def rows_of_tiles(lengths: np.ndarray) -> list[int]:
    """How many leading rows of each tile must be read, for rows of these lengths in this order."""
    if len(lengths) == 0:
        return []
    reach = np.maximum.accumulate(lengths[::-1])  # longest of this row and all later ones
    num_tiles = int(np.searchsorted(STARTS, reach[-1], side="left"))
    return [int(np.count_nonzero(reach > start)) for start in STARTS[:num_tiles]]


def arrange(lengths: Sequence[int], gone: Collection[int], sort: bool = True) -> list[int]:
    """New order of rows (old index of each new row) without the rows in `gone`.

    Rows from the end fill the gaps, which moves the fewest rows. If the tiles are then larger than needed by MAX_WASTE,
    rows are sorted, long ones first: all rows grow at the same speed, so they stay sorted until one joins or leaves.
    sort: False for kernels, which read the tokens of each row alone.
    """
    num_left = len(lengths) - len(gone)
    order = list(range(num_left))
    movers = iter([row for row in range(num_left, len(lengths)) if row not in gone])
    for hole in sorted(row for row in gone if row < num_left):
        order[hole] = next(movers)
    after = np.array([lengths[row] for row in order], dtype=np.int64)
    read = sum(rows * int(STARTS[t + 1] - STARTS[t]) for t, rows in enumerate(rows_of_tiles(after)))
    needed = int(STARTS[np.searchsorted(STARTS, after, side="left")].sum())
    if sort and read > MAX_WASTE * needed:
        order.sort(key=lambda row: -lengths[row])
    return order


class KVStore:
    """The tiles of all layers. Layers and their head sizes are taken from the first keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, Tiles] = {}
        self.states: dict[int, dict[str, torch.Tensor]] = {}  # of a layer, by name: [R, ...]
        # Views of the tiles by (layer, tile), made once rather than for every token: for reading, with their number of
        # rows and positions, and for writing. They are dropped together with their tile.
        self._reads: dict[tuple[int, int], tuple[tuple[int, int], torch.Tensor, torch.Tensor]] = {}
        self._writable: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_changes = 0  # of the tiles' addresses

    @property
    def rooms(self) -> list[int]:
        """The rows that each tile has room for, in every layer."""
        return [keys.shape[0] for keys, _ in next(iter(self.layers.values()), [])]

    @property
    def token_bytes(self) -> int:
        """Bytes of a position in all layers; 0 before the first write."""
        return sum(x.nbytes // (len(x) * x.shape[2]) for tiles in self.layers.values() for x in tiles[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's states in all layers."""
        return sum(x[0].nbytes for states in self.states.values() for x in states.values())

    def bytes_with(self, num_rows: int, length: int, token_bytes: int, row_bytes: int) -> int:
        """Bytes of the store when it has held num_rows rows of this length, with the memory that it has already."""
        allocated = max((len(x) for states in self.states.values() for x in states.values()), default=0)
        states = max(rows_with_memory(num_rows) if num_rows else 0, allocated)
        return positions_of(num_rows, length, self.rooms) * token_bytes + states * row_bytes

    @property
    def num_bytes(self) -> int:
        tiles = sum(x.nbytes for tiles in self.layers.values() for pair in tiles for x in pair)
        return tiles + sum(x.nbytes for states in self.states.values() for x in states.values())

    def reserve(self, rows_of_tiles: Sequence[int], like: KVStore | None = None) -> None:
        """Make room for these rows of each tile in the layers that have tiles, so that none is allocated while the
        model computes: a decode step is then one graph. like: a store that has the layers already."""
        rooms = self.rooms
        missing = [(t, rows) for t, rows in enumerate(rows_of_tiles) if t >= len(rooms) or rooms[t] < rows]
        for layer, tiles in (like or self).layers.items() if missing else ():
            for tile, rows in missing:
                self._tile(layer, tile, rows, *(x[0].transpose(0, 1) for x in tiles[0]))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, writes: Sequence[Write]) -> None:
        """Write k [T, heads, D] and v [T, heads, Dv] to the tiles, as `plan_writes` decided."""
        for w in writes:
            tiles = self._tile(layer, w.tile, w.num_rows, k, v)
            if (layer, w.tile) not in self._writable:
                self._writable[layer, w.tile] = tiles[0].flatten(0, 1), tiles[1].flatten(0, 1)
            index = w.index(k.shape[1])
            for target, x in zip(self._writable[layer, w.tile], (k, v), strict=True):
                x = x if w.source is None else x.index_select(0, w.source())
                target.index_put_(index, x.to(target.dtype))

    def read(self, layer: int, tile: int, num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The leading rows and positions of a tile in the shapes for matrix products: keys [num_rows * heads, D,
        width], values [num_rows * heads, width, Dv]."""
        cached, size = self._reads.get((layer, tile)), (num_rows, width)
        if cached is None or cached[0] != size:
            keys, values = (x[:num_rows].flatten(0, 1)[:, :width] for x in self.layers[layer][tile])
            cached = self._reads[layer, tile] = size, keys.transpose(1, 2), values
        return cached[1], cached[2]

    def keys_of_row(self, layer: int, row: int, length: int) -> torch.Tensor:
        """The keys of a row's first tokens, [length, heads, D]."""
        tiles = [keys[row] for keys, _ in self.layers[layer] if keys.shape[0] > row]
        return torch.cat(tiles, dim=1)[:, :length].transpose(0, 1)

    def write_states(self, layer: int, row: int, states: Mapping[str, torch.Tensor]) -> None:
        """Of one row, without the dim of rows."""
        for name, state in states.items():
            self._state(layer, name, row + 1, state)[row] = state

    def read_states(self, layer: int, num_rows: int) -> dict[str, torch.Tensor]:
        """Of the leading rows: views, through which they are updated."""
        return {name: states[:num_rows] for name, states in self.states[layer].items()}

    def copy_rows(self, source: KVStore, copies: Sequence[RowCopy], device: torch.device) -> None:
        """Copy rows of `source`, all at once, so that rows of this store may move."""
        self.copy_states(source, copies)
        for t, start in enumerate(STARTS):
            copies = [copy for copy in copies if copy[2] > start]
            if not copies:
                return
            new, old, _ = (torch.tensor(side, device=device) for side in zip(*copies, strict=True))
            num_rows = max(copy[0] for copy in copies) + 1
            for layer, tiles in source.layers.items():
                targets = self._tile(layer, t, num_rows, *(x[0].transpose(0, 1) for x in tiles[t]))
                for x, taken in zip(targets, tiles[t], strict=True):
                    _in_memory(x).index_copy_(0, new, _in_memory(taken).index_select(0, old))

    def copy_states(self, source: KVStore, copies: Sequence[RowCopy]) -> None:
        """As copy_rows, without keys and values."""
        new_rows, old_rows = [copy[0] for copy in copies], [copy[1] for copy in copies]
        for layer, of_layer in source.states.items() if copies else ():
            for name, taken in of_layer.items():
                target = self._state(layer, name, max(new_rows) + 1, taken[0])
                target[new_rows] = taken[old_rows]

    def clear(self) -> None:
        """Free the memory."""
        self.layers, self.states = {}, {}
        self.num_changes += 1
        self._reads.clear()
        self._writable.clear()

    def _state(self, layer: int, name: str, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """The states of a layer with room for num_rows."""
        states = self.states.setdefault(layer, {})
        if name not in states or len(states[name]) < num_rows:
            states[name] = _grown(states.get(name, like.new_empty((0, *like.shape))), num_rows)
        return states[name]

    def _tile(
        self, layer: int, index: int, num_rows: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A tile with room for num_rows; heads, head sizes and dtypes are taken from k [T, heads, D] and
        v [T, heads, Dv]."""
        tiles = self.layers.setdefault(layer, [])
        while len(tiles) <= index:
            width = int(STARTS[len(tiles) + 1] - STARTS[len(tiles)])
            tiles.append(_empty_tile(k, v, width))
        if tiles[index][0].shape[0] < num_rows:
            tiles[index] = (_grown(tiles[index][0], num_rows), _grown(tiles[index][1], num_rows))
            self._reads.pop((layer, index), None)
            self._writable.pop((layer, index), None)
            self.num_changes += 1
        return tiles[index]


class TileTable:
    """Where the chunks of a store are in the device's memory, for kernels: the tensors keep their own addresses while
    the tiles change. max_tokens: positions of the longest row."""

    def __init__(self, store: KVStore, max_tokens: int, device: torch.device):
        self.store, self._seen = store, -1
        self._starts = STARTS[: 1 + int(np.searchsorted(STARTS, max_tokens))]
        self._device, self._num_chunks = device, int(self._starts[-1]) // CHUNK
        self.tables = torch.empty(0, dtype=torch.int64)  # of all layers [L, 2, C], in their order in the store
        self.widths = torch.empty(0, dtype=torch.int64)  # of the tile of each chunk
        self._index: dict[int, int] = {}

    def bases(self, layer: int) -> torch.Tensor:
        """int64[2, C]: addresses of the keys and values of each chunk in its tile's first row and head."""
        return self.tables[self._index[layer]]

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Key heads and head size of the layers."""
        return {(tiles[0][0].shape[1], tiles[0][0].shape[3]) for tiles in self.store.layers.values()}

    def update(self) -> None:
        """To be called before a step."""
        if self._seen == self.store.num_changes:
            return
        self._seen = self.store.num_changes
        tables = np.zeros((len(self.store.layers), 2, self._num_chunks), np.int64)
        for table, tiles in zip(tables, self.store.layers.values(), strict=True):
            for pair, start, end in zip(tiles, self._starts, self._starts[1:], strict=False):
                chunks = np.arange(start // CHUNK, end // CHUNK)
                for side, x in enumerate(pair):
                    table[side, chunks] = x.data_ptr() + (chunks * CHUNK - start) * x.shape[3] * x.itemsize
        (sent,) = upload([torch.from_numpy(tables)], self._device)
        if self.tables.shape != sent.shape:
            widths = np.repeat(np.diff(self._starts), np.diff(self._starts) // CHUNK)
            self.widths = torch.from_numpy(widths).to(self._device)
            self.tables = torch.empty_like(sent)
        self._index = {layer: i for i, layer in enumerate(self.store.layers)}
        self.tables.copy_(sent)


def _empty_tile(k: torch.Tensor, v: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tile without rows."""
    dtype, transposed = tile_format(k.device, k.dtype)
    shape = (k.shape[-1], width) if transposed else (width, k.shape[-1])
    keys = k.new_empty((0, k.shape[-2], *shape), dtype=dtype)
    values = v.new_empty((0, v.shape[-2], width, v.shape[-1]), dtype=dtype)
    return keys.transpose(2, 3) if transposed else keys, values


def _in_memory(tile: torch.Tensor) -> torch.Tensor:
    """The view of a tile in its memory order."""
    return tile if tile.stride(-1) == 1 else tile.transpose(2, 3)


def tile_format(device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """The dtype in which keys and values of `dtype` are stored, and whether keys are in the order [R, heads, D, W] in
    memory. Kernels read the order [R, heads, W, D] alone."""
    if device.type == "cpu":
        return torch.promote_types(dtype, torch.float32), True
    return dtype, False


def _grown(tile: torch.Tensor, num_rows: int) -> torch.Tensor:
    stored = _in_memory(tile)
    grown = stored.new_zeros((rows_with_memory(num_rows), *stored.shape[1:]))  # 0 * NaN would be NaN
    grown[: len(stored)] = stored
    return grown if stored is tile else grown.transpose(2, 3)


def positions_of(num_rows: int, length: int, rooms: Sequence[int] = ()) -> int:
    """Positions for which a store has memory when it holds num_rows rows of at most this length in any order. rooms: of
    the tiles that it has already."""
    num_tiles = int(np.searchsorted(STARTS, length)) if num_rows else 0
    needed = [rows_with_memory(num_rows) if num_rows else 0] * num_tiles
    return sum(
        max(pair) * int(STARTS[tile + 1] - STARTS[tile])
        for tile, pair in enumerate(zip_longest(needed, rooms, fillvalue=0))
    )


class CacheBound:
    """num_bytes: rollout.embedded.kv_cache_bytes; None = CACHE_SHARE of a device's free memory, measured while the
    stores are empty, and no limit on a CPU. token_bytes: keys and values of a token in all layers, by the model's
    config; None = unknown, then the first row runs alone. What the stores have counts from then on, with the states of
    a row."""

    def __init__(
        self, num_bytes: int | None, token_bytes: int | None, device: torch.device, running: KVStore, prompts: KVStore
    ):
        self._num_bytes, self._device = num_bytes, device
        self._token_bytes, self._row_bytes = token_bytes, 0
        self._running, self._prompts = running, prompts
        self.measured: int | None = None
        self._is_to_measure = num_bytes is None

    @property
    def num_bytes(self) -> int | None:
        """The limit; None = none."""
        if self._is_to_measure and (free := free_bytes(self._device)) is not None:
            self.measured, self._is_to_measure = int(CACHE_SHARE * free), False
        return self.measured if self._num_bytes is None else self._num_bytes

    def fits(self, num_rows: int, longest: int, num_prompts: int, longest_prompt: int) -> bool:
        """Whether the stores may have this many rows of these lengths. The tiles that they have count, too: tiles don't
        get smaller."""
        limit = self.num_bytes
        if limit is None:
            return True
        token, row = self._sizes()
        if token is None:
            return num_rows == 1 and num_prompts == 0
        prompts = self._prompts.bytes_with(num_prompts, longest_prompt, token, row)
        return self._running.bytes_with(num_rows, longest, token, row) + prompts <= limit

    def require(self, request: Request, length: int) -> None:
        """length: of the request's row at most."""
        limit, (token, row) = self.num_bytes, self._sizes()
        needed = positions_of(1, length) * (token or 0) + row
        if limit is not None and needed > limit:
            origin = f"{CACHE_SHARE:.0%} of the device's free memory" if self._num_bytes is None else self._num_bytes
            raise RequestError(
                f"request {request.id} can never fit: the keys, values and states of its {length} tokens need "
                f"{needed:,} bytes, and {limit:,} bytes are available (rollout.embedded.kv_cache_bytes: {origin}). "
                "Raise that key if the device has the memory, or lower rollout.sampling.max_new_tokens"
            )

    def _sizes(self) -> tuple[int | None, int]:
        """Bytes of a token's keys and values, and of a row's states."""
        if self._running.layers or self._running.states:
            self._token_bytes, self._row_bytes = self._running.token_bytes, self._running.row_bytes
        return self._token_bytes, self._row_bytes

    def clear(self) -> None:
        """Free the memory of both stores."""
        self._running.clear()
        self._prompts.clear()
        self._is_to_measure = self._num_bytes is None

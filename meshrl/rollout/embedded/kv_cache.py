"""The memory of the KV cache: pages of keys and values, which `pages.PageTable` gives to rows, and states of rows.

A layer has keys [P, heads, W, D] and values [P, heads, W, Dv] of P pages; a batched matrix product over neighbouring
pages reads them as they are. The states of layers such as linear attention are by the row of the batch.

On a CPU, keys are in the memory order [P, heads, D, W]: a product with few queries reads them 1.5 times as fast,
because the library copies them to that order otherwise. There, 16-bit keys and values are stored in fp32, which rounds
nothing: products in bf16 take twice as long for a few rows, and are not faster for many.

Letters: P pages, W tokens of a page, D head size, N tokens to write, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from meshrl.core.device import free_bytes, upload
from meshrl.core.errors import RequestError
from meshrl.core.types import Request
from meshrl.plan.decisions import CACHE_SHARE
from meshrl.plan.sizes import pages_with_memory
from meshrl.rollout.embedded.pages import PageTable

RowCopy = tuple[int, int]  # new row, old row
Pair = tuple[torch.Tensor, torch.Tensor]  # of one layer: keys and values


class Places:
    """Where N tokens are. arrays: returns int64[2, N], the page of each token and its place in it."""

    def __init__(self, arrays: Callable[[], torch.Tensor]):
        self._arrays = arrays
        self._index: dict[int, Pair] = {}

    def index(self, heads: int) -> Pair:
        """Each int64[N, heads]: of each token in the pages, seen as [P * heads, W, D]; the same for all layers."""
        if heads not in self._index:
            pages, places = self._arrays()[:, :, None]
            index = pages * heads + torch.arange(heads, device=pages.device)
            self._index[heads] = index, places.expand(-1, heads)
        return self._index[heads]


class KVPool:
    """The pages of all layers. Layers and their head sizes are taken from the first keys and values. page_tokens: W.
    num_pages: returns the pages that must exist."""

    def __init__(self, page_tokens: int, num_pages: Callable[[], int]):
        self.page_tokens, self._num_pages = page_tokens, num_pages
        self.layers: dict[int, Pair] = {}
        self.states: dict[int, dict[str, torch.Tensor]] = {}  # of a layer, by name: [R, ...]
        self._flat: dict[int, Pair] = {}  # views [P * heads, W, D] of a layer, made once rather than for every token
        self._reads: dict[tuple[int, int, int], Pair] = {}  # views of neighbouring pages
        self.num_changes = 0  # of addresses

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers; 0 before the first write."""
        return sum(x[0].nbytes // self.page_tokens for pair in self.layers.values() for x in pair)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's states in all layers."""
        return sum(x[0].nbytes for states in self.states.values() for x in states.values())

    @property
    def num_state_rows(self) -> int:
        """Rows for whose states there is memory."""
        return max((len(x) for states in self.states.values() for x in states.values()), default=0)

    @property
    def num_bytes(self) -> int:
        pages = sum(x.nbytes for pair in self.layers.values() for x in pair)
        return pages + sum(x.nbytes for states in self.states.values() for x in states.values())

    def reserve(self) -> None:
        """Make room for all pages in the layers that exist, so that none is allocated while the model computes: a
        decode step is then one graph. One layer is copied at a time."""
        for layer, pair in self.layers.items():
            if len(pair[0]) < self._num_pages():
                self._flat.pop(layer, None)
                self._reads.clear()
                self.num_changes += 1
                self.layers[layer] = _grown(pair[0], self._num_pages()), _grown(pair[1], self._num_pages())

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, places: Places) -> None:
        """k [N, heads, D] and v [N, heads, Dv]."""
        if layer not in self.layers:
            self.layers[layer] = _empty_pages(k, v, self._num_pages(), self.page_tokens)
            self.num_changes += 1
        index = places.index(k.shape[1])
        for target, x in zip(self._flattened(layer), (k, v), strict=True):
            target.index_put_(index, x.to(target.dtype))

    def gather(self, layer: int, places: Places) -> Pair:
        """The keys [N, heads, D] and values [N, heads, Dv] of N tokens."""
        index = places.index(self.layers[layer][0].shape[1])
        keys, values = self._flattened(layer)
        return keys[index], values[index]

    def read(self, layer: int, first: int, num: int) -> Pair:
        """Neighbouring pages in the shapes for matrix products: keys [num * heads, D, W], values [num * heads, W,
        Dv]."""
        if (layer, first, num) not in self._reads:
            keys, values = (x[first : first + num].flatten(0, 1) for x in self.layers[layer])
            self._reads[layer, first, num] = keys.transpose(1, 2), values
        return self._reads[layer, first, num]

    def copy_pages(self, copies: np.ndarray) -> None:
        """int64[2, N]: new and old pages, in all layers."""
        new, old = (torch.from_numpy(side) for side in copies)
        for pair in self.layers.values():
            for x in pair:
                stored = _in_memory(x)
                stored.index_copy_(0, new, stored.index_select(0, old))

    def forget_reads(self) -> None:
        """Drop the views of `read`, when other pages are neighbours."""
        self._reads.clear()

    def write_states(self, layer: int, row: int, states: Mapping[str, torch.Tensor]) -> None:
        """Of one row, without the dim of rows."""
        for name, state in states.items():
            self._state(layer, name, row + 1, state)[row] = state

    def read_states(self, layer: int, num_rows: int) -> dict[str, torch.Tensor]:
        """Of the leading rows: views, through which they are updated."""
        return {name: states[:num_rows] for name, states in self.states[layer].items()}

    def copy_states(self, source: KVPool, copies: Sequence[RowCopy]) -> None:
        """All at once, so that rows of this pool may move."""
        new_rows, old_rows = [copy[0] for copy in copies], [copy[1] for copy in copies]
        for layer, of_layer in source.states.items() if copies else ():
            for name, taken in of_layer.items():
                target = self._state(layer, name, max(new_rows) + 1, taken[0])
                target[new_rows] = taken[old_rows]

    def clear(self) -> None:
        """Free the memory."""
        self.layers, self.states = {}, {}
        self.num_changes += 1
        self._flat.clear()
        self._reads.clear()

    def _flattened(self, layer: int) -> Pair:
        if layer not in self._flat:
            keys, values = self.layers[layer]
            self._flat[layer] = keys.flatten(0, 1), values.flatten(0, 1)
        return self._flat[layer]

    def _state(self, layer: int, name: str, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """The states of a layer with room for num_rows."""
        states = self.states.setdefault(layer, {})
        if name not in states or len(states[name]) < num_rows:
            states[name] = _grown(states.get(name, like.new_empty((0, *like.shape))), pages_with_memory(num_rows))
        return states[name]


def _empty_pages(k: torch.Tensor, v: torch.Tensor, num_pages: int, width: int) -> Pair:
    """Zeros, because 0 * NaN would be NaN."""
    dtype, transposed = cache_format(k.device, k.dtype)
    shape = (k.shape[-1], width) if transposed else (width, k.shape[-1])
    keys = k.new_zeros((num_pages, k.shape[-2], *shape), dtype=dtype)
    values = v.new_zeros((num_pages, v.shape[-2], width, v.shape[-1]), dtype=dtype)
    return keys.transpose(2, 3) if transposed else keys, values


def cache_format(device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """The dtype in which keys and values of `dtype` are stored, and whether keys are in the order [P, heads, D, W] in
    memory. Kernels read the order [P, heads, W, D] alone."""
    if device.type == "cpu":
        return torch.promote_types(dtype, torch.float32), True
    return dtype, False


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    """A view of keys or values in their memory order."""
    return x.transpose(2, 3) if x.dim() == 4 and x.stride(-1) != 1 else x


def _grown(x: torch.Tensor, size: int) -> torch.Tensor:
    """With zeros up to this size of the first dim."""
    stored = _in_memory(x)
    grown = stored.new_zeros((size, *stored.shape[1:]))
    grown[: len(stored)] = stored
    return grown if stored is x else grown.transpose(2, 3)


class AddressTable:
    """Where the pages of each layer are in the device's memory, and which pages each row reads, for kernels: the
    tensors keep their own addresses while pages move and rows change, as long as the number of slots is the same."""

    def __init__(self, pool: KVPool, table: PageTable, device: torch.device):
        self.pool, self._table, self._device, self._seen = pool, table, device, -1
        self._bases = torch.empty(0, dtype=torch.int64)  # int64[L, 2], of the layers in their order in the pool
        self._index: dict[int, int] = {}
        # int32[slots, 1 + C + C + 1]: of each row the number of its pages, the pages, and their first positions
        self.rows = torch.empty(0, dtype=torch.int32)

    @property
    def pointers(self) -> tuple[int, int]:
        """Addresses of the tensors, which a recorded graph reads."""
        return self._bases.data_ptr(), self.rows.data_ptr()

    def bases(self, layer: int) -> torch.Tensor:
        """int64[2]: addresses of the layer's keys and values."""
        return self._bases[self._index[layer]]

    def update(self, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        """To be called before a step; sends these arrays, too."""
        table, moved = self._table, self._seen != self.pool.num_changes
        if not (arrays or moved or table.changed):
            return []
        addresses = [[x.data_ptr() for x in pair] for pair in self.pool.layers.values()] if moved else []
        if moved:
            self._seen = self.pool.num_changes
            self._index = {layer: i for i, layer in enumerate(self.pool.layers)}
        if (missing := len(table.counts) - len(self.rows)) > 0:
            more = torch.zeros((missing, 2 * table.num_columns + 2), dtype=torch.int32, device=self._device)
            self.rows = more if not len(self.rows) else torch.cat([self.rows, more])
        changed = np.array(sorted(table.changed), np.int64)
        table.changed.clear()
        of_rows = [table.counts[changed, None].astype(np.int32), table.pages[changed], table.starts[changed]]
        own = [np.array(addresses, np.int64).reshape(-1, 2), changed, np.concatenate(of_rows, axis=1)]
        *sent, bases, slots, rows = upload([*arrays, *map(torch.from_numpy, own)], self._device)
        if len(bases):
            self._bases = self._bases if self._bases.shape == bases.shape else torch.empty_like(bases)
            self._bases.copy_(bases)
        if len(slots):
            self.rows.index_copy_(0, slots, rows)
        return sent


class CacheBound:
    """num_bytes: rollout.embedded.kv_cache_bytes; None = CACHE_SHARE of a device's free memory, measured while the
    pool is empty, and no limit on a CPU. token_bytes: keys and values of a token in all layers, by the model's config;
    None = unknown, then the first row runs alone. What the pool has counts from then on, with the states of a row.
    snapshots: states of contexts that rows share."""

    def __init__(
        self, num_bytes: int | None, token_bytes: int | None, device: torch.device, pool: KVPool, snapshots: KVPool
    ):
        self._num_bytes, self._device = num_bytes, device
        self._token_bytes, self._row_bytes = token_bytes, 0
        self._pool, self._snapshots = pool, snapshots
        self.measured: int | None = None
        self._is_to_measure = num_bytes is None

    @property
    def num_bytes(self) -> int | None:
        """The limit; None = none."""
        if self._is_to_measure and (free := free_bytes(self._device)) is not None:
            self.measured, self._is_to_measure = int(CACHE_SHARE * free), False
        return self.measured if self._num_bytes is None else self._num_bytes

    def max_pages(self, num_rows: int = 0, num_snapshots: int = 0) -> int | None:
        """Pages that may exist while there are states of so many rows; None = no limit."""
        limit, (token, row) = self.num_bytes, self._sizes()
        if limit is None:
            return None
        room = self._room(limit, row, num_rows, num_snapshots)
        if not token:  # unknown, or the model has states alone
            return None if (num_rows <= 1 if token is None else room >= 0) else 0
        return max(0, room) // (token * self._pool.page_tokens)

    def _room(self, limit: int, row: int, num_rows: int, num_snapshots: int) -> int:
        """Bytes for pages. The memory that states have counts, too: it does not get smaller."""
        pairs = ((self._pool, num_rows), (self._snapshots, num_snapshots))
        rows = sum(max(pages_with_memory(num) if num else 0, pool.num_state_rows) for pool, num in pairs)
        return limit - rows * row

    def require(self, request: Request, length: int) -> None:
        """length: of the request's row at most."""
        limit, (token, row) = self.num_bytes, self._sizes()
        width = self._pool.page_tokens
        needed = -(-length // width) * width * (token or 0) + row
        if limit is not None and needed > limit:
            origin = f"{CACHE_SHARE:.0%} of the device's free memory" if self._num_bytes is None else self._num_bytes
            raise RequestError(
                f"request {request.id} can never fit: the keys, values and states of its {length} tokens need "
                f"{needed:,} bytes, and {limit:,} bytes are available (rollout.embedded.kv_cache_bytes: {origin}). "
                "Raise that key if the device has the memory, or lower rollout.sampling.max_new_tokens"
            )

    def _sizes(self) -> tuple[int | None, int]:
        """Bytes of a token's keys and values, and of a row's states."""
        if self._pool.layers or self._pool.states:
            self._token_bytes, self._row_bytes = self._pool.token_bytes, self._pool.row_bytes
        return self._token_bytes, self._row_bytes

    def clear(self) -> None:
        """Free the memory."""
        self._pool.clear()
        self._snapshots.clear()
        self._is_to_measure = self._num_bytes is None

"""Attention of one engine step: causal attention inside the new contexts, and one new token of each running row over
its KV cache.

Letters: T tokens of the step, N running rows, H query heads, K key/value heads, D head size, C columns of scores
(the positions of all tiles that are read), W positions of a tile that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from meshrl.model.attention import AttentionSpec, Outs, PackedAttention, StateCompute
from meshrl.model.attention_kernels import probabilities, visible, wide_product
from meshrl.model.state_layers import StateCache
from meshrl.rollout.embedded.decode_graph import StepArrays
from meshrl.rollout.embedded.kv_cache import STARTS, KVStore, TileTable, Write, plan_writes, rows_of_tiles

COLUMNS = 16  # the last tile is read up to a multiple of this many positions


class PrefillAttention(PackedAttention):
    """Packed causal attention that also writes its keys and values, and the states after each context, to the stores.
    rows: of the stores, one for each context."""

    def __init__(
        self,
        cu_seqlens: list[int],
        device: torch.device,
        writes: Sequence[tuple[KVStore, list[Write]]],
        rows: Sequence[tuple[KVStore, int]],
    ):
        super().__init__(cu_seqlens, device)
        self.writes, self.rows = writes, rows
        self.kernels_fit = True  # all layers so far

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.write(layer, k, v)
        self.kernels_fit &= fit_kernels(q, v, spec)
        return super().attend(layer, q, k, v, spec)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for store, writes in self.writes:
            store.write(layer, k, v, writes)

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        """Contexts of equal length at once: padding would change the states after them."""
        contexts = x.split(self.lengths)
        results: dict[int, list[torch.Tensor | None]] = {}
        for length in set(self.lengths):
            members = [i for i, n in enumerate(self.lengths) if n == length]
            cache = StateCache(layer)
            outs = compute(torch.stack([contexts[i] for i in members]), cache)
            for at, i in enumerate(members):
                results[i] = [out if out is None else out[at] for out in outs]
                store, row = self.rows[i]
                store.write_states(layer, row, {name: state[at] for name, state in cache.states.items()})
        in_order = zip(*(results[i] for i in range(len(contexts))), strict=True)
        return [None if any(x is None for x in of_all) else torch.cat(of_all) for of_all in in_order]


class DecodeAttention:
    """One new token for each of the N leading rows of a store: its key and value are written, then it attends to all
    positions of its row. lengths int[N]: positions of each row, including the new token.

    Batched matrix products over tiles, the last one as far as the longest row: on CPUs 1.4 (float32) to 6 times
    (bfloat16, a key head for each query head) as fast as SDPA, which is optimized for many queries per row. The dtypes
    are those of PyTorch's fused kernels, with which the trainer scores, on each device: scores, softmax and sums over
    tiles in fp32, and probabilities rounded to the dtype of the model. A device differs only in the dtype of the tiles,
    which rounds nothing, and in how `wide_product` is computed.
    """

    def __init__(self, store: KVStore, lengths: np.ndarray, arrays: StepArrays):
        self.store = store
        end = -(-int(lengths.max()) // COLUMNS) * COLUMNS  # of the columns that are read
        self.tiles = [
            (rows, slice(int(STARTS[t]), min(int(STARTS[t + 1]), end))) for t, rows in enumerate(rows_of_tiles(lengths))
        ]
        self.writes = plan_writes(np.arange(len(lengths)), lengths - 1, arrays)
        store.reserve([rows for rows, _ in self.tiles])
        self._lengths = arrays.add(lengths[:, None])
        self._biases: dict[tuple[int | None, int], list[torch.Tensor]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.write(layer, k, v)
        num_rows, heads, size = q.shape
        kv_heads = k.shape[1]
        tiles = [self.store.read(layer, t, rows, part.stop - part.start) for t, (rows, part) in enumerate(self.tiles)]
        dtype = tiles[0][1].dtype
        q = q.to(dtype).reshape(num_rows * kv_heads, -1, size)  # query heads of one key head share a product
        scores = self._scores(q, [keys for keys, _ in tiles], kv_heads, spec)
        probs = probabilities(scores, spec.sinks, kv_heads).to(v.dtype).to(dtype)
        out = wide_product(probs[:, :, self.tiles[0][1]], tiles[0][1])  # every row has a position in the first tile
        for (_, values), (rows, columns) in zip(tiles[1:], self.tiles[1:], strict=True):
            part = slice(rows * kv_heads)
            out[part] = wide_product(probs[part, :, columns], values, out[part])
        return out.to(v.dtype).view(num_rows, heads, -1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.store.write(layer, k, v, self.writes)

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        """The states are views of the store, which the layer updates in place."""
        outs = compute(x[:, None], StateCache(layer, self.store.read_states(layer, len(x))))
        return [out if out is None else out[:, 0] for out in outs]

    def _scores(self, q: torch.Tensor, tiles: list[torch.Tensor], kv_heads: int, spec: AttentionSpec) -> torch.Tensor:
        """Attention scores [N * K, H / K, C] of each row over the positions of the tiles, in fp32 (fp64 stays), -inf
        where masked."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = []
        for keys, bias in zip(tiles, self._bias(spec.window, kv_heads, wide), strict=True):
            part = q[: keys.shape[0]]
            if spec.softcap is None:
                scores.append(wide_product(part, keys, bias, spec.scale))
            else:
                capped = torch.tanh(wide_product(part, keys).mul_(spec.scale / spec.softcap))
                scores.append(capped.mul_(spec.softcap).add_(bias))
        if spec.slopes is not None:
            slopes = spec.slopes.to(wide).view(kv_heads, -1, 1)
            for i, (rows, columns) in enumerate(self.tiles):
                ahead = torch.arange(columns.start, columns.stop, device=q.device) - self._lengths()[:rows] + 1
                scores[i] = scores[i] + (slopes * ahead[:, None, None]).flatten(0, 1)
        if len(scores) == 1:  # every row has a position in the first tile
            return scores[0]
        joined = scores[0].new_full((*q.shape[:2], self.tiles[-1][1].stop), -torch.inf)
        for part, (_, columns) in zip(scores, self.tiles, strict=True):
            joined[: part.shape[0], :, columns] = part
        return joined

    def _bias(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The mask of each tile [its rows * K, 1, W]: 0 where the new token may attend, -inf elsewhere; made once per
        step and window."""
        if (window, kv_heads) not in self._biases:
            lengths = self._lengths()
            positions = torch.arange(self.tiles[-1][1].stop, device=lengths.device)
            seen = visible(lengths - 1, positions, window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=positions.device).masked_fill_(~seen, -torch.inf)
            bias = bias.expand(-1, kv_heads, -1).reshape(len(bias) * kv_heads, 1, -1)
            self._biases[window, kv_heads] = [bias[: rows * kv_heads, :, columns] for rows, columns in self.tiles]
        return self._biases[window, kv_heads]


class TiledAttention(DecodeAttention):
    """As DecodeAttention, by the kernels of `kernels.py`, for layers that `fit_kernels`. lengths: returns int64[N] on
    the device."""

    def __init__(self, table: TileTable, lengths: Callable[[], torch.Tensor]):
        self.store, self._table, self._lengths = table.store, table, lengths

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        from meshrl.rollout.embedded.kernels import attend  # Triton is not installed everywhere

        table = self._table
        return attend(q, k, v, table.bases(layer), table.widths, self._lengths(), spec.scale, spec.window)


def fit_kernels(q: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernels can compute the decode attention of a layer."""
    size = q.shape[2]
    plain = spec.softcap is None and spec.sinks is None and spec.slopes is None
    return plain and q.dtype.itemsize == 2 and size == v.shape[2] and size in (16, 32, 64, 128, 256)


class StepAttention:
    """The first tokens of the step are contexts to prefill, the others are the new tokens of the running rows."""

    def __init__(self, prefill: PrefillAttention, decode: DecodeAttention):
        self.prefill, self.decode = prefill, decode

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        n = self.prefill.num_tokens
        return torch.cat(
            [
                self.prefill.attend(layer, q[:n], k[:n], v[:n], spec),
                self.decode.attend(layer, q[n:], k[n:], v[n:], spec),
            ]
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        n = self.prefill.num_tokens
        self.prefill.write(layer, k[:n], v[:n])
        self.decode.write(layer, k[n:], v[n:])

    def mix(self, layer: int, x: torch.Tensor, compute: StateCompute) -> Outs:
        n = self.prefill.num_tokens
        halves = zip(self.prefill.mix(layer, x[:n], compute), self.decode.mix(layer, x[n:], compute), strict=True)
        return [None if a is None or b is None else torch.cat([a, b]) for a, b in halves]

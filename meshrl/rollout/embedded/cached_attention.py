"""What one step of the engine means by "the past": whole contexts side by side, then one new token a running row.

Letters: T tokens of the step, N running rows, H query heads, K key/value heads, D head size, C columns of scores
(the places of all tiles that are read), W places of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from meshrl.model.attention import How, PackedAttention, visible
from meshrl.rollout.embedded.kv_cache import STARTS, KVStore, Tiles, Write, plan_writes, rows_of_tiles


class PrefillAttention(PackedAttention):
    """Packed causal attention whose keys and values stay behind in the stores."""

    def __init__(self, cu_seqlens: list[int], device: torch.device, writes: Sequence[tuple[KVStore, list[Write]]]):
        super().__init__(cu_seqlens, device)
        self.writes = writes

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        for store, writes in self.writes:
            store.write(layer, k, v, writes)
        return super().attend(layer, q, k, v, how)


class DecodeAttention:
    """One new token for each of the N leading rows of a store: its key and value are written, then it attends to all
    places of its row. lengths int[N]: places of each row, the new token's included.

    Batched matrix products over whole tiles, softmax in fp32: on CPUs 1.4 (float32) to 6 times (bfloat16, a key head
    for each query head) as fast as SDPA, which is made for many queries a row.
    """

    def __init__(self, store: KVStore, lengths: np.ndarray, device: torch.device):
        self.store = store
        self.tiles = [
            (rows, slice(int(STARTS[t]), int(STARTS[t + 1]))) for t, rows in enumerate(rows_of_tiles(lengths))
        ]
        self.writes = plan_writes(np.arange(len(lengths)), lengths - 1, device)
        self._lengths = torch.from_numpy(lengths).to(device)[:, None]
        self._biases: dict[int | None, torch.Tensor] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        self.store.write(layer, k, v, self.writes)
        num_rows, heads, size = q.shape
        kv_heads = k.shape[1]
        tiles = self.store.layers[layer]
        held = tiles[0][0].dtype
        q = q.to(held).reshape(num_rows * kv_heads, -1, size)  # query heads of one key head share a product
        scores = self._scores(q, tiles, kv_heads).view(num_rows, heads, -1)
        if how.softcap is not None:
            scores = torch.tanh(scores.float() * (how.scale / how.softcap))
        bias = self._bias(how.window, q.dtype)
        scores = torch.add(bias, scores, alpha=how.scale if how.softcap is None else how.softcap)
        probs = torch.softmax(scores, dim=-1).to(held).view(num_rows * kv_heads, heads // kv_heads, -1)
        out = probs.new_zeros(num_rows * kv_heads, heads // kv_heads, v.shape[2])
        for (_, values), (rows, columns) in zip(tiles, self.tiles, strict=False):
            part = slice(rows * kv_heads)
            out[part].baddbmm_(probs[part, :, columns], values[:rows].flatten(0, 1))
        return out.to(v.dtype).view(num_rows, heads, -1)

    def _scores(self, q: torch.Tensor, tiles: Tiles, kv_heads: int) -> torch.Tensor:
        """q.k of every row with every place of the tiles [N * K, H / K, C]; any number where a tile lacks the row."""
        products = [
            torch.bmm(q[: rows * kv_heads], keys[:rows].flatten(0, 1).transpose(1, 2))
            for (keys, _), (rows, _) in zip(tiles, self.tiles, strict=False)
        ]
        if any(len(p) < len(q) for p in products):
            products = [F.pad(p, (0, 0, 0, 0, 0, len(q) - len(p))) for p in products]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def _bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[N, 1, C]: 0 where the new token may look, -inf elsewhere; made once a step for each window."""
        if window not in self._biases:
            places = torch.arange(self.tiles[-1][1].stop, device=self._lengths.device)
            seen = visible(self._lengths - 1, places, window)
            bias = torch.zeros(seen.shape, dtype=torch.promote_types(torch.float32, dtype), device=places.device)
            self._biases[window] = bias.masked_fill_(~seen, -torch.inf)
        return self._biases[window]


class StepAttention:
    """The first tokens of the step are contexts to prefill, the rest are the running rows' new tokens."""

    def __init__(self, prefill: PrefillAttention, decode: DecodeAttention):
        self.prefill, self.decode = prefill, decode

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        n = self.prefill.num_tokens
        return torch.cat(
            [
                self.prefill.attend(layer, q[:n], k[:n], v[:n], how),
                self.decode.attend(layer, q[n:], k[n:], v[n:], how),
            ]
        )

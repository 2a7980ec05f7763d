"""What one step of the engine means by "the past": whole contexts side by side, then one new token a running row.

A running row sees the prompt it shares with its group (stored once, read once a group) and what is its own.

Letters: T tokens of the step, N running rows, P shared prompts, M rows of one prompt, H query heads, K key/value
heads, G = H / K, D head size, C columns of scores (shared places, then own places), W places of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from meshrl.model.attention import How, PackedAttention, visible
from meshrl.rollout.embedded.kv_cache import STARTS, KVStore, Write, plan_writes, rows_of_tiles


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
    """One new token for each of N rows: its key and value are written, then it attends to all places of its row.

    own_lengths int[N]: places of each row in `own`, the new token's included. shared_rows int[N]: its row in
    `shared`, -1 = none; shared_lengths int[P].
    """

    def __init__(
        self,
        own: KVStore,
        own_lengths: np.ndarray,
        shared: KVStore,
        shared_rows: np.ndarray,
        shared_lengths: np.ndarray,
        device: torch.device,
    ):
        num_rows = len(own_lengths)
        self.own, self.shared = own, shared
        self.own_tiles, self.shared_tiles = rows_of_tiles(own_lengths), rows_of_tiles(shared_lengths)
        self.writes = plan_writes(np.arange(num_rows), own_lengths - 1, device)
        self.num_shared_columns = int(STARTS[len(self.shared_tiles)])
        self.num_prompts = len(shared_lengths)
        self.num_members, member = _places_in_groups(shared_rows)
        has = shared_rows >= 0
        self.prompt_of = torch.from_numpy(np.where(has, shared_rows, 0)).to(device)
        self.member_of = torch.from_numpy(member).to(device)
        self._biases: dict[int | None, torch.Tensor] = {}
        prompt_lengths = np.zeros(num_rows, np.int64)
        prompt_lengths[has] = shared_lengths[shared_rows[has]]
        self._own_lengths = torch.from_numpy(own_lengths).to(device)[:, None]
        self._prompt_lengths = torch.from_numpy(prompt_lengths).to(device)[:, None]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        self.own.write(layer, k, v, self.writes)
        num_rows, heads = q.shape[:2]
        q = q.contiguous()
        scores = self._bias(how.window, q.dtype).expand(-1, heads, -1).clone(memory_format=torch.contiguous_format)
        first = self.num_shared_columns
        if first:
            _add(scores[:, :, :first], self._shared_scores(layer, q), how)
        tiles = self.own.layers[layer]
        for t, rows in enumerate(self.own_tiles):
            columns = slice(first + STARTS[t], first + STARTS[t + 1])
            _add(scores[:rows, :, columns], _scores(q[:rows], tiles[t][0][:rows]), how)
        probs = torch.softmax(scores, dim=-1)
        out = probs.new_zeros(num_rows, heads, v.shape[2])
        probs = probs.to(v.dtype)
        for t, rows in enumerate(self.own_tiles):
            columns = slice(first + STARTS[t], first + STARTS[t + 1])
            out[:rows] += _weighted(probs[:rows, :, columns], tiles[t][1][:rows])
        if first:
            out += self._shared_values(layer, probs[:, :, :first], k.shape[1])
        return out.to(v.dtype)

    def _shared_scores(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [N, H, D] against the prompts, one product a prompt for all rows of its group -> [N, H, columns]."""
        tiles = self.shared.layers[layer]
        queries = self._by_prompt(q, tiles[0][0].shape[1])
        found = q.new_zeros(*queries.shape[:3], self.num_shared_columns)
        for t, rows in enumerate(self.shared_tiles):
            found[:rows, :, :, STARTS[t] : STARTS[t + 1]] = queries[:rows] @ tiles[t][0][:rows].transpose(2, 3)
        return self._by_row(found)

    def _shared_values(self, layer: int, probs: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """probs [N, H, columns] -> [N, H, Dv]: the prompts' part of the output, fp32."""
        tiles = self.shared.layers[layer]
        weights = self._by_prompt(probs, kv_heads)
        out = torch.zeros(
            *weights.shape[:3],
            tiles[0][1].shape[3],
            dtype=torch.promote_types(torch.float32, probs.dtype),
            device=probs.device,
        )
        for t, rows in enumerate(self.shared_tiles):
            out[:rows] += weights[:rows, :, :, STARTS[t] : STARTS[t + 1]] @ tiles[t][1][:rows]
        return self._by_row(out)

    def _by_prompt(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[N, H, D] -> [P, K, M * G, D], zeros where a prompt has fewer than M rows."""
        _, heads, size = x.shape
        grouped = x.new_zeros(self.num_prompts, self.num_members, heads, size)
        grouped[self.prompt_of, self.member_of] = x
        split = grouped.view(self.num_prompts, self.num_members, kv_heads, heads // kv_heads, size).transpose(1, 2)
        return split.reshape(self.num_prompts, kv_heads, -1, size)

    def _by_row(self, x: torch.Tensor) -> torch.Tensor:
        """[P, K, M * G, D] -> [N, H, D]"""
        split = x.view(self.num_prompts, x.shape[1], self.num_members, -1, x.shape[3])
        return split[self.prompt_of, :, self.member_of].flatten(1, 2)

    def _bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[N, 1, C]: 0 where the new token may look, -inf elsewhere; made once a step for each window."""
        if window not in self._biases:
            device = self._own_lengths.device
            own = torch.arange(int(STARTS[len(self.own_tiles)]), device=device)
            prompt = torch.arange(self.num_shared_columns, device=device)
            here = self._prompt_lengths + self._own_lengths - 1
            places = torch.cat([prompt.expand(len(here), -1), self._prompt_lengths + own], 1)
            exists = torch.cat([prompt < self._prompt_lengths, own < self._own_lengths], 1)
            seen = visible(here, places, window)[:, 0] & exists
            bias = torch.zeros(seen.shape, dtype=torch.promote_types(torch.float32, dtype), device=device)
            self._biases[window] = bias.masked_fill_(~seen, -torch.inf)[:, None]
        return self._biases[window]


class StepAttention:
    """The first `split` tokens of the step are contexts to prefill, the rest are the running rows' new tokens."""

    def __init__(self, prefill: PrefillAttention, decode: DecodeAttention):
        self.prefill, self.decode, self.split = prefill, decode, prefill.num_tokens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        a = self.split
        return torch.cat(
            [
                self.prefill.attend(layer, q[:a], k[:a], v[:a], how),
                self.decode.attend(layer, q[a:], k[a:], v[a:], how),
            ]
        )


def _places_in_groups(shared_rows: np.ndarray) -> tuple[int, np.ndarray]:
    """M, and each row's place int64[N] among the rows of its prompt. Rows without a prompt all get one extra place
    of prompt 0: their probabilities there are zeros, so what they write there together is zeros too."""
    seen: dict[int, int] = {}
    member = np.zeros(len(shared_rows), np.int64)
    for row, prompt in enumerate(shared_rows.tolist()):
        member[row] = seen.get(prompt, 0)
        seen[prompt] = seen.get(prompt, 0) + (prompt >= 0)
    most = max((count for prompt, count in seen.items() if prompt >= 0), default=0)
    if -1 in seen:
        member[shared_rows < 0] = most
        most += 1
    return most, member


def _scores(q: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """q [R, H, D], tile [R, K, W, D] -> [R, H, W]"""
    rows, heads, size = q.shape
    keys = tile.flatten(0, 1).transpose(1, 2)
    return torch.bmm(q.view(keys.shape[0], -1, size), keys).view(rows, heads, -1)


def _weighted(probs: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """probs [R, H, W], tile [R, K, W, Dv] -> [R, H, Dv]"""
    rows, heads, width = probs.shape
    values = tile.flatten(0, 1)
    return torch.bmm(probs.view(values.shape[0], -1, width), values).view(rows, heads, -1)


def _add(scores: torch.Tensor, products: torch.Tensor, how: How) -> None:
    """Scale (and softcap) q.k products and add them to the bias that `scores` holds, in fp32."""
    if how.softcap is None:
        scores.add_(products, alpha=how.scale)
    else:
        scores.add_(torch.tanh(products.to(scores.dtype) * (how.scale / how.softcap)), alpha=how.softcap)

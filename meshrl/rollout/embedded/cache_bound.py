"""The limit in bytes of the embedded engine's keys and values. Sequences wait while the tiles that the admitted ones
can need at most would exceed it."""

from __future__ import annotations

import torch

from meshrl.core.device import free_bytes
from meshrl.core.errors import RequestError
from meshrl.core.types import Request
from meshrl.rollout.embedded.kv_cache import KVStore, positions_of

SHARE = 0.8  # of an accelerator's free memory; the rest is for logits and for the contexts that are computed


class CacheBound:
    """num_bytes: rollout.embedded.kv_cache_bytes; None = SHARE of an accelerator's free memory, measured while the
    stores are empty, and no limit on a CPU. token_bytes: keys and values of a token in all layers, by the model's
    config; None = unknown, then the first row runs alone. What the stores have counts from then on, with the states of
    a row."""

    def __init__(
        self, num_bytes: int | None, token_bytes: int | None, device: torch.device, running: KVStore, prompts: KVStore
    ):
        self._num_bytes, self._device = num_bytes, device
        self._token_bytes, self._row_bytes = token_bytes, 0
        self._running, self._prompts = running, prompts
        self._measured: int | None = None

    @property
    def num_bytes(self) -> int | None:
        """The limit; None = none."""
        if self._num_bytes is None and self._measured is None and (free := free_bytes(self._device)) is not None:
            self._measured = int(SHARE * free)
        return self._measured if self._num_bytes is None else self._num_bytes

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
        """length: of the request's row at most. Raises: RequestError when the row would not fit even alone."""
        limit, (token, row) = self.num_bytes, self._sizes()
        needed = positions_of(1, length) * (token or 0) + row
        if limit is not None and needed > limit:
            origin = f"{SHARE:.0%} of the device's free memory" if self._num_bytes is None else self._num_bytes
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
        self._measured = None

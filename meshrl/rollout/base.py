"""The protocol that every rollout engine implements, and its records.

One contract suite (tests/contract/test_rollout_engines.py) runs over all implementations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshrl.core.errors import CapabilityError
from meshrl.core.types import Request, Times, Turn
from meshrl.sync.transaction import WeightReceiver

PARTS = {"weights", "kv_cache"}  # parts of an engine's memory that can be released


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine can do besides sampling and loading weights; anything else raises CapabilityError."""

    release: bool = False  # it can release its memory
    in_flight: bool = False  # weights may change while requests run


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """A snapshot: running and waiting requests, tokens in the cache, computed tokens, weight version, and the limit of
    the KV cache by the device's free memory."""

    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0  # since start
    decode_tokens: int = 0  # sampled, since start
    version: int = -1
    kv_cache_bytes: int | None = None  # None = not measured

    @property
    def computed_tokens(self) -> int:
        """It grows while the engine works."""
        return self.prefill_tokens + self.decode_tokens


def check_parts(parts: set[str]) -> None:
    """Check the argument of `release` and `restore`."""
    if not parts <= PARTS:
        raise CapabilityError(f"parts {sorted(parts - PARTS)} are unknown; allowed: {', '.join(sorted(PARTS))}")


class RolloutEngine(WeightReceiver, Protocol):
    """token ids -> token ids + logprobs. Weights are loaded through the methods of WeightReceiver.

    States of weights: none (version -1) -> begin .. commit -> version v. generate() raises StaleWeightsError when
    min_version is above the version. While a sync is open, the version of that sync counts, and requests wait for it.
    """

    capabilities: Capabilities

    async def generate(self, request: Request) -> Turn:
        """Sample one turn. Waits while a sync is open and while memory is released. An aborted request returns its
        tokens so far, stop_reason "abort"."""
        ...

    async def abort(self, ids: Sequence[str] | None = None) -> int:
        """Abort these requests (None = all), running or waiting; returns their number."""
        ...

    def trust_loaded_weights(self, version: int = 0) -> None:
        """Sample with the weights of the model folder, under this version number, until a sync begins: for evaluation.

        Raises: StaleWeightsError when a sync or a release has replaced them.
        """
        ...

    async def release(self, parts: set[str]) -> int:
        """Free parts of {weights, kv_cache}; returns bytes freed."""
        ...

    async def restore(self, parts: set[str]) -> int:
        """Allocate released parts again; returns bytes. Restored weights are garbage until the next full sync."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


def join_turns(parts: Sequence[Turn]) -> Turn:
    """The turn that an uninterrupted request would have returned: concatenated outputs, the last part's stop_reason.

    Each part is an engine's answer to the same request, with all earlier outputs as its prefix_output; all but the
    last were aborted. Later parts may have higher versions. Routed experts that a part did not record are -1; times
    are summed; engine_id lists the engines in order. The parts are not modified.
    """
    stages = [field.name for field in dataclasses.fields(Times)]
    sampled = [p for p in parts if len(p.output_ids)] or [parts[-1]]  # the others have no extras
    num_context, routed = len(parts[0].context_ids), None
    if recorded := [p.routed_experts for p in parts if p.routed_experts is not None]:
        shape = recorded[0].shape[1:]
        lacking = (np.full((num_context + len(p.output_ids), *shape), -1, np.int16) for p in parts)
        own = [of if p.routed_experts is None else p.routed_experts for p, of in zip(parts, lacking, strict=True)]
        routed = np.concatenate([recorded[0][:num_context], *(routes[num_context:] for routes in own)])
    return dataclasses.replace(
        parts[-1],
        output_ids=np.concatenate([p.output_ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        routed_experts=routed,
        extras={name: np.concatenate([p.extras[name] for p in sampled]) for name in sampled[0].extras},
        engine_id=",".join(dict.fromkeys(p.engine_id for p in parts)),
        times=Times(**{stage: sum(getattr(p.times, stage) for p in parts) for stage in stages}),
    )

"""Join the parts of an aborted and continued request to one Turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshrl.core.errors import MeshrlError
from meshrl.core.types import Times, Turn


def join_turns(parts: Sequence[Turn]) -> Turn:
    """The turn that an uninterrupted request would have returned: concatenated outputs, the last part's stop_reason.

    Each part is an engine's answer to the same request, with all earlier outputs as its prefix_output; all but the
    last were aborted. Later parts may have higher versions. Routed experts that a part did not record are -1; times
    are summed; engine_id lists the engines in order. The parts are not modified.

    Raises: MeshrlError when the parts do not belong to one turn.
    """
    if not parts:
        raise MeshrlError("join_turns got no parts; a turn has at least one")
    first, last = parts[0], parts[-1]
    for i, part in enumerate(parts):
        if i < len(parts) - 1 and part.stop_reason != "abort":
            raise MeshrlError(
                f"part {i} of {len(parts)} ended with {part.stop_reason!r}; only an aborted turn can be continued"
            )
        if not np.array_equal(part.context_ids, first.context_ids):
            raise MeshrlError(
                f"part {i} has another context than part 0: {part.context_ids} instead of {first.context_ids}"
            )
        if (part.seed, part.sampling) != (first.seed, first.sampling):
            raise MeshrlError(f"part {i} was sampled with another seed or other sampling parameters than part 0")
    return dataclasses.replace(
        last,
        output_ids=np.concatenate([p.output_ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        routed_experts=_join_routed(parts),
        extras=_join_extras(parts),
        engine_id=",".join(dict.fromkeys(p.engine_id for p in parts)),
        times=Times(
            queue_s=sum(p.times.queue_s for p in parts),
            prefill_s=sum(p.times.prefill_s for p in parts),
            decode_s=sum(p.times.decode_s for p in parts),
            cached_tokens=sum(p.times.cached_tokens for p in parts),
        ),
    )


def _join_routed(parts: Sequence[Turn]) -> np.ndarray | None:
    """int16[C+R, L, K]: the context from the first part that recorded it, then the outputs of each part."""
    recorded = [p.routed_experts for p in parts if p.routed_experts is not None]
    if not recorded:
        return None
    num_context, shape = len(parts[0].context_ids), recorded[0].shape[1:]
    pieces = [recorded[0][:num_context]]
    for part in parts:
        if part.routed_experts is not None:
            pieces.append(part.routed_experts[num_context:])
        else:
            pieces.append(np.full((len(part.output_ids), *shape), -1, np.int16))
    return np.concatenate(pieces)


def _join_extras(parts: Sequence[Turn]) -> dict[str, np.ndarray]:
    """Every extra over all outputs. A part that was aborted before its first token has no extras."""
    sampled = [p for p in parts if len(p.output_ids)] or [parts[-1]]
    names = {frozenset(p.extras) for p in sampled}
    if len(names) > 1:
        raise MeshrlError(f"the parts of a turn have different extras: {[sorted(n) for n in names]}")
    return {name: np.concatenate([p.extras[name] for p in sampled]) for name in sampled[0].extras}

"""Join the parts of an aborted and continued request to one Turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshrl.core.types import Times, Turn


def join_turns(parts: Sequence[Turn]) -> Turn:
    """The turn that an uninterrupted request would have returned: concatenated outputs, the last part's stop_reason.

    Each part is an engine's answer to the same request, with all earlier outputs as its prefix_output; all but the
    last were aborted. Later parts may have higher versions. Routed experts that a part did not record are -1; times
    are summed; engine_id lists the engines in order. The parts are not modified.
    """
    stages = [field.name for field in dataclasses.fields(Times)]
    return dataclasses.replace(
        parts[-1],
        output_ids=np.concatenate([p.output_ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        routed_experts=_join_routed(parts),
        extras=_join_extras(parts),
        engine_id=",".join(dict.fromkeys(p.engine_id for p in parts)),
        times=Times(**{stage: sum(getattr(p.times, stage) for p in parts) for stage in stages}),
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
    return {name: np.concatenate([p.extras[name] for p in sampled]) for name in sampled[0].extras}

"""The tree of a trajectory's turns, and the checks of each turn in it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np

from meshrl.config.reward import MAX_REWARD
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Trajectory, Turn


class TurnError(MeshrlError):
    """An invalid Turn; the message names trajectory, turn and field."""


def path_to(turns: Sequence[Turn], index: int) -> list[int]:
    """Turn indices from the root to `index`; empty for -1."""
    path: list[int] = []
    while index >= 0:
        path.append(index)
        index = turns[index].parent
    return path[::-1]


def leaf_paths(turns: Sequence[Turn]) -> list[list[int]]:
    """All root-to-leaf paths, in the order in which the leaves were generated."""
    parents = {turn.parent for turn in turns}
    return [path_to(turns, i) for i in range(len(turns)) if i not in parents]


def path_ids(turns: Sequence[Turn], index: int) -> np.ndarray:
    """All tokens from the root to the end of turn `index`, int32; empty for -1."""
    pieces = [ids for i in path_to(turns, index) for ids in (turns[i].context_ids, turns[i].output_ids)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def attach(turns: Sequence[Turn], context_ids: np.ndarray) -> int:
    """The turn that a full context continues: the one whose path is the longest prefix of the context; -1 = none.

    Compared by ids: for a context that a template rewrote, or that was encoded again into other tokens, it is an
    earlier turn or none, and the context becomes a separate row.
    """
    best, best_length = -1, 0
    for i in range(len(turns)):
        ids = path_ids(turns, i)
        if len(ids) > best_length and len(ids) <= len(context_ids) and np.array_equal(ids, context_ids[: len(ids)]):
            best, best_length = i, len(ids)
    return best


def check_turns(trajectory: Trajectory) -> None:
    """Check everything on which flattening relies: parents, lengths, dtypes, finite logprobs, versions, media spans,
    and the sizes of the agent's own rewards.
    """
    for i, turn in enumerate(trajectory.turns):
        place = f"trajectory {trajectory.id!r}, turn {i}"
        if not -1 <= turn.parent < i:
            raise TurnError(f"{place}: parent is {turn.parent}; it must be an earlier turn's index, or -1 for none")
        num_context, num_sampled = len(turn.context_ids), len(turn.output_ids)
        _check_array(place, "context_ids", turn.context_ids, np.int32, num_context)
        _check_array(place, "output_ids", turn.output_ids, np.int32, num_sampled)
        _check_array(place, "logprobs", turn.logprobs, np.float32, num_sampled)
        _check_array(place, "versions", turn.versions, np.int32, num_sampled)
        for name, array in turn.extras.items():
            _check_array(place, f"extras[{name!r}]", array, array.dtype, num_sampled, per_token_dims=None)
        if turn.routed_experts is not None:
            total = num_context + num_sampled
            _check_array(place, "routed_experts", turn.routed_experts, np.int16, total, per_token_dims=2)
        if num_sampled and turn.parent < 0 and num_context == 0:
            raise TurnError(f"{place}: tokens were sampled from an empty context; index 0 of a row has no logprob")
        if not np.isfinite(turn.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(turn.logprobs))[0])
            raise TurnError(f"{place}: logprobs[{at}] is {turn.logprobs[at]}; the engine must report finite numbers")
        if num_sampled and int(turn.versions.min()) < 0:
            raise TurnError(f"{place}: a sampled token has weight version {int(turn.versions.min())}; it must be >= 0")
        reward = turn.reward
        if reward is not None and not (isinstance(reward, (Real, np.floating)) and abs(reward) <= MAX_REWARD):
            raise TurnError(
                f"{place}: reward is {turn.reward!r:.40}; it must be a finite number of at most {MAX_REWARD:g} in size"
            )
        _check_spans(place, turn, trajectory)


def _check_array(
    place: str, name: str, array: np.ndarray, dtype: np.dtype | type, length: int, per_token_dims: int | None = 0
) -> None:
    """per_token_dims: dimensions after the first; None = any."""
    if array.dtype != dtype:
        raise TurnError(f"{place}: {name} is {array.dtype}; it must be {np.dtype(dtype)}")
    good_dims = array.ndim >= 1 if per_token_dims is None else array.ndim == 1 + per_token_dims
    if not good_dims or len(array) != length:
        raise TurnError(
            f"{place}: {name} has shape {array.shape}; it must be [{length}{', ...' if per_token_dims != 0 else ''}] "
            "(context_ids: C tokens new to this turn, output_ids: R tokens; routed_experts covers C + R, the rest R)"
        )


def _check_spans(place: str, turn: Turn, trajectory: Trajectory) -> None:
    end_before = 0
    for media_id, start, length in turn.media_spans:
        if media_id not in trajectory.prompt.media:
            media_ids = sorted(trajectory.prompt.media)
            raise TurnError(f"{place}: media span of {media_id!r}, which the prompt does not have (it has {media_ids})")
        if start < end_before or length < 1 or start + length > len(turn.context_ids):
            raise TurnError(
                f"{place}: media span ({media_id!r}, {start}, {length}) overlaps another or leaves the context of "
                f"{len(turn.context_ids)} tokens"
            )
        end_before = start + length

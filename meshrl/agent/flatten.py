"""The tree of a trajectory's turns with the checks of each turn, and the Samples of scored trajectories: each
root-to-leaf row of the tree as arrays over its tokens. Ids are copied as they were sampled; nothing is encoded again.

T tokens of a row, C new context tokens of a turn, R sampled tokens of a turn, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from numbers import Real

import numpy as np

from meshrl.agent.tools import ERROR
from meshrl.config.reward import MAX_REWARD
from meshrl.core.columns import fill_of
from meshrl.core.errors import MeshrlError
from meshrl.core.types import Metric, Sample, Trajectory, Turn


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


def context_lengths(turns: Sequence[Turn]) -> list[int]:
    """The tokens of the full context of each turn."""
    return [len(path_ids(turns, turn.parent)) + len(turn.context_ids) for turn in turns]


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


_FIRST_TOKENS = 16
_FROZEN = ("tokens", "mask", "turn", "rollout_logprobs", "versions", "routed_experts")


def flatten(trajectories: Sequence[Trajectory]) -> tuple[list[Sample], list[Metric]]:
    """Rows to train on, in the order of the trajectories, and metrics about them.

    Left out are trajectories with a purpose other than train, status failed, reward None or no token. Rows of truncated
    trajectories are included and marked, for algo.truncated; `rollout/truncated_fraction` counts the trajectories.

    A turn that is part of several rows is trained only in the first of them; the others have it as context, with its
    logprobs. A row without any trained token is left out. If no row of a trajectory has one, its first row with
    tokens is kept, so that group statistics include the trajectory's reward.

    `rewards`: a turn's own reward is at the turn's last token, where it is trained. The rest of the trajectory's reward
    is at the last trained token of each row, because each row is an episode with this outcome. The sum of a
    trajectory's only row is the trajectory's reward. `rewards` is writable (a KL may be subtracted from it); all other
    arrays that are filled here are read-only.
    """
    train = [t for t in trajectories if t.purpose == "train"]
    scored = [t for t in train if t.status != "failed" and t.reward is not None]
    samples: list[Sample] = []
    for trajectory in scored:
        check_turns(trajectory)
        samples.extend(_trajectory_rows(trajectory))
    _set_prefix_lengths(samples)
    return samples, _metrics(train, samples)


def _trajectory_rows(trajectory: Trajectory) -> list[Sample]:
    trained_before: set[int] = set()  # turns that an earlier row trains
    rows: list[Sample] = []
    for path in leaf_paths(trajectory.turns):
        rows.append(_row(trajectory, path, trained_before))
        trained_before.update(path)
    retained = [sample for sample in rows if sample.mask.any()] or [sample for sample in rows if len(sample)][:1]
    for row, sample in enumerate(retained):
        sample.row = row
    return retained


def _row(trajectory: Trajectory, path: list[int], trained_before: set[int]) -> Sample:
    assert trajectory.reward is not None  # flatten has left out trajectories without a reward
    turns = [trajectory.turns[i] for i in path]
    sampled = [len(t.output_ids) for t in turns]
    context = [len(t.context_ids) for t in turns]
    ends = np.cumsum([c + r for c, r in zip(context, sampled)]).tolist()
    length = ends[-1]

    def over_row(dtype: type, fill: float, values: Iterable[np.ndarray | int]) -> np.ndarray:
        """[T]: the values of each turn at its sampled tokens, `fill` elsewhere."""
        out, begin = np.empty(length, dtype), 0
        for value, end, r in zip(values, ends, sampled):
            out[begin : end - r] = fill
            out[end - r : end] = value
            begin = end
        return out

    recorded = partial(_recorded, trajectory.id, path, ends)
    mask, rewards = np.zeros(length, bool), np.zeros(length, np.float32)
    last_trained = -1
    for i, turn, end, r in zip(path, turns, ends, sampled):
        mask[end - r : end] = i not in trained_before
        if r and i not in trained_before:
            last_trained = end - 1
            if turn.reward is not None:
                rewards[end - 1] += turn.reward
    if last_trained >= 0:
        rewards[last_trained] += trajectory.reward - sum(t.reward for t in trajectory.turns if t.reward is not None)
    routed = [t.routed_experts for t in turns]  # None for a turn that recorded none
    sample = Sample(
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        row=0,
        prefix_len=context[0],
        tokens=np.concatenate([ids for t in turns for ids in (t.context_ids, t.output_ids)]),
        mask=mask,
        turn=over_row(np.int16, -1, path),
        rollout_logprobs=over_row(np.float32, np.nan, [t.logprobs for t in turns]),
        versions=over_row(np.int32, -1, [t.versions for t in turns]),
        rewards=rewards,
        temperature=_temperature(trajectory, path),
        reward=trajectory.reward,
        truncated=trajectory.status == "truncated",
        engine_id=",".join(dict.fromkeys(t.engine_id for t in turns)),
        env=trajectory.prompt.env,
        media_spans=[
            (media_id, end - r - c + start, size)
            for turn, end, c, r in zip(turns, ends, context, sampled)
            for media_id, start, size in turn.media_spans
        ],
        routed_experts=recorded("routed_experts", routed, -1) if any(r is not None for r in routed) else None,
        token_extras={
            name: recorded(f"extras[{name!r}]", [t.extras.get(name) for t in turns], fill_of(name))
            for name in dict.fromkeys(name for t in turns for name in t.extras)
        },
    )
    sample.media = {media_id: trajectory.prompt.media[media_id] for media_id, _, _ in sample.media_spans}
    for array in [getattr(sample, name) for name in _FROZEN] + list(sample.token_extras.values()):
        if array is not None:
            array.flags.writeable = False
    return sample


def _recorded(
    trajectory_id: str, path: list[int], ends: list[int], name: str, arrays: Sequence[np.ndarray | None], fill: float
) -> np.ndarray:
    """[T, ...]: the array of each turn at the turn's last tokens, `fill` elsewhere. Not all of the arrays are None."""
    first = next(array for array in arrays if array is not None)
    out = np.full((ends[-1], *first.shape[1:]), fill, first.dtype)
    for i, end, array in zip(path, ends, arrays):
        if array is None:
            continue
        if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
            raise TurnError(
                f"trajectory {trajectory_id!r}, turn {i}: {name} is {array.dtype}{list(array.shape)}; earlier turns of "
                f"the row have {first.dtype} of shape {list(first.shape[1:])} for each token"
            )
        out[end - len(array) : end] = array
    return out


def _temperature(trajectory: Trajectory, path: list[int]) -> float:
    """The one temperature of a row's turns; greedy turns (0) report logprobs of temperature 1."""
    temperatures = {}
    for i in path:
        sampling = trajectory.turns[i].sampling
        temperatures[i] = sampling.temperature or 1.0
        if (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) != (1.0, 0, 0.0, 1.0):
            raise TurnError(
                f"trajectory {trajectory.id!r}, turn {i}: sampled with {sampling}; training needs top_p 1, top_k 0, "
                "min_p 0 and repetition_penalty 1, or sampler and trainer would have different distributions"
            )
    if len(set(temperatures.values())) > 1:
        raise TurnError(
            f"trajectory {trajectory.id!r}: one row mixes the temperatures {temperatures} (by turn); the trainer "
            "scores a row with one temperature. Sample all turns of a trajectory with the same temperature"
        )
    return next(iter(temperatures.values()))


def _set_prefix_lengths(samples: list[Sample]) -> None:
    """Fill prefix_len of each row: leading tokens that all rows of its group share and that none of them sampled. It
    never ends inside a media span, nor after one that has another image in another row."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    for rows in groups.values():
        first = rows[0]
        shared = min(s.prefix_len for s in rows)  # so far: the root turn's context
        for row in rows[1:]:
            differ = np.flatnonzero(first.tokens[:shared] != row.tokens[:shared])
            shared = int(differ[0]) if len(differ) else shared
        spans = [{(s.media[name].digest, start, size) for name, start, size in s.media_spans} for s in rows]
        common = set.intersection(*spans)
        for span in sorted(set.union(*spans), key=lambda span: span[1]):
            _, start, size = span
            if start < shared and (start + size > shared or span not in common):
                shared = start
        for sample in rows:
            sample.prefix_len = shared


def _metrics(train: list[Trajectory], samples: list[Sample]) -> list[Metric]:
    """Fractions of all train trajectories; lengths in sampled tokens, each counted once even if rows share it."""
    if not train:
        return []
    lengths = [sum(len(turn.output_ids) for turn in t.turns) for t in train]
    num = float(len(train))

    def fraction(name: str, flags: Iterable[bool]) -> Metric:
        return Metric(name=name, sum=float(sum(flags)), weight=num, unit="fraction")

    messages = [m for t in train for turn in t.turns for m in turn.messages if m.get("role") == "tool"]
    errors = sum(str(m.get("content")).startswith(ERROR) for m in messages)
    unscored = (t.reward is None and t.status != "failed" and not t.has_abstained for t in train)
    return [
        Metric(name="rollout/length_mean_tokens", sum=float(sum(lengths)), weight=num, unit="tokens"),
        Metric(name="rollout/length_max_tokens", sum=float(max(lengths)), reduce="max", unit="tokens"),
        Metric(name="rollout/turns_mean", sum=float(sum(len(t.turns) for t in train)), weight=num, unit="turns"),
        Metric(name="rollout/rows", sum=float(len(samples)), reduce="sum", unit="rows"),
        fraction("rollout/truncated_fraction", (t.status == "truncated" for t in train)),
        fraction("rollout/failed_fraction", (t.status == "failed" for t in train)),
        fraction("rollout/crashed_fraction", (t.failure is not None and t.failure.kind == "crash" for t in train)),
        fraction("rollout/unscored_fraction", unscored),
        fraction("rollout/duplicate_fraction", _duplicates(train)),
        *_most_frequent(train),
        *([Metric(name="rollout/tool_errors", sum=errors, weight=len(messages), unit="fraction")] if messages else []),
    ]


def _most_frequent(train: list[Trajectory]) -> list[Metric]:
    """Of the answers to different prompts; none with one prompt."""
    if len({t.prompt.id for t in train}) == 1:
        return []
    answers = Counter(tuple(turn.output_ids.tobytes() for turn in t.turns) for t in train if t.turns)
    most = float(max(answers.values(), default=0))
    return [Metric(name="rollout/most_frequent_fraction", sum=most, weight=answers.total(), unit="fraction")]


def _duplicates(train: list[Trajectory]) -> list[bool]:
    """For each trajectory: whether it has output, and an earlier one of its group sampled the same tokens."""
    seen: dict[tuple[str, tuple[int, ...], bytes], list[np.ndarray]] = defaultdict(list)
    flags = []
    for trajectory in train:
        outputs = [turn.output_ids for turn in trajectory.turns]
        tokens = outputs[0] if len(outputs) == 1 else np.concatenate([np.zeros(0, np.int32), *outputs])
        alike = seen[trajectory.group_id, tuple(map(len, outputs)), tokens[:_FIRST_TOKENS].tobytes()]
        flags.append(len(tokens) > 0 and any(np.array_equal(tokens, earlier) for earlier in alike))
        if not flags[-1]:
            alike.append(tokens)
    return flags

"""Makes Samples of scored trajectories: each root-to-leaf row of the turn tree as arrays over its tokens. Ids are
copied as they were sampled; nothing is encoded again.

T tokens of a row, C new context tokens of a turn, R sampled tokens of a turn, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from meshrl.agent.tools import ERROR
from meshrl.agent.tree import TurnError, check_turns, leaf_paths
from meshrl.core.columns import fill_of
from meshrl.core.types import Metric, Sample, Trajectory

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

    Raises: TurnError for an invalid turn, a row that mixes temperatures, or a filtered distribution.
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
        *([Metric(name="rollout/tool_errors", sum=errors, weight=len(messages), unit="fraction")] if messages else []),
    ]


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

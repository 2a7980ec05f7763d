"""Makes Samples of scored trajectories: each root-to-leaf row of the turn tree as arrays over its tokens. Ids are
copied as they were sampled; nothing is encoded again (P20).

T tokens of a row, C new context tokens of a turn, R sampled tokens of a turn, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from meshrl.agent.tree import TurnError, check_turns, leaf_paths
from meshrl.core.types import EXTRA_FILLS, Metric, Sample, Trajectory

_FIRST_TOKENS = 16
_FROZEN = ("tokens", "mask", "turn", "rollout_logprobs", "versions", "routed_experts")


def flatten(trajectories: Sequence[Trajectory]) -> tuple[list[Sample], list[Metric]]:
    """Rows to train on, in the order of the trajectories, and metrics about them.

    Left out: purpose other than train, status failed, reward None, no token at all. Rows of truncated
    trajectories are included and marked, for algo.truncated; `rollout/truncated_fraction` counts the trajectories.

    A turn that is part of several rows is trained only in the first of them; the others have it as context, with its
    logprobs. A row without any trained token is left out. The only row of a trajectory is never left out, so that
    group statistics include the trajectory's reward.

    `rewards`: a turn's own reward is at the turn's last token, where it is trained. The trajectory's reward is at the
    last trained token of each row, because each row is an episode with this outcome. `rewards` is writable (a KL may be
    subtracted from it); all other arrays that are filled here are read-only.

    Raises: TurnError for an invalid turn, a row that mixes temperatures, or a filtered distribution.
    """
    train = [t for t in trajectories if t.purpose == "train"]
    scored = [t for t in train if t.status != "failed" and t.reward is not None]
    samples: list[Sample] = []
    for trajectory in scored:
        check_turns(trajectory)
        samples.extend(_rows_of(trajectory))
    _set_prefix_lengths(samples)
    return samples, _metrics(train, samples)


def _rows_of(trajectory: Trajectory) -> list[Sample]:
    trained_before: set[int] = set()  # turns that an earlier row trains
    rows: list[Sample] = []
    trained: list[Sample] = []
    for path in leaf_paths(trajectory.turns):
        sample = _row(trajectory, path, trained_before, row=len(rows))
        is_trained = any(len(trajectory.turns[i].output_ids) for i in path if i not in trained_before)
        if len(sample) and (is_trained or not rows):
            rows.append(sample)
            if is_trained:
                trained.append(sample)
        trained_before.update(path)
    for row, sample in enumerate(trained):
        sample.row = row
    return trained or rows


def _row(trajectory: Trajectory, path: list[int], trained_before: set[int], row: int) -> Sample:
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

    mask, rewards = np.zeros(length, bool), np.zeros(length, np.float32)
    last_trained = -1
    for i, turn, end, r in zip(path, turns, ends, sampled):
        mask[end - r : end] = i not in trained_before
        if r and i not in trained_before:
            last_trained = end - 1
            if turn.reward is not None:
                rewards[end - 1] += turn.reward
    if last_trained >= 0:
        rewards[last_trained] += trajectory.reward
    sample = Sample(
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        row=row,
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
        routed_experts=_routed_experts(trajectory, path, ends, length),
        token_extras=_token_extras(trajectory, path, ends, length),
    )
    sample.media = {media_id: trajectory.prompt.media[media_id] for media_id, _, _ in sample.media_spans}
    for array in [getattr(sample, name) for name in _FROZEN] + list(sample.token_extras.values()):
        if array is not None:
            array.flags.writeable = False
    return sample


def _temperature(trajectory: Trajectory, path: list[int]) -> float:
    """The one temperature of a row's turns; greedy turns (0) report logprobs of temperature 1."""
    found = {}
    for i in path:
        sampling = trajectory.turns[i].sampling
        found[i] = sampling.temperature or 1.0
        if (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) != (1.0, 0, 0.0, 1.0):
            raise TurnError(
                f"trajectory {trajectory.id!r}, turn {i}: sampled with {sampling}; training needs top_p 1, top_k 0, "
                "min_p 0 and repetition_penalty 1, or sampler and trainer would have different distributions"
            )
    if len(set(found.values())) > 1:
        raise TurnError(
            f"trajectory {trajectory.id!r}: one row mixes the temperatures {found} (by turn); the trainer scores a row "
            "with one temperature. Sample all turns of a trajectory with the same temperature"
        )
    return next(iter(found.values()))


def _routed_experts(trajectory: Trajectory, path: list[int], ends: list[int], length: int) -> np.ndarray | None:
    """int16[T, L, K], -1 where no turn recorded them; None when no turn recorded any."""
    recorded = {i: array for i in path if (array := trajectory.turns[i].routed_experts) is not None}
    if not recorded:
        return None
    shapes = {i: array.shape[1:] for i, array in recorded.items()}
    if len(set(shapes.values())) > 1:
        raise TurnError(f"trajectory {trajectory.id!r}: routed_experts differ in [layers, experts] by turn: {shapes}")
    out = np.full((length, *next(iter(shapes.values()))), -1, np.int16)
    for i, end in zip(path, ends):
        if i in recorded:
            out[end - len(recorded[i]) : end] = recorded[i]
    return out


def _token_extras(trajectory: Trajectory, path: list[int], ends: list[int], length: int) -> dict[str, np.ndarray]:
    """Each extra over the row, [T, ...], filled from EXTRA_FILLS where a turn does not have it."""
    out: dict[str, np.ndarray] = {}
    for i, end in zip(path, ends):
        for name, array in trajectory.turns[i].extras.items():
            if name not in out:
                out[name] = np.full((length, *array.shape[1:]), EXTRA_FILLS.get(name, 0), array.dtype)
            if out[name].shape[1:] != array.shape[1:] or out[name].dtype != array.dtype:
                raise TurnError(
                    f"trajectory {trajectory.id!r}, turn {i}: extras[{name!r}] is {array.dtype}{list(array.shape)}; "
                    f"earlier turns of the row have {out[name].dtype}[R, ...] with {list(out[name].shape[1:])} a token"
                )
            out[name][end - len(array) : end] = array
    return out


def _set_prefix_lengths(samples: list[Sample]) -> None:
    """Fill prefix_len of each row: leading tokens that all rows of its group share and that none of them sampled. It
    never ends inside a media span, nor after one that has another image in another row."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    for rows in groups.values():
        first = rows[0]
        shared = min(s.prefix_len for s in rows)  # so far: the root turn's context
        for other in rows[1:]:
            differ = np.flatnonzero(first.tokens[:shared] != other.tokens[:shared])
            shared = int(differ[0]) if len(differ) else shared
        spans = {(s.media[name].digest, start, size) for s in rows for name, start, size in s.media_spans}
        common = set.intersection(
            *({(s.media[name].digest, start, size) for name, start, size in s.media_spans} for s in rows)
        )
        for digest, start, size in sorted(spans, key=lambda span: span[1]):
            if start < shared and (start + size > shared or (digest, start, size) not in common):
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

    unscored = (t.reward is None and t.status != "failed" for t in train)
    return [
        Metric(name="rollout/length_mean_tokens", sum=float(sum(lengths)), weight=num, unit="tokens"),
        Metric(name="rollout/length_max_tokens", sum=float(max(lengths)), reduce="max", unit="tokens"),
        Metric(name="rollout/turns_mean", sum=float(sum(len(t.turns) for t in train)), weight=num, unit="turns"),
        Metric(name="rollout/rows", sum=float(len(samples)), reduce="sum", unit="rows"),
        fraction("rollout/truncated_fraction", (t.status == "truncated" for t in train)),
        fraction("rollout/failed_fraction", (t.status == "failed" for t in train)),
        fraction("rollout/unscored_fraction", unscored),
        fraction("rollout/duplicate_fraction", _duplicates(train)),
    ]


def _duplicates(train: list[Trajectory]) -> list[bool]:
    """For each trajectory: whether it has output, and an earlier one of its group sampled the same tokens (P14)."""
    seen: dict[tuple[str, tuple[bytes, ...]], list[Trajectory]] = defaultdict(list)  # by group and first tokens
    flags = []
    for trajectory in train:
        start = tuple(turn.output_ids[:_FIRST_TOKENS].tobytes() for turn in trajectory.turns)
        earlier = seen[trajectory.group_id, start]
        flags.append(bool(b"|".join(start)) and any(_same_output(trajectory, other) for other in earlier))
        if not flags[-1]:
            earlier.append(trajectory)
    return flags


def _same_output(a: Trajectory, b: Trajectory) -> bool:
    return len(a.turns) == len(b.turns) and all(
        np.array_equal(x.output_ids, y.output_ids) for x, y in zip(a.turns, b.turns)
    )

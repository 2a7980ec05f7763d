"""Rewards of trajectories: the workers grade every term of the config. The reward is the weighted sum of the terms that
apply, plus the rewards that the agent gave its turns.

A failed grading of a term with a weight loses the answer: it has no reward and is not trained. A term of weight 0 loses
nothing. An answer to which no term with a weight applies has no reward, too; it has abstained, and is not lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshrl.config.reward import MAX_REWARD, RewardConfig
from meshrl.core.errors import Failure, Graded, RewardError
from meshrl.core.lookup import code_of
from meshrl.core.types import Metric, Trajectory
from meshrl.reward.sandbox import EVENTS, Log, Sandbox

Decode = Callable[[np.ndarray], str] | None  # ids int32[R] -> text with special tokens, for the parameter `raw`
_ADVICE = {
    "agent": "Let the agent put a parsed message into the last turn of each trajectory.",
    "bad_value": f"Let the reward function return a finite number, of at most {MAX_REWARD:g} in size.",
    "crash": "Fix the reward function at the file and line of its exception.",
    "judge": "Correct the args of the judge, its server or its key; for status 429 lower args.max_parallel.",
    "memory": "Let the reward function use less memory, or raise reward.max_memory_bytes ({max_memory_bytes}).",
    "timeout": "Make the reward function faster, or raise reward.timeout_s ({timeout_s:g}).",
}
"""Kind of a failed grading -> advice to the user."""


class Scorer:
    """Fills `rewards` and `reward` of trajectories. One Scorer and its worker processes exist for all of a run.

    `score` starts the workers if they were not started. Call `start` before any model is loaded: a reward function that
    can't work is then found early.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        note: Callable[[str], None] = lambda _: None,
        log: Log | None = None,
        decode: Decode = None,
    ):
        """functions: Python objects given in place of a kind, by term. note: called at the first failed grading,
        whenever their number has grown tenfold, and at the end. log: called with the output of the functions."""
        self._cfg, self._note, self._decode, self.timeout_s = cfg, note, decode, cfg.timeout_s
        self.code = {name: code_of(term.kind, (functions or {}).get(name)) for name, term in cfg.terms.items()}
        self._sandbox = Sandbox(cfg, functions, log)
        self._failed, self._num_noted, self._first_failure = Counter[str](), 0, ""
        self._weighted = [name for name, term in cfg.terms.items() if term.weight]  # the others are only shown
        self._reported = Counter[str]()  # events of the workers that are in the metrics of an earlier `score`

    async def start(self) -> None:
        """Start the workers."""
        await self._sandbox.start()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Metric]:
        """Grade every trajectory that ended by itself or was truncated; failed ones get reward None.

        A failed grading is a Failure in `rewards`, and is counted: it is never a reward of 0. The reward is then None,
        unless the term has weight 0. Several calls may run at once.
        """
        scored = [t for t in trajectories if t.status in ("done", "truncated")]
        for trajectory in trajectories:
            trajectory.rewards, trajectory.reward, trajectory.has_abstained = {}, None, False
        for trajectory in scored:
            trajectory.rewards = dict.fromkeys(self._cfg.terms)
        items = [(name, t) for t in scored for name, term in self._cfg.terms.items() if term.grades(t.prompt.env)]
        for (name, trajectory), result in zip(items, await self.grade(items, self._decode)):
            trajectory.rewards[name] = result
        for trajectory in scored:
            trajectory.reward = self._reward(trajectory)
        failures = _failures(scored)
        self._failed.update(failure.kind for _, _, failure in failures)
        if failures and not self._first_failure:
            self._first_failure = example(*failures[0])
        if failures and self._failed.total() >= 10 * self._num_noted:
            self._note_failures()
        counts = self._sandbox.counts
        events, self._reported = counts - self._reported, counts
        counted = [Metric(name=name, sum=events[name], reduce="sum", unit=unit) for name, unit in EVENTS.items()]
        return [*self._metrics(scored, Counter(failure.kind for _, _, failure in failures)), *counted]

    async def grade(self, items: Sequence[tuple[str, Trajectory]], decode: Decode = None) -> list[Graded]:
        """The result of each (term, trajectory), in order. Trajectories are not changed and nothing is counted.
        decode: None = the ids have no text, and `raw` is the completion."""
        await self.start()
        payloads = [_payload(trajectory) for _, trajectory in items]
        for (name, trajectory), payload in zip(items, payloads):
            if isinstance(payload, dict) and name in self._sandbox.terms_of_tokens:
                ids = trajectory.turns[-1].output_ids
                payload |= {"raw": decode(ids) if decode else payload["completion"], "tokens": ids.tolist()}
        asked = [(name, payload) for (name, _), payload in zip(items, payloads) if isinstance(payload, dict)]
        graded = iter(await self._sandbox.grade(asked))
        return [next(graded) if isinstance(payload, dict) else payload for payload in payloads]

    async def close(self) -> None:
        """End the workers and all processes that they started."""
        await self._sandbox.close()
        if self._failed.total() > self._num_noted:
            self._note_failures()

    def _note_failures(self) -> None:
        self._num_noted = self._failed.total()
        kinds = ", ".join(f"{n} {kind}" for kind, n in self._failed.most_common())
        self._note(
            f"calls of reward functions that failed so far: {self._num_noted} ({kinds}); such an answer is not "
            "trained, unless the term has weight 0, and its score in an evaluation is the lowest one. The first: "
            f"{self._first_failure}"
        )

    def _reward(self, trajectory: Trajectory) -> float | None:
        """The weighted sum of the terms that apply, and the rewards of turns; None when a grading with a weight failed,
        or nothing applies, and the answer abstains. A sum of terms that is too large fails its largest term."""
        parts: dict[str, float] = {}
        for name in self._weighted:
            value = trajectory.rewards[name]
            if isinstance(value, Failure):
                return None
            if value is not None:
                parts[name] = self._cfg.terms[name].weight * value
        total, of_turns = sum(parts.values(), 0.0), _turn_rewards(trajectory)
        if self._weighted and not parts and not of_turns:
            trajectory.has_abstained = True
            return None
        if abs(total) <= MAX_REWARD:
            return total + sum(of_turns)
        largest = max(parts, key=lambda name: abs(parts[name]))
        trajectory.rewards[largest] = Failure(
            kind="bad_value",
            message=f"the weighted sum of the terms is {total:g}, mostly from this term; allowed: at most "
            f"{MAX_REWARD:g} in size. Lower reward.terms.{largest}.weight or the function's values",
        )
        return None

    def check_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises: RewardError when the share of answers that failed gradings lost is above `max_failure_fraction`.
        trajectories: all that were scored for a step."""
        scored = [t for t in trajectories if t.status in ("done", "truncated")]
        failures = [failure for failure in _failures(scored) if failure[1] in self._weighted]
        lost = len({id(trajectory) for trajectory, _, _ in failures})
        if lost <= self._cfg.max_failure_fraction * len(scored):
            return
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(f.kind for _, _, f in failures).most_common())
        places = ""
        for term, count in Counter(term for _, term, _ in failures).most_common():
            first = next(failure for failure in failures if failure[1] == term)
            places += f"\nreward.terms.{term} failed on {count} of them, first on {example(*first)}"
        advice = " ".join(_ADVICE[kind] for kind in sorted({f.kind for _, _, f in failures}))
        raise RewardError(
            f"{lost} of {len(scored)} answers have no reward, because calls of reward functions failed ({kinds}); "
            f"reward.max_failure_fraction = {self._cfg.max_failure_fraction:g} allows fewer.{places}\n"
            + advice.format(timeout_s=self._cfg.timeout_s, max_memory_bytes=self._cfg.max_memory_bytes)
        )

    def _metrics(self, scored: list[Trajectory], failed: Counter[str]) -> list[Metric]:
        metrics, weights = [], {name: term.weight for name, term in self._cfg.terms.items() if term.weight}
        for name in self._cfg.terms:
            results = [t.rewards[name] for t in scored]
            values = [result for result in results if isinstance(result, float)]
            num_failed, num_abstained = sum(isinstance(r, Failure) for r in results), results.count(None)
            metrics += [
                Metric(name=f"reward/term/{name}", sum=sum(values), weight=len(values)),
                Metric(name=f"reward/failed/{name}", sum=num_failed, weight=len(results), unit="fraction"),
                Metric(name=f"reward/abstained/{name}", sum=num_abstained, weight=len(results), unit="fraction"),
            ]
            if len(weights) > 1 and name in weights:
                part = weights[name] * sum(values)
                metrics.append(Metric(name=f"reward/part/{name}", sum=part, weight=len(values) + num_abstained))
        abstained = sum(t.has_abstained for t in scored)
        metrics.append(Metric(name="reward/abstained", sum=abstained, weight=len(scored), unit="fraction"))
        turn_rewards = [_turn_rewards(t) for t in scored]
        if any(turn_rewards):
            metrics.append(Metric(name="reward/turns", sum=sum(map(sum, turn_rewards)), weight=len(scored)))
        for name in sorted({name for t in scored for name in t.metrics}):
            values = [t.metrics[name] for t in scored if name in t.metrics]
            metrics.append(Metric(name=f"reward/metric/{name}", sum=sum(values), weight=len(values)))
        gradings = len(scored) * len(self._cfg.terms)
        metrics.append(Metric(name="reward/failed", sum=failed.total(), weight=gradings, unit="fraction"))
        metrics += [
            Metric(name=f"reward/failed_{kind}", sum=count, reduce="sum", unit="gradings")
            for kind, count in sorted(failed.items())
        ]
        return metrics


def _failures(scored: Sequence[Trajectory]) -> list[tuple[Trajectory, str, Failure]]:
    return [(t, name, r) for t in scored for name, r in t.rewards.items() if isinstance(r, Failure)]


def example(trajectory: Trajectory, term: str, failure: Failure) -> str:
    return f"row {trajectory.prompt.id}, answer {trajectory.index}, term {term!r}: {failure.kind}: {failure.message}"


def _turn_rewards(trajectory: Trajectory) -> list[float]:
    """The rewards that the agent gave turns of the trajectory."""
    return [float(turn.reward) for turn in trajectory.turns if turn.reward is not None]


def _payload(trajectory: Trajectory) -> dict[str, Any] | Failure:
    """The data about a trajectory for the workers; a Failure when its agent left no text to grade."""
    turns = trajectory.turns
    if not turns or not turns[-1].messages:
        return Failure(kind="agent", message="the trajectory has no parsed message in its last turn")
    content = turns[-1].messages[-1].get("content") or ""
    if isinstance(content, list):  # parts of a multimodal message
        content = "".join(part.get("text", "") for part in content)
    prompt = trajectory.prompt
    return {
        "completion": content,
        "answer": prompt.answer,
        "prompt": {"id": prompt.id, "messages": prompt.messages, "env": prompt.env, "meta": prompt.meta},
        "messages": [message for turn in turns for message in turn.messages],
        "stop_reason": turns[-1].stop_reason,
        "num_tokens": sum(len(turn.output_ids) for turn in turns),
    }

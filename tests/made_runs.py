"""Folders of runs that were not trained: files as a run writes them, with invented numbers and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.loops.evaluate import standard_error
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import JsonlSink
from meshrl.monitor.status import StatusFile

UNITS = {"reward/mean": "", "eval/mean_at_k": "score", "eval/standard_error": "score", "loss/nll": "nats"}
UNITS |= {"rollout/num_tokens": "tokens", "time/rollout_s": "s", "time/train_s": "s"}


def decode(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


def answer(question: str, text: str, score: float, index: int = 0, messages: Sequence[dict[str, Any]] = ()):
    """An answer of one turn. messages: those before it, such as the answers of tools."""
    turn = Turn(
        context_ids=np.array([1], np.int32),
        output_ids=np.array([ord(c) for c in text], np.int32),
        logprobs=np.zeros(len(text), np.float32),
        versions=np.zeros(len(text), np.int32),
        stop_reason="stop",
        messages=[*messages, {"role": "assistant", "content": text}],
    )
    prompt = Prompt(id=question, ordinal=0, messages=[{"role": "user", "content": question}], answer="42")
    rewards = {"correct": score, "form": 0.0}
    return Trajectory(prompt=prompt, group_id=question, index=index, turns=[turn], rewards=rewards, reward=score)


def settings(**values: Any) -> str:
    """A config.yaml of a run, with keys such as run__seed=1."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, name = key.split("__")
        sections.setdefault(section, []).append(f"  {name}: {json.dumps(value)}  # my.yaml:1")
    return "".join("\n".join([f"{section}:", *lines]) + "\n" for section, lines in sections.items())


def made_run(
    folder: Path,
    evals: Mapping[int, Sequence[float]] = {},
    rewards: Sequence[float] = (),
    status: str | None = "done",
    num_steps: int | None = None,
    metric: str = "reward/mean",
    config: str = "",
    evaluation: Mapping[str, str] = {},
) -> Path:
    """evals: the scores of the held-out prompts q0, q1, ... after each number of steps. status: None = the run was
    killed. evaluation: the identity of its evaluations."""
    sink = JsonlSink(folder / "metrics.jsonl", clock=lambda: 1000.0, evaluation=lambda: evaluation)
    file = StatusFile(folder, len(rewards) if num_steps is None else num_steps)
    log = RolloutLog(folder, decode)
    for step in sorted({*range(len(rewards) + 1), *evals}):
        if 0 < step <= len(rewards):
            values = {metric: rewards[step - 1], "rollout/num_tokens": 100.0}
            values |= {"time/rollout_s": 2.0, "time/train_s": 1.0}
            sink.write(step, values, UNITS)
            file.write(step, values, UNITS)
            log.write(step, [answer("1+1?", f"answer {i} of {step}", i, i) for i in range(2)])
        if step in evals:
            scores = evals[step]
            held_out = {"eval/mean_at_k": float(np.mean(scores)), "eval/standard_error": standard_error(scores)}
            sink.write(step, held_out, UNITS)
            log.write(step, [answer(f"q{i}", f"{s:g} at {step}", s) for i, s in enumerate(scores)], name="eval")
    sink.close()
    file.close()
    (folder / "config.yaml").write_text(config or settings(model__path="tiny", run__seed=0))
    if status is not None:
        result = {"status": status, "error": "MeshrlError: broken" if status == "failed" else None, "wall_s": 61.0}
        (folder / "result.json").write_text(json.dumps(result))
    return folder

"""Folders of runs that were not trained: files as a run writes them, with invented numbers and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from meshrl.core.types import Media, Prompt, Trajectory, Turn
from meshrl.data.images import thumbnail_of
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


def image_media(digest: str, seed: int, source: str = "images/7.png", num_tokens: int = 16) -> Media:
    """An image of one colour, as a prompt has it."""
    outputs = {"pixel_values": np.ones((1, 3, 4, 4), np.float32)}
    made = {
        "digest": digest,
        "source": source,
        "num_tokens": num_tokens,
        "thumbnail": thumbnail_of(Image.new("RGB", (40, 30), (60 * seed, 90, 30))),
    }
    return Media(kind="image", outputs=outputs, text="<image>" * num_tokens, **made)


def about_image(media: Media, text: str = "3", score: float = 1.0, index: int = 0) -> Trajectory:
    """An answer to a question about an image."""
    trajectory = answer(f"how many in {media.digest}?", text, score, index)
    prompt, turn = trajectory.prompt, trajectory.turns[0]
    question = prompt.messages[0]["content"] if prompt.messages else ""
    parts = [{"type": "image", "image": "image-0"}, {"type": "text", "text": question}]
    prompt.messages, prompt.media = [{"role": "user", "content": parts}], {"image-0": media}
    turn.context_ids, turn.media_spans = (
        np.arange(1 + media.num_tokens, dtype=np.int32),
        [("image-0", 1, media.num_tokens)],
    )
    return trajectory


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

"""`data.chat_template`, its variables and `rollout.sampling.stop` apply to sampling, training and saved models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import train, write_run
from tiny_tokenizers import THINKING
from transformers import AutoTokenizer

from meshrl.cli import main
from meshrl.monitor.rollout_log import read_rollouts

INLINE = ("cluster.executor=inline", "cluster.num_train_ranks=1")
STOP = ["e", "a", "o", "i", "n", "12", "\u00e9", *"QXYZKJ0123"]
GIVEN = ("chat_template=chat.jinja", "chat_template_kwargs={enable_thinking: false}")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run, and a file with a chat template that differs from its tokenizer's."""
    path = write_run(tmp_path)
    (tmp_path / "chat.jinja").write_text(THINKING, newline="")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template != THINKING
    return path


def test_a_run_uses_and_saves_the_template_and_the_stop_strings_of_its_config(config: Path, tmp_path: Path):
    more = ("rollout.sampling.max_new_tokens=60", "data.max_prompt_tokens=90", "train.max_tokens_per_microbatch=400")
    given = [f"data.{value}" for value in GIVEN] + [f"rollout.sampling.stop={json.dumps(STOP)}"]
    folder = train(config, "run", *INLINE, *given, *more, "loop.num_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ended = 0
    for logged in read_rollouts(folder / "rollouts" / "step_000001.jsonl"):
        prompt, (turn,) = logged.trajectory.prompt, logged.trajectory.turns
        assert tokenizer.decode(prompt.ids.tolist()).endswith("<|im_end|>\n<|im_start|>assistant\n<think></think>")
        assert turn.sampling.stop == tuple(STOP)
        texts = [tokenizer.decode(turn.output_ids[:count].tolist()) for count in range(len(turn.output_ids) + 1)]
        has_stop = [any(stop in text for stop in STOP) for text in texts]
        assert not any(has_stop[:-1])
        assert not has_stop[-1] or turn.stop_reason == "stop"
        ended += has_stop[-1]
    assert ended > 8  # of 16 answers of a random model
    saved = folder / "checkpoints" / "step_000001"
    shutil.move(tmp_path / "chat.jinja", tmp_path / "moved.jinja")  # the run has a copy and does not need the file
    assert main(["convert", str(saved), str(tmp_path / "converted")]) == 0
    for model in (saved / "model", tmp_path / "converted"):
        assert AutoTokenizer.from_pretrained(model).chat_template == THINKING


def test_supervised_training_takes_the_same_keys_and_saves_the_template(config: Path, tmp_path: Path):
    values = json.loads(config.read_text())
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    sft = {"path": "chats.jsonl", "num_steps": 1, "rows_per_step": 1, "max_row_tokens": 99}
    config.write_text(json.dumps({**{key: values[key] for key in ("model", "train", "run")}, "sft": sft}))
    overrides = [*INLINE, *(f"sft.{value}" for value in GIVEN), "run.name=sft"]
    assert main(["sft", str(config), *overrides]) == 0
    saved = tmp_path / "runs" / "sft" / "checkpoints" / "step_000001"
    assert main(["convert", str(saved), str(tmp_path / "converted")]) == 0
    for model in (saved / "model", tmp_path / "converted"):
        assert AutoTokenizer.from_pretrained(model).chat_template == THINKING

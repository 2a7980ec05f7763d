"""`data.chat_template`, its variables and `rollout.sampling.stop` apply to sampling, training and saved models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import train, write_run
from tiny_tokenizers import THINKING, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshrl.cli import main
from meshrl.core.errors import DataError
from meshrl.model import save
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
    given.append("rollout.sampling.stop_token_ids=[9]")
    stops = _as_a_base_model(tmp_path / "model")
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
    best = {"step": 0, "score": 0.5, "model": str(tmp_path / "model")}  # the model before training
    (folder / "checkpoints" / "best.json").write_text(json.dumps(best))
    assert main(["convert", str(folder), str(tmp_path / "untrained"), "--dtype", "float32"]) == 0
    weights = [load_file(path / "model.safetensors") for path in (tmp_path / "model", tmp_path / "untrained")]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())
    for model in (saved / "model", tmp_path / "converted", tmp_path / "untrained"):
        assert AutoTokenizer.from_pretrained(model).chat_template["default"] == THINKING
        _require_stops(model, sorted({*stops, 9}))


def _as_a_base_model(model: Path) -> list[int]:
    """Its EOS is not the token with which the template ends a turn; generation_config.json has a further stop id, and
    values that Transformers loads and does not save; config.json has another EOS and parameters of generation. Returns
    the stop ids."""
    tokenizer = tiny_tokenizer(eos="<|endoftext|>")
    tokenizer.save_pretrained(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "brief.jinja").write_text("{{ messages[0].content }}")
    generation = {"do_sample": False, "temperature": 0.6, "eos_token_id": [1]}
    (model / "generation_config.json").write_text(json.dumps(generation))
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "eos_token_id": 7, "top_p": 0.5, "max_length": 9}))
    return sorted([1, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")])


def _require_stops(model: Path, stops: list[int]) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.generation_config.eos_token_id == stops
    assert (loaded.generation_config.do_sample, loaded.generation_config.temperature) == (False, 0.6)
    assert loaded.config.eos_token_id in stops, "servers also stop at this one"
    assert (model / "additional_chat_templates" / "brief.jinja").is_file()
    greedy = loaded.generate(torch.tensor([[5, 6]]), max_new_tokens=1, pad_token_id=0)[0, -1]
    loaded.generation_config.eos_token_id = [*stops, int(greedy)]
    assert loaded.generate(torch.tensor([[5, 6]]), max_new_tokens=9, pad_token_id=0).shape[1] == 3


@pytest.mark.parametrize(
    ("copied", "expected"),
    [
        (("chat_template*",), "no tokenizer could be loaded from .*tokenizer.json: no such file"),
        (("chat_template*", "tokenizer.json"), "has other tokens than that of"),
    ],
)
def test_a_file_that_no_export_could_write_ends_the_run_before_its_first_step(
    config: Path, monkeypatch: pytest.MonkeyPatch, copied: tuple[str, ...], expected: str
):
    """An exported model without files of its tokenizer, which is noticed when the files are loaded."""
    monkeypatch.setattr(save, "_COPIED", copied)
    own = config.parent / "model" / "tokenizer_config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"extra_special_tokens": {"own_token": "<|own|>"}}))
    with pytest.raises(DataError, match=expected):
        train(config, "refused", *INLINE)
    (folder,) = (config.parent / "runs").iterdir()
    assert not (folder / "metrics.jsonl").read_text() and not (folder / "checkpoints").exists()
    assert not list(folder.glob("tmp*"))


def test_supervised_training_takes_the_same_keys_and_saves_the_template(config: Path, tmp_path: Path):
    values = json.loads(config.read_text())
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    sft = {"path": "chats.jsonl", "num_steps": 1, "rows_per_step": 1, "max_row_tokens": 99}
    config.write_text(json.dumps({**{key: values[key] for key in ("model", "train", "run")}, "sft": sft}))
    overrides = [*INLINE, *(f"sft.{value}" for value in GIVEN), "run.name=sft"]
    stops = _as_a_base_model(tmp_path / "model")
    assert main(["sft", str(config), *overrides]) == 0
    saved = tmp_path / "runs" / "sft" / "checkpoints" / "step_000001"
    assert main(["convert", str(saved), str(tmp_path / "converted")]) == 0
    for model in (saved / "model", tmp_path / "converted"):
        assert AutoTokenizer.from_pretrained(model).chat_template["default"] == THINKING
        _require_stops(model, stops)

"""Every command refuses rows with ids beyond the model's embedding, before it computes anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import tiny_qwen2
from tiny_run import write_run

from meshrl.cli import main
from meshrl.core.errors import DataError
from meshrl.model.limits import text_config

NUM_IDS = 100


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run with a model that has fewer ids than the tokenizer."""
    path = write_run(tmp_path)
    tiny_qwen2(vocab_size=NUM_IDS).save_pretrained(tmp_path / "model")
    assert text_config(str(tmp_path / "model")).vocab_size == NUM_IDS
    return path


def _sft_of(config: Path) -> Path:
    sections = json.loads(config.read_text())
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (config.parent / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    shared = {key: sections[key] for key in ("model", "train", "run")}
    path = config.parent / "sft.yaml"
    path.write_text(
        json.dumps({**shared, "sft": {"path": "chats.jsonl", "num_steps": 1, "rows_per_step": 1, "max_row_tokens": 64}})
    )
    return path


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_a_row_with_an_id_beyond_the_models_embedding_is_refused(command, config, capsys):
    path = _sft_of(config) if command == "sft" else config
    rows = "chats" if command == "sft" else "rows"
    overrides = ["data.eval_path=rows.jsonl"] if command == "eval" else []
    inline = ["cluster.executor=inline", "cluster.num_train_ranks=1"]
    assert main([command, str(path), *overrides, *inline]) == 1
    printed = capsys.readouterr().err
    assert f"meshrl: {DataError.__name__}: " in printed
    assert f"{rows}.jsonl:1: token " in printed
    assert f"embedding ends with id {NUM_IDS - 1}: the embedding has {NUM_IDS} ids" in printed

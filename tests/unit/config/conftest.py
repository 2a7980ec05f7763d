import json
from collections.abc import Callable
from pathlib import Path

import pytest

GOOD = """\
model:
  path: tiny
train:
  optimizer: {lr: 1e-5}
data:
  path: train.jsonl
  eval_path: test.jsonl
  max_prompt_tokens: 100
rollout:
  sampling:
    max_new_tokens: 28
loop:
  num_steps: 20
  prompts_per_step: 6
cluster:
  num_train_ranks: 2
"""

GOOD_SFT = """\
model: {path: tiny}
sft: {path: chat.jsonl, num_steps: 40, rows_per_step: 16, max_row_tokens: 128}
cluster: {num_train_ranks: 2}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """write(text, name) puts a config next to a model folder and data files; the working folder is another one."""
    home = tmp_path / "home"
    elsewhere = tmp_path / "elsewhere"
    for folder in (home / "tiny", elsewhere):
        folder.mkdir(parents=True)
    (home / "tiny" / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 2048}))
    (home / "tiny" / "tokenizer.json").write_text("{}")
    (home / "tiny" / "model.safetensors").write_bytes(b"")
    row = {"question": "1+1=", "answer": "2"}
    (home / "train.jsonl").write_text((json.dumps(row) + "\n") * 30)
    (home / "test.jsonl").write_text(json.dumps(row) + "\n")
    (home / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    templates = {"latin.jinja": b"{{ 1 }} \xe9", "notes.txt": b"hello", "broken.jinja": b"{{ 1 }}\n{{ 1 + }}"}
    for name, template in templates.items():
        (home / name).write_bytes(template)
    monkeypatch.chdir(elsewhere)

    def write_config(text: str, name: str = "run.yaml") -> Path:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


@pytest.fixture
def good(write: Callable[..., Path]) -> Path:
    """A config for `meshrl train` with nothing wrong in it."""
    return write(GOOD)


@pytest.fixture
def good_sft(write: Callable[..., Path]) -> Path:
    """A config for `meshrl sft` with nothing wrong in it."""
    return write(GOOD_SFT, "sft.yaml")

"""Damaged tokenizers, and malicious chat templates: no code runs, no file is read, and none runs without end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import Damage, of_json, of_place, of_text, written
from outcome import check, limits

from meshrl.core.errors import DataError
from meshrl.data.chat import load_tokenizer, render, sft_row, stop_token_ids

MESSAGES = [{"role": "user", "content": "ab 12?"}, {"role": "assistant", "content": "12"}]
NAMES = ["tokenizer", "chat_template", "chat template", "config.json", "added_tokens", "special_tokens"]
EVIL = {
    "reads a file": "{% include '/etc/hostname' %}",
    "imports a template": "{% import 'os' as os %}{{ os }}",
    "reaches for Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaches for globals": "{{ messages.append.__globals__ }}{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "reaches through a format": "{{ '{0.__class__.__mro__}'.format(messages) }}{{ lipsum.__globals__['os'] }}",
    "changes the messages": "{{ messages.append(1) }}",
    "a sum of text and number": "{{ 1 + 'a' }}",
    "a division by zero": "{{ 1 / 0 }}",
    "a range without end": "{% for i in range(10**12) %}x{% endfor %}",
    "memory without end": "{{ 'a' * 10**14 }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "an undefined variable": "{{ no.such.variable }}",
    "no Jinja": "{% for m in messages %}{{ m.content",
    "a number": "{{ messages[7]['role'] }}{{ 1 | join(2) }}",
}


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny / "model", tmp_path / "tokenizer"))


def read(folder: Path) -> tuple[list[int], tuple[int, ...]]:
    tokenizer = load_tokenizer(folder)
    ids, _ = sft_row(tokenizer, MESSAGES, stop_token_ids(tokenizer, folder))
    return ids.tolist(), stop_token_ids(tokenizer, folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"]
)
def test_a_damaged_tokenizer_is_refused_or_gives_tokens(folder: Path, name: str):
    intact, data = read(folder), (folder / name).read_bytes()

    def judge(damage: Damage, value: Any) -> str | None:
        return f"gives {value}" if damage.kind in ("harmless", "doubtful") and value != intact else None

    damages = of_text(data, 5, "doubtful") if name.endswith("jinja") else of_json(data, 6, 20, "doubtful")
    check(folder, name, [*damages, *of_place()], read, judge, [*NAMES, name])


def test_files_of_two_tokenizers_together_are_refused(folder: Path):
    """With a template that does not write the tokenizer's end of turn, the trained model would never stop."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for other in ("config.json", "chat_template.jinja", "tokenizer_config.json"):
            if name != other:
                swapped = written(f"{other} in its place", "content", (folder / other).read_bytes())
                check(folder, name, [swapped], read, named=[*NAMES, str(folder)])


@pytest.mark.parametrize("what", EVIL)
def test_a_template_can_only_write_text(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch):
    """In Transformers' sandbox; every error that a template raises becomes a DataError."""
    monkeypatch.chdir(folder)
    (folder / "chat_template.jinja").write_text(EVIL[what])
    tokenizer = load_tokenizer(folder)
    with limits(), pytest.raises(DataError, match="the chat template refused messages"):
        render(tokenizer, MESSAGES)
    assert not (folder / "ran").exists()


def test_code_in_the_tokenizers_folder_is_not_run(folder: Path):
    """At a terminal, Transformers would ask whether to run it."""
    mark = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with limits():
        assert load_tokenizer(folder).encode("ab 12")  # from tokenizer.json only
    (folder / "tokenizer.json").unlink()
    with limits(), pytest.raises(DataError, match=r"tokenizer_config\.json: auto_map names code of its own"):
        load_tokenizer(folder)
    assert not mark.exists()


def test_messages_that_are_not_valid_text_are_refused(folder: Path):
    tokenizer = load_tokenizer(folder)
    for content in ("\ud800", "a\udfffb"):
        with pytest.raises(DataError):
            render(tokenizer, [{"role": "user", "content": content}])
    assert isinstance(render(tokenizer, [{"role": "user", "content": "\0"}]), np.ndarray)

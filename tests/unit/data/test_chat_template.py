"""data.chat_template and data.chat_template_kwargs: one template with the same variables in every rendering."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizers import CHATML, THINKING, tiny_tokenizer

from meshrl.core.errors import DataError
from meshrl.data.chat import continuation_ids, load_tokenizer, render, render_text, sft_row

USER = {"role": "user", "content": "ab?"}
ANSWER = {"role": "assistant", "content": "12"}
TOOL = {"role": "tool", "content": "ok"}
OFF = {"enable_thinking": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose own template is CHATML, in both files that may contain a template."""
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    return tmp_path


def test_a_template_replaces_the_tokenizers_own_as_text_or_as_a_file(folder: Path):
    short = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "short.jinja").write_bytes(b"\xef\xbb\xbf" + short.encode())  # the byte order mark is dropped
    for given in (short, str(folder / "short.jinja")):
        tokenizer = load_tokenizer(folder, given)
        assert tokenizer.chat_template == short
        assert render_text(tokenizer, [USER]) == "user: ab?\n"
    assert load_tokenizer(folder).chat_template == CHATML


def test_variables_reach_prompts_continuations_and_sft_rows_alike(folder: Path):
    """In a continuation without them the second answer would have another generation prompt than the first one,
    and would be trained with it."""
    tokenizer = load_tokenizer(folder, THINKING, OFF)
    prompt = "<|im_start|>user\nab?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert render_text(tokenizer, [USER]) == prompt
    added = continuation_ids(tokenizer, [TOOL], (2,), ended_by=2)
    assert (
        tokenizer.decode(added.tolist()) == "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    ids, mask = sft_row(tokenizer, [USER, ANSWER, TOOL, ANSWER])
    assert tokenizer.decode(ids[mask].tolist()) == "12<|im_end|>12<|im_end|>"
    twelve = ids[mask][:2].tolist()
    assert ids.tolist() == [*render(tokenizer, [USER]), *twelve, *added, *twelve]


def test_variables_in_the_tokenizers_file_are_not_used(folder: Path):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template_kwargs": OFF}))
    assert "<think>" not in render_text(load_tokenizer(folder, THINKING), [USER])
    assert "<think>" in render_text(load_tokenizer(folder, THINKING, OFF), [USER])


def test_variables_are_checked_against_the_tokenizers_own_template_too(folder: Path):
    tokenizer = load_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    assert "<think></think>" in render_text(load_tokenizer(folder, None, OFF), [USER])
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(
        DataError,
        match=r"chat_template_kwargs.enable_thinking would have no effect: the chat template does not read it",
    ):
        load_tokenizer(folder, None, OFF)
    np.testing.assert_array_equal(render(load_tokenizer(folder), [USER]), render(tokenizer, [USER]))


def test_the_error_for_a_misspelt_variable_lists_the_templates_variables(folder: Path):
    expected = (
        r"chat_template_kwargs.enable_thinkin would have no effect.* It reads .*enable_thinking.*"
        "; did you mean 'enable_thinking'"
    )
    with pytest.raises(DataError, match=expected):
        load_tokenizer(folder, THINKING, {"enable_thinkin": False})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}\n{% if x %}\n{{ 1 + }}{% endif %}", r"is not valid Jinja in line 3 \(\{\{ 1 \+ \}\}.*\)"),
        ("{% for m in messages %}{{ m.content }}", "is not valid Jinja in line 1"),
        ("{{ 1 }}" + "{% if x %}" * 5000, "is not "),
        ("no/such.jinja", "no such file"),
        ("", "is a folder"),
    ],
)
def test_a_template_that_can_not_be_used_is_refused_when_the_tokenizer_loads(
    folder: Path, template: str, expected: str
):
    with pytest.raises(DataError, match=expected):
        load_tokenizer(folder, template)


def test_a_file_without_jinja_is_no_template(folder: Path):
    (folder / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="every prompt would be the text 'hello'"):
        load_tokenizer(folder, str(folder / "notes.txt"))


def test_transformers_own_extensions_of_jinja_are_no_errors(folder: Path):
    marked = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{{ tone }}{% endgeneration %}{% endfor %}"
    )
    assert render_text(load_tokenizer(folder, marked, {"tone": "!"}), [USER, TOOL]) == "ab?!"

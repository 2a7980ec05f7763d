"""What `meshrl model-check` states of a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import CHATML, DROPS_THINKING, SHOWS_TOOLS, THINKING, tiny_tokenizer

from meshrl.core.errors import DataError
from meshrl.data.chat import load_tokenizer, render_text, stop_token_ids
from meshrl.tools.model_check.command import template_facts, template_lines

HISTORY = "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% else %}OLD{% endif %}"


def facts_of(template: str) -> list[str]:
    tokenizer = tiny_tokenizer(template)
    return list(template_facts(tokenizer, stop_token_ids(tokenizer)).values())


def test_a_template_that_keeps_its_history_trains_conversations_as_one_row():
    assert facts_of(CHATML) == ["rendered", "'<|im_end|>'", "continues the row", "one row", "not described"]
    assert facts_of(SHOWS_TOOLS)[-1] == "described, results rendered"
    assert facts_of(DROPS_THINKING)[2:4] == ["continues the row", "one row"]  # the answer has no thinking


def test_a_template_that_rewrites_answers_gives_each_further_turn_a_row_of_its_own():
    system, end, further, several, tools = facts_of(HISTORY + "<|im_end|>{% endfor %}")
    assert (system, end, tools) == ("rendered", "'<|im_end|>'", "not described")
    assert further == "a row of its own, since answers are rewritten"
    assert several.startswith("refused: this chat template can't be split into turns")


def test_what_a_template_refuses_or_leaves_out_is_stated_with_the_reason():
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    assert "no system" in facts_of(no_system)[0]
    drops = CHATML.replace("for m in messages", "for m in messages if m.role not in ('system', 'tool')")
    assert facts_of(drops)[0] == "left out"
    shows = SHOWS_TOOLS.replace("for m in messages", "for m in messages if m.role != 'tool'")
    assert facts_of(shows)[-1] == "described, results left out"
    endless = CHATML.replace("<|im_end|>\n", "\n")
    assert [fact.split(":")[0] for fact in facts_of(endless)[1:4]] == ["refused"] * 3


def test_a_folder_without_a_template_is_one_line(tmp_path: Path):
    assert template_lines(str(tmp_path))[0].startswith("no chat template: no tokenizer could be loaded")
    tiny_tokenizer(None).save_pretrained(tmp_path)
    assert template_lines(str(tmp_path)) == ["no chat template: data.chat_template names one"]
    tiny_tokenizer(THINKING).save_pretrained(tmp_path / "own")
    assert template_lines(str(tmp_path / "own"))[1] == "chat template, an answer ends with: '<|im_end|>'"


def test_a_template_that_leaves_out_texts_is_refused_when_the_tokenizer_is_loaded(tmp_path: Path):
    """Those of some vision-language models read lists of texts and images, which they get."""
    only_lists = CHATML.replace(
        "{{ m.content }}", "{% for part in m.content if part.text %}{{ part.text }}{% endfor %}"
    )
    tiny_tokenizer(only_lists).save_pretrained(tmp_path)
    assert "what?" in render_text(load_tokenizer(tmp_path), [{"role": "user", "content": "what?"}])
    tiny_tokenizer(CHATML.replace("{{ m.content }}", "")).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"leaves out the text of user messages.*data\.chat_template"):
        load_tokenizer(tmp_path)

"""A run whose model would not see its tools ends before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import write_run
from tiny_tokenizers import CHATML, SHOWS_TOOLS

from meshrl.agent.loop import MultiTurn
from meshrl.core.errors import ConfigError
from meshrl.run.inputs import Objects, load_run
from meshrl.run.task import load_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path).parent


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_error_names_the_template_and_the_tools(folder, training):
    options = ["agent.kind=multi_turn", "data.eval_path=rows.jsonl"]
    loaded = load_run(folder / "config.yaml", options)
    expected = rf"chat template of {folder}/model: .*\(calculator\)\. Set data\.chat_template"
    with pytest.raises(ConfigError, match=expected):
        load_task(loaded.config, Objects(), training)
    (folder / "named.jinja").write_text(CHATML)
    loaded = load_run(folder / "config.yaml", [*options, "data.chat_template=named.jinja"])
    with pytest.raises(ConfigError, match=r"data\.chat_template = .*named\.jinja: it renders the same text"):
        load_task(loaded.config, Objects(), training)


def test_a_template_with_tools_is_accepted_and_the_order_of_the_data_stays(folder):
    (folder / "tools.jinja").write_text(SHOWS_TOOLS)
    options = ["data.chat_template=tools.jinja"]
    cfg = load_run(folder / "config.yaml", options).config
    with_tools, without = (load_task(cfg, Objects(agent=agent), True) for agent in (MultiTurn(), None))
    assert "renders no `tool_calls`" in with_tools.tool_note and without.tool_note is None
    assert "calculator" in with_tools.tokenizer.decode(with_tools.train_prompts.next(1)[0].ids)
    assert [p.id for p in with_tools.train_prompts.next(3)] == [p.id for p in without.train_prompts.next(4)[1:]]

"""Rows in memory are read like rows of a file, and errors name the row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import tiny_tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import DataError
from meshrl.data.datasets import PromptMaker, load_sft_rows
from meshrl.data.order import load_eval_prompts, open_feed
from meshrl.data.tables import RowTable

ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i), "level": i % 3} for i in range(20)]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_feed_of_rows_in_memory_equals_the_feed_of_a_file(tmp_path: Path, streaming: bool):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    cfg = DataConfig(path=str(path), streaming=streaming)
    from_file = open_feed(PromptMaker(cfg, tiny_tokenizer()), 3).next(30)
    cfg = cfg.model_copy(update={"path": "<20 rows>"})
    memory = open_feed(PromptMaker(cfg, tiny_tokenizer()), 3, RowTable("data", ROWS))
    state = memory.state()
    prompts = memory.next(30)
    facts = [[(p.ordinal, p.messages, p.answer, p.meta, p.ids.tolist()) for p in feed] for feed in (from_file, prompts)]
    assert facts[0] == facts[1]
    assert all(p.messages[-1]["content"] == ROWS[int(p.id.removeprefix("data-"))]["question"] for p in prompts)
    memory.load_state(state)
    assert [p.id for p in memory.next(30)] == [p.id for p in prompts]


def test_a_resume_with_other_rows_is_refused():
    make = PromptMaker(DataConfig(path="<20 rows>"), tiny_tokenizer())
    state = open_feed(make, 0, RowTable("data", ROWS)).state()
    changed = [*ROWS[:-1], ROWS[-1] | {"question": "changed"}]
    with pytest.raises(DataError, match="another data order"):
        open_feed(make, 0, RowTable("data", changed)).load_state(state)


@pytest.mark.parametrize("bad", ["1+1", None, ["question", "1+1"]])
def test_a_row_that_is_not_a_dict_is_reported_with_its_index(bad: object):
    with pytest.raises(DataError, match=r"^data\[2\] is .*each row must be a dict"):
        open_feed(PromptMaker(DataConfig(path="x"), tiny_tokenizer()), 0, RowTable("data", [*ROWS[:2], bad]))


def test_faults_of_rows_are_reported_with_their_index():
    rows = [*ROWS[:3], {"question": "1+1"}]
    with pytest.raises(DataError, match=r"^eval_data\[3\]: no column 'answer'"):
        load_eval_prompts(PromptMaker(DataConfig(eval_path="x"), tiny_tokenizer()), RowTable("eval_data", rows))
    chats = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": 3}]}]
    with pytest.raises(DataError, match=r"^data\[0\]: message 1 of column 'messages'"):
        load_sft_rows(RowTable("data", chats), SftConfig(path="x", num_steps=1), tiny_tokenizer(), (2,))


def test_held_out_rows_in_memory_obey_eval_limit():
    cfg = DataConfig(eval_path="x", eval_limit=4)
    prompts, _ = load_eval_prompts(PromptMaker(cfg, tiny_tokenizer()), RowTable("eval_data", ROWS))
    assert [(p.id, p.ordinal) for p in prompts] == [(f"eval_data-{i}", -1 - i) for i in range(4)]

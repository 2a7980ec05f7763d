from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden import cases, check_case
from tiny_tokenizers import DROPS_THINKING, tiny_tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import DataError
from meshrl.data.datasets import PromptMaker, load_prompts, load_sft_rows

GOOD = {"question": "1+1=", "answer": "2", "level": 3}


def write(tmp_path, *rows, name="train.jsonl"):
    path = tmp_path / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def config(path, **changes):
    return DataConfig(path=str(path), **changes)


def load(path, **changes):
    return load_prompts(path, PromptMaker(config(path, **changes), tiny_tokenizer()))


def test_a_row_becomes_a_rendered_prompt_with_its_other_columns_in_meta(tmp_path):
    tokenizer = tiny_tokenizer()
    path = write(tmp_path, GOOD, "", {"question": "2+2=", "answer": "4"})
    prompts, dropped = load_prompts(path, PromptMaker(config(path, system="Be brief."), tokenizer))
    assert dropped == 0
    assert [p.id for p in prompts] == ["train-1", "train-3"]  # a blank line is not a row, but it counts as a line
    assert prompts[0].answer == "2"
    assert prompts[0].meta == {"level": 3}
    assert prompts[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1="},
    ]
    assert "Be brief.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>" in tokenizer.decode(prompts[0].ids.tolist())
    assert not prompts[0].ids.flags.writeable


def test_a_message_list_is_used_unchanged(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompts, _ = load(write(tmp_path, {"question": messages}), answer=None)
    assert prompts[0].messages == messages
    assert prompts[0].answer is None


def test_tools_are_rendered_into_the_prompt(tmp_path):
    path = write(tmp_path, GOOD)
    tokenizer = tiny_tokenizer("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ messages[0].content }}")
    tool = {"type": "function", "function": {"name": "calc", "description": "", "parameters": {}}}
    with_tool, _ = load_prompts(path, PromptMaker(config(path), tokenizer, tools=[tool]))
    without, _ = load_prompts(path, PromptMaker(config(path), tokenizer))
    assert tokenizer.decode(with_tool[0].ids.tolist()) == "[calc]1+1="
    assert tokenizer.decode(without[0].ids.tolist()) == "1+1="


def test_prompts_over_the_limit_are_left_out_and_counted(tmp_path):
    path = write(tmp_path, GOOD, {"question": "x" * 100, "answer": "4"}, GOOD)
    prompts, dropped = load(path, max_prompt_tokens=60)
    assert ([p.id for p in prompts], dropped) == (["train-1", "train-3"], 1)
    with pytest.raises(DataError, match=r"all 3 rows are longer than data\.max_prompt_tokens = 5 tokens \(shortest"):
        load(path, max_prompt_tokens=5)


def test_a_limit_takes_the_first_rows_and_reads_no_further(tmp_path):
    path = write(tmp_path, GOOD, GOOD, "not json")
    prompts, _ = load_prompts(path, PromptMaker(config(path), tiny_tokenizer()), limit=2)
    assert [p.id for p in prompts] == ["train-1", "train-2"]


ROWS = Path(__file__).parent / "golden" / "rows.txt"


@pytest.mark.parametrize("given", [given for given, _ in cases(ROWS)])
def test_the_error_for_a_bad_row_has_file_line_and_expected_form(tmp_path, given):
    with pytest.raises(DataError) as error:
        load(write(tmp_path, GOOD, given))
    check_case(ROWS, given, str(error.value), folder=tmp_path)


def answers_from_rows(row):
    return {"prompt": row["question"]} | ({"answer": row["answer"]} if "answer" in row else {})


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        ({}, {"question": "1", "answer": None}, "column 'answer' is null"),
        ({}, {"question": "1", "answer": " "}, "column 'answer' is an empty string"),
        ({"answer": "info.level"}, {"question": "1", "info": {"level": None}}, r"column 'info\.level' is null"),
        ({"map": "test_datasets:answers_from_rows"}, {"question": "1"}, "the answer from data.map test_.* is null"),
        ({"answer": None}, {"question": "1", "answer": "2"}, "data.answer is null"),
    ],
)
def test_a_row_without_an_answer_is_an_error_where_a_reward_needs_one(tmp_path, changes, row, expected):
    """Completions would be compared with the text None."""
    path = write(tmp_path, row)
    message = (
        rf"train\.jsonl:1: {expected}, but completions are compared with it \(reward\.terms\.maths\); give the row"
    )
    with pytest.raises(DataError, match=message):
        load_prompts(path, PromptMaker(config(path, **changes), tiny_tokenizer(), answer_for=["maths"]))


def test_numbers_and_false_are_answers_and_a_map_may_leave_them_out_where_no_reward_needs_one(tmp_path):
    path = write(tmp_path, {"question": "1", "answer": 0}, {"question": "1", "answer": False})
    assert len(load_prompts(path, PromptMaker(config(path), tiny_tokenizer(), answer_for=["maths"]))[0]) == 2
    (prompt,), _ = load(write(tmp_path, {"question": "1"}), map="test_datasets:answers_from_rows")
    assert prompt.answer is None


def test_bytes_that_are_not_utf8_name_file_and_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "caf\xe9", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"train\.jsonl:2: not UTF-8 at byte 17"):
        load(path)


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert load(path)[0][0].answer == "2"


def test_missing_and_empty_files_have_different_errors(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"is a folder, not a file; it has no \*\.jsonl"):
        load(tmp_path)
    with pytest.raises(DataError, match="has no rows"):
        load(write(tmp_path, "", "  "))


def test_two_system_messages_are_a_conflict_and_not_a_choice(tmp_path):
    row = {"question": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    with pytest.raises(DataError, match=r":1: .*data\.system is set too; keep one"):
        load(write(tmp_path, row), answer=None, system="c")


def test_a_template_that_refuses_a_row_names_its_line(tmp_path):
    path = write(tmp_path, GOOD)
    picky = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match=r"train\.jsonl:1: the chat template refused"):
        load_prompts(path, PromptMaker(config(path), tiny_tokenizer(picky)))


def test_sft_rows_are_rendered_filtered_and_named(tmp_path):
    short = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "12"}]}
    long = {"messages": [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "12"}]}
    path = write(tmp_path, short, long, name="warm.jsonl")
    cfg = SftConfig(path=str(path), num_steps=1, max_row_tokens=60)
    rows, dropped = load_sft_rows(path, cfg, tiny_tokenizer(), (2,))
    assert ([r.id for r in rows], dropped) == (["warm-1"], 1)
    assert rows[0].mask.sum() == 2 and len(rows[0].ids) == len(rows[0].mask)


def test_an_sft_row_that_can_not_be_split_names_its_line(tmp_path):
    thinking = {"role": "assistant", "content": "<think>a</think>b"}
    user = {"role": "user", "content": "u"}
    path = write(tmp_path, {"messages": [user, thinking]}, {"messages": [user, thinking, user, thinking]})
    cfg = SftConfig(path=str(path), num_steps=1)
    with pytest.raises(DataError, match=r"train\.jsonl:2: this chat template can't be split into turns"):
        load_sft_rows(path, cfg, tiny_tokenizer(DROPS_THINKING), (2,))
    with pytest.raises(DataError, match=r"column 'messages' is str.*it should be a list"):
        load_sft_rows(write(tmp_path, {"messages": "hello"}), cfg, tiny_tokenizer(), (2,))


def test_an_id_outside_the_embedding_is_reported_with_its_row(tmp_path):
    """It would be an index error, or worse, in a forward pass."""
    tokenizer, chat = tiny_tokenizer(), {"role": "assistant", "content": "z"}
    z = tokenizer.convert_tokens_to_ids("z")
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    vocab_size = len(tokenizer) - 1  # the tokenizer has one more id, which is in no row
    path = write(tmp_path, GOOD, {**GOOD, "question": "z"})
    assert len(load_prompts(path, PromptMaker(config(path), tokenizer, vocab_size=vocab_size))[0]) == 2
    plain = tiny_tokenizer("{{ messages[0].content }}")
    words = (
        rf"train\.jsonl:2: token 0 of 1 is 'z', id {z}, but the model's embedding ends with id {z - 1}: the embedding "
        rf"has {z} ids, the tokenizer {len(tokenizer)}\. Put the tokenizer"
    )
    with pytest.raises(DataError, match=words):
        load_prompts(path, PromptMaker(config(path), plain, vocab_size=z))
    assert len(load_prompts(path, PromptMaker(config(path), plain, vocab_size=z + 1))[0]) == 2
    path = write(tmp_path, {"messages": [{"role": "user", "content": "a"}, chat]}, name="warm.jsonl")
    cfg = SftConfig(path=str(path), num_steps=1)
    assert len(load_sft_rows(path, cfg, tokenizer, (2,), vocab_size)[0]) == 1
    with pytest.raises(DataError, match=rf"warm\.jsonl:1: token 6 of \d+ is 'Ċ', id {newline}, .* has {newline} ids"):
        load_sft_rows(path, cfg, tokenizer, (2,), newline)

"""CSV and JSON files as tables; rows that are left out because they are bad, or held out; epochs as steps."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from tiny_tokenizers import tiny_tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import ConfigError, DataError
from meshrl.data.chat import stop_token_ids
from meshrl.data.datasets import PromptMaker, load_prompts, load_sft_rows
from meshrl.data.order import load_eval_prompts, open_feed
from meshrl.data.tables import csv_rows, open_table
from meshrl.run.inputs import Objects, load_run, load_sft

EXACT = 'id; question;answer\n\n1; "a; ""b""\nc";007\n2;x;NA\n;;\n3;y"z;\n'


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("delimiter", [";", ",", "\t", "|"])
def test_csv_keeps_texts_as_they_are_and_counts_lines(tmp_path, delimiter, line_end):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" + EXACT.replace(";", delimiter).replace("\n", line_end).encode())
    rows = list(open_table(path).rows())
    assert [row.id for row in rows] == ["a-3", "a-5", "a-7"] and not any(row.fault for row in rows)
    quoted = f'a{delimiter} "b"{line_end}c'
    assert rows[0].data == {"id": "1", "question": quoted, "answer": "007"}
    assert [row.data["answer"] for row in rows[1:]] == ["NA", ""] and rows[2].data["question"] == 'y"z'
    ranges = [(1, 2), (0, 1), (2, None), (3, None), (1, 1), (0, 9)]
    found = [[row.id for row in open_table(path).rows(*each)] for each in ranges]
    assert found == [["a-5"], ["a-3"], ["a-7"], [], [], ["a-3", "a-5", "a-7"]] and open_table(path).num_rows == 3


def test_a_pass_over_a_csv_file_has_its_text_in_memory_and_not_its_rows(tmp_path):
    path = rows_file(tmp_path, *(f"{i}+{i},{2 * i}" for i in range(20_000)))
    table, expected = open_table(path), sum(1 for _ in csv_rows(path))
    tracemalloc.start()
    first = table.first()
    for number, _ in enumerate(table.rows(), 1):
        if number == expected:
            held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert first is not None and number == expected and held < 2 * path.stat().st_size


def test_csv_with_line_ends_of_old_macs_is_read(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"question;answer\r1;2\r")
    assert [row.data for row in open_table(tmp_path / "a.csv").rows()] == [{"question": "1", "answer": "2"}]


def test_a_json_file_is_a_list_or_has_one_or_has_an_object_on_each_line(tmp_path):
    path, rows = tmp_path / "a.json", [{"question": "q", "answer": 1}, {"question": "r", "answer": 2}]
    for text in (
        json.dumps(rows),
        json.dumps({"version": "1", "data": rows}),
        json.dumps({"data": rows}, indent=1),
        "\n".join(map(json.dumps, rows)),
    ):
        path.write_text(text)
        assert [row.data for row in open_table(path).rows()] == rows, text
    path.write_text(json.dumps({"question": "q" * 100_000}) + "\n" + json.dumps(rows[1]))
    assert [len(row.data["question"]) for row in open_table(path).rows()] == [100_000, 1], "a long first line"
    conversation = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    for one_row in (rows[0], conversation):
        path.write_text(json.dumps(one_row))
        assert [row.data for row in open_table(path).rows()] == [one_row]
    path.write_text(json.dumps([rows[0], "text"]))
    assert [row.fault for row in open_table(path).rows()] == [
        "",
        f"{path}: row 1 (from 0) is a JSON str and not an object {{column: value}}",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"question,answer,answer\n1,2,3\n", "line 1: several columns have the name 'answer'"),
        ("a.csv", b'question,answer\n1,2\n"3,4\n5,6\n', "line 3: not CSV .* must end"),
        ("a.csv", "question,answer\nB\u00fcro,2\n".encode("latin-1"), "not UTF-8 at byte 17"),
        ("a.json", b'{"a": [{"x": 1}], "b": [{"x": 1}]}', "an object with 2 lists"),
        ("a.json", b"3", "a JSON int; it should be a list of objects"),
        ("a.csv", b'"question,answer\r1,2', "line 1: not CSV"),
        ("a.CSV.GZ", b"", "is compressed; unpack it"),
        ("a.csv.gz", b"", "is compressed; unpack it"),
        ("a.xlsx", b"", "is a spreadsheet; save it as CSV"),
    ],
)
def test_a_file_that_can_not_be_read_is_an_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: {message}"):
        list(open_table(tmp_path / name).rows())


def rows_file(tmp_path, *more: str):
    path = tmp_path / "rows.csv"
    rows = [f"question {i % 40} ?,{i}" for i in range(80)]  # each question is there twice
    path.write_text("\n".join(["question,answer", *rows, *more]))
    return path


def maker(path, **data):
    bad = list[str]() if data.get("bad_rows") == "leave_out" else None
    return PromptMaker(DataConfig(path=str(path), **data), tiny_tokenizer(), bad=bad)


def test_bad_rows_are_left_out_with_their_lines_unless_they_are_most(tmp_path):
    path = rows_file(tmp_path, "1,2,3", ",4", "5,", '"6" 7,8')
    with pytest.raises(DataError, match="3 of the first 84 rows can't be used"):  # an empty answer may be one
        load_prompts(path, maker(path))
    make = maker(path, bad_rows="leave_out")
    assert make.bad is not None and len(load_prompts(path, make)[0]) == 80
    assert [text.removeprefix(f"{path}:").partition(":")[0] for text in make.bad] == ["82", "83", "84", "85"]
    path.write_text("question,answer\n1,2\n3\n4\n")
    with pytest.raises(DataError, match="2 of the first 3 rows can't be used"):
        load_prompts(path, maker(path, bad_rows="leave_out"))


def test_equal_questions_are_on_one_side_for_training_evaluation_and_sft(tmp_path):
    path = rows_file(tmp_path, "Question  5 ?,80")  # another spelling of one
    make = maker(path, eval_fraction=0.3, system="s")
    held_out, _ = load_eval_prompts(make)
    trained = open_feed(make, seed=0).next(81 - len(held_out))
    assert 10 < len(held_out) < 40 and {p.id for p in [*held_out, *trained]} == {f"rows-{i}" for i in range(2, 83)}
    spelled = [{" ".join(p.messages[-1]["content"].lower().split()) for p in side} for side in (held_out, trained)]
    assert not spelled[0] & spelled[1] and len(spelled[0] | spelled[1]) == 40
    assert [p.id for p in load_eval_prompts(maker(path, eval_fraction=0.3, eval_limit=3))[0]] == [
        p.id for p in held_out[:3]
    ]
    tokenizer = tiny_tokenizer()
    sft = SftConfig(path=str(path), num_steps=1, prompt="question", eval_fraction=0.3, system="other")
    rows, _ = load_sft_rows(path, sft, tokenizer, stop_token_ids(tokenizer))
    assert {row.id for row in rows} == {p.id for p in trained}
    assert tokenizer.decode(rows[0].ids[rows[0].mask].tolist()) == f"{trained_answer(trained, rows[0].id)}<|im_end|>"
    with pytest.raises(ConfigError, match=r"data\.eval_fraction = 1e-09 leaves none of 81 rows"):
        load_eval_prompts(maker(path, eval_fraction=1e-9))


def trained_answer(prompts, name):
    return next(p.answer for p in prompts if p.id == name)


def test_epochs_become_steps_of_the_rows_that_are_trained(tmp_path):
    path = rows_file(tmp_path)
    sft = {"path": str(path), "prompt": "question", "rows_per_step": 10, "eval_fraction": 0.25, "num_epochs": 3}
    config = {"model": {"path": "organisation/model"}, "sft": sft}
    loaded = load_sft(config)
    assert loaded.config.sft.num_steps == 18 and loaded.config.sft.num_epochs is None
    assert loaded.origins["sft.num_steps"] == "config-dict, 3 epochs of 60 rows"
    assert load_sft(config, ["sft.num_steps=4"]).config.sft.num_steps == 4
    in_memory = load_sft(
        {**config, "sft": {**sft, "path": None}},
        objects=Objects(rows={"sft.path": [{"question": 1, "answer": 2}] * 80}),
    )
    assert in_memory.config.sft.num_steps == 18
    with pytest.raises(ConfigError, match=r"sft\.num_steps is required"):
        load_sft(config, ["sft.num_epochs=null"])
    written = {**config, "sft": {**sft, "num_steps": 5}}
    with pytest.raises(ConfigError, match="two ways to write one number"):
        load_sft(written)
    assert load_sft(written, ["sft.num_epochs=1"]).config.sft.num_steps == 6
    rl = {"model": {"path": "organisation/model"}, "data": {"path": str(path)}, "loop": {"num_epochs": 2}}
    assert load_run(rl).config.loop.num_steps == 5  # of 32 prompts


def test_held_out_rows_by_two_ways_are_refused_and_the_command_line_wins(tmp_path):
    path = rows_file(tmp_path)
    data = {"path": str(path), "eval_fraction": 0.2, "eval_path": str(path)}
    rl = {"model": {"path": "organisation/model"}, "data": data, "loop": {"num_steps": 2}}
    with pytest.raises(ConfigError, match="give only one"):
        load_run(rl)
    del data["eval_path"]
    assert load_run(rl, [f"data.eval_path={path}"]).config.data.eval_fraction is None
    with pytest.raises(ConfigError, match="read at the start"):
        load_run({**rl, "data": {**data, "streaming": True}})
    columns = {"prompt": "question", "answer": "answer", "num_steps": 2}
    sft = {"model": rl["model"], "sft": {"path": str(path), "eval_fraction": 0.2, **columns}}
    with pytest.raises(ConfigError, match="both hold out rows"):
        load_sft({**sft, "sft": {**sft["sft"], "eval_path": str(path)}})
    assert load_sft(sft, [f"sft.eval_path={path}"]).config.sft.eval_fraction is None

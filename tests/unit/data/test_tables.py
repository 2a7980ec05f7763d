from __future__ import annotations

import datetime
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import tiny_tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import ConfigError, DataError
from meshrl.data.datasets import PromptMaker, load_prompts, load_sft_rows
from meshrl.data.tables import MARK_BYTES, ROWS_AT_ONCE, open_table

NUM = 2 * ROWS_AT_ONCE + 88


def questions(n, first=0):
    return [{"question": f"{i}+1=", "answer": str(i + 1), "level": {"n": i}} for i in range(first, first + n)]


def write_jsonl(path, rows, blank_every=7):
    """With blank lines in between, so that rows and lines are counted apart."""
    lines = [json.dumps(row) + "\n" + "\n" * (i % blank_every == 0) for i, row in enumerate(rows)]
    path.write_text("".join(lines), encoding="utf-8")


def write_parquet(path, rows, row_group_size=100):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)


def make(kind, folder):
    """A table of NUM rows of this kind; folders of shards have two files of different size."""
    folder.mkdir(exist_ok=True)
    rows = questions(NUM)
    if kind == "jsonl":
        write_jsonl(folder / "train.jsonl", rows)
        return folder / "train.jsonl"
    if kind == "parquet":
        write_parquet(folder / "train.parquet", rows)
        return folder / "train.parquet"
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(folder / "set")
        return folder / "set"
    if kind == "split":
        parts = datasets.DatasetDict(
            train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(questions(3))
        )
        parts.save_to_disk(folder / "sets")
        return folder / "sets"
    writer = write_jsonl if kind == "jsonl shards" else write_parquet
    suffix = kind.split()[0]
    writer(folder / f"part-1.{suffix}", rows[300:])
    writer(folder / f"part-0.{suffix}", rows[:300])
    return folder


KINDS = ["jsonl", "parquet", "saved", "split", "jsonl shards", "parquet shards"]


def open_kind(kind, folder):
    return open_table(make(kind, folder), split="train" if kind == "split" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_table_returns_the_same_rows_for_any_range(tmp_path, kind):
    table = open_kind(kind, tmp_path / "data")
    rows = questions(NUM)
    assert table.num_rows == NUM
    assert [raw.data for raw in table.rows()] == rows
    for start, stop in [(0, 3), (0, None), (255, 257), (256, 512), (299, 301), (513, 599), (590, 9999), (300, 300)]:
        assert [raw.data for raw in table.rows(start, stop)] == rows[start:stop], (start, stop)
    assert list(table.rows(NUM, None)) == list(table.rows(NUM + 300, NUM + 301)) == []
    assert len({raw.id for raw in table.rows()}) == NUM


@pytest.mark.parametrize(
    ("kind", "id", "where"),
    [
        ("jsonl", "train-596", "train.jsonl:596"),
        ("parquet", "train-520", "train.parquet: row 520 (from 0)"),
        ("saved", "set-520", "set: row 520 (from 0)"),
        ("split", "sets-train-520", "train: row 520 (from 0)"),
        ("jsonl shards", "part-1-253", "part-1.jsonl:253"),
        ("parquet shards", "part-1-220", "part-1.parquet: row 220 (from 0)"),
    ],
)
def test_a_row_has_its_place_in_its_own_file(tmp_path, kind, id, where):
    """A place that does not count blank lines or earlier shards would lead a user to another row."""
    (raw,) = open_kind(kind, tmp_path / "data").rows(520, 521)
    assert raw.id == id and raw.where.endswith(where)
    if "jsonl" in kind:
        path, _, line = raw.where.rpartition(":")
        with open(path) as file:
            assert json.loads(file.readlines()[int(line) - 1]) == raw.data == questions(NUM)[520]


def test_single_rows_of_a_large_jsonl_file_are_found_without_reading_all_before_them(tmp_path):
    """A wrong offset in the index would return another row under the place and id of the right one."""
    rows = [{"question": f"{i}?", "text": "x" * 500} for i in range(8000)]
    write_jsonl(tmp_path / "large.jsonl", rows)
    lines = (tmp_path / "large.jsonl").read_text().splitlines()
    assert (tmp_path / "large.jsonl").stat().st_size > 3 * MARK_BYTES
    table = open_table(tmp_path / "large.jsonl")
    for i in [0, 1, 1999, 2000, *range(7, 8000, 331), 7999]:
        (raw,) = table.rows(i, i + 1)
        assert raw.data == rows[i]
        assert json.loads(lines[int(raw.where.rpartition(":")[2]) - 1]) == rows[i]
    assert [raw.data for raw in table.rows(7990)] == rows[7990:]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "jsonl shards"])
def test_a_fingerprint_depends_only_on_the_rows(tmp_path, kind):
    table = open_kind(kind, tmp_path / "data")
    assert json.loads(json.dumps(table.fingerprint())) == open_kind(kind, tmp_path / "again").fingerprint()
    other = [*questions(NUM - 1), {"question": "a longer question", "answer": "x", "level": {"n": 0}}]
    path = tmp_path / "other"
    path.mkdir()
    {
        "jsonl": lambda: write_jsonl(path / "train.jsonl", other),
        "jsonl shards": lambda: write_jsonl(path / "train.jsonl", other),
        "parquet": lambda: write_parquet(path / "train.parquet", other),
        "saved": lambda: datasets.Dataset.from_list(other).save_to_disk(path),
    }[kind]()
    assert open_table(path).fingerprint() != table.fingerprint()


def test_the_first_rows_are_read_without_reading_or_counting_the_rest(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\nnot json\n')
    assert [raw.data for raw in open_table(path).rows(0, 1)] == [{"a": 1}]
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "shards" / "1.jsonl").write_text("not json\n")
    assert [raw.data for raw in open_table(tmp_path / "shards").rows(0, 2)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "format", "expected"),
    [
        ("rows.parquet", b"no such thing", "auto", "rows.parquet: this is not a parquet file that pyarrow can read"),
        ("rows.bin", b"{}", "datasets", "is a file; format: datasets needs a folder"),
        ("missing/rows.jsonl", None, "auto", "no such file"),
        ("missing", None, "parquet", "no such file"),
    ],
)
def test_a_path_that_is_not_a_table_is_refused_by_name(tmp_path, name, content, format, expected):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=expected) as error:
        list(open_table(tmp_path / name, format).rows())
    assert name in str(error.value)


def test_a_split_has_to_be_named_where_there_are_several(tmp_path):
    path = make("split", tmp_path / "data")
    with pytest.raises(DataError, match="has the splits train, test, and the split key"):
        open_table(path)
    with pytest.raises(DataError, match="there is no split 'dev'"):
        open_table(path, split="dev")
    assert open_table(path, split="test").num_rows == 3
    with pytest.raises(DataError, match="single data set without splits"):
        open_table(make("saved", tmp_path / "data"), split="train")


def test_a_folder_of_two_kinds_is_read_as_the_one_that_is_named(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", questions(3))
    write_parquet(tmp_path / "a.parquet", questions(2))
    with pytest.raises(DataError, match="could be read as jsonl or as parquet; set format to one of them"):
        open_table(tmp_path)
    assert open_table(tmp_path, "jsonl").num_rows == 3
    assert open_table(tmp_path, "parquet").num_rows == 2


def test_a_misspelt_path_in_an_existing_folder_is_not_read_as_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match="rows/trian: no such file"):
        open_table("rows/trian")


def test_the_error_for_an_unreachable_hub_advises_an_alternative(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"organisation/name: is no file or folder here.*Hugging Face hub.*save_to_disk"
    ):
        open_table("organisation/name", split="train")


def test_prompts_are_equal_for_all_kinds_of_tables(tmp_path):
    loaded = []
    for kind in KINDS:
        path = make(kind, tmp_path / kind)
        split = "train" if kind == "split" else None
        prompts, left_out = load_prompts(path, PromptMaker(DataConfig(), tiny_tokenizer()), 20, split)
        loaded.append([(p.messages, p.answer, p.meta, p.ids.tolist()) for p in prompts])
        assert len(prompts) == 20 and left_out == 0
    assert all(other == loaded[0] for other in loaded)


def test_a_bad_row_of_a_parquet_file_is_named_by_its_number(tmp_path):
    write_parquet(tmp_path / "rows.parquet", [*questions(5), {"question": " ", "answer": "1", "level": None}])
    with pytest.raises(DataError, match=r"rows\.parquet: row 5 \(from 0\): column 'question' is an empty string"):
        load_prompts(tmp_path / "rows.parquet", PromptMaker(DataConfig(), tiny_tokenizer()))


def test_a_column_that_is_not_plain_json_is_refused(tmp_path):
    day = datetime.date(2024, 1, 2)
    write_parquet(tmp_path / "rows.parquet", [{"question": "1+1=", "answer": "2", "day": day}])
    with pytest.raises(DataError, match=r"row 0 \(from 0\): column 'day' contains date .*data\.map"):
        load_prompts(tmp_path / "rows.parquet", PromptMaker(DataConfig(), tiny_tokenizer()))


def test_a_name_with_dots_is_a_field_in_a_column_unless_a_column_has_this_name(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}])
    cfg = DataConfig(prompt="prompt", answer="reward_model.ground_truth")
    (prompt,), _ = load_prompts(tmp_path / "a.jsonl", PromptMaker(cfg, tiny_tokenizer()))
    assert prompt.answer == "2"
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "1+1=", "reward_model.ground_truth": "3", "reward_model": {}}])
    assert load_prompts(tmp_path / "b.jsonl", PromptMaker(cfg, tiny_tokenizer()))[0][0].answer == "3"
    misspelt = DataConfig(prompt="prompt", answer="reward_model.truth")
    with pytest.raises(DataError, match=r"a\.jsonl:1: no column 'reward_model\.truth' \(columns: prompt, reward_m"):
        load_prompts(tmp_path / "a.jsonl", PromptMaker(misspelt, tiny_tokenizer()))


MAPS = """
def good(row):
    return {"messages": [{"role": "user", "content": row["q"]}], "answer": row["n"], "env": "sums", "meta": {"k": 1}}

def plain(row):
    return {"prompt": row["q"]}

def nothing(row):
    return None

def both(row):
    return {"prompt": "a", "messages": []}

def misspelt(row):
    return {"prompt": "a", "anwser": "b"}

def empty(row):
    return {"prompt": ""}

def deep(row):
    return {"prompt": "a", "answer": {1, 2}}

def wrong_meta(row):
    return {"prompt": "a", "meta": "level 3"}

def breaks(row):
    return {"prompt": row["question"]}
"""


@pytest.fixture
def maps(tmp_path, monkeypatch):
    (tmp_path / "row_maps_of_a_user.py").write_text(MAPS)
    monkeypatch.syspath_prepend(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{"q": "1+1=", "n": 2}])

    def load(name):
        cfg = DataConfig(map=f"row_maps_of_a_user:{name}", system="Be brief.")
        return load_prompts(tmp_path / "rows.jsonl", PromptMaker(cfg, tiny_tokenizer()))[0][0]

    return load


def test_a_function_makes_prompts_of_rows_of_any_shape(maps):
    prompt = maps("good")
    assert prompt.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
    assert (prompt.answer, prompt.env, prompt.meta) == (2, "sums", {"k": 1})
    prompt = maps("plain")
    assert prompt.messages[1] == {"role": "user", "content": "1+1="}
    assert (prompt.answer, prompt.env, prompt.meta) == (None, "default", {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", "returned NoneType null; it should be a dict with either prompt or messages"),
        ("both", "returned a dict with 'prompt', 'messages'; it should be a dict with either prompt or messages"),
        ("misspelt", "returned a dict with 'prompt', 'anwser'; it should be"),
        ("empty", "the prompt from data.map is an empty string"),
        ("deep", "the answer contains set .*not plain JSON"),
        ("wrong_meta", 'meta str "level 3"; use a string and a dict'),
        ("breaks", "data.map row_maps_of_a_user:breaks raised KeyError: 'question'"),
    ],
)
def test_a_function_that_returns_no_prompt_is_named_with_file_and_line(maps, name, expected):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{expected}"):
        maps(name)


def test_a_missing_function_is_refused(maps):
    with pytest.raises(ConfigError, match=r"data.map is .* has no 'missing'"):
        maps("missing")


def test_sft_rows_come_from_parquet_too(tmp_path):
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "12"}]
    write_parquet(tmp_path / "chat.parquet", [{"messages": messages}])
    rows, _ = load_sft_rows(tmp_path / "chat.parquet", SftConfig(path="", num_steps=1), tiny_tokenizer(), (2,))
    assert [row.id for row in rows] == ["chat-0"] and rows[0].mask.sum() == 2

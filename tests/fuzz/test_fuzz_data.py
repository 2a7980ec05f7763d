"""Damaged rows in JSONL, parquet, and folders of save_to_disk: rows before the damage are read as they were written.

A flipped bit in a text that stays valid can't be found; a row that is lost, joined or invented can.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import Damage, cuts, flips, of_json, of_place, of_text, rounds_of, written
from outcome import check, limits
from tiny_tokenizers import tiny_tokenizer

from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import DataError
from meshrl.data.datasets import PromptMaker, load_sft_rows
from meshrl.data.order import open_feed
from meshrl.data.tables import open_table

ROWS = [{"question": f"{i}+{i}?", "answer": str(2 * i), "level": {"n": i}} for i in range(40)]
TOKENIZER = tiny_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def table_of(name: str):
    """All operations of a run on a table: first row, count, rendering in memory and streamed."""

    def read(folder: Path) -> list[dict[str, Any]]:
        path = folder / name
        table = open_table(path)
        assert table.first() is None or table.num_rows
        rows = [raw.data for raw in table.rows()]
        cfg = DataConfig(path=str(path), max_prompt_tokens=200)
        prompts = open_feed(PromptMaker(cfg, TOKENIZER), seed=0).next(3)
        cfg = cfg.model_copy(update={"streaming": True})
        streamed = open_feed(PromptMaker(cfg, TOKENIZER), seed=0).next(3)
        assert all(len(prompt.ids) for prompt in [*prompts, *streamed])
        return rows

    return read


def judge(damage: Damage, rows: list[dict[str, Any]]) -> str | None:
    if damage.kind in ("harmless", "doubtful") and rows != ROWS:
        return f"reads {len(rows)} rows, and others"
    if damage.kind == "place":
        return "was read, although no file is there"
    if damage.kind == "cut" and rows != ROWS[: len(rows)]:
        return "rows that were not written"
    return None


def test_damaged_jsonl_is_reported_with_its_line(folder: Path):
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (folder / "rows.jsonl").write_bytes(data)
    check(folder, "rows.jsonl", [*of_text(data, 1), *of_place()], table_of("rows.jsonl"), judge)


@pytest.mark.parametrize("number", ["9" * 5000, "[" * 500 + "]" * 500])
def test_a_number_without_end_is_reported_with_its_line(folder: Path, number: str):
    lines, row = [json.dumps(row) for row in ROWS[:3]], '{"question": "a", "answer": "1", "n": ' + number + "}"
    (folder / "rows.jsonl").write_text("\n".join([*lines, row, *lines]) + "\n")
    with limits(), pytest.raises(DataError, match=r"rows\.jsonl:4: "):
        cfg = DataConfig(path=str(folder / "rows.jsonl"), max_prompt_tokens=200)
        open_feed(PromptMaker(cfg, TOKENIZER), seed=0)


def test_a_line_above_the_limit_is_not_read_to_its_end(folder: Path):
    with (folder / "rows.jsonl").open("wb") as file:
        file.write(json.dumps(ROWS[0]).encode() + b"\n")
        file.truncate(1 << 40)  # a hole of a terabyte
    with limits(), pytest.raises(DataError, match=r"rows\.jsonl:2: a line of more than"):
        list(open_table(folder / "rows.jsonl").rows())


def test_damaged_conversations_are_reported_with_their_line(folder: Path):
    name = "sft.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "b"}]} for i in range(9)
    ]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / name).write_bytes(data)
    cfg = SftConfig(path="", num_steps=1, rows_per_step=1)

    def read(copy: Path) -> int:
        return len(load_sft_rows(copy / name, cfg, TOKENIZER, (2,))[0])

    check(folder, name, [*of_text(data, 2), *of_place()], read)


@pytest.mark.parametrize("checksums", [True, False])
def test_damaged_parquet_is_reported_with_file_and_row(folder: Path, checksums: bool):
    """With checksums in its pages every flipped bit of a row is found."""
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=16, write_page_checksum=checksums)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    rng = random.Random(3)
    marks = [4, footer, len(data) - 8, len(data) - 4, *(rng.randrange(len(data)) for _ in range(8))]
    in_rows = list(flips(data, 4, 24, within=footer))
    in_footer = [
        written(f"{flip.name}, in the footer", "content", data[:footer] + flipped + data[-8:])
        for flip, flipped in _flipped(data[footer:-8], 5)
    ]
    lengths = [written("a longer footer", "content", data[:-8] + b"\xff\xff\xff\x7f" + data[-4:])]
    read = table_of("rows.parquet")
    check(folder, "rows.parquet", [*cuts(data, 6, marks), *in_rows, *in_footer, *lengths, *of_place()], read, judge)
    if checksums:
        check(folder, "rows.parquet", in_rows, read, lambda damage, rows: None if rows == ROWS else "other rows")


def _flipped(data: bytes, seed: int) -> list[tuple[Damage, bytes]]:
    rng = random.Random(seed)
    found = []
    for _ in range(rounds_of(24)):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        found.append((written(f"bit {bit} of byte {at} flipped", "content", flipped), flipped))
    return found


def test_columns_of_parquet_that_are_not_valid_text_are_refused(folder: Path):
    bad = pa.array([b"\xff\xfe"] * 3, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"question": bad, "answer": ["1"] * 3}), folder / "rows.parquet")
    with limits(), pytest.raises(DataError, match=r"rows\.parquet: row 0 \(from 0\)"):
        table_of("rows.parquet")(folder)


def test_an_arrow_type_that_is_a_pickle_is_not_unpickled(folder: Path):
    """Old versions of pyarrow executed it (CVE-2023-47248)."""
    mark = folder / "ran"
    payload = b"cbuiltins\nopen\n(S'" + str(mark).encode() + b"'\nS'w'\ntR."
    field = pa.field(
        "question",
        pa.string(),
        metadata={b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload},
    )
    table = pa.table([pa.array(["a"]), pa.array(["1"])], schema=pa.schema([field, pa.field("answer", pa.string())]))
    pq.write_table(table, folder / "rows.parquet")
    with limits():
        table_of("rows.parquet")(folder)
    datasets.Dataset(table).save_to_disk(folder / "set")
    with limits():
        table_of("set")(folder)
    assert not mark.exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "home"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "set")
    return folder


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_a_damaged_json_file_of_a_saved_set_is_reported(saved: Path, name: str):
    data = (saved / "set" / name).read_bytes()
    damages = [*of_json(data, 7, 20, "doubtful"), *of_place()]
    check(saved, f"set/{name}", damages, table_of("set"), _saved_judge, [name, "/set"])


def test_damaged_arrow_files_are_reported(saved: Path):
    name = "data-00000-of-00001.arrow"
    data = (saved / "set" / name).read_bytes()
    damages = [*cuts(data, 8, [8, 16, len(data) // 3]), *flips(data, 9, 24), *of_place()]
    check(saved, f"set/{name}", damages, table_of("set"), _saved_judge, [name, "/set"])


def _saved_judge(damage: Damage, rows: list[dict[str, Any]]) -> str | None:
    if damage.kind == "place" and rows == ROWS:
        return None  # the Arrow file has the information of dataset_info.json, too
    return judge(damage, rows)


@pytest.mark.parametrize("index", ["../other", "../../../../etc", "/etc", ".", "..", "", "a\0b", 7, None, "x" * 300])
def test_a_saved_set_is_read_from_its_own_folder_only(saved: Path, tmp_path: Path, index: Any):
    shutil.copytree(saved, tmp_path / "copy")
    state = tmp_path / "copy" / "set" / "state.json"
    intact = json.loads(state.read_text())
    name = f"{index}/data-00000-of-00001.arrow" if isinstance(index, str) else index
    state.write_text(json.dumps(intact | {"_data_files": [{"filename": name}]}))
    with limits():
        if index == ".":
            assert table_of("set")(tmp_path / "copy") == ROWS
        else:
            with pytest.raises(DataError, match=r"/set"):
                table_of("set")(tmp_path / "copy")
    splits = tmp_path / "copy" / "dataset_dict.json"
    splits.write_text(json.dumps({"splits": [index]}))
    with limits(), pytest.raises(DataError, match=r"splits|/copy"):
        open_table(tmp_path / "copy", split=index if isinstance(index, str) else None)


def test_a_shard_that_is_not_a_file_is_named(folder: Path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS[:20])
    for name in ("part-0.jsonl", "part-1.jsonl"):
        (folder / name).write_text(lines)

    def read(copy: Path) -> list[dict[str, Any]]:
        return [raw.data for raw in open_table(copy).rows()]

    damages = [damage for damage in of_place() if damage.name != "nothing there"]
    check(folder, "part-1.jsonl", damages, read, lambda damage, value: "was read")

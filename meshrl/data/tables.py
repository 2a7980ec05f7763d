"""Rows of JSONL, parquet, Hugging Face sets and lists behind one small interface: count them, read any stretch of them.

A row comes with an id that finds it again ("train-12") and with the words that an error about it begins with
("data/train.jsonl:12"). JSONL counts lines from 1, as editors do; parquet, Hugging Face rows and lists count from 0, as
pandas does. Of files, only the rows being read are in memory; of a JSONL file the place of every 256th row is kept.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from meshrl.config.data_files import chosen_split, files_of, kind_of, parse_row, split_folder
from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, lines_of, open_plain, read_json, size_of

Row = dict[str, Any]
ROWS_AT_ONCE = 256  # read from parquet and Arrow files in one go; and the distance of a JSONL file's known places


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in its file. where: "train.jsonl:12", the beginning of every error about it."""

    id: str
    where: str
    data: Row


class Table(Protocol):
    """Rows 0 to num_rows - 1, in the order of the file. name: the path, for messages."""

    name: str

    @property
    def num_rows(self) -> int: ...

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        """The rows from `start` up to `stop` (default: the last). Raises: DataError for a row that can't be read."""
        ...

    def fingerprint(self) -> list[Any]:
        """Plain JSON that differs when rows were added, removed or changed in length; found without reading them."""
        ...


def open_table(
    path: str | Path | RowTable, format: str = "auto", subset: str | None = None, split: str | None = None
) -> Table:
    """The rows at a path: JSONL, parquet, a folder of either, a folder made by save_to_disk, or a hub id. Rows in
    memory are a table already.

    Raises: DataError when nothing like it is there, when a split has to be named, or when the hub can't be reached.
    """
    if isinstance(path, RowTable):
        return path
    try:
        kind = kind_of(path, format)
        if kind == "hub":
            return _from_hub(str(path), subset, split)
        folder = split_folder(Path(path), split) if kind == "datasets" else Path(path)
        files = [] if kind == "datasets" else files_of(folder, kind)
    except DataError as cause:
        raise DataError(f"{path}: {cause}") from cause
    if kind == "datasets":
        stem = "-".join(part.name for part in dict.fromkeys((Path(path), folder)))
        return DatasetTable(str(folder), stem, _load_saved(folder))
    tables: list[Table] = [ParquetTable(file) if kind == "parquet" else JsonlTable(file) for file in files]
    return tables[0] if len(tables) == 1 else Shards(str(path), tables)


class RowTable:
    """Rows in memory. name: what the caller calls them, as "data"; row 11 is then data[11]."""

    def __init__(self, name: str, rows: Sequence[Any]):
        self.name, self._rows = name, rows

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        for i in range(start, self.num_rows if stop is None else min(stop, self.num_rows)):
            row, where = self._rows[i], f"{self.name}[{i}]"
            if not isinstance(row, dict):
                raise DataError(
                    f"{where} is {type(row).__name__} {row!r:.80}; each row must be a dict {{column: value}}"
                )
            yield RawRow(f"{self.name}-{i}", where, row)

    def fingerprint(self) -> list[Any]:
        return [self.num_rows]


class JsonlTable:
    """One JSON object a line, UTF-8; blank lines are no rows, and count as lines."""

    def __init__(self, path: Path):
        self._path, self.name = path, str(path)

    @property
    def num_rows(self) -> int:
        return self._index[0]

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        at, number, skip = 0, 0, start
        if start >= ROWS_AT_ONCE:
            if start >= self.num_rows:
                return
            mark = start // ROWS_AT_ONCE
            (at, number), skip = self._index[1][mark], start - mark * ROWS_AT_ONCE
        left = None if stop is None else stop - start
        with self._open() as file:
            file.seek(at)
            for line in self._lines(file, number):
                if left == 0:
                    return
                number += 1
                if not line.strip():
                    continue
                if skip:
                    skip -= 1
                    continue
                where = f"{self._path}:{number}"
                try:
                    row = parse_row(line)
                except Unreadable as cause:
                    raise DataError(f"{where}: {cause}; each line should be one whole JSON object") from cause
                yield RawRow(f"{self._path.stem}-{number}", where, row)
                left = None if left is None else left - 1

    def fingerprint(self) -> list[Any]:
        return [self.num_rows, self._path.stat().st_size, [at for at, _ in self._index[1]]]

    @functools.cached_property
    def _index(self) -> tuple[int, list[tuple[int, int]]]:
        """(number of rows, for every 256th row from the first: (byte, lines before it)). One pass over the file."""
        count, at, places = 0, 0, []
        with self._open() as file:
            for number, line in enumerate(self._lines(file)):
                if line.strip():
                    if count % ROWS_AT_ONCE == 0:
                        places.append((at, number))
                    count += 1
                at += len(line)
        return count, places

    def _open(self) -> BinaryIO:
        try:
            return open_plain(self._path)
        except Unreadable as cause:
            raise DataError(f"{self._path}: {cause}") from cause

    def _lines(self, file: BinaryIO, before: int = 0) -> Iterator[bytes]:
        try:
            for line in lines_of(file):
                yield line
                before += 1
        except Unreadable as cause:
            raise DataError(f"{self._path}:{before + 1}: {cause}") from cause


class ParquetTable:
    """A parquet file, read by row groups; of one row group only the batch in hand is decoded."""

    def __init__(self, path: Path):
        self._path, self.name = path, str(path)
        with self._open() as file, _foreign(path, "no parquet file that pyarrow can read"):
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self._ends = list(accumulate(group.num_rows for group in groups))
            self._bytes = [group.total_byte_size for group in groups]
            if sum(group.num_rows for group in groups) != file.metadata.num_rows or any(g.num_rows < 0 for g in groups):
                raise ValueError(f"its footer speaks of {file.metadata.num_rows} rows, its row groups of others")

    @property
    def num_rows(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        if start >= stop:
            return
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        number = self._ends[first - 1] if first else 0
        with self._open() as file:
            batches = file.iter_batches(ROWS_AT_ONCE, row_groups=range(first, last + 1))
            while number < stop:
                with _foreign(self._path, f"row {max(start, number)} (from 0) or one soon after it can't be read"):
                    batch = next(batches, None)
                    if batch is None:
                        raise ValueError(f"the rows end before the {self.num_rows} that its footer speaks of")
                    head, tail = max(0, start - number), min(batch.num_rows, stop - number)
                    rows = batch.slice(head, tail - head).to_pylist() if head < tail else []
                for i, row in enumerate(rows, start=number + head):
                    yield RawRow(f"{self._path.stem}-{i}", f"{self._path}: row {i} (from 0)", row)
                number += batch.num_rows

    def fingerprint(self) -> list[Any]:
        return [self._ends, self._bytes]

    def _open(self) -> Any:
        try:
            import pyarrow.parquet as pq
        except ImportError as cause:
            raise DataError(f"{self._path}: parquet is read with pyarrow: pip install pyarrow") from cause
        with _foreign(self._path, "no parquet file that pyarrow can read"):
            return pq.ParquetFile(self._path, memory_map=True, page_checksum_verification=True)


class DatasetTable:
    """A Hugging Face `datasets.Dataset`: Arrow files on disk, mapped into memory page by page."""

    def __init__(self, name: str, stem: str, dataset: Any):
        self.name, self._stem, self._dataset = name, stem, dataset
        self._arrow = dataset.with_format("arrow")  # the same rows, as Arrow holds them

    @property
    def num_rows(self) -> int:
        return len(self._dataset)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        for begin in range(start, stop, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, stop)
            with _foreign(self.name, f"row {begin} (from 0) or one soon after it can't be read"):
                # Arrow follows the offsets of a mapped file wherever they lead: damaged ones end the process.
                self._arrow[begin:end].validate(full=True)
                columns = self._dataset[begin:end]
            for i in range(begin, end):
                row = {name: values[i - begin] for name, values in columns.items()}
                yield RawRow(f"{self._stem}-{i}", f"{self.name}: row {i} (from 0)", row)

    def fingerprint(self) -> list[Any]:
        return [self.num_rows, self._dataset.data.nbytes, str(self._dataset.features)]


class Shards:
    """Several tables as one, in their order."""

    def __init__(self, name: str, tables: Sequence[Table]):
        self.name, self._tables = name, list(tables)

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self._tables)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        before = 0  # rows of the tables that are done with; nothing is counted that is not skipped
        for table in self._tables:
            if stop is not None and before >= stop:
                return
            skip = max(0, start - before)
            if skip and skip >= table.num_rows:
                before += table.num_rows
                continue
            before += skip
            for row in table.rows(skip, None if stop is None else skip + stop - before):
                before += 1
                yield row

    def fingerprint(self) -> list[Any]:
        return [table.fingerprint() for table in self._tables]


@contextlib.contextmanager
def _foreign(path: Path | str, what: str) -> Iterator[None]:
    """Around a library that reads a file of ours: of a damaged one it may raise anything. Raises: DataError."""
    try:
        yield
    except Exception as cause:
        told = f"{type(cause).__name__}: {cause!s:.1000}"
        raise DataError(f"{path}: {what}: {told}. Restore the file, or write it anew") from cause


def _load_saved(folder: Path) -> Any:
    datasets = _datasets()
    _require_own_files(folder)
    with _foreign(folder, "is not a whole set of save_to_disk"):
        dataset = datasets.load_from_disk(str(folder))
        dataset.data.validate()  # what the offsets of its rows are is looked at as they are read
        return dataset


def _require_own_files(folder: Path) -> None:
    """Raises: DataError when state.json names Arrow files that are not in the folder, or are no regular files."""
    try:
        named = read_json(folder / "state.json").get("_data_files")
    except Unreadable as cause:
        raise DataError(f"{folder}: state.json in it: {cause}. Save the set anew with save_to_disk") from cause
    entries = named if isinstance(named, list) else [named]
    names = [str(entry["filename"]) for entry in entries if isinstance(entry, dict) and "filename" in entry]
    if not names or len(names) < len(entries):
        raise DataError(f"{folder}: state.json in it: _data_files should be a list of {{filename}}, not {named!r:.80}")
    for name in names:
        try:
            if (folder / name).parent != folder:
                raise Unreadable("is not a file of this folder")
            size_of(folder / name)
        except Unreadable as cause:
            told = f"state.json in it names {name!r:.200}: {cause}"
            raise DataError(f"{folder}: {told}. Save the set anew with save_to_disk") from cause


def _from_hub(name: str, subset: str | None, split: str | None) -> DatasetTable:
    datasets = _datasets()
    try:
        found = datasets.load_dataset(name, name=subset, split=split)
    except (OSError, ValueError) as cause:  # no network, no such set, subset or split
        raise DataError(
            f"can't be had from the Hugging Face hub: {cause}. Where the hub is out of reach, fetch the set elsewhere, "
            "write it with save_to_disk or to_json, and give that path"
        ) from cause
    if isinstance(found, dict):
        split = chosen_split(list(found), split)
        found = found[split]
    return DatasetTable(f"{name}[{split}]", f"{name.partition('/')[2]}-{split}", found)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as cause:
        raise DataError("is a Hugging Face set, which is read with datasets: pip install datasets") from cause
    datasets.disable_progress_bars()  # they would tear the run's own display
    return datasets

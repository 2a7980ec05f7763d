"""Rows of JSONL, parquet and Hugging Face sets behind one small interface: count them, read any stretch of them.

A row comes with an id that finds it again ("train-12") and with the words that an error about it begins with
("data/train.jsonl:12"). JSONL counts lines from 1, as editors do; parquet and Hugging Face rows count from 0, as
pandas does. Only the rows being read are in memory; of a JSONL file the place of every 256th row is kept.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from meshrl.config.data_files import chosen_split, files_of, kind_of, split_folder
from meshrl.core.errors import DataError

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


def open_table(path: str | Path, format: str = "auto", subset: str | None = None, split: str | None = None) -> Table:
    """The rows at a path: JSONL, parquet, a folder of either, a folder made by save_to_disk, or a hub id.

    Raises: DataError when nothing like it is there, when a split has to be named, or when the hub can't be reached.
    """
    try:
        kind = kind_of(path, format)
        if kind == "hub":
            return _from_hub(str(path), subset, split)
        if kind == "datasets":
            folder = split_folder(Path(path), split)
            stem = "-".join(part.name for part in dict.fromkeys((Path(path), folder)))
            return DatasetTable(str(folder), stem, _load_saved(folder))
        files = files_of(Path(path), kind)
    except DataError as cause:
        raise DataError(f"{path}: {cause}") from cause
    tables: list[Table] = [ParquetTable(file) if kind == "parquet" else JsonlTable(file) for file in files]
    return tables[0] if len(tables) == 1 else Shards(str(path), tables)


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
        with self._path.open("rb") as file:
            file.seek(at)
            for line in file:
                if left == 0:
                    return
                number += 1
                if not line.strip():
                    continue
                if skip:
                    skip -= 1
                    continue
                where = f"{self._path}:{number}"
                yield RawRow(f"{self._path.stem}-{number}", where, _parse_line(line, where))
                left = None if left is None else left - 1

    def fingerprint(self) -> list[Any]:
        return [self.num_rows, self._path.stat().st_size, [at for at, _ in self._index[1]]]

    @functools.cached_property
    def _index(self) -> tuple[int, list[tuple[int, int]]]:
        """(number of rows, for every 256th row from the first: (byte, lines before it)). One pass over the file."""
        count, at, places = 0, 0, []
        with self._path.open("rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    if count % ROWS_AT_ONCE == 0:
                        places.append((at, number))
                    count += 1
                at += len(line)
        return count, places


class ParquetTable:
    """A parquet file, read by row groups; of one row group only the batch in hand is decoded."""

    def __init__(self, path: Path):
        self._path, self.name = path, str(path)
        with self._open() as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self._ends = list(accumulate(group.num_rows for group in groups))
            self._bytes = [group.total_byte_size for group in groups]

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
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=range(first, last + 1)):
                head, tail = max(0, start - number), min(batch.num_rows, stop - number)
                if head < tail:
                    for i, row in enumerate(batch.slice(head, tail - head).to_pylist(), start=number + head):
                        yield RawRow(f"{self._path.stem}-{i}", f"{self._path}: row {i} (from 0)", row)
                number += batch.num_rows
                if number >= stop:
                    return

    def fingerprint(self) -> list[Any]:
        return [self._ends, self._bytes]

    def _open(self) -> Any:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as cause:
            raise DataError(f"{self._path}: parquet is read with pyarrow: pip install pyarrow") from cause
        try:
            return pq.ParquetFile(self._path, memory_map=True)
        except pa.ArrowException as cause:
            raise DataError(f"{self._path}: no parquet file that pyarrow can read: {cause}") from cause


class DatasetTable:
    """A Hugging Face `datasets.Dataset`: Arrow files on disk, mapped into memory page by page."""

    def __init__(self, name: str, stem: str, dataset: Any):
        self.name, self._stem, self._dataset = name, stem, dataset

    @property
    def num_rows(self) -> int:
        return len(self._dataset)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        for begin in range(start, stop, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, stop)
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


def _load_saved(folder: Path) -> Any:
    datasets = _datasets()
    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as cause:
        raise DataError(f"is not whole: {cause}. Save the set anew with save_to_disk") from cause


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


def _parse_line(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as cause:
        raise DataError(f"{where}: not UTF-8 at byte {cause.start}; save the file as UTF-8") from cause
    except ValueError as cause:
        raise DataError(f"{where}: not JSON ({cause}); each line should be one whole JSON object") from cause
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}; each line should be one JSON object {{column: value}}")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

"""Rows of JSONL, CSV, JSON, parquet, Hugging Face data sets and lists with one interface: count them, read any range of
them.

A row has an id, by which it can be found again ("train-12"), and a place, with which errors about it begin
("data/train.jsonl:12"). JSONL and CSV count lines from 1, as editors do; all others count rows from 0, as pandas does.
Files are not kept in memory, except JSON, and CSV whose rows are read in another order (data.streaming).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import glob
import itertools
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from meshrl.core.errors import DataError
from meshrl.core.files import MAX_LINE_BYTES, Unreadable, decode, lines_of, open_plain, parse_json, read_text
from meshrl.data.files import (
    as_data_error,
    chosen_split,
    files_of,
    kind_of,
    require_own_arrow_files,
    split_folder,
    unreachable,
)

Row = dict[str, Any]
ROWS_AT_ONCE = 256  # read together from Arrow files
MAX_FILE_BYTES = 1 << 30  # of CSV and JSON, which are read at once
DELIMITERS = ",;\t|"  # of CSV
_CSV_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
MARK_BYTES = 1 << 20  # between two indexed rows of a JSONL file; at most this much is read to find a row


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it is in its file. where: "train.jsonl:12", the beginning of every error about the row. is_filled: it
    has the keys of all rows, with null for those that it lacks, as Arrow's columns do. fault: why it can't be read.
    folder: in which the paths of its images are, as in data/images.py."""

    id: str
    where: str
    data: Row
    is_filled: bool = False
    fault: str = ""
    folder: str | None = None

    def require_read(self) -> None:
        """Raises: DataError for a row that can't be read."""
        if self.fault:
            raise DataError(self.fault)


def column_names(row: Row, prefix: str = "") -> list[str]:
    """The names of a row's columns, then those of values inside a column, as in reward_model.ground_truth."""
    names = [f"{prefix}{name}" for name in row]
    for name, value in row.items():
        if isinstance(value, dict):
            names += column_names(value, f"{prefix}{name}.")
    return list(dict.fromkeys(names))


class Table(ABC):
    """Rows 0 to num_rows - 1, in the order of the file. name: the path, for messages."""

    name: str

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @abstractmethod
    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        """The rows from `start` up to `stop` (default: the last). Raises: DataError where the file can't be read."""

    def fingerprint(self) -> list[Any]:
        """Plain JSON that changes when rows are added or removed, and where it is quickly found, also when they change
        in length."""
        return [self.num_rows]

    def first(self) -> RawRow | None:
        """The first row, without reading or counting the others; None for an empty table."""
        return next(self.rows(0, 1), None)


def open_table(
    path: str | Path | RowTable, format: str = "auto", subset: str | None = None, split: str | None = None
) -> Table:
    """The rows at a path: JSONL, CSV, JSON, parquet, a folder of JSONL or parquet, a folder made by save_to_disk, or a
    hub id. A RowTable is returned as it is.

    Raises: DataError when there is no table, when a split must be named, or when the hub can't be reached.
    """
    if isinstance(path, RowTable):
        return path
    place = Path(path)
    with as_data_error(f"{path}: "):
        kind = kind_of(path, format)
        if kind == "hub":
            return _from_hub(str(path), subset, split)
        if kind == "datasets":
            folder = split_folder(place, split)
            require_own_arrow_files(folder)
            with _library_errors("this is not a complete folder of save_to_disk"):
                dataset = _datasets().load_from_disk(str(folder))
                dataset.data.validate()  # the offsets of rows are checked when rows are read
            stem = "-".join(part.name for part in dict.fromkeys((place, folder)))
            return DatasetTable(str(folder), stem, dataset, folder)
        files = files_of(place, kind)
        if kind == "json":
            return RowTable(str(place), list(json_rows(place)))
        if kind == "csv":
            return CsvTable(place)
    tables: list[Table] = [ParquetTable(file) if kind == "parquet" else JsonlTable(file) for file in files]
    return tables[0] if len(tables) == 1 else Shards(str(path), tables)


def is_dataset(rows: Any) -> TypeGuard[Sequence[Row]]:
    """Whether these rows in memory are a `datasets.Dataset`, without an import of that library."""
    return hasattr(rows, "features") and hasattr(rows, "num_rows")


class RowTable(Table):
    """Rows in memory: a caller's, or those of a JSON file as RawRows. name: the caller's name of them in errors,
    such as "data": row 11 is then data[11]."""

    def __init__(self, name: str, rows: Sequence[Any]):
        self.name, self._rows = name, rows

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        for i in range(start, self.num_rows if stop is None else min(stop, self.num_rows)):
            row, where = self._rows[i], f"{self.name}[{i}]"
            if isinstance(row, RawRow):
                yield row
                continue
            if not isinstance(row, dict):
                raise DataError(
                    f"{where} is {type(row).__name__} {row!r:.80}; each row must be a dict {{column: value}} (from a "
                    'pandas DataFrame: frame.to_dict("records"))'
                )
            yield RawRow(f"{self.name}-{i}", where, row, is_filled=is_dataset(self._rows), folder="")


class JsonlTable(Table):
    """One JSON object per line, UTF-8. Blank lines are not rows, but they count as lines."""

    def __init__(self, path: Path):
        self._path, self.name = path, str(path)

    @property
    def num_rows(self) -> int:
        return self._index[0]

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        row, at, before = 0, 0, 0
        if start:
            if start >= self.num_rows:
                return
            marks = self._index[1]
            row, at, before = marks[bisect_right(marks, start, key=lambda mark: mark[0]) - 1]
        for num_lines, _, line in self._filled_lines(at, before):
            if stop is not None and row >= stop:
                return
            if row >= start:
                yield self._parsed(line, num_lines + 1)
            row += 1

    def _parsed(self, line: bytes, number: int) -> RawRow:
        if line.startswith(b"PAR1"):
            raise DataError(
                f"{self._path} begins like a parquet file; give it the suffix .parquet, or set format: parquet"
            )
        where, start = f"{self._path}:{number}", line[:40].decode("utf-8", "replace").strip()
        advice = f"; each line should be one complete JSON object, and this one begins with {start!r}"
        row, fault = None, ""
        try:
            row = parse_json(decode(line), constants=False)
            if not isinstance(row, dict):
                raise Unreadable(f"a JSON {type(row).__name__} and not an object {{column: value}}")
        except Unreadable as cause:
            row, fault = {}, f"{where}: {cause}{advice}"
        return RawRow(f"{self._path.stem}-{number}", where, row, fault=fault, folder=str(self._path.parent))

    def fingerprint(self) -> list[Any]:
        return [self.num_rows, self._path.stat().st_size, self._index[1]]

    @functools.cached_property
    def _index(self) -> tuple[int, list[list[int]]]:
        """(number of rows, [row, byte, lines before it] of the first row and of one row per MB), from one pass over the
        file."""
        marks, count = list[list[int]](), 0
        for before, at, _ in self._filled_lines():
            if not marks or at - marks[-1][1] >= MARK_BYTES:
                marks.append([count, at, before])
            count += 1
        return count, marks

    def _filled_lines(self, at: int = 0, before: int = 0) -> Iterator[tuple[int, int, bytes]]:
        """(number of lines before it, byte where it begins, line) of each line that is not blank, from the byte `at`
        on, which `before` lines precede."""
        with as_data_error(f"{self._path}: "):
            file = open_plain(self._path)
        with file:
            file.seek(at)
            try:
                for line in lines_of(file):
                    if line.strip():
                        yield before, at, line
                    before, at = before + 1, at + len(line)
            except Unreadable as cause:
                raise DataError(f"{self._path}:{before + 1}: {cause}") from cause


def json_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a JSON list of objects, or of an object with one such list; an object without one is a row. Errors
    follow the path and a colon."""
    value = parse_json(read_text(path, MAX_FILE_BYTES), constants=False)
    if not isinstance(value, list | dict):
        raise Unreadable(f"a JSON {type(value).__name__}; it should be a list of objects {{column: value}}")
    inner = [value] if isinstance(value, list) else [each for each in value.values() if _are_rows(each)]
    if len(inner) > 1:
        raise Unreadable(f"an object with {len(inner)} lists of objects; it should have one, or be one")
    for i, row in enumerate(inner[0] if inner else [value]):
        where, is_row = f"{path}: row {i} (from 0)", isinstance(row, dict)
        fault = "" if is_row else f"{where} is a JSON {type(row).__name__} and not an object {{column: value}}"
        yield RawRow(f"{path.stem}-{i}", where, row if is_row else {}, fault=fault, folder=str(path.parent))


def _are_rows(value: Any) -> bool:
    """Whether a value in an object is a list of rows, and not a conversation: then the object is a row."""
    return isinstance(value, list) and any(isinstance(row, dict) and not {"role", "from"} & {*row} for row in value)


class CsvTable(Table):
    """A CSV file, which is read again in each pass over its rows."""

    def __init__(self, path: Path):
        self._path, self.name = path, str(path)

    @property
    def delimiter(self) -> str:
        return delimiter_of(read_text(self._path, MAX_FILE_BYTES))

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(1 for _ in self.rows())

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        with as_data_error(f"{self._path}: "):
            yield from itertools.islice(self._any_order if start else csv_rows(self._path), start, stop)

    @functools.cached_property
    def _any_order(self) -> list[RawRow]:
        return list(self.rows())


def csv_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a CSV file, whose first line has the names of its columns. All values are texts. Lines without a
    value are not rows. Errors follow the path and a colon."""
    csv.field_size_limit(MAX_LINE_BYTES)
    text = read_text(path, MAX_FILE_BYTES)
    delimiter = delimiter_of(text)
    source = (found.group() for found in _CSV_LINE.finditer(text))
    lines = csv.reader(source, delimiter=delimiter, skipinitialspace=True, strict=True)
    names: list[str] = []
    while True:
        number, values, fault = lines.line_num + 1, list[str](), ""
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as cause:
            fault = f"not CSV ({cause}); a quote in a quoted value is written twice"
            if not names or "end of data" in str(cause):
                raise Unreadable(f"line {number}: {fault}, and the quote that begins in this line must end") from cause
        if not names and any(values):
            names = [name.strip() or f"column_{i}" for i, name in enumerate(values, 1)]
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise Unreadable(f"line {number}: several columns have the name {twice[0]!r}; rename all but one")
        elif fault or any(values):
            if not fault and len(values) != len(names):
                fault = f"{len(values)} values for {len(names)} columns, separated by {delimiter!r}"
            where = f"{path}:{number}"
            row, fault = dict(zip(names, values)), fault and f"{where}: {fault}"
            yield RawRow(f"{path.stem}-{number}", where, row, fault=fault, folder=str(path.parent))


def delimiter_of(text: str) -> str:
    """The one of DELIMITERS that separates most columns in the first line of a CSV file."""
    first = found.group() if (found := re.search(r"[^\r\n]+", text)) else ""
    try:
        return max(
            DELIMITERS, key=lambda each: len(next(csv.reader([first], delimiter=each, skipinitialspace=True), []))
        )
    except csv.Error as cause:
        raise Unreadable(f"line 1: not CSV ({cause})") from cause


class DatasetTable(Table):
    """A `datasets.Dataset`: Arrow files on disk, which are memory-mapped. Images are not decoded. folder: of its files,
    None for one of the hub."""

    def __init__(self, name: str, stem: str, dataset: Any, folder: Path | None = None):
        self.name, self._stem, self._dataset = name, stem, dataset
        self._folder = None if folder is None else str(folder)
        _leave_encoded(dataset.info.features)
        self._arrow = dataset.with_format("arrow")  # the same rows as Arrow tables

    @property
    def num_rows(self) -> int:
        return len(self._dataset)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        for begin in range(start, stop, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, stop)
            with _library_errors(f"{self.name}: row {begin} (from 0) or one soon after it can't be read"):
                # Arrow uses the offsets in a mapped file without a check: damaged ones would crash the process.
                self._arrow[begin:end].validate(full=True)
                columns = self._dataset[begin:end]
            for i in range(begin, end):
                row = {name: values[i - begin] for name, values in columns.items()}
                where = f"{self.name}: row {i} (from 0)"
                yield RawRow(f"{self._stem}-{i}", where, row, is_filled=True, folder=self._folder)

    def fingerprint(self) -> list[Any]:
        return [self.num_rows, self._dataset.data.nbytes, str(self._dataset.features)]


def _leave_encoded(feature: Any) -> None:
    """Let images of these features, at any depth, be read as {bytes, path}."""
    if type(feature).__name__ == "Image":
        feature.decode = False
    inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    for each in feature if isinstance(feature, list) else inner:
        if each is not None:
            _leave_encoded(each)


class ParquetTable(Table):
    """A parquet file. Its footer is read at once. Its rows are read by `datasets`, which writes them as Arrow files to
    its cache (HF_DATASETS_CACHE), so that any single row can be read."""

    def __init__(self, path: Path):
        from pyarrow import parquet

        self._path, self.name = path, str(path)
        with _library_errors(f"{self.name}: this is not a parquet file that pyarrow can read"):
            footer = parquet.read_metadata(path)
            groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
            self._groups = [[group.num_rows, group.total_byte_size] for group in groups]
            if self.num_rows != footer.num_rows or any(group.num_rows < 0 for group in groups):
                raise ValueError(f"its footer states {footer.num_rows} rows, its row groups {self.num_rows}")

    @property
    def num_rows(self) -> int:
        return sum(num_rows for num_rows, _ in self._groups)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        return self._converted.rows(start, stop) if start < self.num_rows else iter(())

    def first(self) -> RawRow | None:
        from pyarrow import parquet

        where = f"{self.name}: row 0 (from 0)"
        verified = {"page_checksum_verification": True}
        with _library_errors(f"{where}: can't be read"), parquet.ParquetFile(self._path, **verified) as file:
            batches = (batch for batch in file.iter_batches(batch_size=1) if batch.num_rows)
            rows = next(batches).to_pylist() if self.num_rows else []
        return RawRow(f"{self._path.stem}-0", where, rows[0]) if rows else None

    def fingerprint(self) -> list[Any]:
        return self._groups

    @functools.cached_property
    def _converted(self) -> DatasetTable:
        datasets = _datasets()
        from pyarrow.dataset import ParquetFragmentScanOptions

        cache = datasets.config.HF_DATASETS_CACHE
        problem = f"its rows can't be read, or can't be written to {cache} (HF_DATASETS_CACHE sets another folder)"
        with _library_errors(f"{self.name}: {problem}"):
            verified = ParquetFragmentScanOptions(page_checksum_verification=True)
            # Escaped, because `datasets` reads the path as a glob pattern.
            dataset = datasets.Dataset.from_parquet(glob.escape(self.name), fragment_scan_options=verified)
            if len(dataset) != self.num_rows:
                raise ValueError(f"it has {len(dataset)} rows, but its footer states {self.num_rows}")
        return DatasetTable(self.name, self._path.stem, dataset, self._path.parent)


class Shards(Table):
    """Several tables, one after the other, as one table."""

    def __init__(self, name: str, tables: Sequence[Table]):
        self.name, self._tables = name, list(tables)

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self._tables)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
        before = 0  # rows read or skipped so far; num_rows is read only for tables that may be skipped
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

    def first(self) -> RawRow | None:
        return next((row for table in self._tables if (row := table.first()) is not None), None)

    def fingerprint(self) -> list[Any]:
        return [table.fingerprint() for table in self._tables]


def _from_hub(name: str, subset: str | None, split: str | None) -> DatasetTable:
    """A data set of the hub."""
    datasets = _datasets()
    offline = datasets.config.HF_HUB_OFFLINE
    reason = None if offline else unreachable(name, "README.md", "dataset")
    try:
        datasets.config.HF_HUB_OFFLINE = offline or reason is not None  # then it only reads its cache
        dataset = datasets.load_dataset(name, name=subset, split=split)
    except (OSError, ValueError) as cause:  # no network, no such dataset, subset or split
        raise DataError(
            f"is no file or folder here, and can't be loaded from the Hugging Face hub: {reason or cause}. If this "
            "machine can't reach the hub, download the data set on another one, write it with save_to_disk or to_json, "
            "and give that path"
        ) from cause
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    if isinstance(dataset, dict):
        split = chosen_split(list(dataset), split)
        dataset = dataset[split]
    return DatasetTable(f"{name}[{split}]", f"{name.partition('/')[2]}-{split}", dataset)


@contextlib.contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """For blocks in which a library reads a user's file: it may raise anything for a damaged one."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error  # `datasets` wraps the error that states the fault in a general one
        reason = f"{type(cause).__name__}: {cause!s:.1000}"
        raise DataError(f"{problem}: {reason}. Restore the file, or write it again") from error


def _datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()  # they would disturb the run's own display
    return datasets


def column_of(row: Row, name: str, key: str, where: str) -> Any:
    """The value of a column. A name with dots may name a value inside a column: reward_model.ground_truth."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            there = ", ".join(column_names(row)[:50]) or "none"  # columns in an error
            raise DataError(
                f"{where}: no column {name!r} (columns: {there}); add it to this row, or set {key} to a column of all "
                "rows"
            )
        value = value[part]
    return value

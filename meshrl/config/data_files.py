"""What a data path names, told without reading its rows: which kind of table, its files, splits, columns and size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshrl.config.places import HUB_ID
from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, is_there, lines_of, open_plain, parse_json, read_json, size_of
from meshrl.core.files import decode as decode_text

Kind = Literal["jsonl", "parquet", "datasets", "hub", "rows"]  # rows: given in memory
PARQUET = (".parquet", ".pq")
FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".txt", *PARQUET)
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What shows without reading rows. columns: their names, those inside a column as column.name; empty where only
    reading would tell. num_rows: None where counting means reading."""

    columns: tuple[str, ...]
    num_rows: int | None


def kind_of(path: str | Path, format: str = "auto") -> Kind:
    """The kind of table at a path, by `format` (jsonl, parquet, datasets), else by what is there and by its suffix.

    A folder is one saved by save_to_disk, or shards: *.jsonl or *.parquet files, read in the order of their names.
    Text of the form organisation/name, where no such place is on this machine, is a set on the Hugging Face hub.

    Raises: DataError in words that follow a path: "no such file", "is a folder, not a file, ...".
    """
    place = Path(path)
    if not is_there(place):
        is_hub_id = HUB_ID.fullmatch(str(path)) and not is_there(place.parent) and place.suffix not in FILE_SUFFIXES
        if is_hub_id and format in ("auto", "datasets"):
            return "hub"
        _require_regular(place)  # says why it is not there
    if place.is_dir():
        return _kind_of_folder(place, format)
    if format == "datasets":
        raise DataError("is a file; format: datasets takes a folder made by save_to_disk, or a hub id")
    _require_regular(place)
    if format == "auto":
        return "parquet" if place.suffix in PARQUET else "jsonl"
    return "parquet" if format == "parquet" else "jsonl"


def _kind_of_folder(place: Path, format: str) -> Kind:
    is_saved = (place / "state.json").is_file() or (place / "dataset_dict.json").is_file()
    found: list[Kind] = ["datasets"] if is_saved else []
    found += [kind for kind in ("jsonl", "parquet") if files_of(place, kind)]  # type: ignore[misc]
    if format != "auto":
        found = [kind for kind in found if kind == format]
    if not found:
        wanted = {"jsonl": "*.jsonl", "parquet": "*.parquet", "auto": "*.jsonl or *.parquet"}.get(format)
        files = f"has no {wanted} in it and " if wanted else ""
        saved = "was not made by save_to_disk" if format in ("auto", "datasets") else "so no shards"
        raise DataError(f"is a folder, not a file; it {files}{saved}")
    if len(found) > 1:
        raise DataError(f"is a folder that could be read as {' or as '.join(found)}; choose one by format")
    return found[0]


def files_of(path: Path, kind: str) -> list[Path]:
    """The files of a table of kind jsonl or parquet: the path itself, or a folder's shards by name.

    Raises: DataError, as kind_of, for a shard that is a folder, a pipe or a link to nowhere.
    """
    if not path.is_dir():
        return [path]
    suffixes = PARQUET if kind == "parquet" else (".jsonl",)
    found = sorted(file for file in path.iterdir() if file.suffix in suffixes and not file.name.startswith("."))
    for file in found:
        _require_regular(file, f"{file.name} in it ")
    return found


def split_folder(path: Path, split: str | None) -> Path:
    """The folder of one split of what save_to_disk wrote; a set with a single split needs none named.

    Raises: DataError, as kind_of, when the split is not there or has to be named.
    """
    index = path / "dataset_dict.json"
    if not index.is_file():
        if split is not None:
            raise DataError(f"holds a single set without splits, so there is no split {split!r}; remove it")
        return path
    names = _json(index).get("splits")
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{index.name} in it: splits should be a list of names of folders beside it, not {names!r:.80}")
    return path / chosen_split(names, split)


def chosen_split(names: list[str], split: str | None) -> str:
    """The split asked for, or the only one. Raises: DataError, as kind_of."""
    if split is None and len(names) == 1:
        return names[0]
    if split is None or split not in names:
        what = "a split has to be named" if split is None else f"there is no split {split!r}"
        raise DataError(f"holds the splits {', '.join(names)}, and {what}")
    return split


def look(path: Path, kind: Kind, split: str | None = None) -> Look:
    """Columns and number of rows of a local table, from its first row or from what its files say of themselves.

    Raises: DataError, as kind_of, for files that are not what their kind says.
    """
    if kind == "datasets":
        folder = split_folder(path, split)
        features = _json(folder / "dataset_info.json").get("features") or {}
        if not isinstance(features, dict):
            raise DataError(f"dataset_info.json in it: features should be an object, not {features!r:.80}")
        return Look(columns=tuple(_feature_names(features)), num_rows=None)
    if kind == "parquet":
        return _parquet(files_of(path, kind))
    return Look(columns=tuple(_names(_first_row(files_of(path, kind)[0]))), num_rows=None)


def look_at_rows(rows: Sequence[Any]) -> Look:
    """As `look`, of rows in memory. Raises: DataError in words that follow their key."""
    if len(rows) == 0:
        raise DataError("holds no rows")
    first = rows[0]
    if not isinstance(first, dict):
        raise DataError(
            f"its first row is {type(first).__name__} {first!r:.80}; each row must be a dict {{column: value}} (of a "
            'pandas DataFrame: frame.to_dict("records"))'
        )
    return Look(columns=tuple(_names(first)), num_rows=len(rows))


def count_rows(path: Path, kind: Kind) -> int | None:
    """Rows of a local table where counting is cheap: parquet says so itself, the lines of JSONL up to 1 GB are read."""
    files = files_of(path, kind)
    if kind == "parquet":
        return look(path, kind).num_rows
    if kind != "jsonl" or sum(file.stat().st_size for file in files) > 1 << 30:
        return None
    try:
        count = 0
        for file in files:
            with open_plain(file) as lines:
                count += sum(1 for line in lines_of(lines) if line.strip())
    except Unreadable as cause:
        raise DataError(str(cause)) from cause
    return count


def parse_row(line: bytes) -> dict[str, Any]:
    """One row of JSONL. Raises: Unreadable."""
    row = parse_json(decode_text(line), constants=False)
    if not isinstance(row, dict):
        raise Unreadable(f"a JSON {type(row).__name__}; each line should be one JSON object {{column: value}}")
    return row


def _require_regular(file: Path, told: str = "") -> None:
    try:
        size_of(file)
    except Unreadable as cause:
        raise DataError(f"{told}{cause}") from cause


def _first_row(file: Path) -> dict[str, Any]:
    line = b""
    try:
        with open_plain(file) as lines:
            line = next((line for line in lines_of(lines) if line.strip()), b"")
        if line.startswith(PARQUET_MAGIC):
            raise DataError("is a parquet file by its first bytes; give it the suffix .parquet, or set format: parquet")
        return parse_row(line)
    except Unreadable as cause:
        start = line[:40].decode("utf-8", "replace").strip()
        raise DataError(
            f"its first row, in {file.name}, is no JSON object, but {start!r} ({cause}); each line must be one: "
            "{column: value}"
        ) from cause


def _parquet(files: list[Path]) -> Look:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as cause:
        raise DataError("is parquet, which is read with pyarrow: pip install pyarrow") from cause
    columns: list[str] = []
    num_rows = 0
    for file in files:
        try:
            footer = pq.ParquetFile(file)
        except (pa.ArrowException, OSError, ValueError) as cause:
            raise DataError(f"{file.name} is no parquet file that pyarrow can read: {cause}") from cause
        with footer:
            num_rows += footer.metadata.num_rows
            columns = columns or list(_arrow_names(footer.schema_arrow))
    return Look(columns=tuple(columns), num_rows=num_rows)


def _names(row: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in row.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, dict):
            names += _names(value, f"{prefix}{name}.")
    return names


def _arrow_names(fields: Any, prefix: str = "") -> list[str]:
    names = []
    for field in fields:
        names.append(f"{prefix}{field.name}")
        if hasattr(field.type, "get_field_index"):  # a struct
            names += _arrow_names(list(field.type), f"{prefix}{field.name}.")
    return names


def _feature_names(features: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, feature in features.items():
        names.append(f"{prefix}{name}")
        if isinstance(feature, dict) and "_type" not in feature:  # a struct
            names += _feature_names(feature, f"{prefix}{name}.")
    return names


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except Unreadable as cause:
        raise DataError(f"{file.name} in it: {cause}. Make the folder anew with save_to_disk") from cause

"""The kind of table at a data path, and the files of the table. No row is read here. And whether the
Hugging Face hub can be reached.

The text of every DataError of this file follows a path and a colon.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from meshrl.config.source import HUB_ID
from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, is_there, open_plain, read_json, size_of

Kind = Literal["jsonl", "json", "csv", "parquet", "datasets", "hub", "rows"]  # rows: given in memory
SHARD_SUFFIXES: dict[Kind, tuple[str, ...]] = {"jsonl": (".jsonl",), "parquet": (".parquet", ".pq")}
CSV_SUFFIXES = (".csv", ".tsv")
FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt", *CSV_SUFFIXES, *SHARD_SUFFIXES["parquet"])
OTHER_FORMS = {  # suffix -> what to do
    **dict.fromkeys((".gz", ".zip", ".bz2", ".xz", ".zst"), "is compressed; unpack it, and name the file in it"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "is a spreadsheet; save it as CSV UTF-8, and name that file"),
}


def kind_of(path: str | Path, format: str = "auto") -> Kind:
    """The kind of table at a path: by `format`, else by the type and suffix of the path; for .json also by its first
    lines, which show whether it is one value or JSONL.

    A folder was made by save_to_disk, or has shards: *.jsonl or *.parquet files, read in the order of their names.
    Text of the form organisation/name, if this machine has no such path, is a data set on the Hugging Face hub.
    """
    place = Path(path)
    if not is_there(place):
        is_hub_id = HUB_ID.fullmatch(str(path)) and not is_there(place.parent) and place.suffix not in FILE_SUFFIXES
        if is_hub_id and format in ("auto", "datasets"):
            return "hub"
    elif place.is_dir():
        return _folder_kind(place, format)
    elif format == "datasets":
        raise DataError("is a file; format: datasets needs a folder made by save_to_disk, or a hub id")
    _require_regular(place)
    if (form := OTHER_FORMS.get(place.suffix.lower())) is not None:
        raise DataError(form)
    suffix = place.suffix.lower() if format == "auto" else f".{format}"
    if suffix == ".json" and (format == "json" or _is_one_value(place)):
        return "json"
    return "csv" if suffix in CSV_SUFFIXES else "parquet" if suffix in SHARD_SUFFIXES["parquet"] else "jsonl"


def _is_one_value(place: Path) -> bool:
    with as_data_error(""), open_plain(place) as file:
        first = next((line for line in file if line.removeprefix(BOM_UTF8).strip()), b"").removeprefix(BOM_UTF8).strip()
        rest = file.read(1 << 16).strip()
    return first.startswith(b"[") or first == b"{" or not rest


def _folder_kind(place: Path, format: str) -> Kind:
    is_saved = (place / "state.json").is_file() or (place / "dataset_dict.json").is_file()
    kinds: list[Kind] = ["datasets"] if is_saved else []
    kinds += [kind for kind in SHARD_SUFFIXES if files_of(place, kind)]
    if format != "auto":
        kinds = [kind for kind in kinds if kind == format]
    if not kinds:
        wanted = {"jsonl": "*.jsonl", "parquet": "*.parquet", "auto": "*.jsonl or *.parquet"}.get(format)
        files = f"has no {wanted} in it and " if wanted else ""
        saved = "was not made by save_to_disk" if format in ("auto", "datasets") else "so no shards"
        if format in ("csv", "json"):
            files, saved = "", f"may have shards of JSONL or parquet, but format: {format} is one file"
        raise DataError(f"is a folder, not a file; it {files}{saved}")
    if len(kinds) > 1:
        raise DataError(f"is a folder that could be read as {' or as '.join(kinds)}; set format to one of them")
    return kinds[0]


def files_of(path: Path, kind: Kind) -> list[Path]:
    """The files of a table of kind jsonl or parquet: the path itself, or the shards of a folder by name."""
    if not path.is_dir():
        return [path]
    suffixes = SHARD_SUFFIXES[kind]
    shards = sorted(file for file in path.iterdir() if file.suffix in suffixes and not file.name.startswith("."))
    for file in shards:
        _require_regular(file, f"{file.name} in it ")
    return shards


def split_folder(path: Path, split: str | None) -> Path:
    """The folder of one split in a folder of save_to_disk; the name may be left out if there is only one split."""
    index = path / "dataset_dict.json"
    if not index.is_file():
        if split is not None:
            raise DataError(f"has a single data set without splits, so there is no split {split!r}; remove it")
        return path
    names = json_of_saved_set(index).get("splits")
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{index.name} in it: splits should be a list of names of folders in it, not {names!r:.80}")
    return path / chosen_split(names, split)


def chosen_split(names: list[str], split: str | None) -> str:
    """The given split, or the only one."""
    if split is None and len(names) == 1:
        return names[0]
    if split is None or split not in names:
        problem = (
            "the split key of this path, such as data.split, must name one of them"
            if split is None
            else f"there is no split {split!r}"
        )
        raise DataError(f"has the splits {', '.join(names)}, and {problem}")
    return split


def require_own_arrow_files(folder: Path) -> None:
    """Raises: DataError when state.json names Arrow files outside the folder, or anything but regular files."""
    named = json_of_saved_set(folder / "state.json").get("_data_files")
    entries = named if isinstance(named, list) else [named]
    names = [str(entry["filename"]) for entry in entries if isinstance(entry, dict) and "filename" in entry]
    if not names or len(names) < len(entries):
        raise DataError(f"state.json in it: _data_files should be a list of objects with a filename, not {named!r:.80}")
    for name in names:
        prefix = f"state.json in it names {name!r:.200}: "
        if (folder / name).parent != folder:
            raise DataError(f"{prefix}this is not a file in the folder. Write the folder again with save_to_disk")
        _require_regular(folder / name, prefix)


def json_of_saved_set(file: Path) -> dict[str, Any]:
    """The contents of a JSON file that save_to_disk wrote."""
    with as_data_error(f"{file.name} in it: ", ". Write the folder again with save_to_disk"):
        return read_json(file)


def _require_regular(file: Path, prefix: str = "") -> None:
    with as_data_error(prefix):
        size_of(file)


@contextmanager
def as_data_error(prefix: str, suffix: str = "") -> Iterator[None]:
    """Raise an Unreadable or DataError of the block as a DataError with more text around it."""
    try:
        yield
    except (Unreadable, DataError) as cause:
        raise DataError(f"{prefix}{cause}{suffix}") from cause


def unreachable(name: str, file: str, repo_type: str) -> str | None:
    """Why the hub does not answer one request for a file; None if it answers, also with an error, which the loaders
    report."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=repo_type))
    except (HfHubHTTPError, OfflineModeIsEnabled) as error:
        return "is not asked in offline mode (HF_HUB_OFFLINE)" if isinstance(error, OfflineModeIsEnabled) else None
    except (HTTPError, OSError) as cause:
        return f"can't be reached: {cause}"
    return None


def require_reachable(name: str) -> None:
    """For the hub id of a model, unless it is a folder or has files in the hub's cache of this machine."""
    from huggingface_hub import try_to_load_from_cache

    if not HUB_ID.fullmatch(name) or Path(name).is_dir() or try_to_load_from_cache(name, "config.json") is not None:
        return
    if (reason := unreachable(name, "config.json", "model")) is not None:
        raise DataError(
            f"{name!r} is neither a folder nor in the hub's cache of this machine, and the Hugging Face hub {reason}. "
            f"Download the model first, on a machine that reaches the hub (hf download {name} --local-dir FOLDER), and "
            "give its folder in place of the name: model.path=FOLDER, or --model FOLDER. `meshrl plan` needs its "
            "config.json alone"
        )

"""The tensors of a model folder by the headers of its safetensors files: position, dtype and shape of each.

Before any data is read, headers are compared with their files and files with the index: a truncated, overlapping or
missing tensor is an error that names file and tensor. Nothing outside the folder is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, decode, open_plain, parse_json, read_json, size_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BITS = {  # of one element, by the dtypes' names in safetensors
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64},
    **{"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8},
}
KINDS = {  # torch's dtypes, as safetensors spells them
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little-endian
_MAX_AXES = 16
_MAX_HEADER_BYTES = 100_000_000  # as in the format's own reader


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. kind: its dtype, as safetensors spells it. offset: its first byte in the file."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, by the names in its files.

    Raises: ConfigError naming file and tensor when there are no safetensors files, or when one is incomplete.
    """
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        what = f" but {pickled[0]}, a pickle, which can run code when it is read" if pickled else ""
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX}{what}. If you trust its source, write the model by "
            "save_pretrained"
        )
    places = None if (folder / SINGLE).exists() else _by_index(folder)
    files = sorted(set(places.values())) if places is not None else [folder / SINGLE]
    found: dict[str, StoredTensor] = {}
    for file in files:
        for stored in read_header(file):
            other = found.setdefault(stored.name, stored)
            if other is not stored:
                raise ConfigError(f"{file}: tensor {stored.name} is in {other.file.name}, too; remove one of them")
    for name, file in (places or {}).items():
        if name not in found or found[name].file != file:
            raise ConfigError(
                f"{folder / INDEX}: tensor {name} should be in {file.name}, which does not hold it. {_WHAT_TO_DO}"
            )
    return found


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, in order of their offsets. Raises: ConfigError naming file and tensor."""
    try:
        size, start, header = _header(file)
        entries = []
        for name, entry in header.items():
            if name != "__metadata__":
                kind, shape, begin, stop = _entry(name, entry)
                entries.append((begin, stop, StoredTensor(file, name, kind, shape, start + begin)))
        entries.sort(key=lambda entry: entry[:2])
        end = 0
        for begin, stop, stored in entries:
            if begin != end:
                what = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
                raise Unreadable(f"tensor {stored.name} {what}: it begins at byte {begin} of the data, not at {end}")
            end = stop
        if end != size - start:
            raise Unreadable(f"{size - start:,} bytes of data, but its header lists {end:,}: it was cut or changed")
    except Unreadable as cause:
        raise ConfigError(f"{file}: {cause}. {_WHAT_TO_DO}") from cause
    return [stored for _, _, stored in entries]


def opened(file: Path) -> Any:
    """The file, opened by safetensors' own reader, which checks its header. A context manager. Raises: Unreadable."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as cause:
        raise Unreadable(f"no safetensors file: {cause}") from cause


def _header(file: Path) -> tuple[int, int, dict[str, Any]]:
    """(bytes of the file, where its data starts, the header). Raises: Unreadable."""
    size = size_of(file)
    with open_plain(file) as data:
        length = int.from_bytes(data.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise Unreadable(f"no safetensors file: its header should have {length:,} bytes, but the file has {size:,}")
        header = parse_json(decode(data.read(length)))
    if not isinstance(header, dict):
        raise Unreadable(f"no safetensors file: its header is a JSON {type(header).__name__}")
    return size, _LENGTH_BYTES + length, header


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, and first and last byte of one entry of a header. Raises: Unreadable."""
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in BITS:
        raise Unreadable(f"tensor {name} has dtype {kind!r:.40}; known are {', '.join(BITS)}")
    if not _are_sizes(shape) or len(shape) > _MAX_AXES or not _are_sizes(place) or len(place) != 2:
        raise Unreadable(
            f"tensor {name} has shape {shape!r:.80} and data_offsets {place!r:.80}; both should list sizes"
        )
    begin, stop = place
    if 8 * (stop - begin) != prod(shape) * BITS[kind]:
        raise Unreadable(f"tensor {name} of shape {shape} and dtype {kind} can't fill the bytes {begin} to {stop}")
    return kind, tuple(shape), begin, stop


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _by_index(folder: Path) -> dict[str, Path]:
    """Tensor -> its file, by model.safetensors.index.json. Raises: ConfigError."""
    path = folder / INDEX
    try:
        index = read_json(path)
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places or not isinstance(index.get("metadata", {}), dict):
            raise Unreadable(f"weight_map should be an object of tensors and files, not {places!r:.80}")
        for name, file in places.items():
            plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
            if not plain:
                raise Unreadable(
                    f"tensor {name} should be in {file!r:.80}, which is no safetensors file of this folder; files "
                    "outside it and pickles (.bin) are never read"
                )
        for file in sorted(set(places.values())):
            try:
                size_of(folder / file)
            except Unreadable as cause:
                raise Unreadable(f"its file {file!r:.80} can't be used: {cause}") from cause
    except Unreadable as cause:
        raise ConfigError(f"{path}: {cause}. {_WHAT_TO_DO}") from cause
    return {name: folder / file for name, file in places.items()}


_WHAT_TO_DO = "Copy or download the model folder again, or write it again by save_pretrained"


def write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file of these tensors that Transformers can read."""
    from safetensors.torch import save_file

    save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata={"format": "pt"})
